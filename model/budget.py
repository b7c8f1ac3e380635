"""Mode `budget`: torch.compile's partitioner picks what a layer keeps, for a share of what it would keep anyway.

The layers are compiled, nothing else; `activation_memory_budget` (torch/_functorch/config.py) is set while they are and
put back. Compiled code decomposes and fuses, so gradients equal those of mode none to rounding, not to the bit.
Dropout is refused below a share of 1: what is recomputed would draw another mask (torch 2.13 on a CPU, by finite
differences; not tried on a GPU).
"""

from __future__ import annotations

import contextlib
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import nn
from torch.nn.modules import module as hooks

from model.replay import Activity

BACKENDS = {"cpu": "aot_eager_decomp_partition", "cuda": "inductor"}  # on a CPU without a C++ compiler
_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


class Compiler:
    """A backend of torch.compile that partitions forward and backward for a memory budget."""

    def __init__(self, fraction: float, device: str, activity: Activity) -> None:
        self.fraction, self.activity = fraction, activity
        self.inner = torch._dynamo.lookup_backend(BACKENDS.get(device, "inductor"))

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.activity.compiled = True
        with functorch.patch(activation_memory_budget=self.fraction):
            return self.inner(graph, inputs)


def compiler(fraction: float, device: str, activity: Activity) -> Callable[..., torch.Tensor]:
    """The compiled forward of a layer: (layer, plain forward's function, arguments). One for all layers."""
    # Code of its own: torch.compile keeps what it compiled, and counts how often, by code object.
    function = types.FunctionType(_forward.__code__.replace(), globals())
    return torch.compile(function, backend=Compiler(fraction, device, activity), dynamic=False, fullgraph=True)


def _forward(layer: nn.Module, forward: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    return forward(layer, *args)


def run(layer: nn.Module, forward: Callable[..., torch.Tensor], compiled: Any, *args: Any) -> torch.Tensor:
    """Stands in for `forward` of a layer."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return forward(layer, *args)
    try:
        with _no_global_hooks():
            return compiled(layer, forward, *args)
    except torch._dynamo.exc.Unsupported as error:
        raise ValueError(
            "mode budget: torch.compile cannot trace this layer as a whole (ZeRO-3, FSDP and other hooks have code of "
            f"their own in it); use another mode: {str(error).splitlines()[0]}"
        ) from error


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Hooks on all modules, as a meter has them, would be traced; those on the layer itself have run already."""
    before = {name: getattr(hooks, name) for name in _HOOKS}
    for name in _HOOKS:
        setattr(hooks, name, OrderedDict())
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(hooks, name, value)
