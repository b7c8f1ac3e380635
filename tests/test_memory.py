"""The meter counts what lives, to the byte, and leaves nothing behind."""

import gc
import threading

import numpy as np
import pytest
import torch
from metered import A, B, C, N, chain
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from model import host
from training.memory import Meter

# -- counting ------------------------------------------------------------------------------------------------


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


# -- budgets -------------------------------------------------------------------------------------------------


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


# -- the host pool -------------------------------------------------------------------------------------------


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
