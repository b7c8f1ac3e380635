"""A loss that weighs every predicted token alike, parameters as declared, and errors for shapes that make no sense."""

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from model.gpt import GPT, IGNORED
from tests.shapes import GPT2, LLAMA, STYLES, batch, gradients, make

# The loss


@pytest.mark.parametrize("style", STYLES)
def test_the_loss_is_the_mean_over_predicted_tokens_or_their_sum_over_the_denominator(style):
    model, (tokens, targets) = make(STYLES[style]), batch(3, 20)
    logits = model.logits(tokens).double()
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    predicted = int((targets != IGNORED).sum())
    loss = model(tokens, targets)
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    assert loss.item() == pytest.approx(losses.sum().item() / predicted, rel=1e-6)
    for denominator in (7.0, torch.tensor(7)):
        scaled = model(tokens, targets, denominator)
        assert scaled.dtype == torch.float32
        assert scaled.item() == pytest.approx(losses.sum().item() / 7, rel=1e-6)


@pytest.mark.parametrize("style", STYLES)
def test_halves_with_one_denominator_accumulate_to_the_whole(style):
    """Also when the halves predict different numbers of tokens, where a mean of means is wrong."""
    model, (tokens, targets) = make(STYLES[style]), batch(4, 20)
    targets[:2, 3:] = IGNORED
    whole = model(tokens, targets)
    whole.backward()
    expected = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    total = (targets != IGNORED).sum()
    halves = [model(tokens[half], targets[half], total) for half in (slice(0, 2), slice(2, 4))]
    for half in halves:
        half.backward()
    assert sum(halves).item() == pytest.approx(whole.item(), rel=1e-6)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name], atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("denominator", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("style", STYLES)
def test_nothing_to_predict_gives_loss_zero_and_gradient_zero(style, dtype, denominator):
    model = make(replace(STYLES[style], label_smoothing=0.1, z_loss=1e-3)).to(dtype)
    tokens, targets = batch(2, 9)
    loss = model(tokens, torch.full_like(targets, IGNORED), denominator)
    loss.backward()
    assert loss.item() == 0
    for name, grad in gradients(model).items():
        assert grad is not None, name
        assert grad.count_nonzero() == 0, name  # a NaN would count


def test_label_smoothing_and_z_loss_follow_their_formulas():
    """(1 - e) * nll + e * mean over the vocabulary of nll, and z * log(Z)^2, each for predicted tokens only."""
    model, (tokens, targets) = make(LLAMA), batch(2, 11)
    smoothed = GPT(replace(LLAMA, label_smoothing=0.2, z_loss=0.01))
    smoothed.load_state_dict(model.state_dict())
    rows = targets.flatten() != IGNORED
    logits = model.logits(tokens).double().flatten(0, 1)[rows]
    nll = -logits.log_softmax(-1)
    hit = nll.gather(1, targets.flatten()[rows, None]).squeeze(1)
    expected = 0.8 * hit + 0.2 * nll.mean(-1) + 0.01 * logits.logsumexp(-1) ** 2
    assert smoothed(tokens, targets).item() == pytest.approx(expected.mean().item(), rel=1e-6)
    assert smoothed(tokens, targets, 3.0).item() == pytest.approx(expected.sum().item() / 3, rel=1e-6)


# Parameters


@pytest.mark.parametrize("style", ["gpt2", "llama-tied"])
def test_a_tied_head_is_one_parameter_with_the_gradient_of_both_uses(style):
    tied, untied = make(STYLES[style]), GPT(replace(STYLES[style], tied_embeddings=False))
    assert tied.head.weight is tied.embedding.weight
    assert sum(p is tied.head.weight for p in tied.parameters()) == 1
    untied.load_state_dict(tied.state_dict())
    tokens, targets = batch(2, 15)
    for model in (tied, untied):
        model(tokens, targets).backward()
    both = untied.embedding.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, both, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_a_frozen_embedding_leaves_every_other_gradient_bitwise_as_it_was(style):
    model, (tokens, targets) = make(replace(STYLES[style], tied_embeddings=False)), batch(2, 15)
    model(tokens, targets).backward()
    expected = gradients(model)
    model.zero_grad()
    model.embedding.requires_grad_(False)
    if model.position_embedding is not None:
        model.position_embedding.requires_grad_(False)
    model(tokens, targets).backward()
    for name, grad in gradients(model).items():
        assert ("embedding" in name) == (grad is None), name
        assert grad is None or torch.equal(grad, expected[name]), name


def test_the_state_holds_these_names():
    linear = ["attention.key", "attention.out", "attention.query", "attention.value", "mlp.down", "mlp.up"]
    norms = ["input_norm", "post_norm"]
    gpt2 = {f"layers.0.{part}.{kind}" for part in linear + norms for kind in ("weight", "bias")}
    gpt2 |= {"embedding.weight", "position_embedding.weight", "norm.weight", "norm.bias", "head.weight"}
    llama = {f"layers.0.{part}.weight" for part in [*linear, "mlp.gate", *norms]}
    llama |= {"embedding.weight", "norm.weight", "head.weight"}
    assert set(GPT(replace(GPT2, num_layers=1)).state_dict()) == gpt2
    assert set(GPT(replace(LLAMA, num_layers=1)).state_dict()) == llama


@pytest.mark.parametrize("style", STYLES)
def test_initial_weights_are_gpt2s_and_follow_from_the_seed(style):
    config = replace(STYLES[style], hidden_size=256, vocab_size=512, num_layers=3, ffn_hidden_size=512)
    torch.manual_seed(0)
    model = GPT(config)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.full_like(p, float(name.endswith("norm.weight")))), name
            continue
        into_residual = name.endswith(("out.weight", "down.weight"))
        std = 0.02 / math.sqrt(6) if into_residual else 0.02
        assert p.std().item() == pytest.approx(std, rel=0.03), name
        assert abs(p.mean().item()) < 6 * std / math.sqrt(p.numel()), name
    torch.manual_seed(0)
    again = GPT(config).state_dict()
    assert all(torch.equal(p, again[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize("style", STYLES)
def test_dropout_reaches_the_embedding_and_each_residual_update_in_training_only(style):
    config = replace(STYLES[style], hidden_dropout=0.5, num_layers=1)
    model, plain = make(config), make(replace(config, hidden_dropout=0.0))
    tokens, targets = batch(2, 40)
    entered = []
    model.layers[0].register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    model(tokens, targets)
    assert 0.4 < (entered[0] == 0).double().mean() < 0.6
    zeros = (model.layers[0].residual(torch.zeros(2, 40, 32), torch.ones(2, 40, 32)) == 0).double().mean()
    assert 0.4 < zeros < 0.6
    assert torch.equal(model.eval()(tokens, targets), plain(tokens, targets))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        *(({name: value}, f"{name}={value!r} must be a whole number above 0")
          for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "num_query_groups",
                       "ffn_hidden_size", "max_position_embeddings")
          for value in (0, -1, 2.0, True)),
        *(({name: None}, f"{name}=None must be") for name in ("num_layers", "hidden_size", "vocab_size")),
        *(({name: value}, f"{name}={value} must be at least 0 and below 1")
          for name in ("hidden_dropout", "attention_dropout", "label_smoothing")
          for value in (-0.1, 1.0, math.nan)),
        *(({name: value}, f"{name}={value} must be above 0")
          for name in ("rope_theta", "norm_epsilon", "init_std") for value in (0.0, -1.0, math.nan, math.inf)),
        *(({"z_loss": value}, "z_loss") for value in (-1e-4, math.nan, math.inf)),
        *(({name: "nonsense"}, f"{name}='nonsense' must be one of")
          for name in ("normalization", "position_embedding", "activation", "attention")),
        ({"hidden_size": 33}, "hidden_size=33 must be divisible by num_attention_heads=4"),
        ({"num_query_groups": 3}, "num_attention_heads=4 must be divisible by num_query_groups=3"),
        ({"num_query_groups": 8}, "num_attention_heads=4 must be divisible by num_query_groups=8"),
        ({"hidden_size": 36}, "rope needs an even head size, not 9"),
        ({"position_embedding": "learned"}, "needs max_position_embeddings"),
    ],
    ids=str,
)  # fmt: skip
def test_a_shape_that_makes_no_sense_is_an_error_that_names_the_field(fields, says):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is what is tested
        replace(LLAMA, **fields)
    assert says in str(error.value)


def test_more_tokens_than_learned_positions_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="81 tokens, but max_position_embeddings is 80"):
        GPT(GPT2).logits(torch.zeros(1, 81, dtype=torch.long))


# A million tokens


class Count(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += function is not torch.ops.prim.device.default
        return function(*args, **(kwargs or {}))


@contextmanager
def bfloat16_by_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_step_of_a_million_tokens_is_traced_in_a_few_hundred_operations(config):
    """So that planning takes seconds at any length: no loop over the sequence is visible, at most the rope table's."""
    operations = []
    for length in (1024, 2**20):
        with FakeTensorMode(), bfloat16_by_default():
            model = GPT(replace(config, max_position_embeddings=length))
            tokens = torch.zeros(1, length, dtype=torch.long)
            with Count() as count:
                loss = model(tokens, tokens)
                loss.backward()
            assert loss.dtype == torch.float32
            assert all(p.grad is not None for p in model.parameters())
        operations.append(count.operations)
    assert operations[0] < 500
    assert operations[1] - operations[0] <= 6 * 64
