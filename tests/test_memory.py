"""The meter counts what lives, to the byte, names who made the peak, and leaves nothing behind."""

import contextlib
import gc
import os
import re
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import tiny as tiny_run
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from model import host
from model.gpt import GPT, GPTConfig
from training import build, world
from training.engine import make_engine
from training.memory import Meter
from training.storages import Storages

N, A, B, C = 32, 10, 20, 5  # batch and the widths of a small chain


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


# -- counting -----------------------------------------------------------------------------------------------------


def test_a_chain_forward_and_backward_is_counted_as_by_hand():
    model, x = chain(), torch.ones(N, A)
    with Meter(model=model) as meter:
        start = meter.live_bytes
        with meter.phase("forward"):
            loss = model(x).sum()
        # relu's output is kept by relu and by the second layer, its input by nobody; the last layer's output by
        # nobody, sum needs only its shape.
        kept = 4 * (N * B + 1)
        assert meter.live_bytes == start + kept
        assert meter.after_forward_bytes == start + kept
        assert meter.peak_bytes == start + 4 * 2 * N * B  # relu's input and output
        assert meter.peak_op == "aten.relu in 1 (forward)"
        meter.reset_peak()
        with meter.phase("backward"):
            loss.backward()
        # The gradient of sum is one number. Both of the second layer's gradients are there at once, then the
        # gradient of relu's input beside that of its output: the peak.
        assert meter.peak_bytes == start + kept + 4 * (1 + C * B + 2 * N * B)
        assert meter.peak_op == "aten.threshold_backward in 1 (backward)"
        assert meter.live_bytes == start + 4 * (1 + A * B + B * C)  # the loss and the gradients
        del loss
        model.zero_grad()
        assert meter.live_bytes == start


def test_the_breakdown_adds_up_and_says_what_is_what():
    model, x = chain(), torch.ones(N, A)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    weights = 4 * (A * B + B * C)
    with Meter(model=model, optimizer=optimizer) as meter:
        for _ in range(2):
            meter.reset_peak()
            with meter.phase("forward"):
                loss = model(x).sum()
            with meter.phase("backward"):
                loss.backward()
            with meter.phase("optimizer"):
                optimizer.step()
            assert sum(meter.breakdown_bytes.values()) == meter.peak_bytes
            assert sum(meter.after_forward_breakdown_bytes.values()) == meter.after_forward_bytes
        after = meter.after_forward_breakdown_bytes
        assert after["parameters"] == weights
        assert after["gradients"] == weights  # not yet zeroed: they are there during the second forward
        assert after["optimizer"] == 2 * weights + 2 * 4  # two moments, a step count for each of two weights
        assert after["activations"] == 4 * (N * B + 1)
        assert after["temporary"] == after["loss"] == 0
    # At entry everything is known by identity, to the same numbers.
    with Meter(model=model, optimizer=optimizer) as meter:
        kinds = meter.breakdown_bytes
        assert (kinds["parameters"], kinds["gradients"]) == (weights, weights)
        assert kinds["optimizer"] == 2 * weights + 2 * 4


def test_views_and_in_place_operations_cost_nothing():
    with Meter() as meter:
        start = meter.live_bytes
        x = torch.zeros(10, 10)
        parts = [x.t(), x[2:], x.view(100), x.detach(), *x.split(3), x.expand(5, 10, 10)]
        x.add_(1).mul_(2)
        assert meter.live_bytes == start + 400
        del x
        assert meter.live_bytes == start + 400  # the views hold it
        del parts
        assert meter.live_bytes == start
        assert meter.peak_bytes == start + 400


def test_operations_of_many_results_count_each():
    x = torch.rand(8, 16)
    with Meter() as meter:
        start = meter.live_bytes
        both = torch.max(x, dim=0)  # values float32, indices int64
        assert meter.live_bytes == start + 16 * (4 + 8)
        listed = torch._foreach_add([x, x], 1.0)
        assert meter.live_bytes == start + 16 * 12 + 2 * 8 * 16 * 4
        del both, listed
        assert meter.live_bytes == start


def test_freed_addresses_are_used_again_without_drift():
    with Meter() as meter:
        start = meter.live_bytes
        for size in range(1, 300):
            a = torch.zeros(size)
            b = a + 1
            assert meter.live_bytes == start + 8 * size
            del a
            assert meter.live_bytes == start + 4 * size
            del b
        assert meter.live_bytes == start
        assert meter.peak_bytes == start + 8 * 299


def test_resized_and_exchanged_storages_count_their_new_size():
    with Meter() as meter:
        start = meter.live_bytes
        x = torch.zeros(10)
        x.resize_(100)
        assert meter.live_bytes == start + 400
        x.untyped_storage().resize_(0)  # as FSDP frees
        assert meter.live_bytes == start
        x.untyped_storage().resize_(400)
        assert meter.live_bytes == start + 400
        x.data = torch.zeros(5)  # as ZeRO-3 frees
        assert meter.live_bytes == start + 20
        x.set_(torch.zeros(7))
        assert meter.live_bytes == start + 28
        torch.ones(30, out=x.resize_(0))
        assert meter.live_bytes == start + 120
        del x
        assert meter.live_bytes == start


def test_tensors_from_before_and_from_elsewhere_count():
    before = torch.zeros(1000)
    with Meter() as meter:
        with_it = meter.live_bytes
        del before
        assert meter.live_bytes == with_it - 4000
        start = meter.live_bytes
        made = []
        thread = threading.Thread(target=lambda: made.append(torch.zeros(50)))
        thread.start()
        thread.join()
        made.append(torch.from_numpy(np.zeros(25)))
        made[0].view(5, 10)  # seen at the first use
        assert meter.live_bytes == start + 200 + 200


def test_sparse_and_meta_tensors_do_no_harm():
    with Meter() as meter:
        start = meter.live_bytes
        huge = torch.empty(1 << 40, device="meta") + 1
        assert huge.is_meta
        assert meter.live_bytes == start
        eye = torch.eye(3).to_sparse()
        assert (eye @ torch.ones(3, 1)).sum() == 3


def test_tensors_inside_a_wrapper_count_once():
    a, b = torch.zeros(10), torch.zeros(10)
    with Meter() as meter:
        start = meter.live_bytes
        out = TwoTensor(a, b) + 1
        assert meter.live_bytes == start + 80
        del out
        assert meter.live_bytes == start


# -- budgets ------------------------------------------------------------------------------------------------------


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad()


def peak_of_step(model: nn.Module, x: torch.Tensor) -> int:
    with Meter() as meter:
        step(model, x)
    return meter.peak_bytes


def test_a_budget_of_the_peak_passes_and_one_byte_less_does_not():
    model, x = chain(), torch.ones(N, A)
    peak = peak_of_step(model, x)
    with Meter(budget_bytes=peak) as meter:
        step(model, x)
    assert (meter.peak_bytes, meter.failed_op) == (peak, "")
    with Meter(model=model, budget_bytes=peak - 1) as meter, pytest.raises(torch.OutOfMemoryError) as error:
        step(model, x)
    wanted = 4 * N * B
    assert str(error.value) == (
        f"out of memory: aten.threshold_backward in 1 (backward) wants {wanted:,} bytes, "
        f"{wanted - 1:,} bytes are free of a budget of {peak - 1:,} bytes"
    )
    assert meter.failed_op == "aten.threshold_backward in 1 (backward)"
    assert meter.peak_bytes < peak  # what was refused was never had


def test_a_step_can_go_on_after_running_out():
    model, x = chain(), torch.ones(N, A)
    with Meter() as probe:
        room = probe.live_bytes + 1000
    with Meter(budget_bytes=room) as meter:
        start = meter.live_bytes
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                step(model, x)
            model.zero_grad()
            gc.collect()  # pytest's error holds the frames
            assert meter.live_bytes == start
        small = torch.zeros(250)
        assert meter.live_bytes == meter.peak_bytes == room
        with pytest.raises(torch.OutOfMemoryError, match="wants 1 bytes, 0 bytes are free"):
            torch.zeros(1, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError):
            small.untyped_storage().resize_(1001)
        assert small.untyped_storage().nbytes() == 1000
    step(model, x)


def test_everything_is_restored_after_nested_failures():
    def state():
        return (
            len(_get_current_dispatch_mode_stack()),
            dict(module_hooks._global_forward_hooks),
            dict(module_hooks._global_forward_pre_hooks),
            dict(optimizer_hooks._global_optimizer_pre_hooks),
            dict(optimizer_hooks._global_optimizer_post_hooks),
            torch.UntypedStorage.__dict__.get("resize_"),
            list(host.watchers),
        )

    def fail(outer):
        with outer, outer.phase("forward"):
            live = outer.live_bytes
            with Meter(budget_bytes=live) as inner:
                with pytest.raises(torch.OutOfMemoryError), inner.phase("backward"):
                    model(x)
                assert (inner.current_phase, outer.current_phase) == ("", "forward")
            y = torch.zeros(10)  # the outer meter goes on
            gc.collect()  # pytest's error holds frames
            assert outer.live_bytes == live + 4 * y.numel()
            raise ZeroDivisionError

    model, x, before = chain(), torch.ones(N, A), state()
    outer = Meter()
    with pytest.raises(ZeroDivisionError):
        fail(outer)
    assert outer.current_phase == ""
    assert state() == before
    with Meter() as meter, pytest.raises(ValueError, match="unknown phase 'fwd': write one of forward, loss"):
        meter.phase("fwd").__enter__()
    assert state() == before


def test_a_meter_opens_again_from_zero_but_not_within_itself():
    meter = Meter()
    with meter:
        keep = torch.zeros(100)
        first = meter.live_bytes
        with pytest.raises(RuntimeError, match="open already"):
            meter.__enter__()
    assert meter.live_bytes == first
    with meter:
        assert meter.live_bytes == meter.peak_bytes == first
        del keep
        assert meter.live_bytes == first - 400
    assert meter.peak_bytes == first


# -- the host pool ------------------------------------------------------------------------------------------------


def test_the_host_pool_is_counted_apart():
    with Meter() as meter:
        device, start = meter.live_bytes, meter.host_bytes
        buffer = host.empty(100, torch.float32)
        assert (meter.live_bytes, meter.host_bytes) == (device, start + 400)
        view = buffer[:50].copy_(torch.zeros(50))
        assert meter.live_bytes == device
        del buffer
        assert meter.host_bytes == start + 400
        del view
        assert (meter.host_bytes, meter.peak_host_bytes) == (start, start + 400)
        assert meter.peak_bytes == device + 200  # the zeros that were copied
        late = torch.zeros(10)
        host.register(late.untyped_storage())
        host.register(late.untyped_storage())
        assert (meter.live_bytes, meter.host_bytes) == (device, start + 40)
        with host.allocation():
            other = late.clone()
        assert host.is_host(other.untyped_storage())
        assert not host.is_host(torch.zeros(1).untyped_storage())
        assert (meter.live_bytes, meter.host_bytes) == (device, start + 80)
        meter.reset_peak()
        assert meter.peak_host_bytes == start + 80
    del late, other
    assert host.live_bytes() == start
    assert meter.host_bytes == start + 80  # as it was when the meter closed


def test_the_host_budget_refuses_before_it_is_passed():
    start = host.live_bytes()
    with Meter(host_budget_bytes=start + 400) as meter:
        kept = host.empty(90, torch.float32)
        with pytest.raises(host.HostOutOfMemoryError, match="wants 44 bytes, 40 bytes are free of a budget of"):
            host.empty(11, torch.float32)
        assert (meter.host_bytes, meter.peak_host_bytes) == (start + 360, start + 360)
        exact = host.empty(10, torch.float32)
        assert meter.peak_host_bytes == start + 400
    assert kept.numel() + exact.numel() == 100


def test_more_memory_than_the_machine_has_is_a_host_out_of_memory():
    with pytest.raises(host.HostOutOfMemoryError):
        host.empty(1 << 60, torch.uint8)


def test_activations_moved_by_hooks_leave_the_device():
    model, x = chain(), torch.ones(N, A)

    def pack(tensor):
        return host.empty(tensor.shape, tensor.dtype).copy_(tensor)

    with Meter(model=model) as meter:
        device, start = meter.live_bytes, meter.host_bytes
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda moved: moved.clone()):
            loss = model(x).sum()
        assert meter.live_bytes == device + 4
        # Saved: x, the transposed second weight, relu's output twice.
        assert meter.host_bytes == start + 4 * (N * A + B * C + 2 * N * B)
        loss.backward()
        del loss
        assert meter.host_bytes == start


# -- who made the peak --------------------------------------------------------------------------------------------


def bump(nbytes: int) -> None:
    """Take so much memory for a moment that it is the peak."""
    torch.empty(nbytes, dtype=torch.uint8)


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


BIG = 1 << 20


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


# -- phases -------------------------------------------------------------------------------------------------------


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


# -- the same everywhere ------------------------------------------------------------------------------------------

STYLES = {
    "llama, sdpa": {},
    "gpt-2, unfused, dropout": {
        "normalization": "layernorm",
        "position_embedding": "learned",
        "max_position_embeddings": 64,
        "activation": "gelu",
        "bias": True,
        "tied_embeddings": True,
        "attention": "unfused",
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
}


@pytest.mark.parametrize("style", STYLES)
def test_the_same_step_takes_the_same_bytes_and_nothing_stays(style):
    model = tiny(**STYLES[style])
    optimizer = torch.optim.AdamW(model.parameters())
    with Meter(model=model, optimizer=optimizer) as meter:
        seen = []
        gc.disable()
        try:
            for _ in range(6):
                meter.reset_peak()
                train(model, optimizer, meter, said=True)
                seen.append(numbers(meter))
        finally:
            gc.enable()
    assert seen[1:] == seen[1:2] * 5


@pytest.mark.parametrize("style", STYLES)
def test_fake_tensors_take_the_bytes_of_real_ones(style):
    def run(model: GPT) -> tuple:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        with Meter(model=model, optimizer=optimizer) as meter:
            start = meter.live_bytes
            for _ in range(2):
                meter.reset_peak()
                train(model, optimizer, meter, said=True)
        peak, op, after, kinds, after_kinds, live = numbers(meter)
        del kinds["other"], after_kinds["other"]  # tensors of other tests may be alive
        return peak - start, op, after - start, kinds, after_kinds, live - start, meter.kind

    real = run(tiny(**STYLES[style]))
    with FakeTensorMode():
        fake = run(tiny(**STYLES[style]))
    assert real[:-1] == fake[:-1]
    assert (real[-1], fake[-1]) == ("cpu", "fake")


def test_a_fake_meter_counts_no_real_memory_and_the_other_way_round():
    real = torch.zeros(100)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with Meter() as meter:
            assert meter.live_bytes == 0
            assert (real + 1).numel() == 100
            kept = torch.zeros(1 << 40), torch.empty(1 << 40, device="meta")
            assert meter.live_bytes == 4 << 40
            pool = host.empty(1 << 40, torch.uint8)
            assert (meter.live_bytes, meter.host_bytes) == (4 << 40, 1 << 40)
        with pytest.raises(torch.OutOfMemoryError), Meter(budget_bytes=(4 << 40) + 99):
            torch.zeros(100, dtype=torch.uint8)
    with Meter() as meter:
        start = meter.live_bytes, meter.host_bytes
        with mode:
            kept[0].add(1)
        assert (meter.live_bytes, meter.host_bytes) == start
    assert max(start) < 1 << 40
    del pool


def test_the_meter_leaves_no_garbage_and_no_reference_to_itself():
    model = tiny()
    gc.collect()
    gc.disable()
    try:
        with Meter(model=model, timeline=10) as meter:
            for _ in range(3):
                model(*tokens()).backward()
            unreachable = gc.collect()
        gone = weakref.ref(meter)
        del meter
        assert gone() is None
        assert unreachable == 0
    finally:
        gc.enable()


def test_backward_in_threads_of_autograd_is_followed():
    class Deep(torch.autograd.Function):  # past 60 nested backward passes autograd goes on in another thread
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            threads.add(threading.get_ident())
            if ctx.depth == 0:
                bump(BIG)
                kept.append(torch.zeros(25))
                return grad * 1, None
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                Deep.apply(x, ctx.depth - 1).sum().backward()
            return x.grad, None

    threads: set[int] = set()
    kept: list[torch.Tensor] = []
    x = torch.ones(10, requires_grad=True)
    with Meter() as meter:
        start = meter.live_bytes
        Deep.apply(x, 70).sum().backward()
        assert len(threads) > 1
        assert meter.live_bytes == start + 40 + 100  # the gradient, and what was kept
        assert meter.peak_bytes > start + BIG


# Bytes per parameter in bf16 between forward and backward of the last micro-batch. Torch adds gradients up in
# float32; ZeRO 1 holds the float32 master twice while gradients accumulate; ZeRO 3 has no gradients of its own, but
# partitions of them in its optimizer, and a bucket.
STATIC = {"torch": (2, 4, 12), "zero0": (2, 2, 12), "zero1": (2, 2, 16), "zero2": (2, 4, 12)}


@pytest.mark.parametrize("name", ["torch", "zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"])
def test_every_engine_steps_in_the_same_bytes(name):
    torch_engine = ["engine.name=torch", "engine.deepspeed_config=null"]
    zero = ["engine.name=deepspeed", f"engine.deepspeed_config={name}"]
    settings = tiny_run.load(*(torch_engine if name == "torch" else zero), "precision=bf16")
    seen = []
    with Meter() as meter:
        host_before = meter.host_bytes
        model = build.build_model(settings)
        engine = make_engine(settings, model, world.join())
        meter.track(model, engine.optimizer)
        gc.disable()
        try:
            for number in range(4):
                meter.reset_peak()
                engine.train_step(tiny_run.batches(number, engine.accumulation), 1e-3, meter)
                seen.append((numbers(meter), meter.host_bytes, meter.peak_host_bytes))
        finally:
            gc.enable()
    assert seen[1:] == seen[1:2] * 3
    assert sum(meter.breakdown_bytes.values()) == meter.peak_bytes
    after, parameters = meter.after_forward_breakdown_bytes, sum(p.numel() for p in model.parameters())
    if name in STATIC:
        found = [after[kind] / parameters for kind in ("parameters", "gradients", "optimizer")]
        assert found == pytest.approx(STATIC[name], rel=0.01)  # norms' step counts, padding
    if "offload" in name:
        # Master weights, their gradients and two moments.
        assert meter.host_bytes - host_before == pytest.approx(16 * parameters, rel=0.01)


def test_an_optimizer_within_an_optimizer_is_known():
    model = chain()
    inner = torch.optim.SGD([torch.zeros(3, 4)], momentum=0.9)
    inner.state[inner.param_groups[0]["params"][0]]["momentum_buffer"] = torch.zeros(3, 4)
    outer = torch.optim.SGD(model.parameters())
    outer.optimizer, outer.flat = inner, [torch.zeros(5)]
    with Meter(model=model, optimizer=outer) as meter:
        kinds = meter.breakdown_bytes
    assert kinds["optimizer"] == 2 * 48 + 20
    assert kinds["parameters"] == 4 * (A * B + B * C)


def test_memory_that_another_thread_shows_in_backward_is_ignored_for_good():
    """Gloo copies gradients in threads of its own and frees them at any time: no two steps would agree."""

    class Foreign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            made = []
            thread = threading.Thread(target=lambda: made.append(torch.zeros(BIG)))
            thread.start()
            thread.join()
            kept.append(made[0].view(2, -1))
            return grad * 1

    kept: list[torch.Tensor] = []
    x = torch.ones(10, requires_grad=True)
    with Meter() as meter:
        start = meter.live_bytes
        Foreign.apply(x).sum().backward()
        kept.append(kept[0].t())
        assert meter.live_bytes == start + 40
        assert meter.peak_bytes < start + BIG
        kept.clear()
        assert meter.live_bytes == start + 40
        x.grad = None
        kept.append(torch.zeros(BIG))  # perhaps at the same address
        assert meter.live_bytes == start + 4 * BIG


@pytest.mark.slow
def test_compiled_regions_run_under_a_meter():
    model = tiny()
    compiled = torch.compile(model, backend="aot_eager")
    with Meter(model=model) as plain:
        model(*tokens()).backward()
        model.zero_grad()
    with Meter(model=model) as meter:
        start = meter.live_bytes
        for _ in range(3):
            compiled(*tokens()).backward()
            model.zero_grad()
    assert meter.live_bytes == start
    assert 0.5 < (meter.peak_bytes - start) / (plain.peak_bytes - start) < 1.5


# -- CUDA ---------------------------------------------------------------------------------------------------------


class FakeCuda:
    """Statistics as torch.cuda gives them, and an allocator to move them."""

    TOTAL = 10_000

    def __init__(self, monkeypatch) -> None:
        self.stats = {
            f"{kind}_bytes.all.{what}": 0 for kind in ("allocated", "reserved") for what in ("current", "peak")
        }
        self.stats["num_alloc_retries"] = 3
        self.free, self.fraction, self.fractions = 9_000, 0.9, []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: self.stats)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, self.TOTAL))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.reset())
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: self.fraction)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.set_fraction)

    def set_fraction(self, fraction, device) -> None:
        assert isinstance(fraction, float)
        assert 0 <= fraction <= 1
        self.fraction = fraction

    def reset(self) -> None:
        for kind in ("allocated", "reserved"):
            self.stats[f"{kind}_bytes.all.peak"] = self.stats[f"{kind}_bytes.all.current"]

    def take(self, nbytes: int) -> None:
        for kind, size in (("allocated", nbytes), ("reserved", 2 * nbytes)):
            current = self.stats[f"{kind}_bytes.all.current"] = self.stats[f"{kind}_bytes.all.current"] + size
            self.stats[f"{kind}_bytes.all.peak"] = max(self.stats[f"{kind}_bytes.all.peak"], current)


def test_on_cuda_the_allocator_is_read(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    cuda.take(100)
    with Meter() as meter:
        assert meter.kind == "cuda"
        assert len(_get_current_dispatch_mode_stack()) == 0  # no operation pays
        assert (meter.live_bytes, meter.peak_bytes, meter.peak_op) == (100, 100, "")
        with meter.phase("forward"):
            cuda.take(400)
            cuda.take(-100)
        with meter.phase("backward"):
            cuda.take(300)
            cuda.take(-500)
            cuda.stats["num_alloc_retries"] += 2
        with meter.phase("optimizer"):
            cuda.take(50)
        assert meter.after_forward_bytes == 400
        assert (meter.live_bytes, meter.peak_bytes, meter.peak_op) == (250, 700, "(backward)")
        assert (meter.reserved_bytes, meter.peak_reserved_bytes, meter.retries) == (500, 1400, 2)
        assert meter.outside_bytes == cuda.TOTAL - cuda.free - 500
        meter.reset_peak()
        assert (meter.peak_bytes, meter.after_forward_bytes, meter.peak_op) == (250, 0, "")
        pool = host.empty(100, torch.uint8)
        assert meter.host_bytes == host.live_bytes() == meter.peak_host_bytes
        del pool
    cuda.take(1000)
    assert (meter.live_bytes, meter.peak_bytes) == (250, 250)  # as it closed


def test_on_cuda_the_budget_limits_the_allocator_and_is_lifted_again(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    class TooBig(nn.Module):
        def forward(self, x):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = nn.Sequential(nn.Linear(A, A), TooBig())
    with Meter(model=model, device="cuda", budget_bytes=2_500) as meter:
        assert cuda.fraction == 0.25
        with pytest.raises(torch.OutOfMemoryError), meter.phase("forward"):
            model(torch.ones(N, A))
        assert meter.failed_op == "in 1 (forward)"
    assert cuda.fraction == 0.9
    with Meter(device=torch.device("cuda"), budget_bytes=cuda.TOTAL * 2) as meter:
        assert cuda.fraction == 1.0
        with pytest.raises(torch.OutOfMemoryError), meter.phase("backward"):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        assert meter.failed_op == "(backward)"
    assert cuda.fraction == 0.9


def test_on_cuda_operations_may_be_followed_beside_the_allocator(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(Storages, "_is_ours", lambda self, tensor: tensor.is_cpu)
    model = chain()
    with Meter(model=model, device="cuda", operations=True, timeline=100) as meter:
        cuda.take(7)
        model(torch.ones(N, A)).sum().backward()
        assert (meter.live_bytes, meter.peak_bytes) == (7, 7)
        assert meter.peak_op == "aten.threshold_backward in 1 (backward)"
        assert meter.breakdown_bytes["temporary"] > 0
        assert meter.timeline[-1][3] == 7


# -- against the process ------------------------------------------------------------------------------------------

RESIDENT = """
import torch
from model.gpt import GPT, GPTConfig
from training.memory import Meter
from training.storages import Storages

torch.set_num_threads(1)
shape = dict(num_layers={layers}, hidden_size={width}, num_attention_heads=16, vocab_size=2048, attention="{attention}")
model = GPT(GPTConfig(**shape)).to(torch.{dtype})
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randint(0, 2048, (1, {length}))

def status(field):
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

with Meter(model=model, optimizer=optimizer) as meter:
    for warm in (True, False):
        meter.reset_peak()
        live = meter.live_bytes
        open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts anew
        resident = status("VmRSS")
        model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        grown, counted = status("VmHWM") - resident, meter.peak_bytes - live
print(grown, counted)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's clear_refs")
@pytest.mark.parametrize(
    ("attention", "dtype", "layers", "width", "length"),
    [
        pytest.param("unfused", "float32", 1, 128, 2432),
        pytest.param("sdpa", "bfloat16", 12, 512, 4096, marks=pytest.mark.slow),
    ],
)
def test_the_process_grows_by_what_is_counted(attention, dtype, layers, width, length, repo_root):
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "131072",  # freed memory goes back to the system at once
        "MALLOC_TRIM_THRESHOLD_": "0",
        "MALLOC_ARENA_MAX": "1",
    }
    script = RESIDENT.format(attention=attention, dtype=dtype, layers=layers, width=width, length=length)
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=repo_root, check=True
    )
    grown, counted = map(int, out.stdout.split())
    assert counted > 1 << 30
    print(f"resident over counted bytes: {grown / counted:.4f}")
    assert abs(grown / counted - 1) < 0.1
