"""Fused attention kernels whose backward can be called by itself: what tiles need to run a kernel once, not twice."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

Tensors = Iterable[torch.Tensor]


class Kernel(NamedTuple):
    """A fused attention: q, k, v [B, H, T, D] to the output, and `extras` tensors that its backward also needs."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    extras: int


def _cpu_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> Tensors:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, True)


def _cpu_backward(
    grad: torch.Tensor, qkv: Tensors, out: torch.Tensor, extras: list[torch.Tensor], dropout: float
) -> Tensors:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, *qkv, out, *extras, dropout, True)


def _cuda_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> Tensors:
    outputs = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout, True)
    return outputs[0], outputs[1], outputs[6], outputs[7]  # output, logsumexp, state of its random numbers


def _cuda_backward(
    grad: torch.Tensor, qkv: Tensors, out: torch.Tensor, extras: list[torch.Tensor], dropout: float
) -> Tensors:
    backward, length = torch.ops.aten._scaled_dot_product_flash_attention_backward, out.shape[-2]
    return backward(grad, *qkv, out, extras[0], None, None, length, length, dropout, True, *extras[1:])


CPU, CUDA = Kernel(_cpu_forward, _cpu_backward, 1), Kernel(_cuda_forward, _cuda_backward, 3)


def find_kernel(
    implementation: str, device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float
) -> Kernel | None:
    """The kernel behind attention=sdpa, where it is one of these."""
    if implementation != "sdpa" or (device.type == "cpu" and dropout):
        return None
    if device.type == "cpu":
        return CPU
    fits = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256
    return CUDA if fits and torch.cuda.get_device_capability(device) >= (8, 0) else None
