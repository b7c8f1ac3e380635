"""The attention half of a layer by groups of heads: x + dropout(attention(norm(x))), one group's q, k, v at a time.

Kept for backward: x, and per head the output [B, T, D] and logsumexp of the fused kernel, so that backward projects
q, k and v again but never runs the attention kernel again. From these the half layer's own output can be given again,
tile by tile, to a tiled MLP, which then keeps nothing.

Implementations that give no logsumexp (unfused, flash_attn, float32 on CUDA) keep x alone and run a group's attention
again in backward.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from model.attention import CoreAttention
from model.attention_kernels import Tensors, find_kernel
from model.gpt import Attention, Block
from model.replay import RandomState
from model.rowwise import rotate, turn
from model.tile_parts import Gradients, Norm, Saved, Weights, anchored, dropout_backward, replayed, slices

Rope = tuple[torch.Tensor, torch.Tensor] | None
ROWS = 4096  # tokens at a time where a tensor as long as the sequence is to be avoided


def attention_part(
    layer: Block, head_groups: int, x: torch.Tensor, rope: Rope
) -> tuple[torch.Tensor, Callable[[slice], torch.Tensor] | None]:
    """`layer`'s first half on x [B, T, C], in `head_groups` groups of heads.

    Also returns a function that gives rows of the result again in backward, where it need not be saved.
    """
    part = _Part(layer, head_groups, x, rope)
    with torch.autocast(x.device.type, enabled=False):
        with torch.no_grad():
            attended = part.attend(x)
        x, part.saved = anchored(x, *(rope or ()), *(attended if part.kernel else ()))
        part.rope = None  # saved, and so let go with everything else
        part.outs = [part.as_rows(out.transpose(1, 2)) for out in attended[:: part.each]]
        del attended
        result = _Tiled.apply(x, part, *part.weights.parameters.values())
    return result, part.again if part.kernel and part.saved and not part.dropout else None


def call(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`forward` of the core attention in a tiled layer; a mode that keeps attention outputs exchanges it again."""
    return function()


def valid_groups(heads: int, key_heads: int) -> list[int]:
    """Numbers of groups that cut `heads` evenly and leave query heads with the key/value head that they share."""
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    return [n for n in divisors if key_heads % n == 0 or n % key_heads == 0]


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
        self.head_dim, self.rope, self.rotated = attention.head_dim, rope, rope is not None
        self.core_dropout = core.dropout if core.training else 0.0
        self.kernel = find_kernel(core.implementation, x.device, self.weights.dtype, self.head_dim, self.core_dropout)
        self.each = 1 + (self.kernel.extras if self.kernel else 0)  # tensors that a group's attention gives
        self.dropout = layer.dropout if layer.training else 0.0
        self.remember = torch.is_grad_enabled()
        self.random: RandomState | None = None  # before the dropout of the whole
        self.core_random: list[RandomState] = []  # before each group's attention
        self.batch, self.rows = x.shape[:-1], x.numel() // x.shape[-1]
        self.groups = list(cut(attention, head_groups))
        self.key_heads = attention.key.out_features // attention.head_dim
        self.saved: Saved | None = None
        self.outs: list[torch.Tensor] = []

    # Forward

    def attend(self, x: torch.Tensor) -> list[torch.Tensor]:
        """For each group its output [B, H, T, D], and what else the kernel's backward needs."""
        rows, normed = x.reshape(self.rows, -1), []  # type: ignore[var-annotated]

        def run(group: Heads, extras: list[torch.Tensor]) -> torch.Tensor:
            if not normed:  # only here: not at all when a mode has kept what `run` gives
                normed.append(self.norm(rows))
            out, *rest = self._attend(self._project(slices(rows, ROWS), lambda tile: normed[0][tile], group))
            extras.extend(rest)
            return out

        attended = []
        for group in self.groups:
            extras: list[torch.Tensor] = []
            attended.append(self.core.forward(partial(run, group, extras)))
            attended += [self.core.forward(partial(extras.pop, 0)) for _ in range(self.each - 1)]
        return attended

    def _project(self, tiles: list[slice], normed: Callable[[slice], torch.Tensor], group: Heads) -> list[torch.Tensor]:
        """q, k, v [B, T, H, D] of a group. normed: gives a tile of the normalised rows."""
        weight, bias = self._weight(group), self._bias(group)
        qkv = torch.empty(self.rows, len(weight), dtype=weight.dtype, device=weight.device)
        for tile in tiles:
            qkv[tile] = F.linear(normed(tile), weight, bias)  # one GEMM: three narrow ones are slow
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The half layer's result [B, T, C], once `outs` is there."""
        if self.remember and self.dropout:
            self.random = RandomState(x.device)
        rows, outs, self.outs = x.reshape(self.rows, -1), self.outs, []
        result = torch.empty_like(rows)
        for tile in slices(rows, ROWS):
            result[tile] = self._residual(rows, outs, tile)
        return result.view(x.shape)

    def _residual(self, rows: torch.Tensor, outs: list[torch.Tensor], tile: slice) -> torch.Tensor:
        update = self.weights.linear(torch.cat([out[tile] for out in outs], dim=-1), "out")  # (t, C)
        return rows[tile] + (F.dropout(update, self.dropout) if self.dropout else update)

    def _load(self) -> tuple[torch.Tensor, Rope, list[torch.Tensor]]:
        """In backward: x, rotary phases, and what `attend` gave."""
        assert self.saved is not None
        x, *rest = self.saved.load()
        return (x, (rest[0], rest[1]), rest[2:]) if self.rotated else (x, None, rest)

    def again(self, tile: slice) -> torch.Tensor:
        """Rows of what `forward` gave, in backward."""
        x, _, attended = self._load()
        outs = [self.as_rows(out.transpose(1, 2)) for out in attended[:: self.each]]
        return self._residual(x.reshape(self.rows, -1), outs, tile)

    # Backward

    def backward(self, grad: torch.Tensor, gradients: Gradients) -> torch.Tensor:
        x, self.rope, attended = self._load()
        rows, grads = x.reshape(self.rows, -1), grad.reshape(self.rows, -1)
        tiles = slices(rows, ROWS)
        updates = self._dropped(grads) if self.dropout else grads.to(self.weights.dtype)
        dnormed = torch.empty(rows.shape, dtype=self.weights.dtype, device=x.device)
        for i, group in enumerate(self.groups):
            # The normalised rows are computed twice for each group: as a whole they would be one tensor more.
            qkv = self._project(tiles, lambda tile: self.norm(rows[tile]), group)
            mine = attended[i * self.each : (i + 1) * self.each]
            dqkv = self._attend_backward(i, qkv, mine, updates, gradients)
            weight = self._weight(group)
            for tile in tiles:
                dnormed[tile].addmm_(dqkv[tile], weight, beta=0 if i == 0 else 1)
                gradients.stacked(group.projections, dqkv[tile], self.norm(rows[tile]))
            del qkv, dqkv
        del updates, attended
        self.rope = None
        if self.saved is not None:
            self.saved.release()

        dx = dnormed if dnormed.dtype == x.dtype else torch.empty_like(rows)
        for tile in tiles:
            d, dnorm = self.norm.with_backward(rows[tile])[1](dnormed[tile])
            torch.add(d, grads[tile], out=dx[tile])
            for name, gradient in dnorm.items():
                gradients.add(name, gradient)
        return dx.view(x.shape)

    def _dropped(self, grads: torch.Tensor) -> torch.Tensor:
        result = torch.empty(grads.shape, dtype=self.weights.dtype, device=grads.device)
        with replayed(self.random):
            for tile in slices(grads, ROWS):
                result[tile] = dropout_backward(grads[tile].to(result.dtype), self.dropout)
        return result

    def _attend_backward(
        self, i: int, qkv: list[torch.Tensor], attended: list[torch.Tensor], updates: torch.Tensor, gradients: Gradients
    ) -> torch.Tensor:
        """Gradients of a group's q, k, v before rotation, side by side as rows; empties `qkv`, to make room."""
        part = self.groups[i].query
        dout = self._as_heads(updates @ self.weights["out.weight"][:, part])
        if self.kernel:
            out, *extras = attended
            heads_first = [t.transpose(1, 2) for t in qkv]
            qkv.clear()
            dqkv = self.kernel.backward(dout.transpose(1, 2), heads_first, out, extras, self.core_dropout)
            del heads_first
            dq, dk, dv = (t.transpose(1, 2) for t in dqkv)
            del dqkv
            out = out.transpose(1, 2)
        else:
            with replayed(self.core_random[i] if self.core_random else None), torch.enable_grad():
                out = CoreAttention.forward(self.core, *(t.requires_grad_() for t in qkv))
            dq, dk, dv = torch.autograd.grad(out, qkv, dout)
            qkv.clear()
            out = out.detach()
        del dout
        gradients.linear("out", updates, self.as_rows(out), into=part)
        if self.rope is not None:
            dq = turn(dq, *self.rope, -1)
            dk = turn(dk, *self.rope, -1)
        return torch.cat([self.as_rows(d) for d in (dq, dk, dv)], dim=-1)

    def _as_heads(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(*self.batch, -1, self.head_dim)  # (B * T, H * D) -> (B, T, H, D)

    def as_rows(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.reshape(self.rows, -1)  # (B, T, H, D) -> (B * T, H * D)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: _Part, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.part = part
        return part.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        part: _Part = ctx.part
        once = part.rows <= ROWS and len(part.groups) <= part.key_heads
        gradients = Gradients(part.weights, ctx.needs_input_grad[2:], one_tile=once)
        return part.backward(grad, gradients), None, *gradients.result()
