"""Offload moves exactly what it should, in the right order, within its budget, and never at the cost of a gradient."""

import gc
import warnings

import pytest
import torch

from model import host, offload, recompute
from model.host import HostOutOfMemoryError
from model.kept import kept_bytes
from model.modes import Mode, parse
from tests.mode_steps import assert_same, gradients, make, step
from tests.shapes import batch
from training.memory import Meter

MODES = ["none+offload", "selective+norm+activation+offload", "full+offload", "full+attention+offload"]
LAYERS, SHAPE = 4, (2, 8)


@pytest.fixture(autouse=True)
def small_things_move_and_known_warnings_are_silent(monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mode ")
        yield


def applied(mode, style="llama", budget=None, dtype=torch.float32, **fields):
    model = make(style, num_layers=LAYERS, **fields).to(dtype)
    recompute.apply(model, mode, host_budget_bytes=budget)
    return model


def pool_of(model) -> offload.HostPool:
    return next(a for a in model.__dict__["run_layers"].args if isinstance(a, offload.HostPool))


def kept_by_group(config, mode, element_size=4):
    return sum(kept_bytes(config, parse(mode.removesuffix("+offload")), *SHAPE, element_size).values())


@pytest.fixture
def log(monkeypatch):
    """The copies in the order in which they start: ("out" or "in", group)."""
    copies = []
    original = offload.Moved._copy

    def noting(moved, slab, target, source, direction):
        copies.append(("in" if direction else "out", moved.group))
        original(moved, slab, target, source, direction)

    monkeypatch.setattr(offload.Moved, "_copy", noting)
    return copies


# What is moved


@pytest.mark.parametrize("style", ["gpt2", "llama"])
@pytest.mark.parametrize("mode", MODES)
def test_all_that_a_layer_keeps_is_moved_but_for_the_last_layers(mode, style):
    model = applied(mode, style, hidden_dropout=0.1)
    for number in (1, 2):
        step(model, number, SHAPE)
        expected = (LAYERS - 1) * kept_by_group(model.config, mode)
        assert recompute.activity(model).offloaded_bytes == number * expected
        assert pool_of(model).total_bytes == expected


def test_groups_move_their_input_once():
    model = applied("full+uniform3+offload")
    step(model, shape=SHAPE)
    assert recompute.activity(model).offloaded_bytes == kept_by_group(model.config, "full")


def test_only_the_layers_whose_mode_says_so_are_moved():
    modes = ["none+offload", "none", "full+offload", "full+attention"]
    model = applied(modes)
    step(model, shape=SHAPE)
    expected = sum(kept_by_group(model.config, mode) for mode in ("none", "full"))
    assert recompute.activity(model).offloaded_bytes == expected


def test_a_storage_is_moved_once_however_many_views_of_it_are_saved():
    pool, activity = offload.HostPool(None), recompute.Activity()
    x = torch.rand(4, 6, requires_grad=True) * 1
    pool.begin(x.shape, 0)
    transfers = offload.Transfers(pool, x, (), 2, activity)
    transfers.begin(0, moving=True)
    views = [x, x.t(), x[1:3], x.view(torch.int32), x[:, ::2].t()]
    saved = [transfers.save(view, offload.storage_key(view)) for view in views]
    assert activity.offloaded_bytes == pool.total_bytes == x.nbytes
    expected = [view.detach().clone() for view in views]
    with transfers.forward():
        pass
    assert saved[0].moved.resident is None
    for handle, view in zip(saved, expected):
        assert torch.equal(handle.get(), view)
        assert handle.get().dtype == view.dtype


def test_parameters_their_views_and_the_rotary_tables_are_never_moved(monkeypatch):
    moved = []
    original = offload.Moved.__init__

    def noting(self, transfers, tensor):
        moved.append(tensor.untyped_storage().data_ptr())
        original(self, transfers, tensor)

    monkeypatch.setattr(offload.Moved, "__init__", noting)
    model = applied("none+offload")
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tables = []
    run = model.run_layers
    model.run_layers = lambda x, rope: run(x, tables.extend(t.untyped_storage().data_ptr() for t in rope) or rope)
    step(model)
    assert moved
    assert len(tables) == 2
    assert not (parameters | set(tables)) & set(moved)


def test_what_is_smaller_than_the_minimum_stays(monkeypatch):
    """Of what a layer keeps the norms' statistics and the logsumexp are small."""
    model = applied("none+offload")
    kept = kept_bytes(model.config, Mode(), *SHAPE, 4)
    small = {name: n for name, n in kept.items() if "rms" in name or name in ("logsumexp",)}
    monkeypatch.setattr(offload, "MIN_BYTES", max(small.values()) + 1)
    step(model, shape=SHAPE)
    left = sum(kept.values()) - sum(small.values())
    assert recompute.activity(model).offloaded_bytes == (LAYERS - 1) * left


def test_short_sequences_are_not_worth_moving_and_default_sizes_say_so(monkeypatch):
    monkeypatch.undo()
    assert offload.MIN_BYTES == 16 * 1024
    model = applied("full+offload")
    step(model, shape=SHAPE)
    with pytest.raises(RuntimeError, match="moved 0 bytes"):
        recompute.require_active(model, "full+offload")


# When


def test_copies_out_follow_forward_and_backward_fetches_one_group_ahead(log):
    model = applied("full+offload")
    loss = model(*batch(*SHAPE))
    assert log == [("out", 0), ("out", 1), ("out", 2)]
    log.clear()
    seen = {}
    for i, layer in enumerate(model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, i=i: seen.update({i: list(log)}))
    loss.backward()
    # While layer 3, which was never moved, is recomputed, the input of layer 2 is on its way, and so on.
    assert seen == {
        3: [("in", 2)],
        2: [("in", 2), ("in", 1)],
        1: [("in", 2), ("in", 1), ("in", 0)],
        0: [("in", 2), ("in", 1), ("in", 0)],
    }


def test_a_group_is_fetched_in_the_order_in_which_backward_needs_it(log):
    model = applied("none+offload")
    model(*batch(*SHAPE)).backward()
    groups = [group for word, group in log if word == "in"]
    assert groups == sorted(groups, reverse=True)
    assert set(groups) == {0, 1, 2}


def test_device_memory_of_a_group_goes_when_the_second_group_after_it_starts(monkeypatch):
    """Copies have the time of one more layer before anybody waits for them."""
    model, in_flight = applied("full+offload"), []
    original = offload.Transfers.begin

    def noting(self, group, moving):
        original(self, group, moving)
        in_flight.append([moved.group for moved in self.in_flight])

    monkeypatch.setattr(offload.Transfers, "begin", noting)
    loss = model(*batch(*SHAPE))
    assert in_flight == [[], [0], [1], [2]]
    loss.backward()


def test_slabs_are_used_again_and_none_is_allocated_after_the_first_step(monkeypatch):
    made = []
    original = offload.Slab.__init__

    def counting(self, nbytes, pin):
        made.append(nbytes)
        original(self, nbytes, pin)

    monkeypatch.setattr(offload.Slab, "__init__", counting)
    model = applied("selective+norm+activation+offload", hidden_dropout=0.1)
    counts = []
    for number in range(5):
        step(model, number, SHAPE)
        with torch.no_grad():
            model(*batch(3, 11))
        counts.append(len(made))
    assert counts == [counts[0]] * 5
    assert sum(made) == pool_of(model).total_bytes


def test_two_forwards_before_one_backward_have_slabs_of_their_own():
    model = applied("full+offload")
    (model(*batch(*SHAPE)) + model(*batch(*SHAPE, seed=2))).backward()
    assert pool_of(model).total_bytes == 2 * (LAYERS - 1) * kept_by_group(model.config, "full")


def test_slabs_of_another_sequence_length_go():
    model = applied("full+offload")
    for length in (8, 16, 12):
        step(model, shape=(2, length))
        assert pool_of(model).total_bytes == (LAYERS - 1) * 2 * length * model.config.hidden_size * 4


# Memory


@pytest.mark.parametrize("mode", ["none", "selective+norm+activation", "full+attention"])
def test_after_forward_and_peak_both_drop_and_host_bytes_are_what_was_moved(mode):
    """On a sequence long enough for activations to be what the peak is made of."""

    def measured(name):
        model = applied(name, num_attention_heads=2)
        with Meter(model=model) as meter:
            step(model, shape=(2, 256))
        return meter

    gc.collect()
    others = host.live_bytes()  # of another test's ZeRO engine: its hooks keep what they saw
    plain, moved = measured(mode), measured(f"{mode}+offload")
    kept = sum(kept_bytes(make(num_attention_heads=2).config, parse(mode), 2, 256, 4).values())
    assert plain.after_forward_bytes - moved.after_forward_bytes == (LAYERS - 1) * kept
    assert moved.peak_host_bytes - others == (LAYERS - 1) * kept
    assert plain.peak_host_bytes == others
    assert plain.peak_bytes - moved.peak_bytes >= (LAYERS - 3) * kept  # the last, the current and the next are there


def test_the_host_budget_is_an_error_with_bytes_and_leaves_the_device_as_it_was():
    model = make("llama", num_layers=LAYERS)
    need = (LAYERS - 1) * kept_by_group(model.config, "full")
    recompute.apply(model, "full+offload", host_budget_bytes=need - 1)
    expected = step(make("llama", num_layers=LAYERS), shape=SHAPE)
    with Meter(model=model) as meter:
        for _ in range(3):
            before = meter.live_bytes
            with pytest.raises(HostOutOfMemoryError) as caught:
                step(model, shape=SHAPE)
            one = need // (LAYERS - 1)
            assert f"asked for {one} bytes" in str(caught.value)
            assert f"{2 * one} of its {need - 1} bytes" in str(caught.value)
            del caught
            gc.collect()
            assert meter.live_bytes == before
    recompute.apply(model, "none")
    assert torch.equal(step(model, shape=SHAPE), expected)
    recompute.apply(model, "full+offload", host_budget_bytes=need)
    model.zero_grad()
    assert torch.equal(step(model, shape=SHAPE), expected)


def test_a_budget_is_not_wasted_on_slabs_that_lie_free():
    model = make("llama", num_layers=LAYERS)
    long = (LAYERS - 1) * 2 * 16 * model.config.hidden_size * 4
    recompute.apply(model, "full+offload", host_budget_bytes=long)
    for length in (16, 12, 16, 4):
        step(model, shape=(2, length))
    assert pool_of(model).total_bytes <= long


def test_a_meters_host_budget_is_an_error_too():
    model = applied("none+offload")
    with Meter(model=model, host_budget_bytes=1000), pytest.raises(HostOutOfMemoryError, match="out of host memory"):
        step(model)
    step(model)


def test_going_back_to_none_gives_the_host_memory_back():
    gc.collect()
    start = host.live_bytes()
    model = applied("none+offload")
    step(model)
    assert host.live_bytes() > start
    recompute.apply(model, "none")
    gc.collect()
    assert host.live_bytes() == start


# Gradients


@pytest.mark.parametrize("mode", MODES)
def test_an_evaluation_in_the_middle_of_a_step_changes_nothing(mode):
    """Between forward and backward, with other shapes, as a run that logs a validation loss might."""
    results = []
    for name in ("none", mode):
        model = applied(name, hidden_dropout=0.1)
        for number in range(3):
            torch.manual_seed(number)
            loss = model(*batch(*SHAPE, seed=number))
            with torch.no_grad():
                model.eval()
                model(*batch(3, 11))
                model.train()
            moved = recompute.activity(model).offloaded_bytes
            loss.backward()
            assert recompute.activity(model).offloaded_bytes == moved
        results.append(gradients(model))
    assert_same(*results)


@pytest.mark.parametrize("where", [0, LAYERS - 1])
def test_what_is_changed_in_place_before_it_is_safe_on_the_host_is_an_error(where):
    """The input of a layer: of the first one, whose copy is on its way, and of the last, which is not copied."""
    model = applied("full+offload")

    def spoil(module, args):
        with torch.no_grad():
            inputs[where].add_(1)

    inputs = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    hook = model.layers[where].mlp.register_forward_pre_hook(spoil)
    loss = model(*batch(*SHAPE))
    hook.remove()
    with pytest.raises(RuntimeError, match="modified in place"):
        loss.backward()


def test_what_is_changed_in_place_after_it_left_does_not_reach_the_gradients():
    model, inputs = applied("full+offload"), []
    handles = [layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0])) for layer in model.layers]
    loss = model(*batch(*SHAPE, seed=0))
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        inputs[0].zero_()
    loss.backward()
    plain = make("llama", num_layers=LAYERS)
    step(plain, shape=SHAPE)
    assert_same(gradients(model), gradients(plain))


def test_weights_cast_by_autocast_may_move_and_gradients_stay_the_same():
    results = []
    for mode in ("none", "none+offload"):
        model = applied(mode)
        step(model, autocast=True)
        results.append(gradients(model))
    assert_same(*results)


# Pinning: a system that says no


class Runtime:
    """Stands in for the CUDA runtime's host functions, and for its last error, which the next kernel reports."""

    def __init__(self):
        self.refuse, self.last_error, self.registered = False, 0, {}

    def kernel(self, *_, device):
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError("CUDA error: out of memory")

    def cudaHostRegister(self, pointer, nbytes, flags):  # noqa: N802
        if self.refuse:
            self.last_error = 2
            return 2
        assert not any(self.pages(pointer, nbytes) & self.pages(*other) for other in self.registered.items())
        self.registered[pointer] = nbytes
        return 0

    def cudaHostUnregister(self, pointer):  # noqa: N802
        del self.registered[pointer]
        return 0

    @staticmethod
    def pages(pointer, nbytes):
        return set(range(pointer // 4096, (pointer + nbytes - 1) // 4096 + 1))


@pytest.fixture
def runtime(monkeypatch):
    def check(error):
        if error:
            raise RuntimeError("out of memory")

    fake = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch, "ones", fake.kernel)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(offload.Slab, "warned", False)
    return fake


def test_pinned_slabs_share_no_page_and_are_unpinned_when_they_go(runtime):
    slabs = [offload.Slab(nbytes, pin=True) for nbytes in (1, 4096, 5000, 100_000, 3)]
    assert all(slab.pinned for slab in slabs)
    assert [len(slab.bytes) for slab in slabs] == [1, 4096, 5000, 100_000, 3]
    assert len(runtime.registered) == 5
    del slabs
    gc.collect()
    assert not runtime.registered


def test_memory_that_cannot_be_pinned_is_used_all_the_same_with_one_warning(runtime):
    runtime.refuse = True
    with pytest.warns(UserWarning, match="cannot be pinned .*ulimit -l") as caught:
        slabs = [offload.Slab(100, pin=True) for _ in range(3)]
    assert len(caught) == 1
    assert not any(slab.pinned for slab in slabs)
    assert len(slabs[0].bytes.fill_(7)) == 100
    del slabs
    gc.collect()


def test_a_refused_pin_is_not_reported_as_an_error_of_the_device_by_the_next_kernel(runtime):
    runtime.refuse = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        offload.Slab(100, pin=True)
    runtime.kernel(device="cuda")
