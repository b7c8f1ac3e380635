"""Operations on rows of the residual stream in float32, a tile of rows at a time.

torch's own RMSNorm decomposes on CPU into float32 copies of the whole [T, C] and keeps some of them until
backward, where the CUDA kernel keeps the input and one number per row. These keep what the CUDA kernel keeps,
on every device.

Each is one operator to torch, as a fused kernel would be: a dispatch mode, fake tensors and torch.compile see
its inputs and outputs and never the loop, hundreds of thousands of operations at a million tokens. What
allocates an operator's outputs is also its fake, so that what is planned is what is allocated.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Elements of a tile: 1 MiB of float32 stays in a CPU core's cache; a GPU kernel should outlast its launch.
CPU_TILE, GPU_TILE = 2**18, 2**22


def tiles(rows: int, row_elements: int, device: torch.device) -> Iterator[slice]:
    step = max(1, (CPU_TILE if device.type == "cpu" else GPU_TILE) // max(1, row_elements))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


@torch.library.custom_op("waterline::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x [..., C] in x's dtype, and 1 / rms of its rows, float32 [rows, 1]."""
    out, rstd = allocate_rms_norm(x, weight, eps)
    rows, out_rows = x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1])
    for tile in tiles(len(rows), rows.shape[1], x.device):
        wide = rows[tile].float()
        rstd[tile] = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        out_rows[tile] = wide * rstd[tile] * weight
    return out, rstd


@rms_norm.register_fake
def allocate_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.numel() // x.shape[-1], 1, dtype=torch.float32)


@torch.library.custom_op("waterline::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `rms_norm` for x and weight, the sum over rows kept in float32."""
    dx, dweight = allocate_rms_norm_backward(grad, x, weight, rstd)
    rows, grads, dx_rows = (t.reshape(-1, x.shape[-1]) for t in (x, grad, dx))
    total = torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
    for tile in tiles(len(rows), rows.shape[1], x.device):
        normed, g = rows[tile].float() * rstd[tile], grads[tile].float()
        total += (g * normed).sum(0)
        g = g * weight
        dx_rows[tile] = (g - normed * (g * normed).mean(-1, keepdim=True)) * rstd[tile]
    return dx, dweight.copy_(total)


@rms_norm_backward.register_fake
def allocate_rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out, rstd = rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return *rms_norm_backward(grad, *ctx.saved_tensors), None


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


def rope_table(length: int, dim: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotary phases (Su et al. 2021, arXiv:2104.09864), each float32 [T, D / 2].

    Phases are formed in float64: in bfloat16 positions above 256 collide, and in float32 the phase of
    position 1,000,000 is already off by up to 0.06.
    """
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    positions = torch.arange(length, dtype=torch.float64, device=device)
    cos, sin = torch.empty(2, length, dim // 2, device=device, dtype=torch.float32).unbind()
    for position, c, s in zip(positions.split(2**14), cos.split(2**14), sin.split(2**14), strict=True):
        phase = torch.outer(position, frequency)  # float64 of a tile only
        c.copy_(phase.cos())
        s.copy_(phase.sin())
    return cos, sin


@torch.library.custom_op("waterline::rotate", mutates_args=())
def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    """x [B, T, H, D] turned by the phases of `rope_table`; direction -1 turns back, which is the gradient."""
    out = allocate_turn(x, cos, sin, direction)
    half = x.shape[-1] // 2
    for tile in tiles(x.shape[1], x.shape[0] * x.shape[2] * x.shape[3], x.device):
        c, s = cos[tile, None], sin[tile, None]  # (t, 1, D / 2), float32 and with it every product
        first, second = x[:, tile, :, :half], x[:, tile, :, half:]
        torch.addcmul(first * c, second, s, value=-direction, out=out[:, tile, :, :half])
        torch.addcmul(second * c, first, s, value=direction, out=out[:, tile, :, half:])
    return out


@turn.register_fake
def allocate_turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    return x.new_empty(x.shape)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)  # one table for all layers; x itself is not needed
        return turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return turn(grad, *ctx.saved_tensors, -1), None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (i, i + D / 2) of x [B, T, H, D] by the phases of `rope_table`, as Llama does."""
    return _Rotate.apply(x, cos, sin)
