"""The meter says who made the peak, in which phase, and what the memory was for."""

import re

import pytest
import torch
from metered import BIG, A, N, bump, numbers, tiny, tokens, train
from torch import nn
from torch.utils.checkpoint import checkpoint

from training.memory import Meter


class Bump(nn.Module):
    """Passes its input on, and takes memory for a moment in forward and in backward."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, forward_bytes, backward_bytes):
            bump(forward_bytes)
            ctx.backward_bytes = backward_bytes
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            bump(ctx.backward_bytes)
            return grad * 1, None, None

    def __init__(self, forward_bytes: int = 0, backward_bytes: int = 0) -> None:
        super().__init__()
        self.bytes = forward_bytes, backward_bytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.Function.apply(x, *self.bytes)


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class OnlyInRecompute(Bump):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bump(self.bytes[0] if torch._C._current_graph_task_id() >= 0 else 1)
        return x.sin()


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (Bump(forward_bytes=BIG), "aten.empty in 1 (forward)"),
        (Bump(backward_bytes=BIG), "aten.empty in 1 (backward)"),
        (Recomputed(Bump(backward_bytes=BIG), reentrant=False), "aten.empty in 1.inner (backward)"),
        (Recomputed(Bump(backward_bytes=BIG), reentrant=True), "aten.empty in 1.inner (backward)"),
        (Recomputed(OnlyInRecompute(BIG), reentrant=False), "aten.empty in 1.inner (recompute)"),
        (Recomputed(OnlyInRecompute(BIG), reentrant=True), "aten.empty in 1.inner (recompute)"),
    ],
)
def test_the_peak_names_operation_module_and_why(part, expected):
    model = nn.Sequential(nn.Linear(A, A), part, nn.Linear(A, A))
    with Meter(model=model) as meter:
        for _ in range(2):
            model(torch.ones(N, A)).sum().backward()
            assert meter.peak_op == expected
            meter.reset_peak()
            assert meter.peak_op == ""


def test_the_peak_may_be_the_optimizers_or_a_gradients_or_a_strangers():
    model = nn.Sequential(nn.Linear(A, A), nn.Linear(A, A))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    with Meter(model=model) as meter:
        model(torch.ones(N, A)).sum().backward()
        meter.reset_peak()
        optimizer.step()
        assert meter.peak_op == "aten.clone (optimizer)"
        handle = model[1].weight.register_post_accumulate_grad_hook(lambda weight: bump(BIG))
        meter.reset_peak()
        model(torch.ones(N, A)).sum().backward()
        assert meter.peak_op == "aten.empty in 1.weight (backward)"
        handle.remove()
        meter.reset_peak()
        bump(BIG)
        assert meter.peak_op == "aten.empty"
    with Meter() as meter:  # told of no model, it names by what was called
        model(torch.ones(N, A)).sum().backward()
        handle = model[1].weight.register_post_accumulate_grad_hook(lambda weight: bump(BIG))
        model(torch.ones(N, A)).sum().backward()
        assert meter.peak_op == "aten.empty in 1.weight (backward)"
        handle.remove()


def test_running_out_within_backward_and_recompute_names_the_place():
    for part, place in (
        (Bump(backward_bytes=BIG), "1 (backward)"),
        (Recomputed(OnlyInRecompute(BIG), False), "1.inner (recompute)"),
    ):
        model = nn.Sequential(nn.Linear(A, A), part, nn.Linear(A, A))
        with Meter() as probe:
            budget = probe.live_bytes + BIG // 2
        with Meter(model=model, budget_bytes=budget) as meter:
            loss = model(torch.ones(N, A)).sum()
            with pytest.raises(torch.OutOfMemoryError, match=re.escape(f"aten.empty in {place} wants {BIG:,}")):
                loss.backward()
            assert meter.failed_op == f"aten.empty in {place}"


def test_phases_are_found_as_they_would_be_said():
    found = []
    for said in (False, True):
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        with Meter(model=model, optimizer=optimizer) as meter:
            for _ in range(2):
                meter.reset_peak()
                train(model, optimizer, meter, said, micro_batches=2)
        kinds = meter.breakdown_bytes
        # Backward's seed, one number, is made just before backward.
        kinds["other"] -= 0 if said else 4
        kinds["temporary"] -= 4 if said else 0
        found.append((*numbers(meter)[:3], kinds, *numbers(meter)[4:]))
    assert found[0] == found[1]


def test_the_loss_is_what_the_head_makes():
    model = tiny(vocab_size=4096)
    (x, y), vocab = tokens(), 4096
    with Meter(model=model, timeline=1000) as meter:
        loss = model(x, y)
        loss.backward()
    rows = x.numel() * vocab * 4
    kinds = meter.breakdown_bytes
    assert " in head " in f" {meter.peak_op} "
    assert kinds["loss"] >= 2 * rows  # logits or their logarithms, and their gradient
    assert kinds["activations"] + kinds["temporary"] < rows
    assert sum(kinds.values()) == meter.peak_bytes
    phases = [phase for i, (_, phase, _, _) in enumerate(meter.timeline) if phase]
    assert [a for a, b in zip(phases, [None, *phases], strict=False) if a != b] == [
        "forward",
        "loss",
        "forward",
        "backward",
    ]
    assert meter.after_forward_breakdown_bytes["gradients"] == 0


def test_evaluation_leaves_nothing_and_is_no_forward():
    model = tiny(hidden_dropout=0.1)
    with Meter(model=model) as meter:
        start = meter.live_bytes
        with torch.no_grad():
            model.eval()
            model(*tokens())
        assert (meter.live_bytes, meter.after_forward_bytes, meter.current_phase) == (start, 0, "")
        with torch.inference_mode():
            model(*tokens())
        assert meter.live_bytes == start


def test_the_timeline_is_bounded_and_keeps_the_peak():
    model = tiny()
    for limit in (2, 7, 50, 100_000):
        with Meter(model=model, timeline=limit) as meter:
            model(*tokens()).backward()
            points = meter.timeline
        assert 2 <= len(points) <= limit
        assert [p[0] for p in points] == sorted({p[0] for p in points})
        assert max(p[3] for p in points) == meter.peak_bytes
    assert "layers.0.mlp" in {p[2] for p in points}
    assert {p[1] for p in points} >= {"forward", "loss", "backward"}
    assert Meter().timeline == []
    with pytest.raises(ValueError, match="timeline=1"):
        Meter(timeline=1)
