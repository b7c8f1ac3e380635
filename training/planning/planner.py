"""What a recipe needs and how long a context fits, for every memory mode, without running it.

    plans = plan(load("llama-8b"), device("h100-80gb"))
    predict(recipe, device(...)).peak_device_bytes

The activations come from a trace of the model code on fake tensors (trace.py, extend.py), what the engine holds from
its bookkeeper (engine_memory.py), the time from a roofline (roofline.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from model import tiling
from model.gpt import GPTConfig, flops_per_token
from model.modes import NAMED, Mode, parse_layers
from model.recompute import effective
from training.build import DTYPES
from training.flops import recomputed_flops_per_token
from training.metering.kinds import OTHER
from training.planning import cuda_layout
from training.planning.engine_books import Walked, walk
from training.planning.engine_memory import gathers, make_engine_memory, parameters_of
from training.planning.extend import Step, step
from training.planning.longest import Found, longest_multiple
from training.planning.prediction import MEMORY_ERROR, Prediction, by_name, peak_of
from training.planning.roofline import (
    CPU_ERROR,
    EFFICIENCY,
    GPU_ERROR,
    HOPPER,
    HOPPER_ATTENTION,
    Speed,
    cpu_speed,
    step_time,
)
from training.planning.target import Device, device, gpu
from training.planning.trace import Job
from training.recipe import Recipe, check_runs_on
from training.values import size

__all__ = ["Device", "ModePlan", "Planner", "Prediction", "advice", "device", "gpu", "plan", "plan_mode", "predict"]


@dataclass
class ModePlan:
    """The longest context of one mode on one device (0: none fits), and what a step needs.

    The step is of the length that was asked for, else of the longest, else of the shortest.
    """

    mode: str
    longest_context: int
    limited_by: str  # device, host or max
    next_tried: int | None  # the shortest length known not to fit
    step: Prediction
    fits: bool  # whether that step does
    same_as: str | None = None  # the mode before that does, or comes to, just the same for this recipe

    def equals(self, other: ModePlan) -> bool:
        """Whether all that is predicted is the same."""
        step = replace(other.step, mode=self.step.mode, notes=self.step.notes)
        return replace(other, mode=self.mode, step=step) == self

    def record(self) -> dict[str, Any]:
        """The mode's part of `--json`."""
        own = {"longest_context": self.longest_context, "limited_by": self.limited_by, "next_tried": self.next_tried}
        return own | {"fits": self.fits, "same_as": self.same_as} | vars(self.step)


class Planner:
    """Predictions for one recipe under one mode on one device; steps that were traced are kept."""

    def __init__(self, recipe: Recipe, mode: str | Sequence[str], device: Device, world_size: int = 1) -> None:
        self.recipe, self.device, self.world_size = recipe, device, world_size
        self.modes = tuple(parse_layers(mode, recipe.model.num_layers))
        self.mode = mode if isinstance(mode, str) else " ".join(dict.fromkeys(mode))
        self.cuda = device.kind == "cuda"
        self._steps: dict[int, tuple[Step, Walked]] = {}
        self._walks: dict[Any, Walked] = {}

    def config(self, seq_length: int) -> GPTConfig:
        fields = self.recipe.gpt_fields()
        if fields["position_embedding"] == "learned" and self.recipe.model.max_position_embeddings is None:
            fields["max_position_embeddings"] = seq_length
        check_runs_on(self.recipe, self.device.kind)
        if fields["attention"] == "flash_attn":  # the same kernel by another way, and not always installed here
            fields["attention"] = "sdpa"
        return GPTConfig(**fields)

    def tiles(self, config: GPTConfig) -> tiling.Tiles:
        return tiling.resolve(config, **self.recipe.tiles.model_dump())

    def effective_modes(self) -> tuple[Mode, ...]:
        """One for each layer: what its mode really does with this recipe's attention and tiles."""
        config = self.config(self.recipe.seq_length)
        return tuple(effective(mode, config, self.tiles(config)) for mode in self.modes)

    def traced(self, seq_length: int) -> tuple[Step, Walked]:
        """The whole step at a length, and what the engine holds along it."""
        if seq_length not in self._steps:
            config = self.config(seq_length)
            job = Job(
                config,
                self.modes,
                DTYPES[self.recipe.precision],
                self.recipe.micro_batch_size,
                seq_length,
                self.tiles(config),
                cuda=self.cuda,
                gathers=gathers(self.recipe, self.world_size),
            )
            whole = step(job)
            self._steps[seq_length] = whole, self._walk(config, whole)
        return self._steps[seq_length]

    def _walk(self, config: GPTConfig, whole: Step) -> Walked:
        key = config.max_position_embeddings
        known = self._walks.get(key)
        if known is None or len(known.passes[0].live) != len(whole.marks):
            engine = make_engine_memory(self.recipe, parameters_of(config), self.world_size, self.cuda)
            known = self._walks[key] = walk(engine, whole.marks)
        return known

    def outside_bytes(self, seq_length: int) -> int:
        """What is there from outside model and engine: tokens and targets, int64, on a CPU those of all micro-batches,
        which are read beforehand; and workspaces of CUDA libraries.
        """
        tokens_bytes = 16 * self.recipe.micro_batch_size * seq_length
        if self.cuda:
            return tokens_bytes + cuda_layout.CUBLAS_WORKSPACE_BYTES + cuda_layout.OWN_KERNEL_TILES_BYTES
        return tokens_bytes * self.recipe.accumulation_steps(self.world_size)

    def candidates(self, seq_length: int) -> np.ndarray:
        """Live device bytes wherever they may peak; the places are the same at every length, as far as tiles allow."""
        whole, walked = self.traced(seq_length)
        places = [np.array([walked.end_top])]
        for one in walked.passes:
            places += [whole.start + one.top, whole.peak + one.live]
        return np.concatenate(places) + self.outside_bytes(seq_length)

    def host_bytes(self, seq_length: int) -> int:
        whole, walked = self.traced(seq_length)
        return walked.host_bytes + int(whole.host_peak.max())

    def reserved(self, peak_bytes: float) -> float:
        return peak_bytes + cuda_layout.fragmentation_bytes(peak_bytes) if self.cuda else peak_bytes

    def fits(self, seq_length: int) -> str:
        """ "" when a step of this length fits, else what it exceeds: device or host."""
        return self.verdict(float(self.candidates(seq_length).max()), float(self.host_bytes(seq_length)))

    def verdict(self, peak_bytes: float, host_bytes: float) -> str:
        budget, host_budget = self.device.budget_bytes, self.device.host_budget_bytes
        if budget is not None and self.reserved(peak_bytes) > budget:
            return "device"
        return "host" if host_budget is not None and host_bytes > host_budget else ""

    def predict(self, seq_length: int) -> Prediction:
        whole, walked = self.traced(seq_length)
        inputs = self.outside_bytes(seq_length)
        peak, kinds, owner = peak_of(whole, walked)
        kinds[OTHER] += inputs
        at = whole.after_forward  # what the engine does there already belongs to backward
        after = max(int(whole.start[at] + one.live[at - 1]) for one in walked.passes)
        result = Prediction(
            self.mode,
            seq_length,
            peak + inputs,
            self.host_bytes(seq_length),
            after + inputs,
            owner,
            by_name(kinds),
            int(self.reserved(peak + inputs)),
            memory_error=MEMORY_ERROR[self.device.kind],
            notes=[*whole.notes, *self._fails()],
        )
        if self.cuda:
            result.allowances_bytes = cuda_layout.allowances(result.peak_device_bytes)
        self._add_time(result, whole, walked)
        return result

    def _fails(self) -> Iterator[str]:
        """What a real run of the mode would end with here."""
        if any(mode.offload == "deepspeed" for mode in self.modes) and gathers(self.recipe, self.world_size):
            yield (
                f"mode {self.mode}: DeepSpeed's offload of activations fails in backward under ZeRO-3 (seen with "
                "deepspeed 0.19.8 on a CPU); use full+offload"
            )

    def _add_time(self, result: Prediction, whole: Step, walked: Walked) -> None:
        speed = speed_of(self.device, self.recipe)
        recipe, config = self.recipe, self.config(result.seq_length)
        parameters = sum(p.numel for p in parameters_of(config))
        share = parameters / self.world_size
        on_host = walked.host_bytes > 0
        itemsize = 2 if recipe.precision == "bf16" else 4
        passes = recipe.accumulation_steps(self.world_size)
        time = step_time(
            whole.work, passes, float(whole.host_peak.max()), share * 28, share * (4 + itemsize), on_host, speed
        )
        tokens = recipe.global_batch_size * result.seq_length
        result.step_time_s, result.stalled_s = time.step_s, time.stalled_s
        result.tokens_per_s = tokens / time.step_s
        result.time_error = speed.error
        # As a run counts them (training/record.py), by formulas: the time above comes from what kernels really do.
        counted = replace(config, attention=recipe.model.attention)
        model = flops_per_token(counted, result.seq_length)
        again = recomputed_flops_per_token(counted, self.modes, result.seq_length, self.tiles(config))
        result.recompute_overhead = again / model
        result.mfu = model * result.tokens_per_s / (speed.flops * self.world_size)
        result.hfu = result.mfu * (1 + result.recompute_overhead)

    def longest(self, granularity: int, seq_max: int) -> Found:
        """The largest multiple of `granularity` up to `seq_max` that fits."""
        degree = 2 if self.recipe.model.attention == "unfused" else 1
        rows = self.recipe.model.max_position_embeddings
        if self.recipe.model.position_embedding == "learned" and rows is not None:
            seq_max = min(seq_max, rows)
        return longest_multiple(granularity, seq_max, degree, self.candidates, self.host_bytes, self.verdict)


def speed_of(device: Device, recipe: Recipe) -> Speed:
    """How fast the device is: from the catalogue, or for a CPU from a short measurement."""
    if device.gpu is not None:
        efficiency = EFFICIENCY | (HOPPER_ATTENTION if device.gpu.name in HOPPER else {})
        flops = device.gpu.bf16_flops * (1.0 if recipe.precision == "bf16" else 0.5)
        return Speed(flops, device.gpu.memory_bytes_per_s, device.gpu.link_bytes_per_s, efficiency, GPU_ERROR)
    flops, memory = cpu_speed(DTYPES[recipe.precision])
    return Speed(flops, memory, None, EFFICIENCY, CPU_ERROR)


def predict(
    recipe: Recipe,
    device: Device,
    mode: str | Sequence[str] | None = None,
    seq_length: int | None = None,
    world_size: int = 1,
) -> Prediction:
    """What one step of the recipe needs, under `mode` and at `seq_length` (None: the recipe's own)."""
    return Planner(recipe, mode or own_mode(recipe), device, world_size).predict(seq_length or recipe.seq_length)


def own_mode(recipe: Recipe) -> str | tuple[str, ...]:
    """The recipe's own mode or modes; `full` stands in for what is decided later."""
    named = isinstance(recipe.recompute, (str, tuple)) and recipe.recompute != "auto"
    return recipe.recompute if named else "full"  # type: ignore[return-value]


def plan_mode(
    recipe: Recipe,
    device: Device,
    mode: str | Sequence[str],
    world_size: int = 1,
    granularity: int | None = None,
    seq_max: int | None = None,
    seq_length: int | None = None,
) -> ModePlan:
    """The longest context under one mode, and a step at `seq_length`."""
    planner = Planner(recipe, mode, device, world_size)
    granularity = granularity or recipe.sweep.granularity
    found = planner.longest(granularity, seq_max or recipe.sweep.seq_max)
    step = planner.predict(seq_length or found.longest or granularity)
    return ModePlan(planner.mode, *found, step, not planner.fits(step.seq_length))


def plan(
    recipe: Recipe,
    device: Device,
    modes: Sequence[str] | None = None,
    world_size: int = 1,
    granularity: int | None = None,
    seq_max: int | None = None,
    seq_length: int | None = None,
    workers: int = 1,
) -> list[ModePlan]:
    """`plan_mode` for each mode (None: all named ones). Modes that do the same for this recipe are planned once, and
    those that come to the same name the first of them.

    workers: processes, forked: more than one only where autograd has not run, which does not survive a fork.
    """
    modes = list(modes or NAMED)
    firsts: dict[tuple[Mode, ...], str] = {}
    own = {mode: Planner(recipe, mode, device, world_size).effective_modes() for mode in modes}
    same = {mode: firsts.setdefault(own[mode], mode) for mode in modes}
    speed_of(device, recipe)  # measured once, here, and not while other processes compute
    plan_one = partial(
        plan_mode,
        recipe,
        device,
        world_size=world_size,
        granularity=granularity,
        seq_max=seq_max,
        seq_length=seq_length,
    )
    if workers < 2 or len(firsts) < 4 or not hasattr(os, "fork"):
        planned = {mode: plan_one(mode) for mode in firsts.values()}
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
            planned = dict(zip(firsts.values(), pool.map(plan_one, firsts.values())))
    shown: list[ModePlan] = []
    for mode, first in same.items():
        one = planned[first]
        if first == mode:  # modes that look different may still come to the same
            first = next((other.mode for other in shown if not other.same_as and other.equals(one)), mode)
        step = replace(one.step, mode=mode)
        shown.append(replace(one, mode=mode, step=step, same_as=None if first == mode else first))
    return shown


def advice(recipe: Recipe, target: Device | None = None, world_size: int = 1) -> str:
    """What to do about a run that went out of memory: the longest context for its mode, and the cheapest mode that
    fits its context; "" when nothing can be said. Takes a few seconds.

    target: where it ran; None: this machine, within the recipe's budgets.
    """
    try:
        target = target or device(None, recipe.budget_bytes, recipe.host_budget_bytes)
        return "; ".join(_advice(recipe, target, world_size)) + ". Planned, not measured."
    except Exception:  # whatever is wrong with a plan, the error it is about has been told
        return ""


def _advice(recipe: Recipe, target: Device, world_size: int) -> Iterator[str]:
    length, own = recipe.seq_length, own_mode(recipe)
    name = f"mode {own}" if isinstance(own, str) else "this list of modes"
    planner = Planner(recipe, own, target, world_size)
    if not planner.fits(length):
        yield f"{name} should have fitted {length:,} tokens by the plan, which is off here"
    else:
        longest = planner.longest(recipe.sweep.granularity, length).longest
        yield (
            f"the longest context that should fit with {name} is {longest:,} tokens"
            if longest
            else (f"no length should fit with {name}")
        )
    steps = [
        other.predict(length)
        for mode in NAMED
        if mode != own and not (other := Planner(recipe, mode, target, world_size)).fits(length)
    ]
    if steps:
        best = min(steps, key=lambda step: step.step_time_s)
        yield (
            f"the cheapest mode that should fit {length:,} tokens is {best.mode} (recompute={best.mode}, "
            f"{size(best.peak_device_bytes)} at the peak)"
        )
    else:
        yield f"no other mode should fit {length:,} tokens: {_remedies(recipe)}"


def _remedies(recipe: Recipe) -> str:
    tiles = recipe.tiles
    words = [f"set tiles.{name}=auto" for name in type(tiles).model_fields if getattr(tiles, name) is None][:1]
    words += ["use a smaller micro_batch_size"] if recipe.micro_batch_size > 1 else []
    return ", or ".join([*words, "shorten seq_length"])
