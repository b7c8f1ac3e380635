"""Tiles of any length change nothing but rounding: loss and every gradient are those of the untiled model."""

import copy
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from model import attention_tiles, offload, recompute, tiling
from model.gpt import GPT, IGNORED, GPTConfig
from tests import shapes
from tests.mode_steps import assert_same, gradients, step, train

T = 13
LENGTHS = (1, 7, T - 1, T, T + 1)
STYLES = {
    "gpt2": shapes.GPT2,
    "llama": shapes.LLAMA,
    "llama-one-key-head": replace(shapes.LLAMA, num_query_groups=1, tied_embeddings=True),
}
ALL = {"loss_tile_tokens": 5, "mlp_tile_tokens": 4, "attention_head_groups": 2}
MODES = [name for name in recompute.MODES if "deepspeed" not in name]  # that one: tests/test_tiling_zero.py


def make(style="llama", **fields) -> GPT:
    """Weights at which gradients are well conditioned: 1e-6 is then a matter of the code and not of the model."""
    torch.manual_seed(0)
    model = GPT(replace(STYLES[style], init_std=0.05, **fields))
    for name, p in model.named_parameters():
        if p.dim() == 1:
            torch.nn.init.normal_(p, 1.0 if name.endswith("norm.weight") else 0.0, 0.05)
    return model


def run(model, shape=(2, T), denominator=None, scale=1.0, targets=None, seed=3):
    """Loss and gradients of one step."""
    model.zero_grad()
    tokens, drawn = shapes.batch(*shape)
    torch.manual_seed(seed)
    loss = model(tokens, drawn if targets is None else targets, denominator)
    (loss * scale).backward()
    return loss.detach(), gradients(model)


def assert_close(ours, theirs, tolerance=1e-6):
    (loss, grads), (their_loss, their_grads) = ours, theirs
    assert abs(loss - their_loss) <= tolerance * abs(their_loss)
    assert grads.keys() == their_grads.keys()
    for name, gradient in their_grads.items():
        # The gradient of a key's bias is zero: softmax does not see a shift. What is left of it is rounding.
        scale = their_grads[name.replace("key.bias", "key.weight")].norm()
        error = (grads[name] - gradient).norm()
        assert error <= tolerance * scale, f"{name}: {error / scale:.2e}"


# Equality over lengths, shapes and styles


@pytest.mark.parametrize("shape", [(1, T), (2, T)], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "unfused"])
@pytest.mark.parametrize("style", STYLES)
def test_tiles_of_any_length_give_the_untiled_loss_and_gradients(style, attention, shape):
    model = make(style, attention=attention)
    expected = run(model, shape)
    for length in LENGTHS:
        for groups in (1, 4):
            tiling.apply(model, length, length, groups)
            assert_close(run(model, shape), expected)


@pytest.mark.parametrize("rows", [1, 5, 4096])
@pytest.mark.parametrize("style", STYLES)
def test_each_kind_of_tile_alone_gives_the_untiled_loss_and_gradients(style, rows, monkeypatch):
    monkeypatch.setattr(attention_tiles, "ROWS", rows)
    model = make(style)
    expected = run(model)
    for name, value in ALL.items():
        tiling.apply(model, **{name: value})
        assert_close(run(model), expected)


@pytest.mark.parametrize("attention", ["sdpa", "unfused"])
@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_one_tile_draws_the_same_dropout_masks_as_the_untiled_model(style, attention):
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.2 if attention == "unfused" else 0.0}
    model = make(style, attention=attention, **dropout)
    expected = run(model)
    tiling.apply(model, 2 * T, 2 * T, 1)
    assert_close(run(model), expected)


@pytest.mark.parametrize("rows", [3, 4096])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_dropout_in_tiles_is_that_of_a_model_whose_masks_are_drawn_tile_by_tile(style, length, rows, monkeypatch):
    monkeypatch.setattr(attention_tiles, "ROWS", rows)
    model = make(style, hidden_dropout=0.2)
    for layer in model.layers:
        steps = iter([rows, length] * 2)  # two halves, each run once
        layer.__dict__["residual"] = partial(_residual_by_tiles, steps)
    expected = run(model, (1, T))
    for layer in model.layers:
        del layer.__dict__["residual"]
    tiling.apply(model, None, length, 2)
    assert_close(run(model, (1, T)), expected)


def _residual_by_tiles(steps, x, update):
    return x + torch.cat([F.dropout(tile, 0.2) for tile in update.split(next(steps), dim=1)], dim=1)


def test_tiles_in_bfloat16_are_as_near_to_float32_as_the_untiled_model():
    model = make()
    exact = run(model)
    model.to(torch.bfloat16)
    expected = run(model)
    tiling.apply(model, **ALL)
    (loss, grads), (their_loss, theirs) = run(model), expected
    assert abs(loss - exact[0]) <= 1.5 * abs(their_loss - exact[0]) + 1e-4
    for name, gradient in exact[1].items():
        ours, untiled = ((g[name].float() - gradient).norm() for g in (grads, theirs))
        assert ours <= 1.5 * untiled, name


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_tiles_under_autocast_are_as_near_to_float32_as_the_untiled_model(style):
    model = make(style)
    exact = run(model)
    with torch.autocast("cpu", torch.bfloat16):
        _, theirs = run(model)
        tiling.apply(model, **ALL)
        loss, grads = run(model)
    assert loss.dtype == torch.float32
    for name, gradient in exact[1].items():
        ours, untiled = ((g[name] - gradient).norm() for g in (grads, theirs))
        assert grads[name].dtype == torch.float32
        assert ours <= 1.5 * untiled + 1e-6 * exact[1][name.replace("key.bias", "key.weight")].norm(), name


# Together with the memory modes


@pytest.fixture
def small_things_move(monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mode ")
        yield


@pytest.mark.usefixtures("small_things_move")
@pytest.mark.parametrize("tiles", [ALL, {"mlp_tile_tokens": 4}, {"attention_head_groups": 2}], ids=str)
@pytest.mark.parametrize(("style", "attention"), [("gpt2", "unfused"), ("llama", "sdpa"), ("gpt2", "sdpa")])
def test_tiles_train_bitwise_the_same_under_every_mode(style, attention, tiles):
    """With dropout where the attention has it, through optimizer steps of two micro-batches."""
    dropout = 0.1 if attention == "unfused" else 0.0
    model = make(style, attention=attention, num_layers=3, hidden_dropout=dropout, attention_dropout=dropout)
    tiling.apply(model, **tiles)
    steps = 2 if tiles == ALL else 1
    expected = train(model, "none", steps, accumulation=2)
    for mode in (*MODES, "full+attention+uniform2+offload", ("none+offload", "full", "full+attention")):
        assert_same(train(model, mode, steps, accumulation=2), expected, mode)


@pytest.mark.usefixtures("small_things_move")
@pytest.mark.parametrize("mode", ["none", "full", "full+attention", "none+offload"])
@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_a_frozen_embedding_leaves_every_other_gradient_as_it_was(style, mode):
    model = make(style, tied_embeddings=False, num_layers=3)
    for name, p in model.named_parameters():
        p.requires_grad_("embedding" not in name and "layers.1.attention" not in name and "layers.2.mlp" not in name)
    loss, expected = run(model)
    assert 0 < len(expected) < len(list(model.parameters()))
    tiling.apply(model, **ALL)
    recompute.apply(model, mode)
    assert_close(run(model), (loss, expected))


@pytest.mark.parametrize("mode", ["none", "full", "full+attention"])
def test_backward_twice_through_a_graph_that_is_kept_gives_twice_the_gradient(mode):
    model = make()
    tiling.apply(model, **ALL)
    recompute.apply(model, mode)
    loss = model(*shapes.batch(2, T))
    loss.backward(retain_graph=True)
    once = {name: g.clone() for name, g in gradients(model).items()}
    loss.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, 2 * once[name])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_evaluation_between_training_steps_changes_nothing_and_keeps_nothing():
    model = make(hidden_dropout=0.1)
    expected = run(model.eval())[0]
    tiling.apply(model, **ALL)
    with torch.no_grad():
        loss = model(*shapes.batch(2, T))
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    first = step(model.train())
    model.eval()
    with torch.no_grad():
        model(*shapes.batch(2, T))
    assert torch.equal(step(model.train()), first)


@pytest.mark.parametrize("name", ["mlp.up", "attention.query", "attention.out", "post_norm"])
def test_a_parameter_changed_between_forward_and_backward_is_an_error(name):
    model = make()
    tiling.apply(model, **ALL)
    loss = model(*shapes.batch(2, T))
    with torch.no_grad():
        model.layers[0].get_submodule(name).weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place"):
        loss.backward()


# apply


def test_applying_nothing_undoes_what_was_applied_and_names_never_change():
    model = make()
    names = list(model.state_dict()), [name for name, _ in model.named_parameters()], list(model.named_modules())
    expected = run(model)
    chosen = tiling.apply(model, "auto", "auto", "auto")
    assert tiling.applied(model) == chosen == tiling.Tiles(8192, 4096, 4)
    found = list(model.state_dict()), [name for name, _ in model.named_parameters()], list(model.named_modules())
    assert found == names
    tiling.apply(model)
    assert tiling.applied(model) == tiling.Tiles()
    assert not any("forward" in module.__dict__ for module in model.modules())
    loss, grads = run(model)
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(grads[name], gradient) for name, gradient in expected[1].items())


def test_a_copy_of_a_tiled_model_uses_its_own_weights():
    model = make()
    tiling.apply(model, **ALL)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    run(other)
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad.any() for p in other.parameters())


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ({"loss_tile_tokens": 0}, "loss_tile_tokens=0 must be a whole number of tokens above 0"),
        ({"mlp_tile_tokens": "big"}, "mlp_tile_tokens='big' must be"),
        ({"mlp_tile_tokens": True}, "mlp_tile_tokens=True must be"),
        ({"attention_head_groups": 3}, "4 heads over 2 key/value heads can be cut into 1, 2, 4 groups"),
    ],
)
def test_tiles_that_do_not_fit_the_model_are_errors_that_say_what_does(tiles, message):
    with pytest.raises(ValueError, match=message):
        tiling.apply(make(), **tiles)


def test_tiles_after_a_mode_are_an_error():
    model = make()
    recompute.apply(model, "full")
    with pytest.raises(ValueError, match="before the recompute mode"):
        tiling.apply(model, 4)
    recompute.apply(model, "none")
    tiling.apply(model, 4)


def test_a_mode_that_tiles_leave_nothing_to_do_warns_and_trains():
    model = make(attention="unfused")
    tiling.apply(model, **ALL)
    with pytest.warns(UserWarning, match="activation, core_attn, norm changes nothing here: tiles"):
        recompute.apply(model, "selective+norm+activation")
    step(model)
    recompute.require_active(model, "selective+norm+activation")


@pytest.mark.parametrize(
    ("heads", "key_heads", "groups"),
    [(32, 8, 8), (16, 16, 8), (12, 12, 12), (28, 4, 4), (64, 8, 4), (8, 1, 8), (2, 2, 2)],
)
def test_auto_takes_few_groups_of_heads_that_are_narrow_enough(heads, key_heads, groups):
    config = GPTConfig(1, heads * 8, heads, 50257, num_query_groups=key_heads)
    assert tiling.resolve(config, "auto", "auto", "auto") == tiling.Tiles(2048, 4096, groups)


# The loss


LOSSES = [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}, {"label_smoothing": 0.1, "z_loss": 1e-3}]


@pytest.mark.parametrize("fields", LOSSES, ids=str)
@pytest.mark.parametrize("denominator", [None, 7.0, torch.tensor(11)], ids=["mean", "number", "tensor"])
def test_loss_tiles_give_means_and_sums_of_every_kind_of_loss(fields, denominator):
    model = make(**fields)
    for scale in (1.0, 0.25, -3.0):
        tiling.apply(model)
        expected = run(model, (2, T), denominator, scale)
        for length in LENGTHS:
            tiling.apply(model, length)
            assert_close(run(model, (2, T), denominator, scale), expected)


def test_a_tile_with_nothing_to_predict_changes_nothing():
    model = make()
    _, targets = shapes.batch(2, T)
    targets[:, 3:11] = IGNORED
    expected = run(model, targets=targets)
    for length in (1, 3, 4):
        tiling.apply(model, length)
        assert_close(run(model, targets=targets), expected)


@pytest.mark.parametrize("fields", LOSSES, ids=str)
def test_a_batch_with_nothing_to_predict_has_zero_loss_and_zero_gradients(fields):
    model = make(**fields)
    tiling.apply(model, **ALL)
    loss, grads = run(model, targets=torch.full((2, T), IGNORED))
    assert loss == 0
    assert all(gradient is not None and not gradient.any() for gradient in grads.values())


def test_targets_outside_the_vocabulary_are_an_error():
    model = make()
    tiling.apply(model, 4)
    for wrong in (-1, model.config.vocab_size):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            run(model, targets=torch.full((2, T), wrong))


def test_a_frozen_head_gets_no_gradient_and_passes_the_same_one_on():
    model = make("llama", tied_embeddings=False)
    model.head.weight.requires_grad_(False)
    expected = run(model)
    tiling.apply(model, 5)
    assert_close(run(model), expected)


def test_a_head_that_trains_alone_gets_the_same_gradient():
    model = make("llama", tied_embeddings=False)
    for name, p in model.named_parameters():
        p.requires_grad_(name == "head.weight")
    expected = run(model)
    tiling.apply(model, 5)
    assert_close(run(model), expected)


def test_the_heads_gradient_is_summed_in_float32_and_rounded_once():
    """200 tiles of one token, each too small a part of the sum to be seen by a bfloat16 one."""
    model = make("llama", tied_embeddings=False).to(torch.bfloat16)
    hidden = torch.ones(1, 200, model.config.hidden_size, dtype=torch.bfloat16)
    targets = torch.zeros(1, 200, dtype=torch.long)
    with torch.no_grad():
        model.head.weight.zero_()
    tiling.apply(model, 1)
    model.head(hidden, targets, 1.0).backward()
    vocabulary = model.config.vocab_size
    expected = torch.full((vocabulary,), 200 / vocabulary)
    expected[0] -= 200
    torch.testing.assert_close(model.head.weight.grad[:, 0].float(), expected, rtol=5e-3, atol=0)
