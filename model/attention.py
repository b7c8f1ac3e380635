"""The core attention: q, k, v in, context out, computed one of three ways.

unfused     scores, mask, softmax, dropout and context as separate operations (as Megatron-LM's local attention):
            the one that keeps [T, T] tensors for backward, so that selective recompute has something to save
sdpa        torch.nn.functional.scaled_dot_product_attention, fused kernels only
flash_attn  the flash-attn package (`pip install -e ".[flash]"`), imported when it is asked for
"""

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# Never the math backend: it would build [T, T] tensors without a word.
FUSED_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class CoreAttention(nn.Module):
    """Causal attention of q [B, T, H, D] over k, v [B, T, G, D], G dividing H; returns [B, T, H, D]."""

    def __init__(self, implementation: str, dropout: float) -> None:
        super().__init__()
        if implementation == "flash_attn":
            flash_attn_func()  # fail here, not in the first step
        self.implementation = implementation
        self.dropout = dropout

    @property
    def fused(self) -> bool:
        return self.implementation != "unfused"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        p = self.dropout if self.training else 0.0
        if self.implementation == "unfused":
            return unfused(q, k, v, p)
        if self.implementation == "flash_attn":
            return flash_attn_func()(q, k, v, dropout_p=p, causal=True)
        return sdpa(q, k, v, p)


def unfused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
    """Keeps the softmax output [B, H, T, T] for backward, and with dropout its mask and output too."""
    batch, length, heads, dim = q.shape
    groups, repeat = k.shape[2], heads // k.shape[2]
    # Query heads that share a key/value head are stacked along the rows: k and v are never repeated.
    q = q.transpose(1, 2).reshape(batch * groups, repeat * length, dim)
    k = k.transpose(1, 2).reshape(batch * groups, length, dim)
    v = v.transpose(1, 2).reshape(batch * groups, length, dim)
    mask = torch.full((length, length), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    # Scale and mask ride on the GEMM, so that scores exist once: (B * G, H / G * T, T)
    scores = torch.baddbmm(mask.repeat(repeat, 1), q, k.transpose(1, 2), alpha=1 / math.sqrt(dim))
    probs = F.dropout(F.softmax(scores, dim=-1), dropout, training=dropout > 0)
    context = torch.bmm(probs, v)  # (B * G, H / G * T, D)
    return context.view(batch, heads, length, dim).transpose(1, 2)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
    if dropout and q.device.type == "cpu":
        raise ValueError(
            "attention_dropout > 0 with attention=sdpa: the fused CPU kernel has no dropout. "
            "Set model.attention_dropout=0, or model.attention=unfused."
        )
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or G, T, D)
    with sdpa_kernel(FUSED_BACKENDS) if q.is_cuda else nullcontext():
        gqa = q.shape[1] != k.shape[1]
        context = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=gqa)
    return context.transpose(1, 2)


def flash_attn_func() -> Any:
    try:
        from flash_attn import flash_attn_func as function
    except ImportError as error:
        raise ValueError(
            'attention=flash_attn needs the flash-attn package: pip install -e ".[flash]" (it compiles for CUDA), '
            "or set model.attention=sdpa"
        ) from error
    return function
