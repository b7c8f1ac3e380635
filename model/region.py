"""A region: a function that is run now, forgotten, and run again when backward asks for what autograd saved in it.

torch.utils.checkpoint does this for the inside of a function, and is used where that is enough. A region adds what
memory modes need on top:

- its *output* may be forgotten too, for whoever saves it (a norm's output is saved by the GEMM behind it, and costs
  more than computing it again);
- the output of a module inside may be *kept*, so that the module does not run again (attention, whose cost grows
  with the square of the context);
- what a region needs itself, its arguments and kept outputs, is saved through the saved-tensor hooks around it, so
  that regions nest in each other, in torch.utils.checkpoint and in any offload;
- only what is still wanted is computed again: the second run ends at the last tensor somebody waits for.

A tensor that autograd saves becomes a `Slot`. Slots hold their region, the region knows its slots weakly: what is
recomputed for a slot lives exactly as long as the autograd node that saved it.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_unflatten

from model.replay import Activity, RandomState, autocast_state, second_run

Function = Callable[..., Any]


class Handle:
    """What stands in for a tensor that autograd saved; `get()` gives the tensor."""

    __slots__ = ()

    def get(self) -> torch.Tensor:
        raise NotImplementedError


class Kept(Handle):
    """A saved tensor that simply stays where it is; like autograd's own, it notices in-place changes."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: a node that holds its own output would otherwise hold itself, and never be freed.
        self.tensor, self.version = tensor.detach(), tensor._version

    def get(self) -> torch.Tensor:
        check_unchanged(self.tensor, self.version)
        return self.tensor


def check_unchanged(tensor: torch.Tensor, version: int) -> None:
    """Raises RuntimeError when `tensor` is no longer what it was when autograd saved it."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified in place after it was saved "
            f"(version {tensor._version}, saved at {version}); change a clone instead"
        )


class Slot(Handle):
    """A saved tensor that is not kept; asking for it makes its region run again.

    view: `tensor` is a view of what the region will deliver (its output, the argument of a kept module).
    """

    __slots__ = ("__weakref__", "dtype", "region", "size", "value", "view")

    def __init__(self, region: "Region", tensor: torch.Tensor, view: bool) -> None:
        self.region, self.size, self.dtype = region, tensor.size(), tensor.dtype
        self.view = (tensor.size(), tensor.stride(), tensor.storage_offset()) if view else None
        self.value: Kept | None = None

    def fill(self, tensor: torch.Tensor) -> None:
        value = tensor.detach()
        if self.view is not None:
            value = value.as_strided(*self.view)
        if value.size() != self.size or value.dtype != self.dtype:
            raise RuntimeError(
                f"recompute gave {value.dtype} {tuple(value.size())} where forward saved {self.dtype} "
                f"{tuple(self.size)}: {DIFFERENT}"
            )
        self.value = Kept(value)

    def get(self) -> torch.Tensor:
        if self.value is None:
            self.region.recompute()
        assert self.value is not None
        return self.value.get()


DIFFERENT = "the recomputed code must do the same operations every time (no state, no side effects)"


class OuterHooks:
    """The saved-tensor hooks that are active where this is made; without any, tensors are kept."""

    __slots__ = ("_unpack", "pack")

    def __init__(self) -> None:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.pack, self._unpack = hooks or (_keep, lambda tensor: tensor)

    def save(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Saves as an autograd node here would; the result returns the tensor."""
        packed = self.pack(tensor if is_parameter(tensor) else tensor.detach())
        return lambda: self.unpack(packed)

    def unpack(self, packed: Any) -> torch.Tensor:
        return packed.get() if isinstance(packed, Handle) else self._unpack(packed)


def _keep(tensor: torch.Tensor) -> Any:
    # A parameter is saved as the object it is: ZeRO-3 and FSDP exchange its data between forward and backward.
    return tensor if isinstance(tensor, torch.nn.Parameter) else Kept(tensor)


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether this is a parameter or a view of one: never an activation."""
    return isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter)


def storage_key(tensor: torch.Tensor) -> StorageWeakRef:
    """Identity of a storage; the weak reference keeps the address from being used again while the key lives."""
    return StorageWeakRef(tensor.untyped_storage())


class _Enough(Exception):  # noqa: N818 - nothing is wrong
    """Everything that is wanted has been recomputed."""


class Region:
    """One call of `function`, whose inside is recomputed in backward.

    stochastic: it draws random numbers, whose generator must be set back. again: what to call the second time, when
    it isn't `function` itself (a module, so that hooks that gather its sharded parameters run). counted: where second
    runs are counted.
    """

    def __init__(
        self,
        function: Function,
        args: tuple,
        kwargs: dict,
        stochastic: bool,
        again: Function | None = None,
        counted: Activity | None = None,
    ) -> None:
        self.function, self.again, self.args_now = function, again or function, (args, kwargs)
        self.outer = OuterHooks()
        leaves, self.structure = tree_flatten((args, kwargs))
        self.leaves = [self._save_leaf(leaf) for leaf in leaves]
        self.arguments = {storage_key(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
        self.random = RandomState(device) if stochastic else None
        self.autocast = autocast_state(device.type)
        self.counted = counted
        self.slots: dict[Any, list[weakref.ref[Slot]]] = {}  # what of the function's run each slot waits for
        self.kept: list[tuple[Callable[[], torch.Tensor], RandomState | None]] = []  # output, generators after it
        self.saves = self.calls = 0  # tensors saved and kept modules called so far, in this run
        self.missing: set[Any] | None = None  # in a second run: what is still wanted

    def _save_leaf(self, leaf: Any) -> Callable[[], Any]:
        return self._save(leaf) if isinstance(leaf, torch.Tensor) else lambda: leaf

    def _save(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        load, requires_grad = self.outer.save(tensor), tensor.requires_grad
        return lambda: load().detach().requires_grad_(requires_grad)

    # First run

    def run(self) -> Any:
        args, kwargs = self.args_now
        del self.args_now  # from here on they are in the care of the outer hooks
        with _running(self), saved_tensors_hooks(self._pack, self.outer.unpack):
            return self.function(*args, **kwargs)

    def _slot(self, key: Any, tensor: torch.Tensor, view: bool) -> Slot:
        slot = Slot(self, tensor, view)
        self.slots.setdefault(key, []).append(weakref.ref(slot))
        return slot

    def output_slot(self, tensor: torch.Tensor) -> Slot:
        """A slot for the region's output, or a view of it, saved by whoever consumes it."""
        return self._slot("output", tensor, view=True)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self._is_given(tensor):
            return self.outer.pack(tensor)
        self.saves += 1
        return self._slot(self.saves, tensor, view=False)

    def _is_given(self, tensor: torch.Tensor) -> bool:
        return is_parameter(tensor) or storage_key(tensor) in self.arguments

    def keep(self, function: Function, args: tuple, kwargs: dict) -> torch.Tensor:
        """Calls a function whose output, and whatever else of its inside backward needs, is kept.

        Its own arguments are not: they are computed again with the rest of the region.
        """
        self.calls += 1
        call = self.calls
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        if self.missing is not None:
            for i, leaf in enumerate(inputs):
                self._deliver((call, i), leaf)
            output, random = self.kept[call - 1]
            if random is not None:
                random.restore()
            return output()
        sources = {storage_key(leaf): (call, i) for i, leaf in enumerate(inputs)}

        def pack(tensor: torch.Tensor) -> Any:
            source = None if is_parameter(tensor) else sources.get(storage_key(tensor))
            return self._slot(source, tensor, view=True) if source else self.outer.pack(tensor)

        with saved_tensors_hooks(pack, self.outer.unpack):
            output = function(*args, **kwargs)
        self.kept.append((self._save(output), RandomState(output.device) if self.random else None))
        return output

    # Second run

    def recompute(self) -> None:
        """Runs the function again and fills every slot that is still alive."""
        leaves = [load() for load in self.leaves]
        self.arguments = {storage_key(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        args, kwargs = tree_unflatten(leaves, self.structure)
        del leaves
        self.saves = self.calls = 0
        self.missing = {key for key, slots in self.slots.items() if any(slot() is not None for slot in slots)}
        try:
            with self._replay(), _running(self), saved_tensors_hooks(self._record, _never):
                self._deliver("output", self.again(*args, **kwargs))
            if self.missing:
                raise RuntimeError(f"recompute did not save the tensors that forward saved: {DIFFERENT}")
        except _Enough:
            pass
        finally:
            self.missing = None

    @contextmanager
    def _replay(self) -> Iterator[None]:
        """Everything that operations depend on besides their arguments, as it was in the first run."""
        with ExitStack() as stack:
            stack.enter_context(second_run(self.counted))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.autocast())
            if self.random is not None:
                stack.callback(RandomState(self.random.device).restore)
                self.random.restore()
            yield

    def _record(self, tensor: torch.Tensor) -> None:
        if not self._is_given(tensor):
            self.saves += 1
            self._deliver(self.saves, tensor)

    def _deliver(self, key: Any, tensor: torch.Tensor) -> None:
        assert self.missing is not None
        if key not in self.missing:
            return
        for reference in self.slots[key]:
            if (slot := reference()) is not None:
                slot.fill(tensor)
        self.missing.remove(key)
        if not self.missing and key != "output":
            raise _Enough


def _never(_: Any) -> torch.Tensor:
    raise RuntimeError("the graph of a second run is never run backward")


class _Thread(threading.local):
    def __init__(self) -> None:
        self.regions: list[Region] = []


_thread = _Thread()


@contextmanager
def _running(region: Region) -> Iterator[None]:
    _thread.regions.append(region)
    try:
        yield
    finally:
        _thread.regions.pop()


def current_region() -> Region | None:
    """The innermost region being run by this thread."""
    return _thread.regions[-1] if _thread.regions else None
