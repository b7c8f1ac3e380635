"""What memory is for, and what can be told of it by identity."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

KINDS = ("parameters", "gradients", "optimizer", "activations", "loss", "temporary", "other")
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOSS, TEMPORARY, OTHER = range(len(KINDS))
IGNORED = -1  # known so as not to count

# What a phase leaves behind is what it was for; what dies within it was temporary.
LEAVES = {"forward": ACTIVATIONS, "loss": LOSS, "backward": GRADIENTS, "optimizer": OPTIMIZER}


def by_name(by_kind: list[int]) -> dict[str, int]:
    """Bytes by the name of their kind."""
    return dict(zip(KINDS, by_kind, strict=True))


def of_model(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, int]]:
    """A model's parameters and gradients, as this rank holds them, with their kind."""
    for parameter in model.parameters():
        yield _local(parameter), PARAMETERS
        if isinstance(shard := getattr(parameter, "ds_tensor", None), torch.Tensor):  # ZeRO-3 keeps it there
            yield shard, PARAMETERS
        if parameter.grad is not None:
            yield _local(parameter.grad), GRADIENTS


def of_optimizer(thing: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    """The tensors that an optimizer holds, and optimizers within it (DeepSpeed's hold torch's, and buckets)."""
    if isinstance(thing, torch.Tensor):
        yield _local(thing)
    elif depth:
        inside: Any = ()
        if isinstance(thing, dict):
            inside = thing.values()
        elif isinstance(thing, (list, tuple, set)):
            inside = thing
        elif hasattr(thing, "param_groups") or dataclasses.is_dataclass(thing):  # an optimizer, a bucket
            inside = vars(thing).values()
        for item in inside:
            yield from of_optimizer(item, depth - 1)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)  # FSDP's parameters are split over the ranks
