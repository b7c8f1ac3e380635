"""The MLP half of a layer, a tile of tokens at a time: x + dropout(mlp(norm(x))), no [T, F] tensor at any moment.

Kept for backward: x, or nothing where the attention half can give x again. Backward computes a tile's norm, up (and
gate) projection and activation again, but not the down projection, whose output no gradient needs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from model.gpt import Block
from model.replay import RandomState
from model.tile_parts import Gradients, Norm, Saved, Weights, anchored, dropout_backward, replayed, slices


def mlp_part(
    layer: Block, tile_tokens: int, x: torch.Tensor, again: Callable[[slice], torch.Tensor] | None = None
) -> torch.Tensor:
    """`layer`'s second half on x [B, T, C], `tile_tokens` rows of B * T at a time.

    again: gives rows of x in backward; without it, x is saved.
    """
    saved = None
    if again is None:
        x, saved = anchored(x)
    part = _MLP(layer, tile_tokens, x, saved, again)
    with torch.autocast(x.device.type, enabled=False):
        return _Tiled.apply(x, part, *part.weights.parameters.values())


class _MLP:
    """One call: what it needs besides x, and the arithmetic of one tile [t, C]."""

    def __init__(self, layer: Block, tile_tokens: int, x: torch.Tensor, saved: Saved | None, again: Any) -> None:
        mlp = layer.mlp
        modules = {"norm": layer.post_norm, "gate": mlp.gate, "up": mlp.up, "down": mlp.down}
        self.weights = Weights(modules, x.device)
        self.norm = Norm(layer.post_norm, self.weights)
        self.activation, self.gated = mlp.activation, mlp.gate is not None
        self.tiles = slices(x.reshape(-1, x.shape[-1]), tile_tokens)
        self.dropout = layer.dropout if layer.training else 0.0
        self.random = RandomState(x.device) if self.dropout and torch.is_grad_enabled() else None
        self.saved, self.again = saved, again

    def input(self, tile: slice) -> torch.Tensor:
        """Rows of x, in backward."""
        if self.saved is None:
            return self.again(tile)
        (x,) = self.saved.load()
        return x.reshape(-1, x.shape[-1])[tile]

    def inner(self, normed: torch.Tensor) -> list[torch.Tensor]:
        """The activation's inputs: up [t, F], and gate where there is one."""
        return [self.weights.linear(normed, name) for name in ("up", *("gate",) * self.gated)]

    def activate(self, inner: list[torch.Tensor]) -> torch.Tensor:
        # The class's own arithmetic: a mode may have exchanged the instance's.
        return type(self.activation).forward(self.activation, *inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update = self.weights.linear(self.activate(self.inner(self.norm(x))), "down")  # (t, C)
        return x + (F.dropout(update, self.dropout) if self.dropout else update)

    def backward(self, x: torch.Tensor, grad: torch.Tensor, gradients: Gradients) -> torch.Tensor:
        weights = self.weights
        normed, norm_backward = self.norm.with_backward(x)
        inner = self.inner(normed)
        with torch.enable_grad():
            activated = self.activate([tensor.requires_grad_() for tensor in inner])
        edge, activated = torch.autograd.graph.get_gradient_edge(activated), activated.detach()
        update = grad.to(weights.dtype)
        if self.dropout:
            update = dropout_backward(update, self.dropout)
        gradients.linear("down", update, activated)
        del activated
        inner_grads = list(torch.autograd.grad(edge, inner, update @ weights["down.weight"]))  # (t, F) each
        del inner, edge, update
        dnormed = None
        for name in ("up", *("gate",) * self.gated):
            dinner = inner_grads.pop(0)
            gradients.linear(name, dinner, normed)
            weight = weights[f"{name}.weight"]
            dnormed = dinner @ weight if dnormed is None else dnormed.addmm_(dinner, weight)
        del normed, dinner
        dx, dnorm = norm_backward(dnormed)
        for name, gradient in dnorm.items():
            gradients.add(name, gradient)
        return dx.add_(grad)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: _MLP, *parameters: torch.Tensor) -> torch.Tensor:
        rows, out = x.reshape(-1, x.shape[-1]), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for tile in part.tiles:
            out.view_as(rows)[tile] = part.forward(rows[tile])
        ctx.part = part
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        part: _MLP = ctx.part
        part.input(slice(0))  # no row of x, but where a mode recomputes, it does so here: before memory is taken
        gradients = Gradients(part.weights, ctx.needs_input_grad[2:], one_tile=len(part.tiles) == 1)
        grads, dx = grad.reshape(-1, grad.shape[-1]), torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        with replayed(part.random):
            for tile in part.tiles:
                dx.view_as(grads)[tile] = part.backward(part.input(tile), grads[tile], gradients)
        if part.saved is not None:
            part.saved.release()
        return dx, None, *gradients.result()
