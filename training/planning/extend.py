"""From a trace of few layers to the step of all layers, byte for byte, where layers repeat.

Groups of layers that follow each other under the same mode do the same work in the same order; only the first and the
last ones of such a run differ (what comes before or after them does; an offloaded group also reaches two groups
ahead). So a run is traced with a few groups, and its middle one stands for all the others: what a middle group adds
to what is alive is added as often as the run has middle groups. Layers within a group repeat in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import numpy as np

from model.modes import Mode
from model.recompute import make_groups
from training.metering.kinds import KINDS
from training.planning.trace import LAYER_MARKS, Interval, Job, Trace, trace
from training.planning.work import Work

Segment = tuple[str, int | None]  # kind of layer mark, layer
# Groups of a run that are traced: with offload a middle one, and at each end as many as differ. DeepSpeed's holds on to
# the inputs of the last two, which the groups before them make.
REPEATS = {None: 2, "async": 5, "deepspeed": 7}
GROUP_LAYERS = 3  # layers of a group that are traced


@dataclass(frozen=True)
class Short:
    """Fewer layers that stand for all: their modes, and for each layer the one that stands for it."""

    modes: tuple[Mode, ...]
    stands_in: tuple[int, ...]


@lru_cache(maxsize=256)
def shorten(modes: tuple[Mode, ...]) -> Short:
    """The fewest layers whose trace can be extended to a model with one of `modes` for each layer.

    Raises ValueError for mode budget: what a compiler keeps is only known when it has compiled.
    """
    if any(mode.recompute == "budget" for mode in modes):
        raise ValueError(f"mode {modes[0]} cannot be planned: what it keeps is the compiler's choice; measure it")
    groups = [(len(group.layers), group.mode) for group in make_groups([None] * len(modes), modes)]  # type: ignore[list-item]
    repeats = max(REPEATS[mode.offload] for mode in modes)
    short: list[Mode] = []
    stands_in: list[int] = []
    for (size, mode), run in groupby(groups):
        length = len(list(run))
        kept = min(length, repeats)
        traced = _traced_layers(size, mode)
        base = len(short)
        for index in range(length):
            group = base + _stand_in(index, length, kept) * traced
            stands_in += [group + _stand_in(layer, size, traced) for layer in range(size)]
        short += [_regrouped(mode, traced)] * (traced * kept)
    if not _cuts_alike(short, groups, repeats):
        return Short(modes, tuple(range(len(modes))))
    return Short(tuple(short), tuple(stands_in))


def _traced_layers(size: int, mode: Mode) -> int:
    # What is kept inside an offloaded group leaves the device when a later group begins, all layers' at once.
    return size if mode.offload and mode.keep else min(size, GROUP_LAYERS)


def _regrouped(mode: Mode, traced: int) -> Mode:
    """The mode with groups of as many layers as are traced."""
    return replace(mode, grouping="uniform", group=traced) if mode.recompute == "full" else mode


def _cuts_alike(short: Sequence[Mode], groups: Sequence[tuple[int, Mode]], repeats: int) -> bool:
    """Whether the shortened layers are cut into groups as they are meant to be."""
    cut = [(len(g.layers), g.mode) for g in make_groups([None] * len(short), short)]  # type: ignore[list-item]
    wanted = []
    for (size, mode), run in groupby(groups):
        traced = _traced_layers(size, mode)
        wanted += [(traced, _regrouped(mode, traced))] * min(len(list(run)), repeats)
    return cut == wanted


def _stand_in(index: int, length: int, kept: int) -> int:
    """Which of `kept` stands for number `index` of `length`: outer ones for themselves, a middle one for the rest."""
    head = kept // 2
    if length == kept or index < head:
        return index
    tail = kept - head - 1
    return index - (length - kept) if index >= length - tail else head


@dataclass
class Step:
    """The step of all layers: arrays with an entry for each interval, in bytes relative to the step's start."""

    marks: list[tuple[str, object]]
    start: np.ndarray
    peak: np.ndarray
    host_peak: np.ndarray
    start_kinds: np.ndarray  # [intervals, kinds], when the interval begins
    kinds: np.ndarray  # [intervals, kinds], at the peak
    owners: list[tuple[str, str, str]]
    after_forward: int  # index of the first interval of backward
    work: dict[str, dict[str, Work]]  # by phase ("forward", "backward", "recompute"), then kernel class
    end: int
    notes: list[str]  # the mode's own warnings


def step(job: Job) -> Step:
    """What a step of `job` holds and does, from the trace of as few layers as tell it."""
    short = shorten(job.modes)
    config = replace(job.config, num_layers=len(short.modes))
    return extend(trace(replace(job, config=config, modes=short.modes)), job.modes, short.stands_in)


def extend(traced: Trace, modes: tuple[Mode, ...], stands_in: Sequence[int]) -> Step:
    """The step of all layers from a trace of those in `stands_in`."""
    segments = _segments(traced)
    order = list(segments)
    sequence: list[tuple[Segment, int | None]] = []
    if len(modes) == len(traced.job.modes):
        sequence = [(segment, segment[1]) for segment in order]
    else:
        sequence = list(_sequence(modes, stands_in, order))
    beginnings = [segments[s][0] for s in order]
    nets = {s: _net(a, b) for s, a, b in zip(order, beginnings, [*beginnings[1:], traced.end])}
    marks: list[tuple[str, object]] = []
    start: list[int] = []
    peak: list[int] = []
    host_peak: list[int] = []
    start_kinds: list[np.ndarray] = []
    kinds: list[np.ndarray] = []
    owners: list[tuple[str, str, str]] = []
    work: dict[str, dict[str, Work]] = {}
    live = host = after_forward = 0
    kinds_live = np.zeros(len(KINDS), dtype=np.int64)
    for segment, layer in sequence:
        intervals = segments[segment]
        base, base_host = intervals[0].start_bytes, intervals[0].start_host_bytes
        for interval in intervals:
            if interval is traced.intervals[traced.after_forward]:
                after_forward = len(marks)
            marks.append(_renamed(interval.mark, segment[1], layer))
            start.append(live + interval.start_bytes - base)
            peak.append(live + interval.peak_bytes - base)
            host_peak.append(host + interval.peak_host_bytes - base_host)
            start_kinds.append(kinds_live + np.subtract(interval.start_kinds_bytes, intervals[0].start_kinds_bytes))
            kinds.append(kinds_live + np.subtract(interval.kinds_bytes, intervals[0].start_kinds_bytes))
            owners.append(_renamed_owner(interval.owner, segment[1], layer))
            _add(work, interval.work)
        net = nets[segment]
        live, host, kinds_live = live + net[0], host + net[1], kinds_live + net[2]
    return Step(
        marks=marks,
        start=np.array(start),
        peak=np.array(peak),
        host_peak=np.array(host_peak),
        start_kinds=np.array(start_kinds),
        kinds=np.array(kinds),
        owners=owners,
        after_forward=after_forward,
        work=work,
        end=live,
        notes=traced.notes,
    )


def _segments(traced: Trace) -> dict[Segment, list[Interval]]:
    segments: dict[Segment, list[Interval]] = {}
    current: list[Interval] = []
    for interval in traced.intervals:
        kind, about = interval.mark
        if kind in LAYER_MARKS:
            key = (kind, about)
            assert key not in segments, f"{key} twice in one step"
            current = segments[key] = []
        current.append(interval)
    return segments


def _net(first: Interval, following: Interval) -> tuple[int, int, np.ndarray]:
    """What a segment adds to live device bytes, host bytes and the bytes of each kind."""
    return (
        following.start_bytes - first.start_bytes,
        following.start_host_bytes - first.start_host_bytes,
        np.subtract(following.start_kinds_bytes, first.start_kinds_bytes),
    )


def _sequence(
    modes: tuple[Mode, ...], stands_in: Sequence[int], traced: list[Segment]
) -> Iterator[tuple[Segment, int | None]]:
    """(segment of the trace, layer of the model) in the order of the whole step."""
    yield ("start", None), None
    for layer, short in enumerate(stands_in):
        yield ("forward", short), layer
    yield ("after", None), None
    groups = make_groups(list(range(len(modes))), modes)
    for group in reversed(groups):
        layers: list[int] = list(group.layers)
        yield ("backward", stands_in[layers[-1]]), layers[-1]
        if ("recompute", stands_in[layers[-1]]) in traced:
            for layer in layers:
                yield ("recompute", stands_in[layer]), layer
        for layer in reversed(layers[:-1]):
            yield ("backward", stands_in[layer]), layer
    yield ("below", None), None


def _renamed(mark: tuple[str, object], short: int | None, layer: int | None) -> tuple[str, object]:
    kind, about = mark
    if short is None or short == layer:
        return mark
    if isinstance(about, str):
        return kind, about.replace(f"layers.{short}.", f"layers.{layer}.", 1)
    return kind, layer


def _renamed_owner(owner: tuple[str, str, str], short: int | None, layer: int | None) -> tuple[str, str, str]:
    operation, module, phase = owner
    if short is not None and short != layer and module.startswith("layers."):
        _, number, *rest = module.split(".")
        module = ".".join(("layers", str(int(number) + (layer or 0) - short), *rest))
    return operation, module, phase


def _add(total: dict[str, dict[str, Work]], part: dict[tuple[str, str], Work]) -> None:
    for (phase, kernel), work in part.items():
        kernels = total.setdefault(phase, {})
        kernels[kernel] = kernels.get(kernel, Work()) + work
