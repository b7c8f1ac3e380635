"""What lives between forward and backward is what the table in model/kept.py says, to the byte, in every layer."""

import gc
import warnings
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from model import offload, recompute
from model.gpt import GPT, GPTConfig
from model.kept import kept_bytes
from model.modes import Mode, parse
from tests.births import Births
from tests.mode_steps import make
from tests.shapes import batch
from tools import plot_modes
from training.memory import Meter

MODES = [
    *(name for name in recompute.MODES if not name.startswith("full") and "offload" not in name),
    "norm",
    "activation",
    "norm+mlp",
    "selective+norm+activation+mlp",
    "full",
    "full+attention",
    "full+qkv",
    "full+projection+mlp_up",
    "full+attention+qkv+projection+mlp_up",
]
SHAPES = [(1, 16), (2, 8)]
CONFIGS = [("gpt2", "unfused", 0.1), ("gpt2", "sdpa", 0.0), ("llama", "unfused", 0.0), ("llama", "sdpa", 0.1)]


@pytest.fixture(autouse=True)
def known_warnings_are_silent():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mode ")
        yield


def kept_by_layer(model, shape):
    births = Births(model)
    with births:
        loss = model(*batch(*shape))
    assert loss.requires_grad
    return [births.alive_bytes(i) for i in range(len(model.layers))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("style", "attention", "dropout"), CONFIGS)
@pytest.mark.parametrize("mode", MODES)
def test_every_layer_keeps_exactly_what_the_table_says(mode, style, attention, dropout, shape):
    """A layer is charged with its output instead of its input, which is the same size: the next one keeps it."""
    model = make(style, attention, dropout).to(torch.bfloat16)
    recompute.apply(model, mode)
    expected = kept_bytes(model.config, parse(mode), *shape)
    assert kept_by_layer(model, shape) == [sum(expected.values())] * 3, expected


@pytest.mark.parametrize(("style", "attention", "dropout"), CONFIGS)
@pytest.mark.parametrize("mode", ["none", "selective+norm+activation", "full+attention"])
def test_the_table_holds_in_float32(mode, style, attention, dropout):
    model = make(style, attention, dropout)
    recompute.apply(model, mode)
    expected = kept_bytes(model.config, parse(mode), 2, 8, element_size=4)
    assert kept_by_layer(model, (2, 8)) == [sum(expected.values())] * 3, expected


@pytest.mark.parametrize(
    ("mode", "groups"),
    [
        ("full+uniform3", [3, 2]),
        ("full+uniform3+attention", [3, 2]),
        ("full+sqrt", [3, 2]),
        ("full+block2", [1, 1, 0, 0, 0]),
        ("full+uniform4", [4, 1]),
    ],
)
def test_a_group_keeps_one_input_and_each_layers_kept_outputs(mode, groups):
    model = make("llama", "sdpa", num_layers=5).to(torch.bfloat16)
    recompute.apply(model, mode)
    one = replace(parse(mode), grouping="uniform", group=1)
    expected = sum(
        sum(kept_bytes(model.config, one if size else Mode(), 2, 8, layers=max(1, size)).values()) for size in groups
    )
    assert sum(kept_by_layer(model, (2, 8))) == expected


def test_the_table_is_the_published_one():
    """In units of bytes per token and layer over hidden size, with as/h = 64 and without statistics (4 bytes a head).

    An implementation that scales scores by an operation of its own keeps 164 where ours, whose scale and mask ride on
    the GEMM, keeps 160. Megatron's 34 + 5as/h has three masks of one byte each; on a CPU they are as wide as the rest.
    """
    gpt = GPTConfig(
        num_layers=1,
        hidden_size=1024,
        num_attention_heads=16,
        vocab_size=100,
        max_position_embeddings=8192,
        normalization="layernorm",
        position_embedding="learned",
        activation="gelu",
        bias=True,
        attention="unfused",
    )
    llama = GPTConfig(
        num_layers=1,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        ffn_hidden_size=14336,
        vocab_size=100,
    )

    def units(config, mode, length=4096):
        tensors = kept_bytes(config, parse(mode), 1, length)
        large = (n for name, n in tensors.items() if not any(word in name for word in ("mean", "rms", "logsumexp")))
        return sum(large) / length / config.hidden_size

    assert units(gpt, "none") == 32 + 2 * 64
    assert units(gpt, "selective") == units(replace(gpt, attention="sdpa"), "none") == 32
    assert units(gpt, "selective+norm+activation") == units(replace(gpt, attention="sdpa"), "norm+activation") == 20
    assert units(gpt, "full") == units(llama, "full") == 2
    assert units(replace(gpt, attention="sdpa"), "full+attention") == units(llama, "full+attention") == 4
    assert units(llama, "none") == 41
    assert units(llama, "norm+activation") == 23
    dropout = replace(gpt, hidden_dropout=0.1, attention_dropout=0.1)
    assert units(dropout, "none") == 34 + 2 + (5 + 1) * 64
    assert units(dropout, "selective") == 34 + 2


@pytest.mark.parametrize(("style", "mode"), [("gpt2", "full+attention"), ("llama", "selective+norm+activation")])
def test_the_meter_sees_the_same_bytes(style, mode):
    """Two models that differ by one layer differ by what the table says: nothing per layer is hidden elsewhere."""

    def after_forward(layers):
        model = make(style, "sdpa", num_layers=layers).to(torch.bfloat16)
        recompute.apply(model, mode)
        x = batch(2, 8)
        with Meter(model=model) as meter:
            model(*x).backward()
        return meter.after_forward_breakdown_bytes["activations"]

    config = make(style, "sdpa").config
    assert after_forward(3) - after_forward(2) == sum(kept_bytes(config, parse(mode), 2, 8).values())


# Against torch's own selective recompute

GEMMS_AND_ATTENTION = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def torch_selective(model: GPT) -> GPT:
    """torch's policy around every layer: keep what GEMMs and attention give, recompute the rest."""

    def policy(context, operation, *args, **kwargs):
        kept = operation in GEMMS_AND_ATTENTION
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def run_layers(x, rope):
        for layer in model.layers:
            contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
            x = checkpoint(layer, x, rope, use_reentrant=False, context_fn=contexts)
        return x

    model.run_layers = run_layers
    return model


@pytest.mark.parametrize(("style", "attention"), [("gpt2", "sdpa"), ("llama", "sdpa"), ("llama", "unfused")])
def test_selective_with_all_modules_keeps_the_smallest_set_and_less_than_torchs_policy(style, attention, capsys):
    """The smallest set from which backward runs without repeating a GEMM or a fused attention kernel.

    The inputs of every norm and activation, q, k, v, and the context (with its logsumexp): each is a GEMM's output,
    or the sum of one and the residual, and is read by the backward of what follows it. All else is recomputed from
    these without a GEMM. Torch's policy keeps the output of every GEMM, also of the last one, which nobody reads.
    """
    mode = "selective+norm+activation"
    ours, theirs = (make(style, attention).to(torch.bfloat16) for _ in range(2))
    recompute.apply(ours, mode)
    tensors = kept_bytes(ours.config, parse(mode), 2, 8)
    needed = {"layer input", "q", "k and v", "context", "residual", "up" if style == "gpt2" else "up and gate"}
    assert set(tensors) - {"logsumexp"} == needed
    kept, other = kept_by_layer(ours, (2, 8))[1], kept_by_layer(torch_selective(theirs), (2, 8))[1]
    with capsys.disabled():
        print(f"\n  kept per layer, {style} {attention}: {kept} bytes; torch's selective policy: {other}")
    assert kept < other
    if attention == "sdpa":
        assert kept == other - tensors["residual"]  # as large as the output of `down`


# Offload


@pytest.mark.parametrize("mode", ["none", "selective+norm+activation", "full", "full+attention", "full+uniform2"])
def test_offload_leaves_nothing_on_the_device_but_the_last_group(mode, monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    results = []
    for name in (mode, f"{mode}+offload"):
        model = make("llama", "sdpa", 0.1, num_layers=4).to(torch.bfloat16)
        recompute.apply(model, name)
        results.append(kept_by_layer(model, (2, 8)))
    kept, left = results
    last = 2 if "uniform2" in mode else 1
    # Births are charged to the layer that makes a group's input: what the last group keeps is its input, made by the
    # layer before, and all that its own layers keep but the output, which the final norm keeps.
    layer_input = kept_bytes(model.config, Mode("full"), 2, 8)["layer input"]
    assert sum(left) == sum(kept[-last:]) + layer_input
    assert not any(left[: -last - 1])


def test_nothing_but_parameters_and_gradients_outlives_a_step():
    model = make("llama", "sdpa", 0.1)
    births = Births(model)
    for mode in ("selective+norm+activation", "full+attention", "full"):
        recompute.apply(model, mode)
        with births:
            model(*batch(2, 8)).backward()
        model.zero_grad()
        gc.collect()
        assert [births.alive(i) for i in range(3)] == [[]] * 3


def test_the_page_about_modes_shows_the_tables_of_bytes_and_flops(repo_root):
    page = (repo_root / "docs" / "modes.md").read_text().splitlines()
    assert [line for line in plot_modes.tables() if line not in page] == []
