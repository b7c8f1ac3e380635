"""FLOPs and bytes of the operations in a trace, by the class of kernel that does them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten


class Work(NamedTuple):
    """What kernels of one class have to do."""

    flops: float = 0.0
    nbytes: float = 0.0  # read and written
    calls: float = 0.0

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(self.flops + other.flops, self.nbytes + other.nbytes, self.calls + other.calls)

    def __mul__(self, times: float) -> Work:  # type: ignore[override]
        return Work(self.flops * times, self.nbytes * times, self.calls * times)


def _matmul(args: Any, out: Any) -> float:
    a = args[-2]
    return 2.0 * out.numel() * a.shape[-1]


def _attention(args: Any, out: Any) -> float:
    """Causal: half of the square. Scores and context, 2 products of forward."""
    q, k = args[0], args[1]
    return 4.0 * q.numel() * k.shape[-2] / 2


def _attention_backward(args: Any, out: Any) -> float:
    """Scores again, and the gradients of probabilities, q, k and v: 5 products."""
    q, k = args[1], args[2]
    return 10.0 * q.numel() * k.shape[-2] / 2


# The operands of the matrix product are the last two arguments of each.
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmm_.default}
FLASH = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
_FREE: dict[Any, bool] = {}  # operations that launch nothing


def work_of(func: Any, args: Any, out: Any) -> tuple[str, float, float] | None:
    """(kernel class, FLOPs, bytes) of one operation; None for what launches no kernel (views, allocations).

    Classes: gemm, attention, attention_backward, memory (everything that only reads and writes).
    """
    free = _FREE.get(func)
    if free is None:
        name = func.overloadpacket.__name__
        _FREE[func] = free = func.is_view or name in ("empty", "new_empty", "empty_like", "detach", "empty_strided")
    if free:
        return None
    nbytes = float(sum(tensor.numel() * tensor.element_size() for tensor in _tensors(args)))
    nbytes += sum(tensor.numel() * tensor.element_size() for tensor in _tensors((out,)))
    if func in MATMULS:
        return "gemm", _matmul(args, out), nbytes
    if func in FLASH:
        kind = "attention_backward" if "backward" in func.overloadpacket.__name__ else "attention"
        return kind, FLASH[func](args, out), nbytes
    return ("memory", 0.0, nbytes) if math.isfinite(nbytes) and nbytes else None


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
