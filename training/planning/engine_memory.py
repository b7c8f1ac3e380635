"""What an engine holds besides the activations: weights, gradients, optimizer state, buffers, event by event.

Every engine has a bookkeeper (engine_books.py), chosen here. Those of DeepSpeed follow deepspeed 0.19.8,
runtime/zero/stage_1_and_2.py, stage3.py and fp16/unfused_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from model.gpt import GPT, GPTConfig
from training.engine_deepspeed import merged_config
from training.metering.kinds import GRADIENTS, OPTIMIZER, PARAMETERS
from training.planning import zero_memory
from training.planning.engine_books import STEP_BYTES, EngineMemory, Mark, Parameter
from training.planning.sharded_memory import FSDPMemory
from training.planning.zero3_memory import Zero3Memory
from training.recipe import Recipe


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
    return replace(config, num_layers=1)


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
            return FSDPMemory(recipe, parameters, world_size, cuda)
        return TorchMemory(recipe, parameters, world_size, cuda)
    config = merged_config(recipe, world_size, sum(p.numel for p in parameters))
    stage = config["zero_optimization"].get("stage", 0)
    if stage == 3:
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
