"""What an engine holds besides the activations: weights, gradients, optimizer state, buffers, event by event.

An engine here is a bookkeeper that walks through the marks of a step (trace.py) and does with numbers what the real
engine does with tensors. It does not depend on the sequence length, so one walk serves every length.
The DeepSpeed engines follow deepspeed 0.19.8, runtime/zero/stage_1_and_2.py, stage3.py and fp16/unfused_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from model.gpt import GPT, GPTConfig
from training.engine_deepspeed import merged_config
from training.metering.kinds import GRADIENTS, KINDS, OPTIMIZER, OTHER, PARAMETERS, TEMPORARY
from training.recipe import Recipe

Mark = tuple[str, object]
STEP_BYTES = 4  # AdamW's count of steps, a float32 for each tensor it updates


@dataclass(frozen=True)
class Parameter:
    name: str
    numel: int
    is_matrix: bool  # weight decay: optimizer group 0; vectors are group 1


def parameters_of(config: GPTConfig) -> list[Parameter]:
    """A model's parameters in the order of `named_parameters()`."""
    with torch.device("meta"):
        model = GPT(_one_layer(config))
    parameters = []
    for name, p in model.named_parameters():
        if name.startswith("layers.0."):
            continue
        parameters.append(Parameter(name, p.numel(), p.dim() >= 2))
        if name in ("embedding.weight", "position_embedding.weight") and _is_last_embedding(model, name):
            parameters += [
                Parameter(f"layers.{i}.{inner}", q.numel(), q.dim() >= 2)
                for i in range(config.num_layers)
                for inner, q in model.layers[0].named_parameters()
            ]
    return parameters


def _is_last_embedding(model: nn.Module, name: str) -> bool:
    return name == ("embedding.weight" if model.position_embedding is None else "position_embedding.weight")


def _one_layer(config: GPTConfig) -> GPTConfig:
    from dataclasses import replace

    return replace(config, num_layers=1)


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


class TorchMemory(EngineMemory):
    """training/engine_torch.py on one rank."""

    def start(self) -> None:
        self.hold(PARAMETERS, self.total * self.itemsize)
        if self.itemsize == 2:
            self.hold(OPTIMIZER, self.total * 4)
        self.hold(OPTIMIZER, self.total * 8 + STEP_BYTES * len(self.parameters))

    def at(self, mark: Mark) -> None:
        kind, name = mark
        if kind == "gradient" and self.itemsize == 2:  # the bf16 gradient is still there while it is added
            if self.first_pass:
                self.hold(GRADIENTS, self.numel[name] * 4)  # type: ignore[index]
        elif kind == "taken" and self.itemsize == 4 and self.first_pass:
            self.hold(GRADIENTS, self.numel[name] * 4)  # type: ignore[index]

    def update(self) -> None:
        self.use(12 * len(self.parameters))  # norms, and their squares in float64
        self.hold(GRADIENTS, -4 * self.total)


def make_engine_memory(
    recipe: Recipe, parameters: Sequence[Parameter], world_size: int, cuda: bool = False
) -> EngineMemory:
    """The bookkeeper of the engine that the recipe names. Raises RecipeError for a configuration it rejects."""
    if recipe.engine.name == "torch":
        if world_size > 1:
            from training.planning.sharded_memory import FSDPMemory

            return FSDPMemory(recipe, parameters, world_size, cuda)
        return TorchMemory(recipe, parameters, world_size, cuda)
    from training.planning import zero_memory

    config = merged_config(recipe, world_size, sum(p.numel for p in parameters))
    stage = config["zero_optimization"].get("stage", 0)
    if stage == 3:
        from training.planning.zero3_memory import Zero3Memory

        return Zero3Memory(recipe, parameters, world_size, cuda, config)
    kinds = {0: zero_memory.Zero0Memory, 1: zero_memory.Zero1Memory, 2: zero_memory.Zero2Memory}
    offload = (config["zero_optimization"].get("offload_optimizer") or {}).get("device", "none") != "none"
    accumulates_fp32 = (config.get("data_types") or {}).get("grad_accum_dtype") == "fp32"
    fp32_stage_1 = stage == 1 and accumulates_fp32 and recipe.precision == "bf16" and not offload
    return (zero_memory.BF16Memory if fp32_stage_1 else kinds[stage])(recipe, parameters, world_size, cuda, config)


def gathers(recipe: Recipe, world_size: int) -> bool:
    """Whether the engine gathers each module's parameters when it is called."""
    if recipe.engine.name == "torch":
        return False  # FSDP gathers whole layers
    config = merged_config(recipe, world_size, 2)
    return config["zero_optimization"].get("stage", 0) == 3


__all__ = ["OTHER", "EngineMemory", "Parameter", "Walked", "gathers", "make_engine_memory", "parameters_of", "walk"]
