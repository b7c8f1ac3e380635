"""The memory modes: which activations of a layer are kept, recomputed or moved to host memory.

`apply(model, mode)` switches a plain GPT from outside, by exchanging the `forward` of the modules named in the
tables below and the loop over the layers. Parameters, their names and `state_dict()` do not notice.

    mode                       kept for backward                        computed again
    none                       everything autograd saves                nothing
    selective                  all but the core attention's inside      scores, softmax, dropout, context
    selective+norm+activation  GEMM inputs and outputs, residuals       also norms and GELU / SwiGLU; no GEMM
    full                       the input of a layer, or of a group      everything but the last GEMM
    full+attention             layer input, attention output            everything but attention and the last GEMM
    ...+offload                the same, in host memory                 the same
    budget0.5                  torch.compile's choice, for half of it   what it takes           (model/budget.py)

The forwards that are put in place: model/layer_loop.py. How a thing is forgotten and brought back: model/region.py.
How it is moved: model/offload.py.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from torch import nn

from model import budget, layer_loop, tiling
from model.gpt import GPT, Block, GPTConfig
from model.layer_loop import Group
from model.modes import NAMED, Mode, parse, parse_layers
from model.offload import MIN_BYTES, HostPool
from model.replay import Activity, is_recomputing

__all__ = ["MODES", "Activity", "Mode", "activity", "apply", "effective", "is_recomputing", "require_active"]

MODES: dict[str, Mode] = {name: parse(name) for name in NAMED}

# selective: modules that are recomputed for their own backward; their output is kept
INSIDE = {"core_attn": ("attention.core_attention",), "mlp": ("mlp",)}
# selective: modules whose output is recomputed, too, for the GEMMs that consume it
OUTPUT = {"norm": ("input_norm", "post_norm"), "activation": ("mlp.activation",)}
# the GEMMs that consume a norm, which is float32 under autocast: each saves a cast copy of its own
CASTS = {"norm": ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")}
# full: modules whose output is kept, so that they do not run again
KEPT = {
    "attention": ("attention.core_attention",),
    "qkv": ("attention.query", "attention.key", "attention.value"),
    "projection": ("attention.out",),
    "mlp_up": ("mlp.gate", "mlp.up"),
}


def apply(model: GPT, mode: str | Mode | Sequence[str | Mode], host_budget_bytes: int | None = None) -> Activity:
    """Switches `model`, in place, to one mode for all layers or to a list with one for each.

    What was applied before is undone first: `apply(model, "none")` gives the plain model back. Offload may use
    `host_budget_bytes` of host memory (None: what there is). Raises ValueError for an unknown mode or a list of the
    wrong length; warns where a mode cannot save what its name says.
    """
    modes = parse_layers(mode, len(model.layers))
    undo = model.__dict__.pop("_recompute", None)
    if undo is not None:
        undo.undo()
    applied = _Applied()
    if all(one == Mode() for one in modes):
        return applied.activity

    model.__dict__["_recompute"] = applied
    layers: list[Block] = list(model.layers)  # type: ignore[arg-type]
    if any(one.recompute == "budget" for one in modes):
        _compile(model, modes, applied)
        return applied.activity
    for layer, one in zip(layers, modes):
        _switch(layer, one, applied, _is_stochastic(model))
    groups = make_groups(range(len(layers)), modes)
    for reason in sorted(set(_reasons_to_warn(model, groups))):
        warnings.warn(reason, stacklevel=2)
    pool = HostPool(host_budget_bytes) if any(one.offload for one in modes) else None
    arguments = (model.layers, groups, pool, applied.activity, _is_stochastic(model))
    applied.exchange(model, "run_layers", partial(layer_loop.run_layers, *arguments))
    return applied.activity


def activity(model: GPT) -> Activity:
    """What the mode applied to `model` has done so far."""
    return model.__dict__["_recompute"].activity if "_recompute" in model.__dict__ else Activity()


def require_active(model: GPT, mode: str | Mode | Sequence[str | Mode]) -> None:
    """Raises RuntimeError when a training step was made and the mode did nothing of what it promises."""
    modes, done = parse_layers(mode, len(model.layers)), activity(model)
    told = [effective(one, model.config, tiling.applied(model)) for one in modes]
    recomputing = [one for one, real in zip(modes, told) if real.recompute in ("selective", "full")]
    moving = [one for one in modes if one.offload]
    if recomputing and not done.recomputed and not done.compiled:
        raise RuntimeError(f"mode {recomputing[0]} recomputed nothing: its forward was replaced or not trained")
    if modes[0].recompute == "budget" and not done.compiled:
        raise RuntimeError(f"mode {modes[0]} compiled nothing: its forward was replaced or not trained")
    if moving and not done.offloaded_bytes:
        raise RuntimeError(
            f"mode {moving[0]} moved 0 bytes to host memory: every tensor is smaller than "
            f"{MIN_BYTES} bytes, or there is one layer only (the last one is never moved); use a mode without offload"
        )


def effective(mode: Mode, config: GPTConfig, tiles: tiling.Tiles) -> Mode:
    """The mode without the words that change nothing for a model of this shape with these tiles."""
    idle = tiling.covered(tiles) | (set() if config.attention == "unfused" else {"core_attn"})
    modules, keep = (tuple(word for word in words if word not in idle) for words in (mode.modules, mode.keep))
    if mode.recompute == "selective" and not modules:
        return Mode(offload=mode.offload)
    return replace(mode, modules=modules, keep=keep)


def make_groups(layers: Sequence[int], modes: Sequence[Mode]) -> list[Group]:
    """Cuts the layers where the mode changes, and `full` into its groups (the last one may be ragged)."""
    groups = []
    position = 0
    for mode, run in groupby(modes):
        length = len(list(run))
        for size, one in _group_sizes(mode, length):
            groups.append(Group(tuple(layers[position : position + size]), one))
            position += size
    return groups


def _group_sizes(mode: Mode, length: int) -> Iterator[tuple[int, Mode]]:
    if mode.grouping == "block":  # the first k layers, one by one; the others keep everything
        for i in range(length):
            yield 1, mode if i < mode.group else Mode(offload="async" if mode.offload == "async" else None)
        return
    size = math.ceil(math.sqrt(length)) if mode.grouping == "sqrt" else mode.group
    for start in range(0, length, size):
        yield min(size, length - start), mode


# What is exchanged


class _Applied:
    """What `apply` exchanged, so that it can be undone, and what the exchanged code counts."""

    def __init__(self) -> None:
        self.activity = Activity()
        self.previous: list[tuple[nn.Module, str, Any]] = []

    def exchange(self, module: nn.Module, name: str, function: partial) -> None:
        # Partial objects, not closures: copy.deepcopy binds them to the copy.
        self.previous.append((module, name, module.__dict__.get(name)))
        module.__dict__[name] = function

    def undo(self) -> None:
        for module, name, previous in reversed(self.previous):
            if previous is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = previous


def _switch(layer: Block, mode: Mode, applied: _Applied, stochastic: bool) -> None:
    def exchange(paths: Sequence[str], function: Any, *arguments: Any) -> None:
        for module in _modules(layer, paths):
            applied.exchange(module, "forward", partial(function, module, module.forward, *arguments))

    activity = applied.activity
    for name in mode.modules:
        if name == "core_attn" and layer.attention.core_attention.fused:
            continue  # a fused kernel keeps its inputs and its output; running it twice would buy nothing
        exchange(INSIDE.get(name, ()), layer_loop.recomputed, stochastic, activity)
        exchange(OUTPUT.get(name, ()), layer_loop.output_recomputed, activity)
        exchange(CASTS.get(name, ()), layer_loop.cast_recomputed)
    for name in mode.keep:
        exchange(KEPT[name], layer_loop.kept)


def _compile(model: GPT, modes: Sequence[Mode], applied: _Applied) -> None:
    mode = modes[0]
    if any(one != mode for one in modes):
        raise ValueError(f"mode {mode} is for all layers: they share what is compiled; name it for every layer")
    tiles = tiling.applied(model)
    if tiles.mlp_tile_tokens or tiles.attention_head_groups:
        raise ValueError(
            f"mode {mode}: the compiler cannot see into tiles of layers; leave them out, or take another mode"
        )
    if mode.fraction < 1 and _is_stochastic(model):
        raise ValueError(
            f"mode {mode}: torch's partitioner draws dropout anew when it recomputes, and gradients would be wrong; "
            "write budget1, another mode, or dropout 0"
        )
    compiled = budget.compiler(mode.fraction, next(model.parameters()).device.type, applied.activity)
    for layer in model.layers:
        applied.exchange(layer, "forward", partial(budget.run, layer, type(layer).forward, compiled))


def _modules(layer: Block, paths: Sequence[str]) -> Iterator[nn.Module]:
    for path in paths:
        parent, _, name = path.rpartition(".")
        module = getattr(layer.get_submodule(parent), name)
        if module is not None:  # an ungated MLP has no gate
            yield module


def _is_stochastic(model: GPT) -> bool:
    return model.config.hidden_dropout > 0 or model.config.attention_dropout > 0


def _reasons_to_warn(model: GPT, groups: Sequence[Group]) -> Iterator[str]:
    implementation = model.config.attention
    fused = implementation != "unfused"
    for group in groups:
        name = str(group.mode)
        if idle := tiling.covered(tiling.applied(model)) & {*group.mode.modules, *group.mode.keep}:
            meant = "; core_attn is what the word selective stands for" if "core_attn" in idle else ""
            yield (
                f"mode {name}: {', '.join(sorted(idle))} changes nothing here: tiles keep less than that, and compute "
                f"the rest again, in every mode{meant}"
            )
        if fused and "core_attn" in group.mode.modules:
            others = [] if {"norm", "activation"} <= {*group.mode.modules} else ["norm+activation"]
            yield (
                f"mode {name}: `selective` by recomputing core_attn saves nothing under attention={implementation}, "
                "whose kernel keeps q, k, v and its output only, and no scores; attention is not recomputed. For fewer "
                f"bytes use {' or '.join([*others, 'full+attention'])}"
            )
        if not fused and "attention" in group.mode.keep:
            yield (
                f"mode {name}: unfused attention needs its [T, T] probabilities to skip its second run, and they are "
                "kept; use attention=sdpa, or full"
            )
        if group.mode.recompute == "full" and 1 < len(group.layers) == len(model.layers):
            yield (
                f"mode {name}: one group holds all {len(group.layers)} layers, so backward recomputes the whole model "
                "at once and its peak is that of mode none; use smaller groups"
            )
