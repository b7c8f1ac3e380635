"""What tiles leave alive, to the byte: the table of docs/tiles.md; and nothing as large as [T, V] or [T, F] is made."""

import gc
import warnings
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import attention_tiles, recompute, tiling
from model.gpt import GPT, GPTConfig
from tests import shapes
from tools import tiles as table
from tools.tiles import ATTENTION, LOSS, MLP, layer, per_token, step
from tools.tiles_speed import loss_peak
from training.memory import Meter
from training.recipe import load

AUTO = {LOSS: "auto", MLP: "auto", ATTENTION: "auto"}
SMALL = {LOSS: 32, MLP: 16, ATTENTION: 2}
LAYERS = 2


def config(name: str, **fields) -> GPTConfig:
    return GPTConfig(**(load(name).gpt_fields() | {"num_layers": LAYERS} | fields))


LLAMA = config("llama-8b")
GPT2 = config("gpt-1.3b", max_position_embeddings=2**21)

# Of one layer, in units of h, on: nothing, MLP tiles, MLP and attention tiles. The last: input, attention output,
# gradient of the half layer's output and of its norm's output, 2h each, and one of eight groups: query, its gradient
# and that of the output, 2h / 8 each, key, value and their gradients, 2h / 8 * key/value heads / heads each.
LAYER = {LLAMA: (57, 16, 9), GPT2: (42, 22, 9.75)}


def layer_bytes(c: GPTConfig, on: tuple[str, ...]) -> float:
    """Per token: the above, logsumexp of every head, and 4 bytes of statistics for every untiled norm."""
    number = (MLP in on) + (ATTENTION in on)
    return LAYER[c][number] * c.hidden_size + 4 * c.num_attention_heads + 4 * (2 - number)


def step_bytes(c: GPTConfig, mode: str, on: tuple[str, ...]) -> float:
    """Per token: tokens, and rotary phases or positions; then the loss, or a layer with the next one's input."""
    h, inputs = c.hidden_size, 8 + (4 * c.head_dim if c.position_embedding == "rope" else 8)
    if LOSS in on:
        return layer_bytes(c, on) + 2 * h + inputs
    loss = 12 * c.vocab_size + 4 * h  # three of [T, V] in float32, the loss's input and its norm's
    return loss + 2 * h * (LAYERS if mode == "full" else 1) + inputs + 4


@pytest.mark.parametrize(("name", "mode", "on"), table.ROWS, ids=[row[0] for row in table.ROWS])
@pytest.mark.parametrize("c", [LLAMA, GPT2], ids=["llama-8b", "gpt-1.3b"])
def test_live_bytes_per_token_are_those_of_the_table(c, name, mode, on):
    tiles = dict.fromkeys(on, "auto")
    if name == "`full`" or ATTENTION in on:  # of the others, the step tells
        assert per_token(layer, c, mode, tiles) == layer_bytes(c, on)
    assert per_token(step, c, mode, tiles) == step_bytes(c, mode, on)
    if ATTENTION in on:
        assert step_bytes(c, mode, on) <= 12 * c.hidden_size


def test_dropout_costs_a_tiled_layer_one_tensor_more():
    c = config("gpt-1.3b", max_position_embeddings=2**21, hidden_dropout=0.1)
    plain = layer_bytes(GPT2, (LOSS, MLP, ATTENTION))
    assert per_token(layer, c, "full", AUTO) == plain + 2 * c.hidden_size <= 12 * c.hidden_size


@pytest.mark.parametrize("tiles", [{LOSS: 32}, {MLP: 16}, {ATTENTION: 2}, SMALL], ids=str)
@pytest.mark.parametrize("c", [shapes.LLAMA, shapes.GPT2], ids=["llama", "gpt2"])
def test_a_step_on_fake_tensors_has_the_peak_of_a_real_one(c, tiles, monkeypatch):
    """Although it runs three tiles of many."""
    monkeypatch.setattr(attention_tiles, "ROWS", 24)
    for mode in ("none", "full") if tiles == SMALL else ("full",):
        fake, owner = step(c, mode, tiles, 80)
        model = bfloat16(c)
        tiling.apply(model, **tiles)
        recompute.apply(model, mode)
        with Meter(model=model) as meter:
            others = meter.live_bytes - sum(p.nbytes for p in model.parameters())
            model(*(torch.zeros(1, 80, dtype=torch.long) for _ in range(2))).backward()
        assert (meter.peak_bytes - others, meter.peak_op) == (fake, owner)


class Made(TorchDispatchMode):
    """The largest storages that operations make, in elements, by dtype; and how often each operation runs."""

    def __init__(self):
        super().__init__()
        self.largest: dict[torch.dtype, int] = Counter()
        self.calls: dict[str, int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.largest[tensor.dtype] = max(self.largest[tensor.dtype], elements)
        return out


def bfloat16(c: GPTConfig) -> GPT:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return GPT(c)
    finally:
        torch.set_default_dtype(torch.float32)


LONG = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 160, "ffn_hidden_size": 128}
LENGTH = 1024


@pytest.mark.parametrize("style", [{"num_query_groups": 2}, {"tied_embeddings": True, "activation": "gelu"}], ids=str)
def test_nothing_as_large_as_the_logits_or_the_inside_of_an_mlp_is_made_and_no_float32_hidden_state(style):
    model = bfloat16(GPTConfig(**(LONG | style)))
    tokens, targets = shapes.batch(1, LENGTH)
    with Made() as plain:
        model(tokens, targets).backward()
    assert plain.largest[torch.bfloat16] >= LENGTH * 128
    assert plain.largest[torch.float32] == LENGTH * 160
    tiling.apply(model, **SMALL)
    for mode in ("none", "full", "full+attention+offload"):
        recompute.apply(model, mode)
        with Made() as made:
            model(tokens, targets).backward()
            with torch.no_grad():
                model(tokens, targets)
        assert made.largest[torch.bfloat16] <= LENGTH * 32 * 1.5  # q, k and v of one group of two
        assert made.largest[torch.float32] < LENGTH * 32


@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("full", 1), ("full+attention", 0), ("none+offload", 0)])
def test_the_attention_kernel_runs_again_in_backward_only_where_the_mode_says_so(mode, again):
    model = GPT(shapes.LLAMA)
    tiling.apply(model, **SMALL)
    recompute.apply(model, mode)
    with Made() as forward:
        loss = model(*shapes.batch(1, 40))
    with Made() as backward:
        loss.backward()
    kernel, groups = "_scaled_dot_product_flash_attention_for_cpu", 2 * shapes.LLAMA.num_layers
    assert forward.calls[kernel] == groups
    assert backward.calls[kernel] == again * groups
    assert backward.calls[f"{kernel}_backward"] == groups


def test_an_mlp_tile_runs_its_first_products_twice_and_its_last_one_once():
    """Under `full`, too: what tiles compute again is not computed again by the mode."""
    model = GPT(shapes.LLAMA)
    counts = []
    for tiles, mode in (({}, "none"), ({MLP: 8, ATTENTION: 2}, "none"), ({MLP: 8, ATTENTION: 2}, "full")):
        recompute.apply(model, "none")
        tiling.apply(model, **tiles)
        recompute.apply(model, mode)
        with _Products(shapes.LLAMA.ffn_size) as made:
            model(*shapes.batch(1, 40)).backward()
        counts.append(made.products)
    assert [count / counts[0] for count in counts] == [1, 11 / 9, 11 / 9]


class _Products(TorchDispatchMode):
    """Rows of matrix products with one side as wide as the MLP's inside."""

    def __init__(self, width):
        super().__init__()
        self.width, self.products = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            if self.width in (a.shape[0], a.shape[1], b.shape[1]):
                self.products += a.shape[0] * a.shape[1] * b.shape[1]
        return out


@pytest.mark.parametrize("mode", ["none", "full", "full+attention", "none+offload"])
def test_live_bytes_stay_flat_without_the_garbage_collector(mode):
    model = GPT(shapes.LLAMA)
    tiling.apply(model, **SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recompute.apply(model, mode)
    live = []
    gc.collect()
    gc.disable()
    try:
        with Meter(model=model) as meter:
            for i in range(8):
                loss = model(*shapes.batch(1, 80))
                loss.backward()
                live.append(meter.live_bytes)  # with the loss, and so the graph, still there
                if i == 4:
                    with torch.no_grad():
                        model(*shapes.batch(1, 80))
    finally:
        gc.enable()
    assert len(set(live[1:])) == 1


def test_what_a_graph_saved_is_let_go_by_backward_and_not_when_the_loss_dies():
    model = GPT(shapes.LLAMA)
    tiling.apply(model, **SMALL)
    with Meter(model=model) as meter:
        model(*shapes.batch(1, 80)).backward()
        before = meter.live_bytes
        loss = model(*shapes.batch(1, 80))
        loss.backward()
        assert meter.live_bytes - before == loss.nbytes


def test_loss_tiles_take_a_twentieth_of_the_memory_at_a_vocabulary_of_50257():
    assert loss_peak(131_072, None) >= 20 * loss_peak(131_072, "auto")
