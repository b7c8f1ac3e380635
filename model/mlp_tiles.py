"""The MLP half of a layer, a tile of tokens at a time: x + dropout(mlp(norm(x))), no [T, F] tensor at any moment.

Kept for backward: x. Backward computes a tile's norm, up (and gate) projection and activation again, but not the
down projection, whose output no gradient needs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from model.gpt import Block
from model.tile_parts import (
    Gradients,
    Norm,
    RandomState,
    Weights,
    anchored,
    dropout_backward,
    saved_input,
    slices,
)


def mlp_part(layer: Block, tile_tokens: int, x: torch.Tensor) -> torch.Tensor:
    """`layer`'s second half on x [B, T, C], `tile_tokens` rows of B * T at a time."""
    x, node = anchored(x)
    part = _MLP(layer, tile_tokens, x)
    with torch.autocast(x.device.type, enabled=False):
        return _Tiled.apply(x, part, node, *part.weights.parameters.values())


class _MLP:
    """One call: what it needs besides x, and the arithmetic of one tile [t, C]."""

    def __init__(self, layer: Block, tile_tokens: int, x: torch.Tensor) -> None:
        mlp = layer.mlp
        modules = {"norm": layer.post_norm, "gate": mlp.gate, "up": mlp.up, "down": mlp.down}
        self.weights = Weights(modules, x.device)
        self.norm = Norm(layer.post_norm, self.weights)
        self.activation, self.gated = mlp.activation, mlp.gate is not None
        self.tiles = slices(x.reshape(-1, x.shape[-1]), tile_tokens)
        self.dropout = layer.dropout if layer.training else 0.0
        self.random = RandomState(x.device) if self.dropout and torch.is_grad_enabled() else None

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
    def forward(ctx: Any, x: torch.Tensor, part: _MLP, node: Any, *parameters: torch.Tensor) -> torch.Tensor:
        rows, out = x.reshape(-1, x.shape[-1]), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out_rows = out.view_as(rows)
        for tile in part.tiles:
            out_rows[tile] = part.forward(rows[tile])
        ctx.part, ctx.node = part, node
        if node is None:
            ctx.save_for_backward(x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        part: _MLP = ctx.part
        x = saved_input(ctx, ctx.node)
        with torch.random.fork_rng(enabled=False) if part.random is None else part.random.replayed():
            gradients = Gradients(part.weights, ctx.needs_input_grad[3:], one_tile=len(part.tiles) == 1)
            rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
            dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            dx_rows = dx.view_as(rows)
            for tile in part.tiles:
                dx_rows[tile] = part.backward(rows[tile], grads[tile], gradients)
        return dx, None, None, *gradients.result()
