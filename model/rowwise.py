"""Operations on rows of the residual stream in float32, a tile of rows at a time.

torch's own RMSNorm decomposes on CPU into float32 copies of the whole [T, C] and keeps some of them until backward,
where the CUDA kernel keeps the input and one number per row. These keep what the CUDA kernel keeps, on every device,
and their float32 temporaries are one tile large.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

TILE_ELEMENTS = 2**18  # 1 MiB of float32: stays in a core's cache


def tiles(rows: int, row_elements: int) -> Iterator[slice]:
    step = max(1, TILE_ELEMENTS // row_elements)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows)
        rstd = torch.empty(len(rows), 1, dtype=torch.float32, device=x.device)
        for tile in tiles(*rows.shape):
            wide = rows[tile].float()
            rstd[tile] = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            out[tile] = wide * rstd[tile] * weight
        ctx.save_for_backward(x, weight, rstd)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
        dx = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        dw = (
            torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
            if ctx.needs_input_grad[1]
            else None
        )
        for tile in tiles(*rows.shape):
            normed, g = rows[tile].float() * rstd[tile], grads[tile].float()
            if dw is not None:
                dw += (g * normed).sum(0)
            if dx is not None:
                g = g * weight
                dx[tile] = (g - normed * (g * normed).mean(-1, keepdim=True)) * rstd[tile]
        return None if dx is None else dx.view(x.shape), None if dw is None else dw.to(weight.dtype), None


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return _RMSNorm.apply(x, self.weight, self.eps)


def rope_table(
    length: int, dim: int, theta: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotary phases (Su et al. 2021, arXiv:2104.09864), each float32 [T, D / 2].

    Phases are formed in float64: in bfloat16 positions above 256 collide, and in float32 the phase of position
    1,000,000 is already off by 0.06.
    """
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    cos, sin = torch.empty(2, length, dim // 2, device=device, dtype=torch.float32).unbind()
    for tile in tiles(length, dim):
        position = torch.arange(tile.start, tile.stop, dtype=torch.float64, device=device)
        phase = torch.outer(position, frequency)
        cos[tile], sin[tile] = phase.cos(), phase.sin()
    return cos, sin


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    half = x.shape[-1] // 2
    for tile in tiles(x.shape[1], x.shape[0] * x.shape[2] * x.shape[3]):
        c, s = cos[tile, None], direction * sin[tile, None]  # (t, 1, D / 2)
        first, second = x[:, tile, :, :half].float(), x[:, tile, :, half:].float()
        out[:, tile, :, :half] = first * c - second * s
        out[:, tile, :, half:] = second * c + first * s
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)  # one table for all layers; x itself is not needed
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _rotated(grad, *ctx.saved_tensors, -1), None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (i, i + D / 2) of x [B, T, H, D] by the phases of `rope_table`, as Llama does."""
    return _Rotate.apply(x, cos, sin)
