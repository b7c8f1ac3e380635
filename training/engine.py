"""What trains a model: one optimizer step from micro-batches, the same few methods for DeepSpeed and plain torch.

    engine = make_engine(recipe, model, world)
    result = engine.train_step(batches, lr, meter)   # forward and backward per micro-batch, then one step
    loss = engine.eval_loss(batches)
    engine.state() / engine.load_state(tensors)      # this rank's part of the training state

Both engines weigh every predicted token of the global batch alike, stop before a gradient that is not finite reaches
the weights, and keep float32 master weights and moments when the model itself is bf16.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from model.gpt import IGNORED
from training.metering import kinds
from training.recipe import Recipe
from training.run import NOT_FINITE, RunError
from training.world import World

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and targets, int64 [B, T], on the CPU


class Phases(Protocol):
    """The part of training.memory.Meter that an engine needs."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]: ...


class NoPhases:
    """Stands in for a meter where nobody measures."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the predicted tokens of the global batch, before the step. grad_norm: before clipping."""

    loss: float
    grad_norm: float
    predicted_tokens: int


class Engine:
    """Base of both engines: everything but forward, backward and the weight update."""

    name: str
    optimizer: Any  # torch's, or DeepSpeed's around it

    def __init__(self, recipe: Recipe, model: nn.Module, world: World) -> None:
        self.recipe = recipe
        self.model = model
        self.world = world
        self.accumulation = recipe.accumulation_steps(world.size)
        self.step_number = 0  # optimizer steps done; the loop sets it after loading

    # Each engine's own part.

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, denominator: float) -> torch.Tensor:
        raise NotImplementedError

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add the gradients of one micro-batch; `last` ends the accumulation."""
        raise NotImplementedError

    def update(self, lr: float) -> float:
        """Clip and apply the gradients; returns their norm. `check_norm` before anything is changed."""
        raise NotImplementedError

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's weights and optimizer state by name: the live tensors, not copies."""
        raise NotImplementedError

    def after_load(self) -> None:
        """Bring the model's weights up to date with the master weights just loaded."""

    def release(self) -> None:
        """Give back the memory of weights, gradients and optimizer state; the engine is of no use afterwards.

        By emptying storages: hooks that autograd holds keep a dropped ZeRO engine's tensors alive for ever.
        """
        optimizer = list(kinds.of_optimizer(self.optimizer))
        gradients = [tensor.grad for tensor in optimizer if tensor.is_leaf and tensor.grad is not None]
        for tensor in (*(tensor for tensor, _ in kinds.of_model(self.model)), *optimizer, *gradients):
            with contextlib.suppress(RuntimeError):  # memory that is not torch's own
                tensor.untyped_storage().resize_(0)

    def layout(self) -> dict[str, Any]:
        """What saved state depends on: it can be loaded only where this is the same."""
        return {"engine": self.name, "ranks": self.world.size, "precision": self.recipe.precision}

    # What is the same for both.

    def train_step(self, batches: Iterable[Batch], lr: float, meter: Phases | None = None) -> StepResult:
        """One optimizer step over this rank's micro-batches.

        Raises RunError, on every rank, when the loss or a gradient is not finite; the weights are then as before.
        """
        meter = meter or NoPhases()
        batches = list(batches)
        predicted = self._predicted(batches)
        # Both engines average gradients over ranks, so each rank's part is of the sum times the number of ranks.
        denominator = max(1.0, predicted) / self.world.size
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for i, (tokens, targets) in enumerate(batches):
            with meter.phase("forward"):
                loss = self.forward(self._move(tokens), self._move(targets), denominator)
            with meter.phase("backward"):
                self.backward(loss, last=i == len(batches) - 1)
            total += loss.detach()
            del loss
        mean = self.world.sum(float(total))[0] / self.world.size
        if not math.isfinite(mean):
            raise self._not_finite("loss", mean)
        with meter.phase("optimizer"):
            norm = self.update(lr)
        self.step_number += 1
        return StepResult(mean, norm, int(predicted))

    @torch.no_grad()
    def eval_loss(self, batches: Iterable[Batch]) -> float:
        """Mean loss over the predicted tokens of all ranks' batches, which must be equally many on every rank."""
        batches = list(batches)
        predicted = max(1.0, self._predicted(batches))
        training = self.model.training
        self.model.eval()
        try:
            total = sum(float(self.forward(self._move(x), self._move(y), predicted)) for x, y in batches)
        finally:
            self.model.train(training)
        return self.world.sum(total)[0]

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Copy saved tensors into the live ones, so that resuming needs no more memory than starting did."""
        own = self.state()
        if saved.keys() != own.keys():
            names = sorted(saved.keys() ^ own.keys())
            raise RunError(f"saved state does not belong to this model: {names[0]} is in only one of the two")
        for name, tensor in own.items():
            if saved[name].shape != tensor.shape:
                shapes = f"{list(saved[name].shape)}, not {list(tensor.shape)}"
                raise RunError(f"saved state does not belong to this model: {name} is {shapes}")
        # Out of a meter's sight: what is copied from is a file mapped into memory, not memory of the device.
        with torch.no_grad(), _disable_current_modes():
            for name, tensor in own.items():
                tensor.copy_(saved[name])
        self.after_load()

    def check_norm(self, norm: float) -> float:
        """The gradient norm, or RunError when it is not finite (DeepSpeed writes -1 for that in places)."""
        if not math.isfinite(norm) or norm < 0:
            raise self._not_finite("gradient norm", math.nan if norm < 0 else norm)
        return norm

    def _not_finite(self, what: str, value: float) -> RunError:
        return RunError(
            f"step {self.step_number + 1}: the {what} is {value}. The weights were not changed. Try a lower "
            f"optimizer.lr (now {self.recipe.optimizer.lr}), more optimizer.warmup_steps, a lower "
            "optimizer.clip_grad, or precision fp32; then look at the data of this step.",
            NOT_FINITE,
        )

    def _predicted(self, batches: list[Batch]) -> float:
        return self.world.sum(sum(int((targets != IGNORED).sum()) for _, targets in batches))[0]

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.world.device, non_blocking=True)


def make_engine(recipe: Recipe, model: nn.Module, world: World) -> Engine:
    """The engine that the recipe names, around a model that is already on the device and in its precision.

    Raises RecipeError when ranks, batch sizes or the DeepSpeed configuration contradict each other.
    """
    if recipe.engine.name == "deepspeed":
        from training.engine_deepspeed import (
            DeepSpeedEngine,
        )  # imports deepspeed: slow, and not always needed

        return DeepSpeedEngine(recipe, model, world)
    from training.engine_torch import TorchEngine

    return TorchEngine(recipe, model, world)
