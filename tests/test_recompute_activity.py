"""A mode does what it says in every step, nothing in evaluation, and leaves nothing behind."""

import gc
import warnings
from collections import Counter

import pytest
import torch
from torch import nn

from model import layer_loop, offload, recompute, region
from model.modes import Mode
from tests.births import Births
from tests.mode_steps import make, step
from tests.shapes import batch

MODES = [name for name in recompute.MODES if "deepspeed" not in name]
VARIED = ("selective+norm+activation+offload", "full", "full+attention+qkv+uniform2+offload")
ALL = (*MODES, "full+attention+qkv+uniform2+offload", "selective+norm+activation+mlp")
OURS = (region.Region, region.Slot, region.Kept, layer_loop.Keeper, offload.Transfers, offload.Moved)
_of_other_tests: set[int] = set()  # a ZeRO engine's hooks keep what they saw for the rest of the process


@pytest.fixture(autouse=True)
def _note_what_other_tests_left():
    _of_other_tests.clear()
    gc.collect()
    _of_other_tests.update(id(thing) for thing in left_behind())


def left_behind():
    return [thing for thing in gc.get_objects() if type(thing) in OURS and id(thing) not in _of_other_tests]


@pytest.fixture(autouse=True)
def small_things_move_and_known_warnings_are_silent(monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mode ")
        yield


@pytest.fixture
def no_garbage_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=() if mode in VARIED else pytest.mark.slow) for mode in ALL])
def test_live_bytes_are_flat_over_fifty_steps_without_the_garbage_collector(mode):
    """With evaluation, a forward whose graph is dropped, and accumulation in between."""
    model = make("llama", "unfused", 0.1, num_layers=2)
    recompute.apply(model, mode)
    optimizer = torch.optim.AdamW(model.parameters())
    births, live = Births(model), []
    with births:
        for number in range(50):
            if number % 10 == 3:
                with torch.no_grad():
                    model(*batch(2, 5))
            if number % 10 == 5:
                model(*batch(1, 5))
            if number % 10 == 7:
                step(model, number, shape=(1, 5))
            step(model, number, shape=(1, 5))
            optimizer.step()
            optimizer.zero_grad()
            if number % 10 == 1:
                live.append(births.all_alive_bytes())
    assert live[1:] == live[:1] * 4
    assert not left_behind()


@pytest.mark.usefixtures("no_garbage_collector")
@pytest.mark.parametrize("mode", ["norm+activation+offload", "full", "full+attention+offload"])
def test_a_forward_that_fails_half_way_leaves_nothing_and_the_next_step_works(mode):
    model = make("llama")
    recompute.apply(model, mode)
    expected = step(model)
    model.zero_grad()

    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    hook = model.layers[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        step(model)
    hook.remove()
    assert not left_behind()
    assert torch.equal(step(model), expected)


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_recomputes_nothing_and_moves_nothing(mode):
    model = make("llama", "unfused", 0.1)
    done = recompute.apply(model, mode)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(*batch(2, 9))
            model.logits(batch(2, 9)[0])
    assert done == recompute.Activity()
    assert not left_behind()


@pytest.mark.parametrize(
    ("mode", "count"),
    [
        ("none", 0),
        ("selective", 3),
        ("norm", 6),
        ("activation", 3),
        ("selective+norm+activation", 12),
        ("mlp", 3),
        ("full", 3),
        ("full+uniform2", 2),
        ("full+block2", 2),
        ("full+sqrt", 2),
        ("full+attention", 3),
        (["none", "full", "norm"], 3),
    ],
)
def test_every_step_recomputes_each_region_once(mode, count):
    model = make("llama", "unfused", 0.1)
    done = recompute.apply(model, mode)
    for number in (1, 2):
        step(model, number)
        assert recompute.activity(model).recomputed == done.recomputed == number * count


@pytest.mark.parametrize("mode", ["none", "full", "full+attention", "mlp", "norm", "full+uniform2"])
def test_side_effects_of_a_layer_fire_once_when_they_ask(mode):
    """A counter that asks `is_recomputing` counts forwards; one that does not sees what runs again."""
    fired = Counter()

    def count(module, *_):
        fired["all"] += 1
        fired["forward"] += not recompute.is_recomputing()

    model = make("llama", "sdpa", 0.1)
    recompute.apply(model, mode)
    for layer in model.layers:
        layer.mlp.up.register_forward_hook(count)
        layer.mlp.register_forward_pre_hook(count)
    for number in (1, 2):
        step(model, number)
        assert fired["forward"] == 6 * number
    assert (fired["all"] > fired["forward"]) == (mode not in ("none", "norm"))


# A mode that does nothing is an error


@pytest.mark.parametrize("mode", ["norm", "full", "full+attention", "mlp", ["none", "full", "none"]])
def test_a_mode_that_recomputes_nothing_is_an_error(mode):
    """Its loop over the layers was replaced by another, say, or the model is in evaluation only."""
    model = make("llama")
    recompute.apply(model, mode)
    with torch.no_grad():
        model(*batch(2, 9))
    with pytest.raises(RuntimeError, match="recomputed nothing"):
        recompute.require_active(model, mode)
    step(model)
    recompute.require_active(model, mode)


def test_a_mode_that_was_never_applied_is_an_error():
    model = make("llama")
    step(model)
    recompute.require_active(model, "none")
    with pytest.raises(RuntimeError, match="mode full recomputed nothing"):
        recompute.require_active(model, "full")


def test_selective_promises_nothing_under_a_fused_kernel():
    model = make("llama", "sdpa")
    recompute.apply(model, "selective")
    step(model)
    recompute.require_active(model, "selective")


@pytest.mark.parametrize("mode", ["none+offload", "full+offload", [Mode(), "none+offload", Mode()]])
def test_offload_that_moves_nothing_is_an_error(mode, monkeypatch):
    model = make("llama")
    recompute.apply(model, mode)
    step(model)
    recompute.require_active(model, mode)
    monkeypatch.setattr(offload, "MIN_BYTES", 1 << 20)
    recompute.apply(model, mode)
    step(model)
    with pytest.raises(RuntimeError, match="moved 0 bytes"):
        recompute.require_active(model, mode)


def test_offload_of_one_layer_moves_nothing_and_says_so():
    model = make("llama", num_layers=1)
    recompute.apply(model, "full+offload")
    step(model)
    with pytest.raises(RuntimeError, match="one layer only"):
        recompute.require_active(model, "full+offload")


def test_a_layer_exchanged_for_another_module_still_runs_under_its_mode():
    """People wrap layers after they chose a mode."""
    called = []

    class Wrapper(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x, rope):
            called.append(self)
            return self.layer(x, rope)

    model = make("llama")
    recompute.apply(model, "selective+norm+activation")
    for i, layer in enumerate(model.layers):
        model.layers[i] = Wrapper(layer)
    assert torch.equal(step(model), step(make("llama")))
    assert called == list(model.layers)
    recompute.require_active(model, "selective+norm+activation")
