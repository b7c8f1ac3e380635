"""FLOPs of one trained token: the model's own (MFU) and what the machine really computes (HFU)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model.gpt import GPTConfig, flops_per_token
from model.modes import Mode
from model.recompute import make_groups

CAUSAL = 0.5  # of the T x T square is needed; the convention of model.gpt.flops_per_token


def hardware_flops_per_token(
    config: GPTConfig, seq_length: int, modes: Sequence[Mode], causal: float = CAUSAL
) -> float:
    """FLOPs of forward, backward and recompute for one token; `modes` has one mode per layer.

    Matrix products only, as for model FLOPs. `causal`: the share of attention's square that is counted.

    A recompute stops as soon as all that backward needs is there, so the last product of a region never runs
    again: the MLP's down projection in a group of layers, probabilities times values in `selective`.
    """
    attention = 12 * config.num_layers * config.hidden_size * seq_length
    layers: list[Any] = [None] * config.num_layers
    extra = sum(
        _recomputed(config, seq_length * causal, group.mode, len(group.layers)) for group in make_groups(layers, modes)
    )
    return flops_per_token(config, seq_length) + attention * (causal - CAUSAL) + extra


def _recomputed(config: GPTConfig, keys: float, mode: Mode, layers: int) -> float:
    """Forward FLOPs per token that run again for `layers` layers; `keys` are looked at by a query, on average."""
    h, f, kv = config.hidden_size, config.ffn_size, config.query_groups * config.head_dim
    scores = 2 * h * keys
    up = 2 * h * f * (2 if config.activation == "swiglu" else 1)
    if mode.recompute == "selective":
        core = scores if "core_attn" in mode.modules and config.attention == "unfused" else 0.0
        return layers * (core + (up if "mlp" in mode.modules else 0.0))
    if mode.recompute == "full":
        parts = {"qkv": 2 * h * (h + 2 * kv), "attention": 2 * scores, "projection": 2 * h * h, "mlp_up": up}
        again = sum(flops for part, flops in parts.items() if part not in mode.keep)
        return layers * again + (layers - 1) * 2 * h * f
    return 0.0
