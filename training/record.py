"""What a run says of itself: the numbers of each logged step, and the result at its end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from model import tiling
from model.gpt import GPT, flops_per_token
from model.modes import Mode
from training import hardware
from training.build import DTYPES, mode_name
from training.engine import StepResult
from training.flops import hardware_flops_per_token
from training.memory import Meter
from training.metrics import PEAKS
from training.recipe import Recipe
from training.world import World


class Tally:
    """Times, peaks and losses of a run so far; complete enough at any moment to write result.json from it."""

    def __init__(self, recipe: Recipe, world: World, meter: Meter) -> None:
        self.recipe, self.world, self.meter = recipe, world, meter
        self.tokens_per_step = recipe.seq_length * recipe.global_batch_size
        self.steps = 0
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.step_times_s: list[float] = []
        self.peaks = dict.fromkeys(PEAKS, 0)  # the largest of the whole run
        self.peak_op = ""
        self.memory: dict[str, Any] = {}  # the content of memory.json: what held the device's memory in the last step
        self.first_step_s: float | None = None  # from the start of the program to the end of its first step
        self._unlogged_s: list[float] = []
        self._flops: tuple[float, float] = (0.0, 0.0)  # of the model and of the hardware, per token
        one = hardware.peak_flops(world.device, DTYPES[recipe.precision])  # may measure: before the meter counts
        self._peak_flops = one * world.size if one else None
        self._mark_s = time.perf_counter()

    def start(self, model: GPT, modes: Sequence[Mode], records: Iterable[dict[str, Any]] = ()) -> None:
        """The model is built, with one mode for each layer, and `records` of metrics.jsonl are what an earlier process
        did of this run."""
        recipe, tiles = self.recipe, tiling.applied(model)
        self._flops = (
            flops_per_token(model.config, recipe.seq_length),
            hardware_flops_per_token(model.config, recipe.seq_length, modes, tiles),
        )
        for record in records:
            self.val_loss = record.get("val_loss", self.val_loss)
            if "loss" in record:
                self.steps, self.loss = record["step"], record["loss"]
                self.step_times_s.append(record["step_time_s"])
                self.peaks = {name: max(self.peaks[name], record[name]) for name in PEAKS}
        self.meter.reset_peak()
        self.resume_clock()

    def resume_clock(self) -> None:
        """Step time counts from here: what came before (evaluation, saving) is not part of any step."""
        self._mark_s = time.perf_counter()

    def count(self, step: int, result: StepResult) -> None:
        """A step is done. Its time is all since the last one: data, metrics and meter included."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        now_s = time.perf_counter()
        self._unlogged_s.append(now_s - self._mark_s)
        self.step_times_s.append(now_s - self._mark_s)
        self._mark_s = now_s
        self.steps, self.loss = step, result.loss

    def record(self, result: StepResult, lr: float) -> dict[str, Any]:
        """The line of metrics.jsonl for the step just counted; all ranks call it. Times are means since the last.

        mfu and hfu are null where the device's peak is not known. Causal attention counts half of the square.
        """
        time_s = statistics.fmean(self._unlogged_s)
        self._unlogged_s.clear()
        speed = self.tokens_per_step / time_s
        if self.recipe.log.memory:
            self.memory = self._memory()
        mfu, hfu = (f * speed / self._peak_flops if self._peak_flops else None for f in self._flops)
        return {
            "step": self.steps,
            "tokens": self.steps * self.tokens_per_step,
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "step_time_s": time_s,
            "tokens_per_s": speed,
            "mfu": mfu,
            "hfu": hfu,
            **self.see_peaks(),
        }

    def _memory(self) -> dict[str, Any]:
        meter = self.meter
        return {
            "step": self.steps,
            "peak_device_bytes": meter.peak_bytes,
            "breakdown_bytes": meter.breakdown_bytes,
            "after_forward_device_bytes": meter.after_forward_bytes,
            "after_forward_breakdown_bytes": meter.after_forward_breakdown_bytes,
            "timeline": [
                {"operation": n, "phase": phase, "module": module, "live_device_bytes": live}
                for n, phase, module, live in meter.timeline
            ],
        }

    def see_peaks(self) -> dict[str, int]:
        """Peaks since the last call, the largest of all ranks; all ranks call it."""
        meter = self.meter
        mine = (meter.peak_bytes, meter.after_forward_bytes, meter.peak_host_bytes)
        peaks = dict(zip(PEAKS, map(int, self.world.max(*mine)), strict=True))
        if peaks["peak_device_bytes"] > self.peaks["peak_device_bytes"]:
            self.peak_op = meter.peak_op
        self.peaks = {name: max(self.peaks[name], peaks[name]) for name in PEAKS}
        meter.reset_peak()
        return peaks

    @property
    def step_time_s(self) -> float | None:
        """Median, without the first step, which pays for warming up."""
        times = self.step_times_s[1:] or self.step_times_s
        return statistics.median(times) if times else None

    def result(self, status: str, error: str | None = None) -> dict[str, Any]:
        """The content of result.json; asks no other rank."""
        time_s = self.step_time_s
        if status != "completed":  # the peak it ran into is not in the tally yet
            self.peaks["peak_device_bytes"] = max(self.peaks["peak_device_bytes"], self.meter.peak_bytes)
            self.peaks["peak_host_bytes"] = max(self.peaks["peak_host_bytes"], self.meter.peak_host_bytes)
            self.peak_op = self.meter.failed_op or self.peak_op or self.meter.peak_op
        return {
            "status": status,
            "recipe": self.recipe.name,
            "mode": mode_name(self.recipe),
            "seq_length": self.recipe.seq_length,
            "micro_batch_size": self.recipe.micro_batch_size,
            "world_size": self.world.size,
            "device": hardware.device_name(self.world.device),
            "steps": self.steps,
            "loss": self.loss,
            "val_loss": self.val_loss,
            "tokens_per_s": self.tokens_per_step / time_s if time_s else None,
            "step_time_s": time_s,
            **self.peaks,
            "peak_op": self.peak_op,
            "budget_bytes": self.recipe.budget_bytes,
            "first_step_s": self.first_step_s,
            "error": error,
        }
