"""The plain torch engine: AdamW on float32 master weights, FSDP2 when there is more than one rank."""

from __future__ import annotations

import math

import torch
from torch import nn

from training.engine import Engine
from training.optimizer import clip_, create_state, make_adamw, parameter_groups, sum_of_squares
from training.recipe import Recipe
from training.world import World


def shard(model: nn.Module) -> None:
    """Split every layer's and the model's parameters over all ranks; each layer is gathered while it runs."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, sharing its memory; the tensor itself when it is whole."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class TorchEngine(Engine):
    """fp32: AdamW works on the weights. bf16: on float32 copies; gradients are added up in float32 as they arrive."""

    name = "torch"

    def __init__(self, recipe: Recipe, model: nn.Module, world: World) -> None:
        super().__init__(recipe, model, world)
        if world.size > 1:
            shard(model)
        self.masters: dict[str, torch.Tensor] = {}
        groups = parameter_groups(model.parameters(), recipe.optimizer.weight_decay)
        names = {p: name for name, p in model.named_parameters()}
        for group in groups:
            group["params"] = [self._master(names[p], p) for p in group["params"]]
        self.weights = {names[p]: p for p in model.parameters() if names[p] in self.masters}
        self.optimizer = make_adamw(recipe, groups)
        create_state(self.optimizer, self.masters.values())

    def _master(self, name: str, weight: nn.Parameter) -> torch.Tensor:
        part = local(weight.detach())
        if weight.dtype == torch.float32:
            self.masters[name] = part
        else:
            self.masters[name] = master = part.float()
            weight.register_post_accumulate_grad_hook(lambda p: _move_gradient(p, master))
        return self.masters[name]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, denominator: float) -> torch.Tensor:
        return self.model(tokens, targets, denominator)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        loss.backward()

    def update(self, lr: float) -> float:
        for name, weight in self.weights.items():
            if weight.grad is not None:
                self.masters[name].grad, weight.grad = local(weight.grad), None
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        # Of the sum, not of each rank's own value: every rank must come to the same decision.
        norm = self.check_norm(math.sqrt(self.world.sum(sum_of_squares(gradients))[0]))
        clip_(gradients, norm, self.recipe.optimizer.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.after_load()
        return norm

    @torch.no_grad()
    def after_load(self) -> None:
        for name, weight in self.weights.items():
            if weight.dtype != torch.float32:
                local(weight).copy_(self.masters[name])

    def state(self) -> dict[str, torch.Tensor]:
        state = {f"weight.{name}": master for name, master in self.masters.items()}
        for name, master in self.masters.items():
            state |= {f"{key}.{name}": value for key, value in self.optimizer.state[master].items()}
        return state


def _move_gradient(weight: nn.Parameter, master: torch.Tensor) -> None:
    """Add a finished bf16 gradient to the master's in float32 and free it."""
    gradient, weight.grad = local(weight.grad), None  # type: ignore[arg-type]
    master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
