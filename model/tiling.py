"""Tiles: the loss, the MLP and attention computed piece by piece, so that no layer's working set is in the way.

`apply(model, ...)` switches a plain GPT from outside, by exchanging `forward` of the head and of the layers;
parameters, their names and `state_dict()` do not notice. Apply tiles before a recompute mode (model/recompute.py).

    loss_tile_tokens        head, cross entropy and their gradients per tile of tokens: no [T, V]    loss_tiles.py
    mlp_tile_tokens         norm, MLP and residual per tile of tokens: no [T, F]                     mlp_tiles.py
    attention_head_groups   norm, QKV, rotation, attention, output projection per group of heads     attention_tiles.py

What is fixed is the length of a tile, not the number of tiles: that would make tiles grow with the sequence.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from model.attention_tiles import Rope, attention_part, call, valid_groups
from model.gpt import GPT, Block, GPTConfig
from model.loss_tiles import tiled_loss
from model.mlp_tiles import mlp_part

Auto = int | Literal["auto"] | None

LOGITS_ELEMENTS = 2**27  # of one tile, by `auto`: 256 MiB in bfloat16
LOSS_TILE_MAX = 8192
MLP_TILE = 4096  # long enough that adding a tile's weight gradients costs little beside computing them
GROUP_WIDTH = 0.9  # of the hidden size: one group's seven tensors in backward beside five of the hidden size


@dataclass(frozen=True)
class Tiles:
    """What is applied to a model, `auto` resolved; None: not tiled."""

    loss_tile_tokens: int | None = None
    mlp_tile_tokens: int | None = None
    attention_head_groups: int | None = None


def apply(
    model: GPT,
    loss_tile_tokens: Auto = None,
    mlp_tile_tokens: Auto = None,
    attention_head_groups: Auto = None,
) -> Tiles:
    """Switches `model`, in place, to these tiles; None is not tiled, and undoes what was applied before.

    Tokens are rows of B * T. "auto" is a length or number that suits the model's shape (`resolve`). Returns what is
    applied. Raises ValueError for a number that does not fit the model, or when a recompute mode is applied already.
    """
    chosen = resolve(model.config, loss_tile_tokens, mlp_tile_tokens, attention_head_groups)
    if "run_layers" in model.__dict__:
        raise ValueError("apply tiles before the recompute mode: recompute.apply(model, 'none') takes a mode off")
    layers: list[Block] = list(model.layers)  # type: ignore[arg-type]
    module: nn.Module
    for module in (model.head, *layers, *(layer.attention.core_attention for layer in layers)):
        module.__dict__.pop("forward", None)
    # Partial objects, not closures: copy.deepcopy binds them to the copy.
    if chosen.loss_tile_tokens:
        model.head.__dict__["forward"] = partial(tiled_loss, model.head, chosen.loss_tile_tokens)
    for layer in layers:
        if chosen.attention_head_groups:
            layer.attention.core_attention.__dict__["forward"] = call
        if chosen.attention_head_groups or chosen.mlp_tile_tokens:
            layer.__dict__["forward"] = partial(_block, layer, chosen)
    model.__dict__["_tiles"] = chosen
    return chosen


def applied(model: GPT) -> Tiles:
    """The tiles that are applied to a model."""
    return model.__dict__.get("_tiles", Tiles())


def covered(tiles: Tiles) -> set[str]:
    """Words of a memory mode (model/modes.py) that change nothing, because these tiles keep less anyway."""
    words = set()
    if tiles.attention_head_groups:
        words |= {"core_attn", "qkv", "projection"}
    if tiles.mlp_tile_tokens:
        words |= {"mlp", "activation", "mlp_up"}
    return words | {"norm"} if tiles.attention_head_groups and tiles.mlp_tile_tokens else words


def resolve(
    config: GPTConfig,
    loss_tile_tokens: Auto = None,
    mlp_tile_tokens: Auto = None,
    attention_head_groups: Auto = None,
) -> Tiles:
    """The numbers that `apply` would use for a model of this shape.

    auto: of the loss, the largest power of two that keeps a tile's logits within 2^27 elements, at most 8192 tokens;
    of the MLP, 4096 tokens; of attention, the smallest possible number of groups with which one group's tensors in
    backward are at most 0.9 as wide as the model (8 with as many key/value heads), or one for each head. Raises
    ValueError naming the value and what is possible.
    """
    possible = valid_groups(config.num_attention_heads, config.query_groups)
    loss = min(LOSS_TILE_MAX, 2 ** max(0, (LOGITS_ELEMENTS // config.vocab_size).bit_length() - 1))
    groups = next((n for n in possible if group_width(config, n) <= GROUP_WIDTH), possible[-1])
    if attention_head_groups not in (None, "auto", *possible):
        raise ValueError(
            f"attention_head_groups={attention_head_groups!r}: {config.num_attention_heads} heads over "
            f"{config.query_groups} key/value heads can be cut into {', '.join(map(str, possible))} groups"
        )
    return Tiles(
        _tokens("loss_tile_tokens", loss_tile_tokens, loss),
        _tokens("mlp_tile_tokens", mlp_tile_tokens, MLP_TILE),
        groups if attention_head_groups == "auto" else attention_head_groups,
    )


def group_width(config: GPTConfig, head_groups: int) -> float:
    """Width of one group's q, k, v and their gradients and that of its output, over the hidden size."""
    heads, key_heads = config.num_attention_heads, config.query_groups
    return 3 / head_groups + 4 * max(key_heads / head_groups, 1) / heads


def _tokens(name: str, value: Auto, auto: int) -> int | None:
    if value == "auto":
        return auto
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name}={value!r} must be a whole number of tokens above 0, auto, or nothing")
    return value


def _block(layer: Block, tiles: Tiles, x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Block.forward with one half or both tiled. x: [B, T, C]."""
    again = None
    if tiles.attention_head_groups:
        x, again = attention_part(layer, tiles.attention_head_groups, x, rope)
    else:
        x = layer.residual(x, layer.attention(layer.input_norm(x), rope))
    if tiles.mlp_tile_tokens:
        return mlp_part(layer, tiles.mlp_tile_tokens, x, again)
    return layer.residual(x, layer.mlp(layer.post_norm(x)))
