"""What a bookkeeper of an engine is: bytes held besides the activations, walked through the marks of a step.

It does with numbers what the real engine does with tensors (engine_memory.py names them all). It does not depend on the
sequence length, so one walk serves every length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from training.metering.kinds import KINDS, TEMPORARY
from training.recipe import Recipe

Mark = tuple[str, object]
STEP_BYTES = 4  # AdamW's count of steps, a float32 for each tensor it updates


@dataclass(frozen=True)
class Parameter:
    name: str
    numel: int
    is_matrix: bool  # weight decay: optimizer group 0; vectors are group 1


class EngineMemory:
    """Bytes held on the device by kind, on the host, and the most held within one call."""

    def __init__(self, recipe: Recipe, parameters: Sequence[Parameter], world_size: int, cuda: bool) -> None:
        self.recipe, self.parameters, self.world_size, self.cuda = recipe, list(parameters), world_size, cuda
        self.itemsize = 2 if recipe.precision == "bf16" else 4
        self.numel = {p.name: p.numel for p in parameters}
        self.total = sum(self.numel.values())
        self.accumulation = recipe.accumulation_steps(world_size)
        self.live = [0] * len(KINDS)
        self.host_bytes = 0
        self._top = self._live = 0
        self.first_pass = self.last_pass = True

    # For the engines.

    def hold(self, kind: int, nbytes: int) -> None:
        """Device memory that stays until it is given back with a negative number."""
        self.live[kind] += nbytes
        self._live += nbytes
        self._top = max(self._top, self._live)

    def use(self, nbytes: int) -> None:
        """Device memory that is taken and given back at once."""
        self._top = max(self._top, self._live + nbytes)

    def hold_offloaded(self, kind: int, nbytes: int, registered: bool = True) -> None:
        """What offload puts on the host. On a CPU the meter sees it as device memory unless it is registered."""
        if self.cuda or registered:
            self.host_bytes += nbytes
        else:
            self.hold(kind, nbytes)

    # What an engine does.

    def start(self) -> None:
        """Build the engine."""
        raise NotImplementedError

    def at(self, mark: Mark) -> None:
        """Something happens in the model: see training/planning/trace.py for the marks."""

    def end_pass(self) -> None:
        """Backward of one micro-batch is over."""

    def update(self) -> None:
        """The optimizer step."""

    def take_top(self) -> int:
        """The most held since the last call, now included."""
        top, self._top = self._top, self._live
        return top

    @property
    def live_bytes(self) -> int:
        return self._live


@dataclass
class Walk:
    """An engine's bytes along one pass: `live` and `kinds` during an interval, `top` when its mark was handled."""

    live: np.ndarray
    top: np.ndarray
    kinds: np.ndarray


@dataclass
class Walked:
    passes: list[Walk]  # the first, a middle and the last micro-batch of a step, as far as there are as many
    start_bytes: int
    start_kinds: list[int]
    end_top: int  # the most held outside the passes: between them and in the optimizer step
    end_kinds: list[int]
    host_bytes: int


def walk(engine: EngineMemory, marks: Sequence[Mark], steps: int = 2) -> Walked:
    """Walks an engine through whole steps and returns its bytes in the last one (the first may differ)."""
    engine.start()
    for _ in range(steps):
        engine.take_top()
        start_bytes, start_kinds = engine.live_bytes, engine.live[:]
        passes, end_top, end_kinds = [], 0, engine.live[:]
        count = min(engine.accumulation, 3)
        for number in range(count):
            engine.first_pass, engine.last_pass = number == 0, number == count - 1
            live, top, kinds = [], [], []
            for mark in marks:
                engine.at(mark)
                top.append(engine.take_top())
                live.append(engine.live_bytes)
                kinds.append(engine.live[:])
            passes.append(Walk(np.array(live), np.array(top), np.array(kinds)))
            engine.end_pass()
            end_top, end_kinds = _higher(engine, end_top, end_kinds)
        engine.update()
        end_top, end_kinds = _higher(engine, end_top, end_kinds)
    return Walked(passes, start_bytes, start_kinds, end_top, end_kinds, engine.host_bytes)


def _higher(engine: EngineMemory, top: int, kinds: list[int]) -> tuple[int, list[int]]:
    new = engine.take_top()
    if new <= top:
        return top, kinds
    kinds = engine.live[:]
    kinds[TEMPORARY] += new - sum(kinds)
    return new, kinds
