"""What `recompute.apply` puts in place: the loop over the layers, and the forwards of modules inside them.

Each of the forwards here stands in for `forward` of `module`, and is told both.
"""

import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from model import offload_deepspeed
from model.modes import Mode
from model.offload import HostPool, Transfers
from model.region import Function, OuterHooks, Region, StorageWeakRef, current_region, is_parameter, storage_key
from model.replay import Activity, second_run


@dataclass(frozen=True)
class Group:
    """Positions of consecutive layers under one mode; under `full` they are forgotten and recomputed together."""

    layers: tuple[int, ...]
    mode: Mode


class Keeper:
    """Decides, for every tensor that autograd saves in the layers, which of the three fates it has."""

    def __init__(self, transfers: Transfers | None) -> None:
        self.outer = OuterHooks()
        # Forgotten outputs of the layer being run, with their version: one that was changed since would come back
        # unchanged.
        self.outputs: dict[StorageWeakRef, tuple[Region, int]] = {}
        self.transfers = transfers

    def pack(self, tensor: torch.Tensor) -> Any:
        if is_parameter(tensor):
            return self.outer.pack(tensor)
        key = storage_key(tensor)
        region, version = self.outputs.get(key, (None, 0))
        if region is not None and version == tensor._version:
            return region.output_slot(tensor)
        if self.transfers and (moved := self.transfers.save(tensor, key)):
            return moved
        return self.outer.pack(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        return self.outer.unpack(packed)

    def run_forgetting(self, region: Region) -> torch.Tensor:
        """Runs a region whose output is forgotten, too, by whoever saves it in this layer."""
        output = region.run()
        self.outputs[storage_key(output)] = (region, output._version)
        return output

    @contextmanager
    def around_layers(self) -> Iterator[None]:
        previous, _thread.keeper = _thread.keeper, self
        moving = self.transfers.forward() if self.transfers else nullcontext()
        try:
            with saved_tensors_hooks(self.pack, self.unpack), moving:
                yield
        finally:
            _thread.keeper = previous
            self.outputs.clear()  # a region refers to its keeper: without this, both would live for ever


class _Thread(threading.local):
    keeper: Keeper | None = None


_thread = _Thread()


def _untraced(function: Function) -> Function:
    """Under torch.compile, runs `function` and all it calls eagerly: the compiler cannot trace saved-tensor hooks."""

    @torch._disable_dynamo
    def eagerly(*args: Any) -> Any:
        warnings.warn(
            "torch.compile cannot trace kept outputs, recomputed norms and activations, or offload: what they touch "
            "runs eagerly. Of the memory modes, none, selective, mlp and full compile as a whole",
            stacklevel=2,
        )
        return function(*args)

    @wraps(function)
    def run(*args: Any) -> Any:
        return eagerly(*args) if torch.compiler.is_compiling() else function(*args)

    return run


# The loop over the layers


def run_layers(
    layers: nn.ModuleList,
    groups: Sequence[Group],
    pool: HostPool | None,
    activity: Activity,
    stochastic: bool,
    x: torch.Tensor,
    rope: Any,
) -> torch.Tensor:
    """GPT.run_layers under a mode. x: [B, T, C]."""
    if not torch.is_grad_enabled():
        return _plain(layers, rope, x)
    if torch.compiler.is_compiling() and all(_is_traceable(group.mode) for group in groups):
        for group in groups:
            x = _run_group(layers, group, activity, stochastic, x, rope)
        return x
    return _run_hooked(layers, groups, pool, activity, stochastic, x, rope)


def _is_traceable(mode: Mode) -> bool:
    return not mode.offload and not mode.keep and not {"norm", "activation"}.intersection(mode.modules)


@_untraced
def _run_hooked(
    layers: nn.ModuleList,
    groups: Sequence[Group],
    pool: HostPool | None,
    activity: Activity,
    stochastic: bool,
    x: torch.Tensor,
    rope: Any,
) -> torch.Tensor:
    transfers = None
    if pool:
        pool.begin(x.shape, reserved_bytes=x.nbytes * sum(group.mode.offload == "deepspeed" for group in groups))
        transfers = Transfers(pool, x, rope or (), len(groups), activity)
    keeper = Keeper(transfers)
    with keeper.around_layers():
        for index, group in enumerate(groups):
            keeper.outputs.clear()
            if transfers:
                transfers.begin(index, group.mode.offload == "async")
            x = _run_group(layers, group, activity, stochastic, x, rope)
    return x


def _run_group(
    layers: nn.ModuleList, group: Group, activity: Activity, stochastic: bool, x: torch.Tensor, rope: Any
) -> torch.Tensor:
    # rope in a closure: as an argument, DeepSpeed would take it for an activation
    run = partial(_plain, [layers[i] for i in group.layers], rope)
    if group.mode.recompute != "full":
        return run(x)
    if group.mode.offload == "deepspeed":
        return offload_deepspeed.checkpoint(run, x, activity)
    if group.mode.keep:
        return Region(run, (x,), {}, stochastic, counted=activity).run()
    return _torch_checkpoint(run, activity, stochastic, x)


def _plain(layers: Iterable[nn.Module], rope: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x, rope)
    return x


def _torch_checkpoint(function: Function, activity: Activity, stochastic: bool, *args: Any) -> Any:
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": stochastic}
    if torch.compiler.is_compiling():
        activity.compiled = True  # the compiler takes no context that counts
    else:
        settings["context_fn"] = lambda: (nullcontext(), second_run(activity))
    return checkpoint(function, *args, **settings)


# Forwards of modules


def recomputed(module: nn.Module, forward: Function, stochastic: bool, activity: Activity, *args: Any) -> Any:
    """Keeps the arguments and the output of a module, and nothing of its inside."""
    if not torch.is_grad_enabled():
        return forward(*args)
    if torch.compiler.is_compiling():
        return _torch_checkpoint(forward, activity, stochastic, *args)
    return Region(forward, args, {}, stochastic, counted=activity).run()


@_untraced
def output_recomputed(module: nn.Module, forward: Function, activity: Activity, *args: Any) -> Any:
    """Keeps the arguments of a module; its output is forgotten by all who save it for backward."""
    keeper = _keeper_here()
    if keeper is None:
        return forward(*args)
    # Called again as a module, so that hooks that gather its sharded parameters run.
    return keeper.run_forgetting(Region(forward, args, {}, False, again=module, counted=activity))


@_untraced
def cast_recomputed(module: nn.Module, forward: Function, x: torch.Tensor) -> torch.Tensor:
    """Under autocast, casts the input of a GEMM before the GEMM would, so that the copy can be forgotten."""
    keeper, device = _keeper_here(), x.device.type
    if keeper is None or not torch.is_autocast_enabled(device):
        return forward(x)
    dtype = torch.get_autocast_dtype(device)
    if x.dtype == dtype:
        return forward(x)
    return forward(keeper.run_forgetting(Region(_cast, (x, dtype), {}, False)))


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


@_untraced
def kept(module: nn.Module, forward: Function, *args: Any) -> Any:
    """Keeps the output of a module, and what its own backward needs, in a region that forgets everything else."""
    region = current_region()
    return forward(*args) if region is None else region.keep(forward, args, {})


def _keeper_here() -> Keeper | None:
    """Who can forget an output here; inside a region nobody needs to: it forgets everything."""
    return _thread.keeper if torch.is_grad_enabled() and current_region() is None else None
