"""What is exchanged around the model while a step is traced on tensors without content, and put back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from model import attention_kernels, attention_tiles, gpt, host, loss_tiles, mlp_tiles, offload_deepspeed
from model.region import is_parameter
from model.replay import second_run


@contextlib.contextmanager
def surroundings(job: Any) -> Iterator[None]:
    """The job's dtype as default, and stand-ins for what asks for the kind of device or cannot run without values."""
    before = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        torch.set_default_dtype(job.dtype)
        stack.callback(torch.set_default_dtype, before)
        for module, stand_ins in (
            (torch, {"autocast": _NoAutocast, "is_autocast_enabled": lambda *_: False}),
            (torch, {"get_autocast_dtype": lambda *_: job.dtype}),
            (F, {"scaled_dot_product_attention": _flash_attention}),
            (attention_tiles, {"find_kernel": _find_kernel}),
            (gpt, {"rope_table": _rope_table}),
            (gpt.GPT, {"reset_parameters": lambda _: None}),
            (host, {"empty": _host_empty}),
            (offload_deepspeed, {"checkpoint": partial(_deepspeed_checkpoint, job.cuda, [])}),
            (F, {"dropout": _cuda_dropout} if job.cuda else {}),
            (F, {"linear": _Zero3Linear.run} if job.gathers else {}),
        ):
            stack.enter_context(exchanged(module, **stand_ins))
        yield


@contextlib.contextmanager
def exchanged(module: Any, **functions: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


class _NoAutocast(contextlib.nullcontext):
    """torch.autocast knows no meta device."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def _flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    """F.scaled_dot_product_attention with the kernel it chooses on a CPU; on CUDA the shapes are the same."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]


def _find_kernel(implementation: str, *_: Any) -> Any:
    return attention_kernels.CPU if implementation == "sdpa" else None


def _cuda_dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """What F.dropout is on CUDA: one kernel that keeps a mask of one byte. On the CPU the mask has x's dtype."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


def _host_empty(shape: Any, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
    with host.allocation():
        tensor = torch.empty(shape, dtype=dtype, device="meta")
    host.register(tensor.untyped_storage())
    return tensor


def _rope_table(length: int, dim: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """model.rowwise.rope_table without its loop over positions."""
    cos, sin = torch.empty(2, length, dim // 2, device=device, dtype=torch.float32).unbind()
    return cos, sin


class _Waiting:
    """The input of a group of layers that waits for backward: on the device, in host memory, or in both."""

    def __init__(self, x: torch.Tensor) -> None:
        self.on_device: torch.Tensor | None = x
        self.on_host: torch.Tensor | None = None

    def copy_to_host(self) -> None:
        assert self.on_device is not None
        self.on_host = host.empty(self.on_device.shape, self.on_device.dtype)

    def take(self) -> torch.Tensor:
        if self.on_device is None:
            assert self.on_host is not None
            self.on_device = torch.empty_like(self.on_host).copy_(self.on_host)
        x, self.on_device, self.on_host = self.on_device, None, None
        return x


def _deepspeed_checkpoint(
    cuda: bool, recent: list[_Waiting], function: Any, x: torch.Tensor, activity: Any
) -> torch.Tensor:
    """The memory of model.offload_deepspeed.checkpoint, which needs values and a process group.

    DeepSpeed runs the function and then empties x, whoever holds it; backward runs all of the function again. On a CPU
    x is copied beforehand, the copy counts as host memory from then on, and backward uses it as it is. A GPU keeps the
    last x, copies the one before it to the host and holds on to it meanwhile (offload_activations.py, keep_last_count
    and max_fwd_stash_count).
    """
    waiting = _Waiting(x.detach() if cuda else x.detach().clone())
    key = x.untyped_storage()._cdata  # hooks that knew x itself would keep it alive

    def pack(tensor: torch.Tensor) -> Any:
        return waiting if tensor.untyped_storage()._cdata == key and not is_parameter(tensor) else tensor

    def unpack(packed: Any) -> torch.Tensor:
        return packed.take() if isinstance(packed, _Waiting) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), set_checkpoint_early_stop(False):
        contexts = nullcontext(), second_run(activity)
        output = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts)
    x.data = torch.empty([], device=x.device, dtype=x.dtype)
    if not cuda:
        host.register(waiting.on_device.untyped_storage())  # type: ignore[union-attr]
        return output
    recent.append(waiting)
    if len(recent) > 1:
        recent[-2].copy_to_host()
    if len(recent) > 2:
        recent.pop(0).on_device = None
    return output


# Tiles


class _Weighed(list):
    """The tiles that a loop runs; the second one may stand for many."""

    def __init__(self, tiles: list[slice], count: int, weigh: Callable[[float], None]) -> None:
        super().__init__(tiles)
        self.stand_in, self.weigh = count - len(tiles) + 1, weigh

    def __iter__(self) -> Iterator[slice]:
        for i, tile in enumerate(super().__iter__()):
            self.weigh(self.stand_in if i == 1 else 1)
            yield tile
        self.weigh(1)


@contextlib.contextmanager
def few_tiles(job: Any, weigh: Callable[[float], None]) -> Iterator[None]:
    """Loops over tiles run three of them, the second with the weight of all between, so that a trace costs the same at
    every length.

    What a tile makes goes into buffers of the whole length, so that leaving tiles out changes no byte. Attention
    tiles with dropout are the exception: they are joined, and must all be there.
    """

    def slices(x: torch.Tensor, step: int) -> list[slice]:
        starts: Any = range(0, len(x), step)
        few = [*starts[:2], starts[-1]] if len(starts) > 3 else starts
        return _Weighed([slice(start, min(start + step, len(x))) for start in few], len(starts), weigh)

    with contextlib.ExitStack() as stack:
        for module in (loss_tiles, mlp_tiles):
            stack.enter_context(exchanged(module, slices=slices))
        if not job.config.hidden_dropout:
            stack.enter_context(exchanged(attention_tiles, slices=slices))
        yield


# ZeRO-3


class _Zero3Linear(torch.autograd.Function):
    """DeepSpeed exchanges F.linear under ZeRO-3 by one that saves the parameter, not a view of its gathered data."""

    @staticmethod
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return _Zero3Linear.apply(x, weight, bias)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        if x.dim() == 2 and bias is not None:
            return torch.addmm(bias, x, weight.t())
        output = x.matmul(weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        dx = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        dweight = dbias = None
        if ctx.needs_input_grad[1]:
            dweight = grad.reshape(-1, grad.shape[-1]).t().matmul(x.reshape(-1, x.shape[-1]))
        if bias is not None and ctx.needs_input_grad[2]:
            dbias = grad.reshape(-1, grad.shape[-1]).sum(0) if grad.dim() > 2 else grad.sum(0)
        return dx, dweight, dbias


def mark_gathers(model: torch.nn.Module, owners: dict[torch.nn.Module, str], mark: Callable[[str, Any], None]) -> None:
    """Marks where DeepSpeed's hooks fetch and release a module's own parameters, in forward and in backward."""

    class Mark(torch.autograd.Function):
        """Passes a tensor on, and marks when backward passes by: on a module's output it is about to enter the module,
        on its input it has left it.
        """

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, what: str, name: str) -> torch.Tensor:
            ctx.mark = what, name
            return x.detach()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            mark(*ctx.mark)
            return grad, None, None

    def before(module: torch.nn.Module, args: Any) -> Any:
        name = owners[module]
        mark("enter", name)
        return tuple(
            Mark.apply(a, "leave backward", name) if isinstance(a, torch.Tensor) and a.is_floating_point() else a
            for a in args
        )

    def after(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        name = owners[module]
        mark("leave", name)
        return Mark.apply(output, "enter backward", name)

    for module in owners:
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
