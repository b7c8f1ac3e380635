"""Where CUDA kernels and the CUDA allocator hold other bytes than the CPU's, for a trace made on the CPU.

Each difference has a name and a function here, and `make plan` lists them, so that a person can disagree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from training.metering.storages import Storages

aten = torch.ops.aten

MIB, GIB = 2**20, 2**30
ALLOCATOR_BLOCK = 512  # c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize: what every request is rounded up to

CONTEXT_BYTES = 640 * MIB  # CUDA context, cuBLAS and kernels loaded by torch: outside the allocator; 400 to 800 MiB
CUBLAS_WORKSPACE_BYTES = 32 * MIB  # torch, CUDABlas: one workspace from the allocator, 32 MiB on Hopper, 8 MiB before
OWN_KERNEL_TILES_BYTES = 32 * MIB  # model/rowwise.py works on float32 tiles of 2^22 elements on a GPU
FRAGMENTATION = 0.03  # of the peak: memory the allocator reserves in 2 MiB and 20 MiB blocks, and cannot join

LAYOUTS = (
    "Modelled: dropout masks of 1 byte, LayerNorm statistics in float32, requests rounded to 512 bytes, flash "
    "attention's workspaces in backward, gradients added in place. Not modelled: those of embedding backward and NCCL."
)

# Kernels whose gradients torch adds up in place when no dispatch mode watches, as none does in a real CUDA step.
_FORK_ADD = aten.add.Tensor


def rounded(nbytes: int) -> int:
    """What the allocator gives out for a request, and counts as allocated."""
    return -(-nbytes // ALLOCATOR_BLOCK) * ALLOCATOR_BLOCK


def fragmentation_bytes(peak_bytes: float) -> float:
    """An allowance: what the allocator reserves beyond what it has given out at the peak."""
    return FRAGMENTATION * peak_bytes + 20 * MIB


def allowances(peak_bytes: float) -> dict[str, int]:
    """What is added for CUDA by name, that a person can disagree with; the first two are in the peak already."""
    return {
        "cublas_workspace": CUBLAS_WORKSPACE_BYTES,
        "own_kernel_tiles": OWN_KERNEL_TILES_BYTES,
        "allocator_fragmentation": int(fragmentation_bytes(peak_bytes)),
        "cuda_context": CONTEXT_BYTES,
    }


def stored_bytes(func: Any, index: int, nbytes: int) -> int:
    """Bytes of an operation's output as CUDA keeps it.

    LayerNorm: mean and 1/std of the rows are float32 on CUDA, and of the input's dtype on the CPU.
    """
    return nbytes


def workspace_bytes(func: Any, args: Any) -> int:
    """Device memory that a CUDA kernel takes and returns within one operation.

    Backward of flash attention (PyTorch's FlashAttention-2, mha_bwd): dq accumulated in float32, a float32 number for
    every row (both with T rounded up to 128 and D to 32), and, under GQA, dk and dv for every query head.
    """
    if func is not aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return 0
    q, k = args[1], args[2]
    batch, heads, length, dim = q.shape
    rows = batch * heads * (-(-length // 128) * 128)
    expanded = 0 if k.shape[1] == heads else 2 * batch * heads * k.shape[-2] * dim * q.element_size()
    return rows * (-(-dim // 32) * 32) * 4 + rows * 4 + expanded


@contextlib.contextmanager
def adding_in_place(books: Storages, func: Any, args: Any) -> Iterator[None]:
    """While autograd adds up gradients that meet at a fork: in place on CUDA, so the sum needs no memory of its own."""
    spare = 0
    if func is _FORK_ADD and books.phase == "backward" and _by_autograd(args):
        spare = args[0].untyped_storage().nbytes()
    books.live_bytes -= spare
    try:
        yield
    finally:
        books.live_bytes += spare


def _by_autograd(args: Any) -> bool:
    a, b = args[0], args[1]
    if not (isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype):
        return False
    node = torch._C._current_autograd_node()
    own = isinstance(node, torch.autograd.function.BackwardCFunction)  # a Function written in Python
    return not torch.is_grad_enabled() and node is not None and not own
