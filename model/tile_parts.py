"""What the tiled parts of a layer share.

A tiled part is one autograd function around a norm, a sub-layer, dropout and the residual: x [B, T, C] in, x [B, T, C]
out. It keeps little more than x and computes the rest again in backward, a tile at a time, so that there is one
gradient in and one gradient out and nothing in between that is as long as the sequence without need.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from model.replay import RandomState


def slices(x: torch.Tensor, step: int) -> list[slice]:
    """The rows of x [rows, C] in tiles of `step`, the last one ragged.

    Of fake tensors, which have a size and no content, the first two and the last: every tile between allocates what
    the second did, and a plan for a million tokens should not take a million operations.
    """
    starts = range(0, len(x), step)
    if isinstance(x, FakeTensor) and len(starts) > 3:
        starts = [*starts[:2], starts[-1]]  # type: ignore[assignment]
    return [slice(start, min(start + step, len(x))) for start in starts]


class Weights:
    """A part's parameters by name, in the dtype that its GEMMs use; None for those it does not have.

    They are read from the parameter objects at every use: ZeRO-3 and FSDP exchange their data between forward and
    backward. A parameter that was changed in place in between is an error, as it is for autograd's own.
    """

    def __init__(self, modules: dict[str, nn.Module | None], device: torch.device) -> None:
        """modules: by the name that their `weight` and `bias` are to have in front."""
        self.parameters: dict[str, nn.Parameter] = {}
        for name, module in modules.items():
            for kind in ("weight", "bias"):
                if (parameter := getattr(module, kind, None)) is not None:
                    self.parameters[f"{name}.{kind}"] = parameter
        self.versions = {name: p._version for name, p in self.parameters.items()}
        autocast = torch.is_autocast_enabled(device.type)
        first = next(iter(self.parameters.values()))
        self.dtype = torch.get_autocast_dtype(device.type) if autocast else first.dtype

    def __contains__(self, name: str) -> bool:
        return name in self.parameters

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.raw(name).to(self.dtype)

    def raw(self, name: str) -> torch.Tensor:
        parameter = self.parameters[name]
        if hasattr(parameter, "ds_status") and not parameter.numel():
            # ZeRO-3, and a recompute within this backward gave the layer's parameters back when it was done; the hook
            # behind the layer's backward gives them back again.
            parameter.all_gather()  # type: ignore[attr-defined]
        if parameter._version != self.versions[name]:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} that backward needs was modified in place since forward"
            )
        return parameter.detach()

    def linear(self, x: torch.Tensor, name: str, part: slice = slice(None)) -> torch.Tensor:
        """x @ weight^T + bias, of the output features in `part`."""
        bias = self[f"{name}.bias"][part] if f"{name}.bias" in self.parameters else None
        return F.linear(x, self[f"{name}.weight"][part], bias)


class Gradients:
    """Gradients of a part's parameters, each summed over tiles: in float32 when there is more than one to sum.

    wanted: whether each parameter, in order, needs a gradient.
    """

    def __init__(self, weights: Weights, wanted: tuple[bool, ...], one_tile: bool) -> None:
        self.names = list(weights.parameters)
        self.totals = {
            name: torch.zeros_like(
                weights.raw(name), dtype=None if one_tile and p.dtype == weights.dtype else torch.float32
            )
            for (name, p), needed in zip(weights.parameters.items(), wanted, strict=True)
            if needed
        }
        self.dtypes = {name: p.dtype for name, p in weights.parameters.items()}

    def linear(
        self, name: str, grad: torch.Tensor, x: torch.Tensor, out: slice = slice(None), into: slice = slice(None)
    ) -> None:
        """Adds the gradients of x [n, in] @ weight^T + bias for grad [n, out]; out, into: the features they cover."""
        if (total := self.totals.get(f"{name}.weight")) is not None:
            add_product(total[out, into], grad.t(), x)
        if (total := self.totals.get(f"{name}.bias")) is not None and into.start in (None, 0):
            total[out] += grad.sum(0)

    def stacked(self, projections: Iterable[tuple[str, slice]], grad: torch.Tensor, x: torch.Tensor) -> None:
        """As `linear`, of several projections of x whose gradients lie side by side, with the features they cover."""
        product, total = grad.t() @ x, grad.sum(0)
        start = 0
        for name, part in projections:
            stop = start + part.stop - part.start
            self.add(f"{name}.weight", product[start:stop], part)
            self.add(f"{name}.bias", total[start:stop], part)
            start = stop

    def add(self, name: str, gradient: torch.Tensor, part: slice = slice(None)) -> None:
        if name in self.totals:
            self.totals[name][part] += gradient

    def result(self) -> tuple[torch.Tensor | None, ...]:
        """One gradient for each parameter, in the parameter's dtype."""
        totals = (self.totals.pop(name, None) for name in self.names)
        return tuple(None if t is None else t.to(self.dtypes[n]) for n, t in zip(self.names, totals, strict=True))


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, in place where the dtypes allow it."""
    if total.dtype == a.dtype == b.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


class Norm:
    """A norm outside its module: the class's own arithmetic, no hooks, no exchanged forward, detached parameters."""

    def __init__(self, module: nn.Module, weights: Weights) -> None:
        self.module, self.weights = module, weights

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises x [..., C], in the dtype of the part's GEMMs."""
        parameters = {name: self.weights.raw(f"norm.{name}") for name in self._names()}
        return self._run(x, parameters)

    def with_backward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Also a function from the output's gradient to those of x and, by name, of the parameters."""
        names = self._names()
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            parameters = {name: self.weights.raw(f"norm.{name}").requires_grad_() for name in names}
            output = self._run(leaf, parameters)
        edge, result = torch.autograd.graph.get_gradient_edge(output), output.detach()

        def backward(grad: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            dx, *rest = torch.autograd.grad(edge, (leaf, *parameters.values()), grad)
            return dx, {f"norm.{name}": gradient for name, gradient in zip(names, rest, strict=True)}

        return result, backward

    def _names(self) -> list[str]:
        return [name for name in ("weight", "bias") if f"norm.{name}" in self.weights]

    def _run(self, x: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        settings = {"eps": self.module.eps, "normalized_shape": x.shape[-1:], "bias": None}
        stand_in: Any = SimpleNamespace(**{**settings, **parameters})
        return type(self.module).forward(stand_in, x).to(self.weights.dtype)


def dropout_backward(grad: torch.Tensor, p: float) -> torch.Tensor:
    """The gradient of dropout, drawing the mask anew: the generator must stand where it stood in forward."""
    with torch.enable_grad():
        leaf = grad.detach().requires_grad_()
        output = F.dropout(leaf, p)
    return torch.autograd.grad(output, leaf, grad)[0]


@contextmanager
def replayed(random: RandomState | None) -> Iterator[None]:
    """Random numbers are drawn as from `random` on, and afterwards as if none had been drawn; None changes nothing."""
    if random is None:
        yield
        return
    with torch.random.fork_rng(devices=[random.device] if random.cuda is not None else []):
        random.restore()
        yield


class Saved:
    """Tensors that autograd saved for the backward of more than one function, which unpacks them together, once."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.tensors: tuple[torch.Tensor, ...] = ()

    def load(self) -> tuple[torch.Tensor, ...]:
        if not self.tensors:
            self.tensors = self.node.saved_tensors  # through the saved-tensor hooks that were active in forward
        return self.tensors

    def release(self) -> None:
        self.tensors = ()


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: Any, *others: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *others)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


def anchored(x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, Saved | None]:
    """x, saved for backward with others *before* what runs on it; and what was saved (None without gradient).

    Recompute ends at the last tensor that somebody waits for. An autograd function saves after it has run: if a
    layer's last function saved its own input, `full` would run all of it a second time to get there, and again where
    its backward recomputes what it needs.
    """
    if not torch.is_grad_enabled():
        return x, None
    # With a frozen embedding x needs no gradient, and autograd would not save it.
    needs_gradient = None if x.requires_grad else torch.empty(0, device=x.device, requires_grad=True)
    x = _Anchor.apply(x, needs_gradient, *others)
    return x, Saved(x.grad_fn)
