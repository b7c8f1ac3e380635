"""The model is the published one: Hugging Face's logits and gradients, and the published sizes and FLOPs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from model.gpt import GPT, GPTConfig, flops_per_token, num_parameters
from tests.shapes import GPT2, LLAMA, STYLES, batch, gradients

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
    model, tokens = GPT(config), torch.zeros(batch_size, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    masked_half = 6 * config.num_layers * config.hidden_size * length
    assert counter.get_total_flops() == tokens.numel() * (flops_per_token(config, length) + masked_half)
