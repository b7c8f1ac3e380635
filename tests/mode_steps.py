"""Training steps under a memory mode whose every result can be compared bit by bit."""

import copy
from dataclasses import replace

import torch

from model import recompute
from model.gpt import GPT
from tests import shapes


def make(style="llama", attention="sdpa", dropout=0.0, **fields) -> GPT:
    """A small GPT; dropout everywhere where `attention` has it on a CPU."""
    drop = {"hidden_dropout": dropout, "attention_dropout": dropout if attention == "unfused" else 0.0}
    return shapes.make(replace(shapes.STYLES[style], **({"num_layers": 3, "attention": attention} | drop | fields)))


def step(model: GPT, seed=0, shape=(2, 9), autocast=False) -> torch.Tensor:
    """One forward and backward; returns the loss. Gradients add up."""
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(*shapes.batch(*shape, seed=seed))
    loss.backward()
    return loss.detach()


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(model: GPT, mode, steps=3, accumulation=1, autocast=False) -> dict[str, torch.Tensor]:
    """Losses, gradients and weights of every step of a copy of `model` that is trained under `mode`, by name."""
    model = copy.deepcopy(model)
    recompute.apply(model, mode)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    record = {}
    for number in range(steps):
        optimizer.zero_grad()
        for i in range(accumulation):
            record[f"step {number}: loss {i}"] = step(model, seed=10 * number + i, autocast=autocast)
        record |= {f"step {number}: gradient of {name}": grad for name, grad in gradients(model).items()}
        optimizer.step()
        record |= {f"step {number}: {name}": p.detach().clone() for name, p in model.named_parameters()}
    recompute.require_active(model, mode)
    return record


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], mode: object = "") -> None:
    """Bitwise equality of everything, naming what differs first."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), f"{mode} {name} differs by {(ours[name] - tensor).abs().max():.3g}"
