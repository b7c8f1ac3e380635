"""Books over the storages of one device, exact to the byte: what lives, of which kind, and the peak."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from model import host
from training.metering.kinds import IGNORED, KINDS, LOSS, OTHER, TEMPORARY
from training.metering.places import Places

Origin = tuple[Any, weakref.ref | None, str]  # operation, module or parameter, phase


class _Record(weakref.ref):
    """One live storage; its callback takes the bytes off the books."""

    __slots__ = ("birth", "key", "kind", "nbytes")
    key: int
    nbytes: int
    kind: int
    birth: int


class Storages(TorchDispatchMode):
    """Follows each storage of a device ("cpu", "cuda" or "fake") from the operation that makes it until it
    dies.

    While entered it sees the operations of this thread and of autograd's. Storages, not tensors: views share
    one. `kind_of_birth` says what a storage made now is for.
    """

    supports_higher_order_operators = True

    def __init__(self, device: str, places: Places, budget_bytes: int | None, kind_of_birth: Callable[[], int]) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.by_kind = [0] * len(KINDS)
        self.peak_by_kind = self.by_kind[:]
        self.peak_origin: Origin | None = None
        self.failed_origin: Origin | None = None
        self.births = 0
        self.phase = ""  # only to be told with the peak
        self.after_operation: Callable[[], None] | None = None
        self._peak_birth = 0
        self._device = device
        self._places = places
        self._budget_bytes = budget_bytes
        self._kind_of_birth = kind_of_birth
        self._records: dict[int, _Record] = {}
        self._died: Callable[[_Record], None] | None = self._take_off  # one bound method for all callbacks
        self._known = {torch.Tensor, torch.nn.Parameter, FakeTensor}  # types that have a storage of their own

    def close(self) -> None:
        """Stop following; the totals stay, and nothing that refers back to self or to the meter."""
        self._records = {}
        self._died = None
        self._kind_of_birth = lambda: OTHER
        self.after_operation = None

    # -- seeing tensors --------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the method below, at 0.7 us per operation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and not self._known.issuperset(types):
            return NotImplemented  # a wrapper such as DTensor: let it run, and see the tensors inside it
        records = self._records
        try:
            for arg in args:
                if isinstance(arg, torch.Tensor) and arg.untyped_storage()._cdata not in records:
                    self._see_stranger(arg)
        except NotImplementedError:  # a sparse tensor has no storage
            pass
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        except torch.OutOfMemoryError:  # of the CUDA allocator, which does not say who asked
            self.failed_origin = self._origin(func)
            raise
        if isinstance(out, torch.Tensor):
            self.see(out, func)
        elif out is not None:
            self._see_all(out, func)
        if self.after_operation is not None:
            self.after_operation()
        return out

    def see(self, tensor: torch.Tensor, origin: Any) -> None:
        """Put a tensor's storage on the books, or its new size when it was resized.

        Raises torch.OutOfMemoryError, leaving the books as they are, when the budget has no room for it.
        """
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return
        record = self._records.get(storage._cdata)
        if record is not None:
            nbytes = storage.nbytes()
            if nbytes != record.nbytes and record.kind != IGNORED:
                self._resize(record, nbytes, origin)
            return
        if not self._is_ours(tensor):
            return
        if host.allocating():
            host.register(storage)
        if host.is_host(storage):
            return
        record = self._record(storage, self._kind_of_birth())
        self._resize(record, storage.nbytes(), origin)
        self._records[record.key] = record

    def _see_stranger(self, tensor: torch.Tensor) -> None:
        """A tensor made where no operation shows it: by numpy, or in another thread.

        One that turns up in backward is ignored: it is a buffer of gloo, whose threads free it at any time.
        """
        self._kind_of_birth()  # brings the phase up to date
        if self.phase == "backward":
            record = self._record(tensor.untyped_storage(), IGNORED)
            self._records[record.key] = record
        else:
            self.see(tensor, "memory from outside")

    def _record(self, storage: torch.UntypedStorage, kind: int) -> _Record:
        assert self._died is not None
        record = _Record(storage, self._died)
        self.births += 1
        record.key, record.nbytes, record.kind, record.birth = storage._cdata, 0, kind, self.births
        return record

    def _see_all(self, out: Any, func: Any) -> None:
        if isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self.see(item, func)
                else:
                    self._see_all(item, func)

    def see_existing(self) -> None:
        """Put every tensor on the books that Python's garbage collector knows."""
        gc.collect()  # what is garbage anyway must not count
        for thing in gc.get_objects():
            kind = type(thing)  # not isinstance: it would run the properties of lazily imported objects
            if issubclass(kind, torch.Tensor) and (
                kind in self._known or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
            ):
                self.see(thing, "")

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return self._device == "fake" and tensor.fake_device.type != "meta"
        return tensor.is_cuda if self._device == "cuda" else self._device == "cpu" and tensor.is_cpu

    # -- the books -------------------------------------------------------------------------------------------

    def _resize(self, record: _Record, nbytes: int, origin: Any) -> None:
        grown = nbytes - record.nbytes
        # Callbacks may run at any call below: live_bytes is read and written in one statement, never kept.
        if self._budget_bytes is not None and grown > 0 and self.live_bytes + grown > self._budget_bytes:
            free = self._budget_bytes - self.live_bytes
            self.failed_origin = self._origin(origin)
            raise torch.OutOfMemoryError(
                f"out of memory: {self._places.describe(self.failed_origin)} wants {grown:,} bytes, "
                f"{max(0, free):,} bytes are free of a budget of {self._budget_bytes:,} bytes"
            )
        record.nbytes = nbytes
        self.live_bytes += grown
        self.by_kind[record.kind] += grown
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.peak_by_kind = self.by_kind[:]
            self._peak_birth = self.births
            self.peak_origin = self._origin(origin)

    def _origin(self, origin: Any) -> Origin:
        reference, why = self._places.now()
        return origin, reference, why or self.phase

    def _take_off(self, record: _Record) -> None:
        if self._records.get(record.key) is record:
            del self._records[record.key]
            self.live_bytes -= record.nbytes
            self.by_kind[record.kind] -= record.nbytes

    def take_off(self, storage: torch.UntypedStorage) -> None:
        """Strike a storage that turned out to be host memory."""
        record = self._records.get(storage._cdata)
        if record is not None:
            self._take_off(record)

    def before_resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Note a size that a storage is about to get without an operation."""
        record = self._records.get(storage._cdata)
        if record is not None and record.kind != IGNORED:
            self._resize(record, nbytes, "storage.resize_")

    def reset_peak(self) -> None:
        self.peak_bytes, self.peak_by_kind = self.live_bytes, self.by_kind[:]
        self._peak_birth, self.peak_origin, self.failed_origin = self.births, None, None

    # -- kinds -----------------------------------------------------------------------------------------------

    def assign(self, tensor: torch.Tensor, kind: int, only_other: bool = False) -> None:
        """Say what a tensor's storage is for (only if nothing is known of it yet, with `only_other`)."""
        record = self._records.get(tensor.untyped_storage()._cdata)
        if record is not None and record.kind not in (kind, IGNORED) and (not only_other or record.kind == OTHER):
            self._move(record, kind)

    def settle(self, births: int, kind: int) -> None:
        """What lives of the storages made after the first `births` is of that kind, no longer temporary."""
        for record in reversed(self._records.values()):
            if record.birth <= births:
                break
            if record.kind in (TEMPORARY, LOSS):
                self._move(record, kind)

    def _move(self, record: _Record, kind: int) -> None:
        old, record.kind = record.kind, kind
        self.by_kind[old] -= record.nbytes
        self.by_kind[kind] += record.nbytes
        if record.birth <= self._peak_birth:  # it was alive at the peak: alive now, and made before
            self.peak_by_kind[old] -= record.nbytes
            self.peak_by_kind[kind] += record.nbytes


@contextlib.contextmanager
def resizes_seen(storages: Storages) -> Iterator[None]:
    """Tell of `storage.resize_`: FSDP frees and refills parameters by it, and it is no operation."""
    kept = torch.UntypedStorage.__dict__.get("resize_")
    inner = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        storages.before_resize(storage, nbytes)
        return inner(storage, nbytes)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        if kept is None:
            del torch.UntypedStorage.resize_
        else:
            torch.UntypedStorage.resize_ = kept  # type: ignore[method-assign]
