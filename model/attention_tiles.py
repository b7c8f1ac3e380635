"""The attention half of a layer by groups of heads: x + dropout(attention(norm(x))), one group's q, k, v at a time.

Kept for backward: x, and per head the output [B, T, D] and logsumexp of the fused kernel, so that backward projects
q, k and v again but never runs the attention kernel again. Implementations that give no logsumexp (unfused,
flash_attn, float32 on CUDA) keep x alone and run a group's attention again in backward.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from model.attention import CoreAttention
from model.gpt import Attention, Block
from model.rowwise import rotate, turn
from model.tile_parts import Gradients, Norm, RandomState, Weights, dropout_backward, slices

Rope = tuple[torch.Tensor, torch.Tensor] | None
Tensors = Iterable[torch.Tensor]
ROWS = 4096  # tokens at a time where a tensor as long as the sequence is to be avoided


def attention_part(layer: Block, head_groups: int, x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """`layer`'s first half on x [B, T, C], in `head_groups` groups of heads."""
    part = _Part(layer, head_groups, x, rope)
    with torch.autocast(x.device.type, enabled=False):
        return _Tiled.apply(x, part, *part.weights.parameters.values())


def call(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`forward` of the core attention in a tiled layer; a mode that keeps attention outputs exchanges it again."""
    return function()


def valid_groups(heads: int, key_heads: int) -> list[int]:
    """Numbers of groups that cut `heads` evenly and leave query heads with the key/value head that they share."""
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    return [n for n in divisors if key_heads % n == 0 or n % key_heads == 0]


# Kernels whose backward can be called by itself


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


class Heads(NamedTuple):
    """A group of heads: the features of the query projection, and of key and value, that belong to it."""

    query: slice
    key: slice

    @property
    def projections(self) -> tuple[tuple[str, slice], ...]:
        return ("query", self.query), ("key", self.key), ("value", self.key)

    @property
    def widths(self) -> list[int]:
        return [part.stop - part.start for _, part in self.projections]


def cut(attention: Attention, groups: int) -> Iterator[Heads]:
    heads = attention.query.out_features // attention.head_dim
    key_heads = attention.key.out_features // attention.head_dim
    size, key_size = heads // groups, max(1, key_heads // groups)
    for start in range(0, heads, size):
        key_start = start * key_heads // heads
        first, last = (start, key_start), (start + size, key_start + key_size)
        yield Heads(*(slice(a * attention.head_dim, b * attention.head_dim) for a, b in zip(first, last, strict=True)))


class _Part:
    """One call: what it needs besides x, and its arithmetic. Rows are those of x as [B * T, C]."""

    def __init__(self, layer: Block, head_groups: int, x: torch.Tensor, rope: Rope) -> None:
        attention, core = layer.attention, layer.attention.core_attention
        projections = {name: getattr(attention, name) for name in ("query", "key", "value", "out")}
        self.weights = Weights({"norm": layer.input_norm, **projections}, x.device)
        self.norm = Norm(layer.input_norm, self.weights)
        self.core: Any = core
        self.head_dim, self.rope = attention.head_dim, rope
        self.core_dropout = core.dropout if core.training else 0.0
        self.kernel = find_kernel(core.implementation, x.device, self.weights.dtype, self.head_dim, self.core_dropout)
        self.dropout = layer.dropout if layer.training else 0.0
        self.remember = torch.is_grad_enabled()
        self.random: RandomState | None = None  # before the dropout of the whole
        self.core_random: list[RandomState] = []  # before each group's attention
        self.batch, self.rows = x.shape[:-1], x.numel() // x.shape[-1]
        self.groups = list(cut(attention, head_groups))
        self.key_heads = attention.key.out_features // attention.head_dim

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The half layer's output [B, T, C], and what backward needs besides x."""
        rows, normed = x.reshape(self.rows, -1), []  # type: ignore[var-annotated]

        def run(group: Heads, extras: list[torch.Tensor]) -> torch.Tensor:
            if not normed:  # only here: not at all when a mode has kept what `run` gives
                normed.append(self.norm(rows))
            out, *rest = self._attend(self._project(normed, group))
            extras.extend(rest)
            return out

        outs, kept = [], []
        for group in self.groups:
            extras: list[torch.Tensor] = []
            out = self.core.forward(partial(run, group, extras))  # (B, H, T, D)
            outs.append(self._as_rows(out.transpose(1, 2)))
            if self.kernel:
                kept += [out, *(self.core.forward(partial(extras.pop, 0)) for _ in range(self.kernel.extras))]
        normed.clear()
        return self._project_out(rows, outs).view(x.shape), kept

    def _project(self, normed: Iterable[torch.Tensor], group: Heads) -> list[torch.Tensor]:
        """q, k, v [B, T, H, D] of a group, from the normalised rows in tiles."""
        weight, bias = self._weight(group), self._bias(group)
        tiles = [F.linear(tile, weight, bias) for tile in normed]  # one GEMM: three narrow ones are slow
        qkv = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        del tiles
        q, k, v = (self._as_heads(part) for part in qkv.split(group.widths, dim=-1))
        return [q, k, v] if self.rope is None else [rotate(q, *self.rope), rotate(k, *self.rope), v.contiguous()]

    def _weight(self, group: Heads) -> torch.Tensor:
        return torch.cat([self.weights[f"{name}.weight"][part] for name, part in group.projections])

    def _bias(self, group: Heads) -> torch.Tensor | None:
        if "query.bias" not in self.weights:
            return None
        return torch.cat([self.weights[f"{name}.bias"][part] for name, part in group.projections])

    def _attend(self, qkv: list[torch.Tensor]) -> Tensors:
        if self.kernel:
            return self.kernel.forward(*(t.transpose(1, 2) for t in qkv), self.core_dropout)
        if self.remember and self.core_dropout:
            self.core_random.append(RandomState(qkv[0].device))
        return (CoreAttention.forward(self.core, *qkv).transpose(1, 2),)

    def _project_out(self, rows: torch.Tensor, outs: list[torch.Tensor]) -> torch.Tensor:
        if self.remember and self.dropout:
            self.random = RandomState(rows.device)
        result = torch.empty_like(rows)
        for tile in slices(rows, ROWS):
            update = self.weights.linear(torch.cat([out[tile] for out in outs], dim=-1), "out")  # (t, C)
            result[tile] = rows[tile] + (F.dropout(update, self.dropout) if self.dropout else update)
        return result

    def backward(
        self, x: torch.Tensor, kept: list[torch.Tensor], grad: torch.Tensor, gradients: Gradients
    ) -> torch.Tensor:
        rows, grads = x.reshape(self.rows, -1), grad.reshape(self.rows, -1)
        whole: torch.Tensor | None = None
        if self.random is None:
            tiles, updates = [slice(0, self.rows)], grads.to(self.weights.dtype)
            whole, norm_backward = self.norm.with_backward(rows)
        else:  # the dropped gradients are a tensor more: the normalised rows make room, and are made anew
            tiles, updates = slices(rows, ROWS), self._dropped(grads)

        dnormed = torch.empty(rows.shape, dtype=self.weights.dtype, device=x.device)
        each = len(kept) // len(self.groups)
        for i, group in enumerate(self.groups):
            normed = (self.norm(rows[tile]) if whole is None else whole for tile in tiles)
            qkv = self._project(normed, group)
            dqkv = self._attend_backward(i, qkv, kept[i * each : (i + 1) * each], updates, gradients)
            del qkv
            weight = self._weight(group)
            for tile in tiles:
                n = self.norm(rows[tile]) if whole is None else whole
                dnormed[tile].addmm_(dqkv[tile], weight, beta=0 if i == 0 else 1)
                gradients.stacked(group.projections, dqkv[tile], n)
            del dqkv, n
        del updates, whole

        dx = dnormed if dnormed.dtype == x.dtype else torch.empty_like(rows)
        for tile in tiles:
            if self.random is not None:
                norm_backward = self.norm.with_backward(rows[tile])[1]
            d, dnorm = norm_backward(dnormed[tile])
            torch.add(d, grads[tile], out=dx[tile])
            for name, gradient in dnorm.items():
                gradients.add(name, gradient)
        return dx.view(x.shape)

    def _dropped(self, grads: torch.Tensor) -> torch.Tensor:
        assert self.random is not None
        result = torch.empty(grads.shape, dtype=self.weights.dtype, device=grads.device)
        with self.random.replayed():
            for tile in slices(grads, ROWS):
                result[tile] = dropout_backward(grads[tile].to(result.dtype), self.dropout)
        return result

    def _attend_backward(
        self, i: int, qkv: list[torch.Tensor], kept: list[torch.Tensor], updates: torch.Tensor, gradients: Gradients
    ) -> torch.Tensor:
        """Gradients of a group's q, k, v before rotation, side by side as rows [B * T, (H + 2 G) * D]."""
        part = self.groups[i].query
        dout = self._as_heads(updates @ self.weights["out.weight"][:, part])
        if self.kernel:
            out, *extras = kept
            transposed = [t.transpose(1, 2) for t in qkv]
            dqkv = self.kernel.backward(dout.transpose(1, 2), transposed, out, extras, self.core_dropout)
            dq, dk, dv = (t.transpose(1, 2) for t in dqkv)
            del dqkv
            out = out.transpose(1, 2)
        else:
            with self.core_random[i].replayed() if self.core_random else nullcontext(), torch.enable_grad():
                out = CoreAttention.forward(self.core, *(t.requires_grad_() for t in qkv))
            dq, dk, dv = torch.autograd.grad(out, qkv, dout)
            out = out.detach()
        del dout
        gradients.linear("out", updates, self._as_rows(out), into=part)
        if self.rope is not None:
            dq = turn(dq, *self.rope, -1)
            dk = turn(dk, *self.rope, -1)
        return torch.cat([self._as_rows(d) for d in (dq, dk, dv)], dim=-1)

    def _as_heads(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(*self.batch, -1, self.head_dim)  # (B * T, H * D) -> (B, T, H, D)

    def _as_rows(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.reshape(self.rows, -1)  # (B, T, H, D) -> (B * T, H * D)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: _Part, *parameters: torch.Tensor) -> torch.Tensor:
        result, kept = part.forward(x)
        ctx.part = part
        ctx.save_for_backward(x, *kept)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        part: _Part = ctx.part
        x, *kept = ctx.saved_tensors
        once = part.random is None and len(part.groups) <= part.key_heads
        gradients = Gradients(part.weights, ctx.needs_input_grad[2:], one_tile=once)
        return part.backward(x, kept, grad, gradients), None, *gradients.result()
