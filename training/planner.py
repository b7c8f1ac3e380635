"""What a recipe needs and how long a context fits, for every memory mode, without running it.

    plans = plan(load("llama-8b"), device("h100-80gb"))
    predict(recipe, device(...)).peak_device_bytes

The activations come from a trace of the model code on fake tensors (training/trace.py, training/extend.py), what the
engine holds from its bookkeeper (training/engine_memory.py), the time from a roofline (training/roofline.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from model import tiling
from model.gpt import GPTConfig, flops_per_token
from model.modes import NAMED, parse_layers
from training import cuda_layout, gpus, hardware
from training.build import DTYPES
from training.engine_memory import Walked, gathers, make_engine_memory, parameters_of, walk
from training.extend import Step, step
from training.gpus import find as gpu
from training.kinds import ACTIVATIONS, GRADIENTS, KINDS, LOSS, OPTIMIZER, OTHER, PARAMETERS, TEMPORARY
from training.longest import Found, longest_multiple
from training.recipe import Recipe
from training.roofline import CPU_ERROR, EFFICIENCY, GPU_ERROR, HOPPER, HOPPER_ATTENTION, Speed, cpu_speed, step_time
from training.trace import Job
from training.work import Work

__all__ = ["Device", "ModePlan", "Planner", "Prediction", "advice", "device", "gpu", "plan", "plan_mode", "predict"]

MEMORY_ERROR = {"cpu": 0.01, "cuda": 0.05}  # relative error band of a peak; on CUDA not yet measured


@dataclass(frozen=True)
class Device:
    """What is planned for. budget_bytes None: no limit is known."""

    kind: str  # "cpu" or "cuda"
    name: str
    budget_bytes: int | None
    host_budget_bytes: int | None = None
    gpu: gpus.GPU | None = None


def device(
    gpu_name: str | None = None, budget_bytes: int | None = None, host_budget_bytes: int | None = None
) -> Device:
    """The named GPU, else the one in this machine, else this machine's CPU (which needs a budget).

    A budget for a GPU is what the allocator may reserve, as train.py limits it; without one everything but the CUDA
    context may be reserved. Raises ValueError naming the catalogue.
    """
    found = gpu(gpu_name) if gpu_name else gpus.in_this_machine()
    if found is not None:
        limit = found.memory_bytes - cuda_layout.CONTEXT_BYTES
        limit = limit if budget_bytes is None else min(budget_bytes, limit)
        return Device("cuda", found.name, limit, host_budget_bytes or found.host_bytes, found)
    if budget_bytes is None:
        raise ValueError(
            "no GPU in this machine: name one with GPU= (" + ", ".join(gpus.CATALOGUE) + ") or a budget for this "
            "machine's CPU with BUDGET=24GiB"
        )
    return Device("cpu", hardware.cpu_name(), budget_bytes, host_budget_bytes)


@dataclass
class Prediction:
    """One step of a recipe: bytes on the device and the host, who causes the peak, and how long it takes."""

    mode: str
    seq_length: int
    peak_device_bytes: int  # as the meter or CUDA's allocator counts it
    peak_host_bytes: int
    after_forward_device_bytes: int
    peak_op: str
    breakdown_bytes: dict[str, int]
    reserved_bytes: int  # what is compared with the budget: on CUDA the peak and the fragmentation allowance
    allowances_bytes: dict[str, int] = field(default_factory=dict)  # CUDA specifics by name, of which the peak has some
    step_time_s: float = 0.0
    tokens_per_s: float = 0.0
    mfu: float | None = None
    hfu: float | None = None
    recompute_overhead: float = 0.0  # time of recompute, relative to the rest
    stalled_s: float = 0.0
    memory_error: float = 0.0
    time_error: float = 0.0
    notes: list[str] = field(default_factory=list)  # what the mode cannot do here


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

    def record(self) -> dict[str, Any]:
        """The mode's part of `--json`."""
        own = {"longest_context": self.longest_context, "limited_by": self.limited_by, "next_tried": self.next_tried}
        return own | {"fits": self.fits} | vars(self.step)


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
        return GPTConfig(**fields)

    def traced(self, seq_length: int) -> tuple[Step, Walked]:
        """The whole step at a length, and what the engine holds along it."""
        if seq_length not in self._steps:
            config = self.config(seq_length)
            tiles = tiling.resolve(config, **self.recipe.tiles.model_dump())
            job = Job(
                config,
                self.modes,
                DTYPES[self.recipe.precision],
                self.recipe.micro_batch_size,
                seq_length,
                tiles,
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

    def input_bytes(self, seq_length: int) -> int:
        """Tokens and targets on the device, int64; on a CPU those of all micro-batches, which are read beforehand."""
        batches = 1 if self.cuda else self.recipe.accumulation_steps(self.world_size)
        return 16 * self.recipe.micro_batch_size * seq_length * batches

    def candidates(self, seq_length: int) -> np.ndarray:
        """Live device bytes wherever they may peak; the places are the same at every length, as far as tiles allow."""
        whole, walked = self.traced(seq_length)
        places = [np.array([walked.end_top])]
        for one in walked.passes:
            places += [whole.start + one.top, whole.peak + one.live]
        return np.concatenate(places) + self.input_bytes(seq_length)

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
        inputs = self.input_bytes(seq_length)
        peak, kinds, owner = _peak(whole, walked)
        kinds[OTHER] += inputs
        after = max(int(whole.start[whole.after_forward] + one.live[whole.after_forward]) for one in walked.passes)
        result = Prediction(
            self.mode,
            seq_length,
            peak + inputs,
            self.host_bytes(seq_length),
            after + inputs,
            owner,
            _breakdown(kinds),
            int(self.reserved(peak + inputs)),
            memory_error=MEMORY_ERROR[self.device.kind],
            notes=whole.notes,
        )
        if self.cuda:
            result.allowances_bytes = cuda_layout.allowances(result.peak_device_bytes)
        self._add_time(result, whole, walked)
        return result

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
        peak = speed.flops * self.world_size
        result.mfu = flops_per_token(config, result.seq_length) * result.tokens_per_s / peak
        done = sum(work.flops for kernels in whole.work.values() for work in kernels.values())
        result.hfu = done * passes / time.step_s / speed.flops
        again = whole.work.get("recompute", {})
        total = Work()
        for kernels in whole.work.values():
            for work in kernels.values():
                total = total + work
        result.recompute_overhead = sum(w.flops for w in again.values()) / max(1.0, total.flops)

    def longest(self, granularity: int, seq_max: int) -> Found:
        """The largest multiple of `granularity` up to `seq_max` that fits."""
        degree = 2 if self.recipe.model.attention == "unfused" else 1
        rows = self.recipe.model.max_position_embeddings
        if self.recipe.model.position_embedding == "learned" and rows is not None:
            seq_max = min(seq_max, rows)
        return longest_multiple(granularity, seq_max, degree, self.candidates, self.host_bytes, self.verdict)


def _peak(whole: Step, walked: Walked) -> tuple[int, list[int], str]:
    """The peak, its bytes by kind, and who causes it."""
    best, kinds, owner = walked.end_top, walked.end_kinds[:], "(optimizer)"
    for one in walked.passes:
        own, engine = whole.peak + one.live, whole.start + one.top
        i, j = int(own.argmax()), int(engine.argmax())
        if engine[j] > max(best, own[i]):
            best = int(engine[j])
            kinds = list(whole.start_kinds[j] + one.kinds[j])
            kinds[TEMPORARY] += best - sum(kinds)
            what, about = whole.marks[j]
            owner = f"{'engine at ' if what != 'loss' else ''}{what} of {about}" if about else what
        elif own[i] > best:
            best, kinds = int(own[i]), list(whole.kinds[i] + one.kinds[i])
            operation, module, phase = whole.owners[i]
            words = (operation, f"in {module}" if module else "", f"({phase})" if phase else "")
            owner = " ".join(word for word in words if word)
    return int(best), [int(k) for k in kinds], owner


def _breakdown(kinds: Sequence[int]) -> dict[str, int]:
    names = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOSS, TEMPORARY)
    result = {KINDS[kind]: int(kinds[kind]) for kind in names}
    result["temporary"] += int(kinds[OTHER])  # tokens and targets
    return result


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
    workers: int | None = None,
) -> list[ModePlan]:
    """`plan_mode` for each mode (None: all named ones), in a few processes (None: at most two)."""
    modes = list(modes or NAMED)
    speed_of(device, recipe)  # measured once, here, and not while other processes compute
    one = partial(
        plan_mode,
        recipe,
        device,
        world_size=world_size,
        granularity=granularity,
        seq_max=seq_max,
        seq_length=seq_length,
    )
    workers = min(2, os.cpu_count() or 1) if workers is None else workers
    if workers < 2 or len(modes) < 4 or not hasattr(os, "fork"):
        return [one(mode) for mode in modes]
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        return list(pool.map(one, modes))


def advice(recipe: Recipe, device: Device, world_size: int = 1) -> str:
    """What to do about a run that went out of memory: the longest context for its mode, and the cheapest mode that
    fits its context.
    """
    own = own_mode(recipe)
    found = Planner(recipe, own, device, world_size).longest(recipe.sweep.granularity, recipe.seq_length)
    name = own if isinstance(own, str) else "this list of modes"
    lines = [
        f"the longest context that mode {name} should fit here is {found.longest:,} tokens"
        if found.longest
        else f"mode {name} should not fit here at any length"
    ]
    fitting = [
        planner.predict(recipe.seq_length)
        for mode in NAMED
        if not (planner := Planner(recipe, mode, device, world_size)).fits(recipe.seq_length)
    ]
    if fitting:
        best = min(fitting, key=lambda step: step.step_time_s)
        lines.append(
            f"for {recipe.seq_length:,} tokens the cheapest mode that should fit is {best.mode}: "
            f"recompute={best.mode} ({best.peak_device_bytes / 2**30:.2f} GiB at the peak)"
        )
    else:
        lines.append(f"no mode should fit {recipe.seq_length:,} tokens here: {_remedies(recipe)}")
    return "; ".join(lines) + ". Planned, not measured."


def _remedies(recipe: Recipe) -> str:
    tiles = recipe.tiles
    missing = [name for name in type(tiles).model_fields if getattr(tiles, name) is None]
    words = [f"set tiles.{name}=auto" for name in missing[:1]]
    words += ["a smaller micro_batch_size"] if recipe.micro_batch_size > 1 else []
    return ", or ".join([*words, "a shorter seq_length"])
