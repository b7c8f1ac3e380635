"""Small things to meter, shared by the meter's tests."""

import contextlib

import torch
from torch import nn

from model.gpt import GPT, GPTConfig
from training.memory import Meter

N, A, B, C = 32, 10, 20, 5  # batch and the widths of a small chain
BIG = 1 << 20


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(A, B, bias=False), nn.ReLU(), nn.Linear(B, C, bias=False))


def tiny(**fields) -> GPT:
    torch.manual_seed(0)
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
    return GPT(GPTConfig(**(shape | fields)))


def tokens(length: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.arange(2 * (length + 1)).view(2, length + 1) % 64
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def bump(nbytes: int) -> None:
    """Take so much memory for a moment that it is the peak."""
    torch.empty(nbytes, dtype=torch.uint8)


def train(model: GPT, optimizer: torch.optim.Optimizer, meter: Meter, said: bool, micro_batches: int = 1) -> None:
    def phase(name):
        return meter.phase(name) if said else contextlib.nullcontext()

    for _ in range(micro_batches):
        batch = tokens()
        with phase("forward"):
            loss = model(*batch)
        with phase("backward"):
            loss.backward()
        del loss
    with phase("optimizer"):
        optimizer.step()
    optimizer.zero_grad()


def numbers(meter: Meter) -> tuple:
    """All a meter says of a step."""
    return (
        meter.peak_bytes,
        meter.peak_op,
        meter.after_forward_bytes,
        meter.breakdown_bytes,
        meter.after_forward_breakdown_bytes,
        meter.live_bytes,
    )
