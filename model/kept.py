"""What one layer keeps for backward under each mode, tensor by tensor, in bytes: the table that tests hold to the byte.

It prices the implementation in this folder on a CPU, in one dtype and without tiles. On CUDA a dropout mask has one
byte instead of an element, and LayerNorm's two statistics have four bytes each. Megatron's table 2 (Korthikanti et al.
2022, arXiv:2205.05198) counts the same tensors, with masks of one byte and without statistics.
"""

from collections.abc import Iterator

from model.gpt import GPTConfig
from model.modes import Mode


def kept_bytes(
    config: GPTConfig, mode: Mode, batch: int, seq_length: int, element_size: int = 2, layers: int = 1
) -> dict[str, int]:
    """Bytes that a group of `layers` layers keeps between forward and backward, by tensor; on the host with offload.

    batch sequences of seq_length tokens; element_size: bytes of an activation. Only `full` makes groups of more than
    one layer, which share their input.
    """
    rows = _full(config, mode, batch, seq_length) if mode.recompute == "full" else _selective(config, mode, seq_length)
    tokens = batch * seq_length
    return {
        name: tokens * (count * (4 if name == "logsumexp" or "rms" in name else element_size)) * (layers if n else 1)
        for n, (name, count) in enumerate(rows)
        if count
    }


def _selective(c: GPTConfig, mode: Mode, seq_length: int) -> Iterator[tuple[str, int]]:
    """Tensors and their elements per token, in order of forward."""
    h, f, kv, a = c.hidden_size, c.ffn_size, c.query_groups * c.head_dim, c.num_attention_heads
    fused, gated, layernorm = c.attention != "unfused", c.activation == "swiglu", c.normalization == "layernorm"
    norm, core, activation, mlp = (m not in mode.modules for m in ("norm", "core_attn", "activation", "mlp"))
    statistics = (" mean and deviation", 2) if layernorm else (" rms", 1)
    mask = h if c.hidden_dropout else 0

    yield "layer input", h
    yield f"input norm{statistics[0]}", statistics[1] * norm
    yield "input norm output", h * norm
    yield "q", h
    yield "k and v", 2 * kv
    yield "probabilities", a * seq_length * (core and not fused)
    yield "dropped probabilities and mask", 2 * a * seq_length * (core and not fused and c.attention_dropout > 0)
    yield "context", h
    yield "logsumexp", a * fused
    yield "attention dropout mask", mask
    yield "residual", h
    yield f"post norm{statistics[0]}", statistics[1] * norm
    yield "post norm output", h * norm
    yield "up and gate" if gated else "up", f * (1 + gated) * mlp
    yield "silu of gate", f * (gated and activation and mlp)
    yield "activation output", f * (activation and mlp)
    yield "MLP dropout mask", mask


def _full(c: GPTConfig, mode: Mode, batch: int, seq_length: int) -> Iterator[tuple[str, int]]:
    h, f, kv, a = c.hidden_size, c.ffn_size, c.query_groups * c.head_dim, c.num_attention_heads
    fused, gated = c.attention != "unfused", c.activation == "swiglu"
    qkv, attention, projection, up = (name in mode.keep for name in ("qkv", "attention", "projection", "mlp_up"))
    inside = attention and not fused

    yield "layer input", h
    yield "q, k and v before rotation", (h + 2 * kv) * qkv
    # Unfused attention multiplies batches of matrices, and copies q, k and v where they are not laid out as such.
    yield "copy of q", h * (inside and (batch > 1 or kv < h))
    yield "copies of k and v", 2 * kv * (inside and batch > 1)
    yield "probabilities", a * seq_length * inside
    yield "dropped probabilities and mask", 2 * a * seq_length * (inside and c.attention_dropout > 0)
    yield "context", h * attention
    yield "logsumexp", a * (attention and fused)
    yield "projection", h * projection
    yield "up and gate" if gated else "up", f * (1 + gated) * up
