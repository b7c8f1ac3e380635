"""GEMMs and attention kernels that run in backward are those that a mode promises, and so are their FLOPs."""

import functools
import warnings
from collections import Counter
from dataclasses import replace

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from model import recompute
from model.modes import Mode, parse, parse_layers
from tests.mode_steps import make
from tests.shapes import batch
from training.flops import hardware_flops_per_token, recomputed_flops_per_token
from training.planning.work import work_of

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
LAYERS = 4
SHAPE = (2, 8)


@pytest.fixture(autouse=True)
def known_warnings_are_silent():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mode ")
        yield


class Products(TorchDispatchMode):
    """Counts GEMMs by the shape of what they multiply, and attention kernels by name."""

    def __init__(self):
        super().__init__()
        self.counts, self.flops = Counter(), 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        kind, flops, _ = work_of(func, args, out) or ("", 0.0, 0.0)
        if kind == "gemm":
            self.counts[tuple(args[-2].shape), tuple(args[-1].shape)] += 1
        elif kind.startswith("attention"):
            self.counts[func.overloadpacket.__name__] += 1
        self.flops += flops
        return out


@functools.cache
def backward(mode, style, attention, dropout):
    model = make(style, attention, dropout, num_layers=LAYERS)
    recompute.apply(model, mode)
    loss = model(*batch(*SHAPE))
    with Products() as products:
        loss.backward()
    return products


def run_again(mode, style, attention, dropout=0.0):
    """What backward runs under `mode` beyond what it runs under `none`, and its FLOPs."""
    plain, again = (backward(name, style, attention, dropout) for name in ("none", mode))
    assert not plain.counts - again.counts
    return again.counts - plain.counts, again.flops - plain.flops


def products(style, attention):
    """The products of one layer's forward by name."""
    b, t = SHAPE
    config = make(style, attention).config
    h, f, kv, d = config.hidden_size, config.ffn_size, config.query_groups * config.head_dim, config.head_dim
    rows, groups = b * t, b * config.query_groups
    heads = config.num_attention_heads // config.query_groups * t
    core = {"core": FLASH}
    if attention == "unfused":
        core = {"scores": ((groups, heads, d), (groups, d, t)), "context": ((groups, heads, t), (groups, t, d))}
    gate = {"gate": ((rows, h), (h, f))} if config.activation == "swiglu" else {}
    return {
        "q": ((rows, h), (h, h)),
        "k": ((rows, h), (h, kv)),
        "v": ((rows, h), (h, kv)),
        **core,
        "out": ((rows, h), (h, h)),
        **gate,
        "up": ((rows, h), (h, f)),
        "down": ((rows, f), (f, h)),
    }


# Which products run again, in how many of the layers; without a name all of them.
FUSED = {
    "selective": "",
    "selective+norm+activation": "",
    "norm": "",
    "activation": "",
    "mlp": "gate up",
    "norm+activation+mlp": "gate up",
    "full": "q k v core out gate up",
    "full+sqrt": "q k v core out gate up down/2",
    "full+uniform3": "q k v core out gate up down/2",
    "full+block1": "q/1 k/1 v/1 core/1 out/1 gate/1 up/1",
    "full+attention": "q k v out gate up",
    "full+attention+uniform4": "q k v out gate up down/3",
    "full+qkv": "core out gate up",
    "full+projection": "q k v core gate up",
    "full+mlp_up": "q k v core out",
    "full+attention+mlp_up": "q k v out",
    "full+attention+qkv+projection+mlp_up": "",
}
UNFUSED = {
    "selective": "scores",
    "selective+norm+activation": "scores",
    "full": "q k v scores context out gate up",
    "full+attention": "q k v out gate up",
}


def promised(words, style, attention):
    names = products(style, attention)
    counts = Counter()
    for word in words.split():
        name, _, layers = word.partition("/")
        if name in names:
            counts[names[name]] += int(layers or LAYERS)
    return counts


@pytest.mark.parametrize("style", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("attention", "mode"), [("sdpa", mode) for mode in FUSED] + [("unfused", mode) for mode in UNFUSED]
)
def test_backward_runs_the_products_that_the_mode_promises_and_no_other(style, attention, mode):
    words = (FUSED if attention == "sdpa" else UNFUSED)[mode]
    assert run_again(mode, style, attention)[0] == promised(words, style, attention)


@pytest.mark.parametrize("mode", ["full+attention", "full+attention+uniform3", "full+attention+offload"])
def test_a_kept_attention_kernel_never_runs_twice(mode):
    assert run_again(mode, "llama", "sdpa", dropout=0.1)[0][FLASH] == 0


def test_dropout_behind_the_last_product_makes_it_run_again():
    """Its mask is what the last product's region saves last; the mask costs more to keep than it is worth."""
    for mode in ("full", "full+attention"):
        assert run_again(mode, "gpt2", "sdpa", dropout=0.1)[0] == promised(FUSED[mode] + " down", "gpt2", "sdpa")


def test_what_nobody_needs_is_not_recomputed():
    """Frozen projections need no input to their gradients: with them goes the activation, if nothing else wants it."""
    model = make("gpt2")
    recompute.apply(model, "activation")
    for layer in model.layers:
        layer.mlp.down.weight.requires_grad_(False)
        layer.mlp.up.requires_grad_(False)
        layer.mlp.up.bias.requires_grad_(False)
    done = recompute.activity(model)
    model(*batch(*SHAPE)).backward()
    assert done.recomputed == 0


@pytest.mark.parametrize(
    ("style", "attention", "dropout"), [("gpt2", "unfused", 0.1), ("llama", "unfused", 0.0), ("llama", "sdpa", 0.1)]
)
def test_recomputed_flops_are_the_ones_that_run(style, attention, dropout):
    config = make(style, attention, dropout, num_layers=LAYERS).config
    modes = [*recompute.MODES, *FUSED]
    modes += [("full+attention", "none", "full", "mlp"), ("full+uniform3", "full+uniform3", "norm", "full")]
    for mode in modes:
        if "deepspeed" in mode:
            continue
        layers = parse_layers(mode, LAYERS)
        if attention == "unfused" and any("attention" in one.keep for one in layers):
            continue
        tokens, causal = SHAPE[0] * SHAPE[1], 1.0 if attention == "unfused" else 0.5
        formula = tokens * recomputed_flops_per_token(config, layers, SHAPE[1], causal=causal)
        assert run_again(mode, style, attention, dropout)[1] == formula, mode
        model, hardware = (
            hardware_flops_per_token(config, SHAPE[1], one, causal=causal) for one in ([Mode()] * LAYERS, layers)
        )
        assert tokens * (hardware - model) == pytest.approx(formula, rel=1e-12)


def test_recompute_costs_half_and_two_thirds_of_what_was_published():
    """Published: core attention (s/18h)/(1+s/6h), 0.9% for GPT-3 at 2k; kept attention 24h of 72h+6s, 9% at 128k.

    Ours end early: core attention at its second product of two, kept attention before the last product, 8h of 24h.
    """

    def overhead(mode, hidden, length, causal, attention):
        shape = {"hidden_size": hidden, "num_attention_heads": 32, "attention": attention, "vocab_size": 1}
        config, modes = make("gpt2", num_layers=8).config, [parse(mode)] * 8
        config = replace(config, **shape)
        plain, again = (hardware_flops_per_token(config, length, m, causal=causal) for m in ([Mode()] * 8, modes))
        return again / plain - 1

    s, h = 2048, 12288
    assert overhead("selective", h, s, 1.0, "unfused") == pytest.approx(s / 18 / h / (1 + s / 6 / h) / 2, rel=1e-4)
    assert overhead("selective", h, s, 1.0, "unfused") == pytest.approx(0.009 / 2, rel=0.01)
    s, h = 131072, 4096
    assert overhead("full+attention", h, s, 0.5, "sdpa") == pytest.approx(16 * h / (72 * h + 6 * s), rel=1e-4)
    assert overhead("full+attention", h, s, 0.5, "sdpa") == pytest.approx(0.091 * 2 / 3, rel=0.01)
    assert overhead("full", h, s, 0.5, "sdpa") == pytest.approx((16 * h + 2 * s) / (72 * h + 6 * s), rel=1e-4)
