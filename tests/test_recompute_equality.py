"""Whatever a mode forgets, recomputes or moves: loss, every gradient and the trained weights are those of `none`."""

import copy
import itertools
import warnings

import pytest
import torch

from model import offload, recompute
from model.modes import Mode
from tests.mode_steps import assert_same, gradients, make, step, train
from tests.shapes import batch

STYLES, ATTENTION = ("gpt2", "llama"), ("unfused", "sdpa")
MODES = [name for name in recompute.MODES if "deepspeed" not in name]
# Groups that come out ragged, every kept output, offload on top of them, and modes that differ per layer.
MORE = (
    "selective+norm+activation+mlp",
    "norm+mlp+offload",
    "full+uniform4",
    "full+uniform2+attention+offload",
    "full+block2+offload",
    "full+qkv+projection",
    "full+attention+qkv+mlp_up+projection",
    ("full+attention", "norm+activation", "none"),
    ("none+offload", "full", "selective"),
    ("full+offload", "full+attention+offload", "selective+norm+offload"),
)
# Parts of a model that train without the rest.
FROZEN = {"embedding": ("embedding", "position_embedding"), "all but one layer": ("layers.0", "layers.2", "embedding")}


@pytest.fixture(autouse=True)
def small_things_move_and_known_warnings_are_silent(monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mode ")
        yield


def with_layers(modes, style, attention, dropout, layers=3, **settings):
    model = make(style, attention, dropout, num_layers=layers)
    expected = train(model, "none", **settings)
    for mode in modes:
        yield mode, train(model, mode, **settings), expected


def active(modes, attention):
    """Those that promise something: under a fused kernel `selective` by itself is `none`."""
    return [mode for mode in modes if attention == "unfused" or mode not in ("none", "selective")]


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("style", STYLES)
def test_every_mode_trains_bitwise_as_none_does_from_the_first_step_on(style, attention):
    """With dropout, through three optimizer steps."""
    for mode, ours, theirs in with_layers(active(MODES, attention), style, attention, 0.1):
        assert_same(ours, theirs, mode)


@pytest.mark.parametrize(("style", "attention"), [("gpt2", "unfused"), ("llama", "sdpa")])
def test_ragged_groups_every_kept_output_and_modes_per_layer_train_bitwise_as_none_does(style, attention):
    for mode, ours, theirs in with_layers(MORE, style, attention, 0.1, steps=2):
        assert_same(ours, theirs, mode)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"accumulation": 2}, {"autocast": True}], ids=str)
@pytest.mark.parametrize("layers", [1, 5])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("style", STYLES)
def test_the_whole_matrix_trains_bitwise_as_none_does(style, attention, dropout, layers, settings):
    modes = [*MODES, "full+uniform3", "full+uniform4", *(mode for mode in MORE if isinstance(mode, str))]
    if layers == 1:
        modes = [mode for mode in modes if "offload" not in mode]  # the last layer is never moved
    for mode, ours, theirs in with_layers(active(modes, attention), style, attention, dropout, layers, **settings):
        assert_same(ours, theirs, mode)


@pytest.mark.parametrize("layers", [1, 5])
@pytest.mark.parametrize("mode", ["full+uniform3", "full+uniform4", "full+sqrt", "full+attention+uniform3"])
def test_each_layer_of_a_group_receives_its_predecessors_output(layers, mode):
    for _, ours, theirs in with_layers([mode], "llama", "sdpa", 0.1, layers, steps=1):
        assert_same(ours, theirs)


@pytest.mark.parametrize(
    "mode", ["selective+norm+activation", "full", "full+attention", "none+offload", "full+offload"]
)
def test_accumulated_gradients_are_bitwise_those_of_none(mode):
    for _, ours, theirs in with_layers([mode], "gpt2", "unfused", 0.1, accumulation=2, steps=1):
        assert_same(ours, theirs)


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("mode", ["selective+norm+activation", "full", "full+attention", "full+qkv", "full+offload"])
def test_no_gradient_is_lost_or_zero_when_parts_are_frozen(mode, frozen):
    model = make("llama", dropout=0.1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN[frozen]))
    ours, theirs = train(model, mode), train(model, "none")
    assert_same(ours, theirs)
    assert all(gradient.any() for name, gradient in ours.items() if "gradient" in name)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.split(" of ")[1] for name in ours if "gradient" in name} == trained


@pytest.mark.parametrize("mode", ["selective", "norm", "full", "full+attention", "norm+activation+offload"])
def test_pure_bfloat16_trains_bitwise_as_none_does(mode):
    model = make("llama", "unfused", dropout=0.1).to(torch.bfloat16)
    assert_same(train(model, mode), train(model, "none"))


@pytest.mark.parametrize("mode", MODES)
def test_autocast_is_replayed_as_it_was(mode):
    """Backward is called outside of autocast, as it should be: only forward's own autocast counts."""
    model = make("llama", "unfused", dropout=0.1)
    assert_same(train(model, mode, steps=1, autocast=True), train(model, "none", steps=1, autocast=True))


@pytest.mark.parametrize("mode", ["selective+norm+activation", "mlp", "full", "full+attention"])
def test_autocast_around_backward_only_does_not_reach_what_is_recomputed(mode):
    results = []
    for name in ("none", mode):
        model = make("llama", "unfused")
        recompute.apply(model, name)
        loss = model(*batch(2, 9))
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        results.append(gradients(model))
    assert_same(*results)


@pytest.mark.parametrize("mode", MODES)
def test_training_then_evaluation_then_training_is_bitwise_that_of_none(mode):
    """Also when evaluation keeps its graph for nothing: in eval mode, with gradients enabled."""
    results = []
    for name in ("none", mode):
        model, record = make("llama", "unfused", dropout=0.1), {}
        recompute.apply(model, name)
        record["first"] = step(model, 1)
        with torch.no_grad():
            model.eval()
            record["evaluation"] = model(*batch(3, 11))
        record["evaluated with a graph"] = model(*batch(3, 11)).detach()
        model.train()
        record["second"] = step(model, 2)
        results.append(record | gradients(model))
    assert_same(*results)


@pytest.mark.parametrize("mode", MODES)
def test_two_forwards_before_one_backward_and_two_backwards_of_one_forward(mode):
    results = []
    for name in ("none", mode):
        model = make("llama", "unfused", dropout=0.1)
        recompute.apply(model, name)
        torch.manual_seed(0)
        first, second = model(*batch(2, 9, seed=1)), model(*batch(2, 9, seed=2))
        torch.manual_seed(7)  # backward must not depend on where the generator is, nor move it
        (first * 3 + second).backward(retain_graph=True)
        twice = torch.rand(3)
        second.backward()
        results.append(gradients(model) | {"random numbers after backward": twice})
    assert_same(*results)


@pytest.mark.parametrize("mode", ["selective", "norm+activation", "full", "full+attention", "norm+offload"])
def test_gradients_of_gradients_are_those_of_none(mode):
    results = []
    for name in ("none", mode):
        model = make("gpt2", "unfused", tied_embeddings=False)
        recompute.apply(model, name)
        weights = [p for p in model.parameters() if p.dim() > 1]
        first = torch.autograd.grad(model(*batch(2, 9)), weights, create_graph=True)
        sum(gradient.square().sum() for gradient in first).backward()
        results.append(gradients(model))
    assert_same(*results)


@pytest.mark.parametrize("inner", ["selective+norm+activation", "full", "full+attention", "norm+activation+offload"])
@pytest.mark.parametrize("outer", ["checkpoint", "save_on_cpu", "both"])
def test_modes_work_inside_recompute_and_hooks_of_others(inner, outer):
    """The model as a part of something larger that recomputes or moves what it saves."""
    results = []
    for name in ("none", inner):
        model = make("llama", dropout=0.1)
        recompute.apply(model, name)
        torch.manual_seed(0)
        with torch.autograd.graph.save_on_cpu() if outer != "checkpoint" else torch.enable_grad():
            if outer == "save_on_cpu":
                loss = model(*batch(2, 9))
            else:
                loss = torch.utils.checkpoint.checkpoint(model, *batch(2, 9), use_reentrant=False)
        loss.backward()
        results.append({"loss": loss.detach()} | gradients(model))
    assert_same(*results)


@pytest.mark.parametrize("mode", MODES)
def test_names_parameters_and_state_do_not_notice_a_mode(mode):
    plain, model = make("gpt2", "unfused"), make("gpt2", "unfused")
    recompute.apply(model, mode)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    plain.load_state_dict(model.state_dict())


def test_going_back_to_none_leaves_nothing_of_a_mode():
    model, plain = make("llama", "unfused"), make("llama", "unfused")
    for mode in ("selective+norm+activation+mlp", "full+attention+qkv", "none+offload", "none"):
        recompute.apply(model, mode)
    for ours, theirs in zip(model.modules(), plain.modules()):
        assert ours.__dict__.keys() == theirs.__dict__.keys()


def test_a_copy_of_a_model_under_a_mode_runs_its_own_layers():
    model = make("llama", "unfused", dropout=0.1)
    for mode in ("selective+norm+activation+mlp", "full+attention", "norm+offload"):
        recompute.apply(model, mode)
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        expected = make("llama", "unfused", dropout=0.1)
        assert torch.equal(step(other), step(expected))
        assert_same(gradients(other), gradients(expected))
        assert not gradients(model)
        recompute.require_active(other, mode)
        model.load_state_dict(expected.state_dict())


def test_a_list_of_modes_must_have_one_for_each_layer():
    with pytest.raises(ValueError, match="2 modes for 3 layers"):
        recompute.apply(make(), ["none", "full"])


def test_groups_are_cut_where_the_mode_changes_and_the_last_one_is_ragged():
    def lengths(modes):
        return [(len(group.layers), str(group.mode)) for group in recompute.make_groups(range(len(modes)), modes)]

    uniform, block, root = (Mode("full", grouping=g, group=k) for g, k in (("uniform", 3), ("block", 2), ("sqrt", 1)))
    assert [n for n, _ in lengths([uniform] * 5)] == [3, 2]
    assert [n for n, _ in lengths([root] * 10)] == [4, 4, 2]
    assert [name.split("+")[0] for _, name in lengths([block] * 4)] == ["full", "full", "none", "none"]
    mixed = [uniform] * 4 + [Mode()] + [uniform] * 2
    assert [n for n, _ in lengths(mixed)] == [3, 1, 1, 2]
    for offload_kind, rest in (("async", "none+offload"), ("deepspeed", "none")):
        block = Mode("full", grouping="block", group=1, offload=offload_kind)
        assert lengths([block] * 2)[1] == (1, rest)


@pytest.mark.parametrize(
    ("mode", "attention", "text"),
    [
        ("selective", "sdpa", "recomputing core_attn saves nothing under attention=sdpa"),
        ("full+attention", "unfused", "probabilities"),
        ("full+uniform3", "sdpa", "one group holds all 3 layers"),
    ],
)
def test_a_mode_that_cannot_save_what_it_says_warns_with_the_reason(mode, attention, text):
    with pytest.warns(UserWarning, match=text):
        recompute.apply(make(attention=attention), mode)


def test_every_pair_of_named_modes_can_follow_each_other():
    model = make("llama", "unfused", dropout=0.1)
    step(model)
    expected = gradients(model)
    for mode in itertools.chain(MODES, reversed(MODES)):
        recompute.apply(model, mode)
        model.zero_grad()
        step(model)
        assert_same(gradients(model), expected)
