"""Each attention computes causal attention over grouped heads, and only `unfused` ever holds a [T, T] tensor."""

import math
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.attention import CoreAttention, sdpa, unfused
from model.gpt import GPT, GPTConfig

# Of the largest value. bfloat16 probabilities carry 8 bits, and so does every gradient made from them.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 0.02}
SHAPES = [(2, 33, 4, 2, 8), (3, 16, 4, 1, 16), (1, 1, 2, 2, 8), (2, 65, 6, 6, 8)]  # B, T, H, G, D
FUNCTIONS = {"unfused": unfused, "sdpa": sdpa}


def make(batch, length, heads, groups, dim, dtype=torch.float32):
    torch.manual_seed(0)
    q, grad = torch.randn(2, batch, length, heads, dim).to(dtype)
    k, v = torch.randn(2, batch, length, groups, dim).to(dtype)
    return [q, k, v], grad


def reference(q, k, v, dropout=0.0):
    """Head by head, row by row, as the formula is written: softmax(q k^T / sqrt(D)) v over what came before."""
    rows = []
    repeat = q.shape[2] // k.shape[2]
    for t in range(q.shape[1]):
        heads = []
        for h in range(q.shape[2]):
            keys, values = k[:, : t + 1, h // repeat], v[:, : t + 1, h // repeat]  # (B, t + 1, D)
            scores = (keys * q[:, t, None, h]).sum(-1) / math.sqrt(q.shape[-1])
            heads.append((scores.softmax(-1)[..., None] * values).sum(1))
        rows.append(torch.stack(heads, 1))
    return torch.stack(rows, 1)  # (B, T, H, D)


def with_gradients(function, inputs, grad):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs, 0.0)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_equals_its_formula_in_value_and_gradients(shape, dtype, name):
    inputs, grad = make(*shape, dtype)
    expected = with_gradients(reference, [x.double() for x in inputs], grad.double())
    for actual, exact in zip(with_gradients(FUNCTIONS[name], inputs, grad), expected):
        assert actual.dtype == dtype
        assert actual.shape == exact.shape
        assert (actual.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_later_token_never_changes_an_earlier_logit(norm, dtype, name):
    torch.manual_seed(0)
    positions = "learned" if norm == "layernorm" else "rope"
    config = GPTConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=50,
        max_position_embeddings=40,
        normalization=norm,
        position_embedding=positions,
        attention=name,
        init_std=0.3,
    )
    model = GPT(config).to(dtype)
    tokens = torch.randint(50, (2, 40))
    before = model.logits(tokens)
    for position in (1, 17, 39):
        changed = tokens.clone()
        changed[0, position:] = (changed[0, position:] + 1) % 50
        after = model.logits(changed)
        assert torch.equal(after[:, :position], before[:, :position])
        assert torch.equal(after[1], before[1])
        assert not torch.equal(after[0, position], before[0, position])


class Outputs(TorchDispatchMode):
    """Counts the elements of every tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        self.total += sum(sizes)
        return out


def outputs(attention, length, dtype, training):
    config = GPTConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_query_groups=1,
        vocab_size=32,
        attention=attention,
        hidden_dropout=0.1,
    )
    model = GPT(config).to(dtype).train(training)
    tokens = torch.zeros(1, length, dtype=torch.long)
    with Outputs() as seen, torch.set_grad_enabled(training):
        loss = model(tokens, tokens)
        if training:
            loss.backward()
    return seen


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_no_tensor_outside_unfused_is_as_large_as_the_square_of_the_sequence(dtype, training):
    seen = [outputs("sdpa", length, dtype, training) for length in (512, 1024, 1536)]
    assert seen[0].largest < 512 * 512
    assert seen[1].largest == 2 * seen[0].largest
    assert seen[2].total - seen[1].total == seen[1].total - seen[0].total  # linear in T, to the element
    assert outputs("unfused", 512, dtype, training).largest == 2 * 512 * 512  # both heads


def test_unfused_drops_probabilities_and_rescales_the_rest():
    (q, k, _), _ = make(2, 16, 4, 2, 16)
    v = torch.eye(16)[None, :, None].expand(2, 16, 2, 16)  # the context is the row of probabilities
    dropped, whole = unfused(q, k, v, 0.25), unfused(q, k, v, 0.0)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)
    share = kept.sum() / (whole != 0).sum()
    assert 0.7 < share < 0.8


@pytest.mark.parametrize("name", FUNCTIONS)
def test_dropout_belongs_to_training(name):
    (q, k, v), _ = make(2, 16, 4, 2, 8)
    core = CoreAttention(name, 0.5).eval()
    assert torch.equal(core(q, k, v), FUNCTIONS[name](q, k, v, 0.0))


def test_dropout_in_a_fused_kernel_that_has_none_is_an_error_that_says_what_to_set():
    (q, k, v), _ = make(1, 4, 2, 2, 8)
    with pytest.raises(ValueError, match=r"attention_dropout=0, or model\.attention=unfused"):
        CoreAttention("sdpa", 0.1)(q, k, v)


def test_a_missing_flash_attn_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    config = GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=8, attention="flash_attn")
    with pytest.raises(ValueError, match=r"\[flash\].*model\.attention=sdpa"):
        GPT(config)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [*FUNCTIONS, "flash_attn"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(2, 128, 8, 2, 64), (1, 100, 4, 4, 128)], ids=str)
def test_a_gpu_computes_what_the_cpu_computes(shape, dtype, name):
    if name == "flash_attn":
        pytest.importorskip("flash_attn")
        if dtype == torch.float32:
            pytest.skip("flash-attn has no float32")
    inputs, grad = make(*shape, dtype)
    core = CoreAttention(name, 0.0)
    expected = with_gradients(unfused, [x.float() for x in inputs], grad.float())
    actual = with_gradients(lambda q, k, v, _: core(q, k, v), [x.cuda() for x in inputs], grad.cuda())
    for gpu, cpu in zip(actual, expected):
        assert (gpu.cpu().float() - cpu).abs().max() <= max(TOLERANCE[dtype], 1e-3) * cpu.abs().max()
