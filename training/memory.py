"""The meter: live device bytes, host bytes, the peak and who caused it; one for CPU, CUDA and fake tensors.

On CPU and for fake tensors every storage is followed from the operation that made it until it dies, so the numbers
are exact and the same on every run. On CUDA the allocator's statistics are the truth; storages are followed as well
when `operations=True`, to name the operation at the peak.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode

from model import host

KINDS = ("parameters", "gradients", "optimizer", "activations", "loss", "temporary", "other")
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOSS, TEMPORARY, OTHER = range(len(KINDS))
PHASES = ("forward", "loss", "backward", "optimizer")
# What a phase leaves behind is what it was for; what dies within it was temporary.
LEAVES = {"forward": ACTIVATIONS, "loss": LOSS, "backward": GRADIENTS, "optimizer": OPTIMIZER}
MAX_MARKS = 100_000  # module boundaries remembered, to find an autograd node's module

_graph_task = torch._C._current_graph_task_id  # -1 outside backward
_node = torch._C._current_autograd_node
_sequence_number = torch._C._autograd._get_sequence_nr


class _Record(weakref.ref):
    """One live storage: a weak reference whose callback takes its bytes off."""

    __slots__ = ("birth", "key", "kind", "nbytes")
    key: int
    nbytes: int
    kind: int
    birth: int


class _Places:
    """Which module runs: by hooks in forward, by autograd's sequence numbers in backward.

    An autograd node carries the number that was current when forward made it. Noting that number at every module
    boundary is enough to find a node's module later, with no hook on any tensor.
    """

    def __init__(self) -> None:
        self.stack: list[tuple[weakref.ref, int]] = []  # (module, graph task that called it)
        self.numbers: list[int] = []
        self.modules: list[weakref.ref | None] = []
        self.roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def mark(self) -> None:
        number = _sequence_number()
        if self.numbers and (number < self.numbers[-1] or len(self.numbers) > MAX_MARKS):
            half = len(self.numbers) // 2 if number >= self.numbers[-1] else len(self.numbers)
            del self.numbers[:half], self.modules[:half]
        self.numbers.append(number)
        self.modules.append(self.stack[-1][0] if self.stack else None)

    def enter(self, module: torch.nn.Module) -> None:
        if not self.stack:
            self.roots.add(module)
        self.stack.append((weakref.ref(module), _graph_task()))
        self.mark()

    def leave(self, module: torch.nn.Module) -> None:
        while self.stack and self.stack.pop()[0]() is not module:
            pass
        self.mark()

    def now(self) -> tuple[weakref.ref | None, str]:
        """The module at work, and "recompute" or "backward" where that is why it works."""
        task = _graph_task()
        if self.stack and self.stack[-1][1] == task:
            return self.stack[-1][0], "" if task < 0 else "recompute"
        node = _node() if task >= 0 else None
        if node is None:
            return None, "" if task < 0 else "backward"
        place = bisect.bisect_right(self.numbers, node._sequence_nr()) - 1
        last = len(self.numbers) - 1
        return (self.modules[place] if 0 <= place < last else None), "backward"

    def name(self, reference: weakref.ref | None, models: Iterable[torch.nn.Module]) -> str:
        module = reference() if reference is not None else None
        if module is None:
            return ""
        for root in (*models, *self.roots):
            for name, child in root.named_modules():
                if child is module:
                    return name or type(module).__name__
        return type(module).__name__


class _Follower(TorchDispatchMode):
    """Shows the meter every tensor that an operation reads or makes."""

    supports_higher_order_operators = True

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper this avoids costs 0.7 us per operation; compiled regions skip the mode anyway

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meter = self.meter
        if types and not all(t in meter._plain for t in types):
            return NotImplemented  # a wrapper (DTensor): let it run, and see the tensors inside
        records = meter._records
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.untyped_storage()._cdata not in records:
                meter._found(arg)
        out = func(*args, **kwargs) if kwargs else func(*args)
        if isinstance(out, torch.Tensor):
            meter._made(out, func)
        elif out is not None:
            meter._made_all(out, func)
        return out


class Meter:
    """Counts memory between `with Meter() as meter:` and its end.

    Tensors that exist at entry count too (all that the garbage collector knows). `model` and `optimizer` give names
    to modules and kinds to storages; `track` adds them later.

    device: "cpu", "cuda" or "fake"; None: "fake" under FakeTensorMode, else the model's device, else cuda if present.
    budget_bytes: an operation that would take the live device bytes above it raises torch.OutOfMemoryError.
    host_budget_bytes: the same for the host pool (model/host.py), raising model.host.HostOutOfMemoryError.
    timeline: how many points (sequence number, phase, module, live bytes) to keep at most; 0 keeps none.
    operations: follow every operation; None: yes on CPU and for fake tensors, no on CUDA.
    """

    def __init__(
        self,
        *,
        device: str | None = None,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        budget_bytes: int | None = None,
        host_budget_bytes: int | None = None,
        timeline: int = 0,
        operations: bool | None = None,
    ) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self.host_budget_bytes = host_budget_bytes
        self._tracked: list[tuple[Any, Any]] = []
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._records: dict[int, _Record] = {}
        self._live = 0
        self._by_kind = [0] * len(KINDS)
        self._peak = 0
        self._peak_kinds = self._by_kind[:]
        self._peak_birth = 0
        self._peak_at: tuple[Any, weakref.ref | None, str] | None = None
        self._births = 0
        self._peak_host = 0
        self.after_forward_bytes = 0
        self.after_forward_breakdown_bytes: dict[str, int] = {}
        self.current_phase = ""
        self._phase_start = 0
        self._loss_number = -1
        self._places = _Places()
        self._plain: set[type] = {torch.Tensor, torch.nn.Parameter}
        if model is not None or optimizer is not None:
            self.track(model, optimizer)

    # -- entering and leaving -------------------------------------------------------------------------------------

    def __enter__(self) -> Meter:
        self._fake = _fake_mode_active() if self.device is None else self.device == "fake"
        if self._fake:
            from torch._subclasses.fake_tensor import FakeTensor

            self._plain.add(FakeTensor)
        reference = weakref.ref(self)

        def died(record: _Record) -> None:
            meter = reference()
            if meter is not None and meter._records.get(record.key) is record:
                meter._drop(record)

        self._died = died
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):  # not isinstance: it would run properties of lazy objects
                self._found(thing)
        self._classify()
        self.reset_peak()
        with contextlib.ExitStack() as stack:
            host.watchers.append(self._host_grows)
            stack.callback(host.watchers.remove, self._host_grows)
            before = nn_module.register_module_forward_pre_hook(self._before_module)
            stack.callback(before.remove)
            after = nn_module.register_module_forward_hook(self._after_module, always_call=True)
            stack.callback(after.remove)
            stack.enter_context(_Follower(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        self._records.clear()

    def track(self, model: torch.nn.Module | None = None, optimizer: Any = None) -> None:
        """Name the modules of a model and count its storages, and an optimizer's, under their kinds."""
        if model is not None:
            self._models.add(model)
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else None
        self._classify()

    # -- numbers ----------------------------------------------------------------------------------------------------

    @property
    def live_bytes(self) -> int:
        """Device bytes alive now."""
        return self._live

    @property
    def peak_bytes(self) -> int:
        """The most device bytes alive at once since entry or `reset_peak`."""
        return self._peak

    @property
    def host_bytes(self) -> int:
        """Bytes of the host pool alive now."""
        return host.live_bytes(self._fake)

    @property
    def peak_host_bytes(self) -> int:
        """The most host pool bytes alive at once since entry or `reset_peak`."""
        return self._peak_host

    @property
    def peak_op(self) -> str:
        """Who caused the peak, like "aten.mm in layers.3.mlp.fc1 (backward)"."""
        return self._describe(self._peak_at)

    @property
    def breakdown_bytes(self) -> dict[str, int]:
        """The bytes at the peak by kind; they add up to `peak_bytes`."""
        return dict(zip(KINDS, self._peak_kinds))

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        self._peak, self._peak_kinds, self._peak_birth = self._live, self._by_kind[:], self._births
        self._peak_at = None
        self._peak_host = host.live_bytes(self._fake)

    # -- phases -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a part of the step: forward, loss, backward or optimizer."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}: one of {', '.join(PHASES)}")
        outer = self.current_phase
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, name: str) -> None:
        old = self.current_phase
        if old in LEAVES:
            self._settle(LEAVES[old])
        if old in ("forward", "loss") and name not in ("forward", "loss"):
            self.after_forward_bytes = self.live_bytes
            self.after_forward_breakdown_bytes = dict(zip(KINDS, self._by_kind))
        self.current_phase = name
        self._phase_start = self._births

    def _settle(self, kind: int) -> None:
        """Give what the phase left behind its kind, in the peak's breakdown as well."""
        for record in reversed(self._records.values()):
            if record.birth <= self._phase_start:
                break
            if record.kind == TEMPORARY:
                self._move(record, kind)
        self._classify()

    def _move(self, record: _Record, kind: int) -> None:
        old, record.kind = record.kind, kind
        self._by_kind[old] -= record.nbytes
        self._by_kind[kind] += record.nbytes
        if record.birth <= self._peak_birth:
            self._peak_kinds[old] -= record.nbytes
            self._peak_kinds[kind] += record.nbytes

    def _classify(self) -> None:
        for model in self._models:
            for parameter in model.parameters():
                self._assign(parameter, PARAMETERS)
                if parameter.grad is not None:
                    self._assign(parameter.grad, GRADIENTS)

    def _assign(self, tensor: torch.Tensor, kind: int) -> None:
        record = self._records.get(tensor.untyped_storage()._cdata)
        if record is not None and record.kind != kind:
            self._move(record, kind)

    # -- storages -----------------------------------------------------------------------------------------------------

    def _found(self, tensor: torch.Tensor) -> None:
        self._add(tensor, None, OTHER)

    def _made(self, tensor: torch.Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        record = self._records.get(storage._cdata)
        if record is None:
            self._add(tensor, func, TEMPORARY if self.current_phase else OTHER)
        elif record.nbytes != storage.nbytes():
            self._grow(storage.nbytes() - record.nbytes, func, record.kind)
            record.nbytes = storage.nbytes()

    def _made_all(self, out: Any, func: Any) -> None:
        if isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self._made(item, func)
                elif isinstance(item, (tuple, list)):
                    self._made_all(item, func)

    def _add(self, tensor: torch.Tensor, func: Any, kind: int) -> None:
        if (type(tensor).__name__ == "FakeTensor") != self._fake or (not self._fake and not tensor.is_cpu):
            return
        storage = tensor.untyped_storage()
        if host.is_host(storage):
            return
        if host.allocating():
            host.register(storage)
            return
        nbytes = storage.nbytes()
        self._births += 1
        self._grow(nbytes, func, kind)
        record = _Record(storage, self._died)
        record.key, record.nbytes, record.kind, record.birth = storage._cdata, nbytes, kind, self._births
        self._records[record.key] = record

    def _grow(self, nbytes: int, func: Any, kind: int) -> None:
        live = self._live + nbytes
        if live > self._peak:
            if self.budget_bytes is not None and live > self.budget_bytes:
                free = self.budget_bytes - self._live
                raise torch.OutOfMemoryError(
                    f"out of memory: {self._describe((func, *self._places.now()))} wants {nbytes} bytes, "
                    f"{free} bytes are free of the budget of {self.budget_bytes}"
                )
            self._peak = live
            self._by_kind[kind] += nbytes
            self._peak_kinds = self._by_kind[:]
            self._peak_birth = self._births
            self._peak_at = (func, *self._places.now())
        else:
            self._by_kind[kind] += nbytes
        self._live = live

    def _drop(self, record: _Record) -> None:
        del self._records[record.key]
        self._live -= record.nbytes
        self._by_kind[record.kind] -= record.nbytes

    def _host_grows(self, nbytes: int, fake: bool, storage: torch.UntypedStorage | None) -> None:
        if fake != self._fake:
            return
        live = host.live_bytes(fake) + nbytes
        if self.host_budget_bytes is not None and live > self.host_budget_bytes:
            raise host.HostOutOfMemoryError(
                f"out of host memory: {nbytes} bytes wanted, "
                f"{self.host_budget_bytes - live + nbytes} bytes are free of the host budget of {self.host_budget_bytes}"
            )
        self._peak_host = max(self._peak_host, live)
        record = self._records.get(storage._cdata) if storage is not None else None
        if record is not None:
            self._drop(record)

    # -- modules ------------------------------------------------------------------------------------------------------

    def _before_module(self, module: torch.nn.Module, args: Any) -> None:
        self._places.enter(module)

    def _after_module(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        self._places.leave(module)

    def _describe(self, at: tuple[Any, weakref.ref | None, str] | None) -> str:
        if at is None:
            return ""
        func, module, why = at
        op = str(func.overloadpacket) if hasattr(func, "overloadpacket") else str(func or "a tensor made elsewhere")
        name = self._places.name(module, self._models)
        phase = why or self.current_phase
        return op + (f" in {name}" if name else "") + (f" ({phase})" if phase else "")


def _fake_mode_active() -> bool:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())
