"""The order of copies and kernels on CUDA streams, proven on a GPU that only keeps time (tests/streams.py)."""

import contextlib
import gc

import pytest
import torch

from model import offload, recompute
from tests.mode_steps import assert_same, gradients, make, step
from tests.shapes import batch
from tests.streams import Block, Gpu, Race, Stream

MODES = ["none+offload", "norm+activation+offload", "full+offload", "full+attention+offload", "full+uniform2+offload"]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    gpu = Gpu(monkeypatch)
    yield gpu
    gc.collect()
    assert not gpu.cuda.registered


def run(gpu, mode, steps=3):
    """Steps with an evaluation, a second forward before backward, and a graph that is dropped."""
    model = make("llama", dropout=0.1, num_layers=4)
    recompute.apply(model, mode)
    with gpu:
        for number in range(steps):
            step(model, number, (2, 8))
            with torch.no_grad():
                model(*batch(2, 8))
            model(*batch(2, 8))
            torch.manual_seed(number)
            (model(*batch(2, 8)) + model(*batch(2, 8, seed=2))).backward()
    return model


@pytest.mark.parametrize("mode", MODES)
def test_no_copy_races_with_a_kernel_or_another_copy(gpu, mode):
    model = run(gpu, mode)
    assert gpu.copies > 20
    assert gpu.cuda.registered
    gradient = gradients(model)
    assert_same(gradient, gradients(run(contextlib.nullcontext(), "none")))


# Each of the waits, taken out, is a race: none is there for nothing, and the test would see it missing.


def test_without_waiting_for_copies_out_device_memory_is_reused_too_early(gpu, monkeypatch):
    monkeypatch.setattr(offload.Moved, "_wait_for_copy", lambda moved: None)
    with pytest.raises(Race):
        run(gpu, "none+offload")


@pytest.mark.parametrize("method", ["release", "load", "__del__"])
def test_each_wait_for_a_copy_is_needed(gpu, monkeypatch, method):
    original, wait, deaf = getattr(offload.Moved, method), offload.Moved._wait_for_copy, []

    def deafened(moved):
        deaf.append(moved)
        try:
            return original(moved)
        finally:
            deaf.pop()

    monkeypatch.setattr(offload.Moved, method, deafened)
    monkeypatch.setattr(offload.Moved, "_wait_for_copy", lambda moved: None if moved in deaf else wait(moved))
    with pytest.raises(Race):
        never_asked_for(gpu) if method == "__del__" else run(gpu, "none+offload")


def never_asked_for(gpu):
    """Backward ends in the middle of a layer, whose other tensors were fetched for nothing."""
    model = make("llama", num_layers=4)
    recompute.apply(model, "none+offload")
    with gpu:
        kept = []
        model.layers[1].mlp.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        for _ in range(3):
            loss = model(*batch(2, 8))
            torch.autograd.grad(loss, kept)
            del loss
            kept.clear()
            for _ in range(30):
                torch.ones(2, 8, 32) + 1  # kernels that take the memory


def test_what_is_fetched_and_never_asked_for_gives_its_memory_back_after_the_copy(gpu):
    never_asked_for(gpu)
    assert gpu.copies > 20


@pytest.mark.parametrize("direction", [0, 1])
def test_a_copy_waits_for_the_kernels_before_it(gpu, monkeypatch, direction):
    """Out: for what computes the source. In: for whoever had the memory before."""
    original = offload.HostPool.copy_streams

    def streams(pool, device):
        first = device not in pool.streams
        both = original(pool, device)
        if first:
            monkeypatch.setattr(both[direction], "wait_stream", lambda other: None, raising=False)
        return both

    monkeypatch.setattr(offload.HostPool, "copy_streams", streams)
    with pytest.raises(Race):
        run(gpu, "none+offload")


@pytest.mark.parametrize("direction", [0, 1])
def test_a_copy_waits_for_the_slabs_last_copy(gpu, monkeypatch, direction):
    """Out: until the slab's last reader is done with it. In: until the copy out has written it."""
    original = offload.HostPool.copy_streams

    def streams(pool, device):
        first = device not in pool.streams
        both = original(pool, device)
        if first:
            # What the current stream has waited for would cover it up.
            monkeypatch.setattr(both[direction], "wait_event", lambda event: None, raising=False)
            monkeypatch.setattr(both[direction], "wait_stream", lambda other: kernels(both[direction], other))
        return both

    def kernels(stream, other):
        stream.clock[other] = other.clock[other]

    monkeypatch.setattr(offload.HostPool, "copy_streams", streams)
    with pytest.raises(Race):
        run(gpu, "none+offload")


def test_the_clock_finds_a_race_and_an_event_settles_it():
    block, one, two = Block(), Stream(), Stream()
    block.access(one, True, "write")
    with pytest.raises(Race):
        block.access(two, False, "read")
    two.wait_event(one.record_event())
    block.access(two, False, "read")
    with pytest.raises(Race):
        block.access(one, True, "write")
