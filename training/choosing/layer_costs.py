"""What a layer's choices cost in bytes, and what a whole list of modes peaks at, read off the planner's traces.

`auto` assigns modes to layers by the bytes that a layer keeps and the peak while it runs (assignment.py).
Both come from short traces in which every layer has the same mode: its middle layers are what the mode costs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from model.modes import Mode
from training.planning import cuda_layout, engine_memory
from training.planning.engine_books import Walked, walk
from training.planning.extend import Step, extend, shorten
from training.planning.trace import Job, Trace, trace
from training.recipe import Recipe

TOKEN_BYTES = 16  # of a token and its target, int64


@dataclass(frozen=True)
class Traced:
    """A step of one list of modes under an engine. Bytes are all that the device holds."""

    step: Step
    walked: Walked
    totals: np.ndarray  # the most during each interval
    peak_bytes: int
    needed_bytes: int  # the peak, and on CUDA what fragmentation adds to it
    host_bytes: int
    inputs_bytes: int

    @property
    def after_forward_bytes(self) -> int:
        at = self.step.after_forward
        return int(self.step.start[at] + max(one.live[at] for one in self.walked.passes)) + self.inputs_bytes

    @property
    def engine_bytes(self) -> np.ndarray:
        """What the engine holds during each interval of the fullest micro-batch."""
        return self.walked.passes[-1].live

    def index(self, kind: str, layer: int | None) -> int:
        """Of the interval with which this mark's segment begins."""
        return self.step.marks.index((kind, layer))


@dataclass(frozen=True)
class SpanBytes:
    """What `span` layers under one mode cost, beside what is there whatever is chosen."""

    kept_bytes: int
    transient_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Surroundings:
    """What is there whatever the layers choose."""

    base_bytes: int  # between forward and backward of the layers, without what they keep
    loss_bytes: int  # peak of the loss above that
    gradient_bytes: int  # that a layer's backward leaves behind
    outside_bytes: int  # peak of everything that no choice changes: embedding, optimizer step


class Tracer:
    """Traces of a recipe's steps, each made once."""

    def __init__(self, recipe: Recipe, job: Job, world_size: int) -> None:
        self.recipe, self.job, self.world_size = recipe, job, world_size
        self.seconds = 0.0  # spent here
        self._traces: dict[tuple[Mode, ...], Trace] = {}  # of few layers, by their modes
        self._one = lru_cache(maxsize=512)(self._trace)
        # Micro-batches wait on the CPU; on a GPU one is there at a time.
        waiting = 1 if job.cuda else recipe.accumulation_steps(world_size)
        self.inputs_bytes = TOKEN_BYTES * job.micro_batch_size * job.seq_length * waiting

    def uniform(self, mode: Mode, num_layers: int) -> Traced:
        return self._one((mode,) * num_layers)

    def of(self, modes: tuple[Mode, ...]) -> Traced:
        """The step of these modes, one for each layer."""
        return self._one(modes)

    def _trace(self, modes: tuple[Mode, ...]) -> Traced:
        start = time.perf_counter()
        config = replace(self.job.config, num_layers=len(modes))
        short = shorten(modes)
        if short.modes not in self._traces:
            few = replace(self.job, config=replace(config, num_layers=len(short.modes)), modes=short.modes)
            self._traces[short.modes] = trace(few)
        traced = extend(self._traces[short.modes], modes, short.stands_in)
        parameters = engine_memory.parameters_of(config)
        engine = engine_memory.make_engine_memory(self.recipe, parameters, self.world_size, self.job.cuda)
        walked = walk(engine, traced.marks)
        passes = [
            np.maximum(traced.peak + one.live, traced.start + np.maximum(one.top, one.live)) for one in walked.passes
        ]
        totals = np.max(passes, axis=0) + self.inputs_bytes
        peak = max(int(totals.max()), walked.end_top + self.inputs_bytes)
        host = int(traced.host_peak.max()) + walked.host_bytes
        needed = peak + cuda_layout.fragmentation_bytes(peak) if self.job.cuda else peak
        self.seconds += time.perf_counter() - start
        return Traced(traced, walked, totals, peak, int(needed), host, self.inputs_bytes)

    # -- what a mode costs -----------------------------------------------------------------------------------

    def span(self, mode: Mode) -> SpanBytes:
        """What a group of layers under this mode costs.

        Traced for one layer; a larger group and offload follow from that, and `of` tells what neighbours add.
        """
        one = self._traced_layer(replace(mode, group=1, offload=None))
        if mode.recompute == "full" and mode.group > 1:
            # Recompute holds what mode none keeps for every layer but the one in backward; the group has one input.
            plain, bare = self._traced_layer(Mode()), self._traced_layer(Mode("full"))
            outputs = one.kept_bytes - bare.kept_bytes
            one = SpanBytes(
                bare.kept_bytes + mode.group * outputs,
                one.transient_bytes + (mode.group - 1) * (plain.kept_bytes - outputs),
                0,
            )
        if mode.offload:
            # The group before is still on its way out in forward, the one below is on its way in in backward.
            return SpanBytes(0, one.transient_bytes + 2 * one.kept_bytes, one.kept_bytes)
        return one

    def _traced_layer(self, mode: Mode) -> SpanBytes:
        """Bytes of the middle layer of a step in which all layers have this mode."""
        traced = self.uniform(mode, 5)
        start, totals = traced.step.start, traced.totals
        kept = int(start[traced.index("forward", 3)] - start[traced.index("forward", 2)])
        # Backward: from the start of the middle layer to that of the layer before it.
        begin, end = traced.index("backward", 2), traced.index("backward", 1)
        beside = self._before_backward(traced, begin) + 3 * kept
        transient = int(totals[begin:end].max()) - beside
        # Forward: what backward holds besides (the gradient of the layers' output, of the head) is not there yet.
        forward = totals[traced.index("forward", 2) : traced.index("forward", 3)]
        return SpanBytes(kept, max(0, transient, int(forward.max()) - beside), 0)

    def _before_backward(self, traced: Traced, index: int) -> int:
        """All that is there when backward of a layer begins, without what layers keep: as under mode none."""
        plain = self.uniform(Mode(), 5)
        at = plain.index("backward", 2)
        kept = int(plain.step.start[plain.index("forward", 3)] - plain.step.start[plain.index("forward", 2)])
        activations = int(plain.step.start[at]) - 3 * kept
        return activations + int(traced.engine_bytes[index]) + traced.inputs_bytes

    def surroundings(self, num_layers: int) -> Surroundings:
        """Read off a step in which all layers have mode none."""
        plain = self.uniform(Mode(), num_layers)
        start, engine, totals = plain.step.start, plain.engine_bytes, plain.totals
        last = plain.index("backward", num_layers - 1)
        kept = int(start[plain.index("after", None)] - start[plain.index("forward", 0)])
        base = int(start[last]) - kept + int(engine[last]) + plain.inputs_bytes
        loss = int(totals[plain.index("after", None) : last].max()) - kept - base
        below = plain.index("below", None)
        gradients = int(engine[below] - engine[last]) // num_layers
        outside = max(int(totals[below:].max()), plain.walked.end_top + plain.inputs_bytes)
        outside = max(outside, int(totals[: plain.index("forward", 0)].max()))
        return Surroundings(base, max(0, loss), max(0, gradients), outside)
