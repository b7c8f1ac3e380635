"""FLOPs of one trained token: the model's own (MFU) and what the machine really computes (HFU)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model.gpt import GPTConfig, flops_per_token
from model.modes import Mode
from model.recompute import make_groups
from model.tiling import Tiles

CAUSAL = 0.5  # of the T x T square is needed; the convention of model.gpt.flops_per_token


def hardware_flops_per_token(
    config: GPTConfig, seq_length: int, modes: Sequence[Mode], tiles: Tiles | None = None, causal: float = CAUSAL
) -> float:
    """FLOPs of forward, backward and recompute for one token; `modes` has one mode per layer.

    Matrix products only, as for model FLOPs. `causal`: the share of attention's square that is counted.
    """
    attention = 12 * config.num_layers * config.hidden_size * seq_length
    extra = recomputed_flops_per_token(config, modes, seq_length, tiles, causal)
    return flops_per_token(config, seq_length) + attention * (causal - CAUSAL) + extra


def recomputed_flops_per_token(
    config: GPTConfig, modes: Sequence[Mode], seq_length: int, tiles: Tiles | None = None, causal: float = CAUSAL
) -> float:
    """Forward FLOPs that backward repeats, for one token; `modes` has one mode per layer.

    A recompute stops as soon as all that backward needs is there, so the last product of a region never runs again:
    the MLP's down projection in a group of layers (unless dropout follows it, whose mask is needed), probabilities
    times values in `selective`.
    """
    layers: list[Any] = [None] * config.num_layers
    return sum(
        _recomputed(config, seq_length * causal, group.mode, len(group.layers), tiles or Tiles())
        for group in make_groups(layers, modes)
    )


def _recomputed(config: GPTConfig, keys: float, mode: Mode, layers: int, tiles: Tiles) -> float:
    """Forward FLOPs per token that run again for `layers` layers; `keys` are looked at by a query, on average."""
    h, f, kv = config.hidden_size, config.ffn_size, config.query_groups * config.head_dim
    scores = 2 * h * keys
    qkv, core, projection = 2 * h * (h + 2 * kv), 2 * scores, 2 * h * h
    up, down = 2 * h * f * (2 if config.activation == "swiglu" else 1), 2 * h * f
    total = 0.0
    # Tiles compute this again for their own backward, in every mode.
    if tiles.mlp_tile_tokens:
        total += layers * up
    if tiles.attention_head_groups:
        total += layers * (qkv + (0 if config.attention == "sdpa" else core))
    # Tiled attention that keeps its output can give a tiled MLP its input again; a recompute then ends before.
    gives_again = (
        tiles.attention_head_groups
        and tiles.mlp_tile_tokens
        and config.attention == "sdpa"
        and not config.hidden_dropout
    )
    if gives_again:
        total += layers * projection
    if mode.recompute == "selective":
        if "core_attn" in mode.modules and config.attention == "unfused" and not tiles.attention_head_groups:
            total += layers * scores
        if "mlp" in mode.modules and not tiles.mlp_tile_tokens:
            total += layers * up
    elif mode.recompute == "full":
        kept = {*mode.keep, *(["qkv"] if tiles.attention_head_groups and "attention" in mode.keep else [])}
        parts = {"qkv": qkv, "attention": core, "projection": 0 if gives_again else projection}
        total += layers * sum(flops for part, flops in parts.items() if part not in kept)
        total += (layers - 1) * (projection if gives_again else 0)
        if tiles.mlp_tile_tokens:
            total += (layers - 1) * up
        elif "mlp_up" not in kept:
            total += layers * up
        ends_early = tiles.mlp_tile_tokens or not config.hidden_dropout
        total += (layers - 1 if ends_early else layers) * down
    return total
