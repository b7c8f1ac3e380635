"""The model computes what the published GPT-2 and Llama compute, and its loss weighs every predicted token alike."""

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from model.gpt import GPT, IGNORED, GPTConfig, flops_per_token, num_parameters

GPT2 = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=97,
    max_position_embeddings=80,
    normalization="layernorm",
    position_embedding="learned",
    activation="gelu",
    bias=True,
    tied_embeddings=True,
)
LLAMA = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=80,
    vocab_size=97,
    rope_theta=500000.0,
)
STYLES = {"gpt2": GPT2, "llama": LLAMA, "llama-tied": replace(LLAMA, tied_embeddings=True)}


def make(config, seed=0):
    torch.manual_seed(seed)
    return GPT(replace(config, init_std=0.2))


def batch(*shape, vocab_size=97, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(vocab_size, (2, *shape), generator=generator)
    targets[..., ::5] = IGNORED
    return tokens, targets


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# What others publish

NAMES = [
    ("transformer.", ""),
    ("model.", ""),
    ("wte", "embedding"),
    ("embed_tokens", "embedding"),
    ("wpe", "position_embedding"),
    ("lm_head", "head"),
    ("ln_f", "norm"),
    ("h.", "layers."),
    ("ln_1", "input_norm"),
    ("ln_2", "post_norm"),
    ("input_layernorm", "input_norm"),
    ("post_attention_layernorm", "post_norm"),
    ("self_attn.q_proj", "attention.query"),
    ("self_attn.k_proj", "attention.key"),
    ("self_attn.v_proj", "attention.value"),
    ("self_attn.o_proj", "attention.out"),
    ("attn.c_proj", "attention.out"),
    ("c_fc", "up"),
    ("mlp.c_proj", "mlp.down"),
    ("_proj", ""),
]


def translated(theirs):
    """Hugging Face's names and layouts in ours; its GPT-2 stores matrices transposed, and q, k, v in one."""
    ours = {}
    for name, tensor in theirs.items():
        if ".c_" in name and tensor.dim() == 2:
            tensor = tensor.T
        for old, new in NAMES:
            if name.startswith(old) or f".{old}" in name or old == "_proj":
                name = name.replace(old, new, 1)
        if "attn.c_attn" in name:
            for part, piece in zip(("query", "key", "value"), tensor.chunk(3)):
                ours[name.replace("attn.c_attn", f"attention.{part}")] = piece
        else:
            ours[name] = tensor
    return ours


def hugging_face(style):
    transformers = pytest.importorskip("transformers", reason="needs the `hf` extra")
    special = {"bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager", "use_cache": False}
    config = STYLES[style]
    if style == "gpt2":
        no_dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
        shape = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 80, "vocab_size": 97}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **no_dropout, **special))
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=80,
            vocab_size=97,
            rope_theta=500000.0,
            rms_norm_eps=1e-5,
            tie_word_embeddings=config.tied_embeddings,
            **special,
        )
    )


@pytest.mark.parametrize("style", STYLES)
def test_logits_and_gradients_equal_hugging_face_for_the_same_weights(style):
    theirs = hugging_face(style)
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    ours = {kind: GPT(replace(STYLES[style], attention=kind)) for kind in ("unfused", "sdpa")}
    for model in ours.values():
        missing, unexpected = model.load_state_dict(translated(dict(theirs.named_parameters())), strict=False)
        assert (missing, unexpected) == (["head.weight"] if model.config.tied_embeddings else [], [])
    for length in (1, 2, 17, 80):
        tokens, targets = batch(2, length)
        targets[0, 0] = 1  # also the shortest predicts something
        expected = theirs(tokens).logits
        theirs.zero_grad()
        expected_loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
        expected_loss.backward()
        expected_grads = translated(gradients(theirs))
        assert expected.abs().max() > 1
        for model in ours.values():
            torch.testing.assert_close(model.logits(tokens), expected, atol=1e-4, rtol=0)
            model.zero_grad()
            loss = model(tokens, targets)
            loss.backward()
            torch.testing.assert_close(loss, expected_loss, atol=1e-5, rtol=0)
            assert gradients(model).keys() == expected_grads.keys()
            for name, grad in gradients(model).items():
                torch.testing.assert_close(grad, expected_grads[name], atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (replace(GPT2, num_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=50257), 124_439_808),
        (replace(GPT2, num_layers=48, hidden_size=1600, num_attention_heads=25, vocab_size=50257), 1_557_611_200),
        (replace(LLAMA, num_layers=16, hidden_size=2048, num_attention_heads=32, num_query_groups=8,
                 ffn_hidden_size=8192, vocab_size=128256, tied_embeddings=True), 1_235_814_400),
        (replace(LLAMA, num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8,
                 ffn_hidden_size=14336, vocab_size=128256), 8_030_261_248),
        (replace(LLAMA, num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=None,
                 ffn_hidden_size=11008, vocab_size=32000), 6_738_415_616),
    ],
    ids=["gpt2-124M", "gpt2-xl", "llama-3.2-1B", "llama-3.1-8B", "llama-2-7B"],
)  # fmt: skip
def test_parameters_equal_the_published_counts(config, published):
    assert num_parameters(replace(config, max_position_embeddings=1024)) == published


CONFIGS = st.builds(
    lambda groups, repeat, half, **fields: GPTConfig(
        hidden_size=groups * repeat * 2 * half, num_attention_heads=groups * repeat, num_query_groups=groups, **fields
    ),
    groups=st.integers(1, 3),
    repeat=st.integers(1, 3),
    half=st.integers(1, 8),
    num_layers=st.integers(1, 3),
    vocab_size=st.integers(1, 100),
    ffn_hidden_size=st.none() | st.integers(1, 100),
    max_position_embeddings=st.integers(1, 100),
    normalization=st.sampled_from(["layernorm", "rmsnorm"]),
    position_embedding=st.sampled_from(["learned", "rope"]),
    activation=st.sampled_from(["gelu", "swiglu"]),
    bias=st.booleans(),
    tied_embeddings=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(CONFIGS)
def test_num_parameters_counts_every_number_of_the_model_once(config):
    with torch.device("meta"):
        model = GPT(config)
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())


@settings(max_examples=15, deadline=None)
@given(CONFIGS, st.integers(1, 3), st.integers(1, 20))
def test_flops_are_what_torch_counts_less_the_half_of_the_square_that_is_masked(config, batch_size, length):
    """Unfused attention computes the whole square, 12 * L * h * s FLOPs per token, of which causality needs half."""
    config = replace(config, attention="unfused", max_position_embeddings=20)
    with FakeTensorMode():
        model, tokens = GPT(config), torch.zeros(batch_size, length, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(tokens, tokens).backward()
    masked_half = 6 * config.num_layers * config.hidden_size * length
    assert counter.get_total_flops() == tokens.numel() * (flops_per_token(config, length) + masked_half)


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
