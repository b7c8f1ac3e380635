"""AdamW's groups, its state and its learning rate: the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from training.recipe import Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1.

    Linear warmup to lr, which the last warmup step has; then constant, a cosine down to min_lr (Loshchilov &
    Hutter 2017, arXiv:1608.03983), or constant with a linear decay to min_lr over the last decay_steps (WSD: Hu
    et al. 2024, arXiv:2404.06395).
    """
    o = recipe.optimizer
    min_lr = o.lr / 10 if o.min_lr is None else o.min_lr
    if step <= o.warmup_steps:
        return o.lr * step / o.warmup_steps
    if o.schedule == "constant":
        return o.lr
    if o.schedule == "cosine":
        done = (step - o.warmup_steps) / (recipe.steps - o.warmup_steps)
        return min_lr + (o.lr - min_lr) * (1 + math.cos(math.pi * done)) / 2
    decay_steps = o.decay_steps or max(1, recipe.steps // 10)
    left = min(decay_steps, recipe.steps - step)
    return min_lr + (o.lr - min_lr) * left / decay_steps


def parameter_groups(parameters: Iterable[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices (embeddings among them) with weight decay, vectors (norms and biases) without.

    Chosen by shape, not by name, so that no wrapper around a module can move a parameter to the other group.
    """
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_adamw(recipe: Recipe, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), fused: one pass, no temporary as large as the model."""
    o = recipe.optimizer
    return torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True)


def create_state(optimizer: torch.optim.AdamW, parameters: Iterable[torch.Tensor]) -> None:
    """Make the moments now, not in the first step: from the start a run needs all the memory it will need."""
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(p, requires_grad=False),
        }


def clip_(gradients: list[torch.Tensor], norm: float, max_norm: float | None) -> None:
    """Scale gradients in place to a norm of at most `max_norm`, as DeepSpeed does it."""
    if max_norm is not None and (norm + 1e-6) / max_norm > 1:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))


def sum_of_squares(gradients: list[torch.Tensor]) -> float:
    """Squared 2-norm of all gradients together."""
    norms = torch.stack([torch.linalg.vector_norm(g) for g in gradients])
    return float(norms.double().square().sum())
