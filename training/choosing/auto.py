"""`recompute: auto`: the modes, layer by layer, of the least step time that fits the budget.

Candidates are everything that is implemented (candidates.py): their bytes come from the planner's traces, their
seconds from a short calibration on the device, and the choice among them is exact (assignment.py). What that model
leaves out, because it depends on which layers are neighbours (the last group is not moved, copies in flight, what is
fetched ahead), is found by predicting the whole step of the chosen list, corrected by the difference, and solved again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from model import tiling
from model.gpt import GPTConfig, num_parameters
from model.modes import Mode, parse
from training.build import DTYPES
from training.choosing.assignment import Choice, DoesNotFit, assign, evaluate
from training.choosing.calibration import Shape, Times
from training.choosing.candidates import Candidates, leanest, modes
from training.choosing.layer_costs import Tracer
from training.choosing.layer_plan import Fixed, Layer, Made, Plan, tiles_of
from training.planning import engine_memory
from training.planning.trace import Job
from training.recipe import Recipe

SOLVES = 12  # at most so many corrections
# Of the budget left free: what the planner's prediction of a step may be off by.
MARGIN = {"cpu": 0.01, "cuda": 0.03}
NEAR = 0.05  # of the budget: a list of modes may need that much less than the leanest mode for all layers
GIB = 2**30


@dataclass(frozen=True)
class Place:
    """Where the plan will run. host_bytes None: no limit. `times` gives the seconds of a shape's modes."""

    device: torch.device
    name: str
    world_size: int
    budget_bytes: int
    host_bytes: int | None
    times: Callable[[Shape, Sequence[Mode]], Times]
    margin: float | None = None  # of the budget; None: by the kind of device

    @property
    def margin_bytes(self) -> int:
        margin = MARGIN[self.device.type] if self.margin is None else self.margin
        return int(self.budget_bytes * margin)


@dataclass(frozen=True)
class Solution:
    """Modes for all layers and what is predicted of the whole step; `choices` are what the model took them for."""

    candidates: Candidates
    choices: tuple[Choice, ...]
    peak_bytes: int
    needed_bytes: int
    host_bytes: int
    layers_s: float
    correction_bytes: int  # the whole step's prediction above the model's peak

    @property
    def micro_batch_s(self) -> float:
        return self.layers_s + self.candidates.times.head_s


def find_any(recipe: Recipe, config: GPTConfig, place: Place, correction_bytes: int = 0) -> Plan:
    """`find`; where nothing fits, with less margin, down to what only fits if the prediction is too high.

    Without it, the longest context of a fixed mode, which nobody keeps from being tried, would be longer.
    """
    margin = MARGIN[place.device.type]
    for wanted in (margin, 0.0, -margin):
        try:
            return find(recipe, config, replace(place, margin=wanted), correction_bytes)
        except DoesNotFit as error:
            problem = error
    raise problem


def find(recipe: Recipe, config: GPTConfig, place: Place, correction_bytes: int = 0) -> Plan:
    """The plan of least predicted step time for `recipe`, whose `recompute` is not looked at.

    `correction_bytes`: by how much a measured step was above its prediction. Raises DoesNotFit when nothing fits.
    """
    room = place.budget_bytes - place.margin_bytes - correction_bytes
    best: Solution | None = None
    problem: DoesNotFit | None = None
    spent = {"calibration": 0.0, "traces": 0.0, "choice": 0.0}
    for tiles in tile_variants(recipe, config):
        shape = Shape(config, tiles, DTYPES[recipe.precision], recipe.micro_batch_size, recipe.seq_length)
        tracer = Tracer(recipe, _job(recipe, shape, place), place.world_size)
        with _clock(spent, "traces"):
            least = min(tracer.uniform(mode, config.num_layers).needed_bytes for mode in leanest(config.num_layers))
        if least > room * (1 + NEAR):  # not worth the seconds that timing these tiles takes
            problem = DoesNotFit(f"the leanest mode needs {least:,} bytes of {room:,}")
            continue
        with _clock(spent, "calibration"):
            plain = place.times(shape, [Mode()])
            if best and config.num_layers * sum(plain.layers["none"]) + plain.head_s >= best.micro_batch_s:
                continue  # not even with everything kept would it be faster
            times = place.times(shape, modes(config, tiles))
        with _clock(spent, "traces"):
            candidates = Candidates(tracer, times, place.host_bytes)
        traced_s = tracer.seconds
        with _clock(spent, "choice"):
            try:
                found = solve(candidates, room, place.host_bytes)
                if best is None or found.micro_batch_s < best.micro_batch_s:
                    best = found
            except DoesNotFit as error:
                problem = error
        spent["traces"] += tracer.seconds - traced_s
        spent["choice"] -= tracer.seconds - traced_s
    if best is None:
        assert problem is not None
        raise problem
    with _clock(spent, "choice"):
        return _plan(recipe, config, place, best, correction_bytes, spent)


def tile_variants(recipe: Recipe, config: GPTConfig) -> Iterator[tiling.Tiles]:
    """The recipe's tiles, and those with more that it does not speak of, each cheaper in memory than the last."""
    words = recipe.tiles.model_dump()
    yield tiling.resolve(config, **words)
    tokens = recipe.micro_batch_size * recipe.seq_length
    for name in ("loss_tile_tokens", "mlp_tile_tokens", "attention_head_groups"):
        if words[name] is None:
            words[name] = "auto"
            tiles = tiling.resolve(config, **words)
            if name == "attention_head_groups" or getattr(tiles, name) < tokens:
                yield tiles


def _job(recipe: Recipe, shape: Shape, place: Place) -> Job:
    gathers = engine_memory.gathers(recipe, place.world_size)
    size = (shape.micro_batch_size, shape.seq_length)
    return Job(shape.config, (), shape.dtype, *size, shape.tiles, place.device.type == "cuda", gathers)


# One variant of tiles


def solve(candidates: Candidates, room_bytes: int, host_bytes: int | None) -> Solution:
    """The list of modes of least time whose whole predicted step fits. Raises DoesNotFit, saying what is too large."""
    around = candidates.around
    if around.outside_bytes > room_bytes:
        problem = "weights, gradients, optimizer and embedding alone need"
        raise DoesNotFit(f"{problem} {around.outside_bytes:,} bytes of {room_bytes:,}")
    best: Solution | None = None
    for found in (*_corrected(candidates, room_bytes, host_bytes), *_uniform(candidates, room_bytes, host_bytes)):
        if not _fits(found, room_bytes, host_bytes):
            continue
        if best is None or (found.layers_s, found.needed_bytes) < (best.layers_s, best.needed_bytes):
            best = found
    if best is None:
        least = min(predicted(candidates, candidates.for_all(c)).needed_bytes for c in candidates.choices)
        raise DoesNotFit(f"the leanest mode needs {least:,} bytes of {room_bytes:,}")
    return best


def _fits(found: Solution, room_bytes: int, host_bytes: int | None) -> bool:
    return found.needed_bytes <= room_bytes and (host_bytes is None or found.host_bytes <= host_bytes)


def predicted(candidates: Candidates, choices: Sequence[Choice]) -> Solution:
    """What the planner says of the whole step."""
    model = evaluate(choices, candidates.limits(0, None))
    traced = candidates.tracer.of(spread(choices))
    off = traced.needed_bytes - candidates.around.base_bytes - model.peak_bytes
    return Solution(
        candidates, tuple(choices), traced.peak_bytes, traced.needed_bytes, traced.host_bytes, model.step_s, off
    )


def _corrected(candidates: Candidates, room_bytes: int, host_bytes: int | None) -> Iterator[Solution]:
    """Assignments under a limit that is corrected by how far the model was off, which depends on the list."""
    low, high = 0, None  # limits known to be too small or to fit, and not to fit
    limit = room_bytes - candidates.around.base_bytes
    for _ in range(SOLVES):
        try:
            assigned = assign(candidates.choices, candidates.limits(limit, host_bytes))
        except DoesNotFit:
            if high is None:
                return
            low = limit
            wanted = (low + high) // 2
        else:
            found = predicted(candidates, assigned.choices)
            yield found
            if _fits(found, room_bytes, host_bytes):
                low = limit
            else:
                high = limit
            # All limits from this list's own peak up to the next list's give this list again.
            wanted = assigned.peak_bytes + room_bytes - found.needed_bytes
            if high is not None and not low < wanted < high:
                wanted = (low + high) // 2
        if wanted <= low or wanted == limit:
            return
        limit = wanted


def _uniform(candidates: Candidates, room_bytes: int, host_bytes: int | None) -> Iterator[Solution]:
    """One mode for all layers, the fastest that fits: so that no fixed mode is ever better."""
    lists = [candidates.for_all(choice) for choice in candidates.choices]
    limits = candidates.limits(0, None)
    for choices in sorted(lists, key=lambda each: evaluate(each, limits).step_s):
        found = predicted(candidates, choices)
        yield found
        if _fits(found, room_bytes, host_bytes):
            return


def spread(choices: Sequence[Choice]) -> tuple[Mode, ...]:
    """A mode for each layer."""
    return tuple(parse(choice.name) for choice in choices for _ in range(choice.span))


# The record


def made_for(recipe: Recipe, config: GPTConfig, world_size: int, device: str) -> Made:
    engine: str = recipe.engine.name
    if recipe.engine.deepspeed_config:
        engine += f" {recipe.engine.deepspeed_config}"
    return Made(
        recipe=recipe.name,
        model={name: getattr(config, name) for name in config.__dataclass_fields__},
        seq_length=recipe.seq_length,
        micro_batch_size=recipe.micro_batch_size,
        accumulation=recipe.accumulation_steps(world_size),
        precision=recipe.precision,
        engine=engine,
        world_size=world_size,
        device=device,
    )


def _plan(
    recipe: Recipe, config: GPTConfig, place: Place, best: Solution, correction_bytes: int, spent: dict[str, float]
) -> Plan:
    candidates, accumulation = best.candidates, recipe.accumulation_steps(place.world_size)
    update_s = candidates.times.adam_s_per_element * num_parameters(config) / place.world_size

    def step_s(layers_s: float) -> float:
        return accumulation * (layers_s + candidates.times.head_s) + update_s

    room = place.budget_bytes - place.margin_bytes - correction_bytes
    fixed = []
    for choice in candidates.choices:
        model = evaluate(candidates.for_all(choice), candidates.limits(0, None))
        peak = max(candidates.around.outside_bytes, candidates.around.base_bytes + model.peak_bytes)
        fits = peak <= room and (place.host_bytes is None or model.host_bytes <= place.host_bytes)
        fixed.append(
            Fixed(
                mode=choice.name,
                peak_device_bytes=peak,
                peak_host_bytes=model.host_bytes,
                step_time_s=step_s(model.step_s),
                fits=fits,
            )
        )
    layers = [
        Layer(
            mode=choice.name,
            kept_bytes=choice.kept_bytes // choice.span,
            host_bytes=choice.host_bytes // choice.span,
            forward_s=choice.forward_s / choice.span,
            backward_s=choice.backward_s / choice.span,
        )
        for choice in best.choices
        for _ in range(choice.span)
    ]
    curve = [(budget, step_s(layers_s)) for budget, layers_s in _curve(best, place, room)]
    return Plan(
        made_for=made_for(recipe, config, place.world_size, place.name),
        budget_bytes=place.budget_bytes,
        margin_bytes=place.margin_bytes,
        correction_bytes=correction_bytes,
        host_budget_bytes=place.host_bytes,
        tiles=tiles_of(candidates.tracer.job.tiles),
        layers=tuple(layers),
        plain_bytes=candidates.plain_bytes,
        peak_device_bytes=best.peak_bytes,
        after_forward_bytes=candidates.tracer.of(spread(best.choices)).after_forward_bytes,
        needed_bytes=best.needed_bytes,
        peak_host_bytes=best.host_bytes,
        step_time_s=step_s(best.layers_s),
        curve=tuple(curve),
        fixed=tuple(fixed),
        seconds=dict(spent),
    )


def _curve(best: Solution, place: Place, room_bytes: int) -> Iterator[tuple[int, float]]:
    """(budget, seconds of the layers) for less and for more memory, corrected as the plan was."""
    budget = place.budget_bytes
    step = GIB if budget >= 8 * GIB else 1 << max(0, (budget // 8).bit_length() - 1)
    for times in (-2, -1, 0, 1, 2, 3, 4, 6, 8):
        if times == 0:
            yield budget, best.layers_s
            continue
        limit = room_bytes + times * step - best.candidates.around.base_bytes - best.correction_bytes
        if room_bytes + times * step < best.candidates.around.outside_bytes:
            continue
        try:
            found = assign(best.candidates.choices, best.candidates.limits(limit, place.host_bytes))
        except DoesNotFit:
            continue
        # The plan itself is still there with more memory, and a smaller one cannot be faster.
        yield budget + times * step, min(found.step_s, best.layers_s) if times > 0 else max(found.step_s, best.layers_s)


class _clock:  # noqa: N801 - used like a function
    """Adds the seconds of a `with` block to an entry."""

    def __init__(self, spent: dict[str, float], what: str) -> None:
        self.spent, self.what = spent, what

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.spent[self.what] += time.perf_counter() - self.start
