"""Activation offload: what is kept for backward waits in host memory.

`Transfers` moves what autograd saves in one forward pass. Copies out overlap the next layer's forward, copies in are
started one layer ahead in backward; the last layer, needed first, is not moved. A storage is moved once however many
views of it are saved. On CUDA copies run on streams of their own from and to pinned memory. On CPU the same code
copies into a host pool that the meter counts apart, so that its order, bytes and gradients can be tested anywhere.
"""

import contextlib
import mmap
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence

import torch

from model import host
from model.region import Handle, StorageWeakRef, check_unchanged, storage_key
from model.replay import Activity

MIN_BYTES = 16 * 1024  # below, starting a copy costs more than it frees


class Slab:
    """Host memory for one storage, pinned when the device is CUDA and the system allows it.

    Raises HostOutOfMemoryError when the machine, or a meter's budget, has no room for it.
    """

    warned = False

    def __init__(self, nbytes: int, pin: bool) -> None:
        self.pinned = False
        self.last_copy: torch.cuda.Event | None = None  # into or out of this slab
        # Pages are pinned whole and once, so a pinned slab shares none of its pages with another.
        page = mmap.PAGESIZE
        memory = host.empty(-(-nbytes // page) * page + page if pin else nbytes, torch.uint8)
        self.allocated_bytes = memory.nbytes
        start = -memory.data_ptr() % page if pin else 0
        self.bytes = memory[start : start + nbytes]
        if pin:
            self.pinned = self._pin()

    def _pin(self) -> bool:
        # Registered by hand: torch's pinned allocator rounds every size up to a power of two.
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.nbytes, 0))
            return True
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda")  # a kernel, which takes the blame: CUDA keeps its last error until asked
            if not Slab.warned:
                Slab.warned = True
                warnings.warn(
                    f"host memory cannot be pinned ({error}): offload copies through pageable memory, which is slower "
                    "and does not overlap; raise `ulimit -l`",
                    stacklevel=2,
                )
            return False

    def __del__(self) -> None:
        if self.pinned and not sys.is_finalizing():
            if self.last_copy is not None:
                self.last_copy.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())


class HostPool:
    """Slabs of exact sizes that are used again in the next step, within a budget of host bytes."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.total_bytes = 0  # free or in use
        self.reserved_bytes = 0  # for what others move (DeepSpeed)
        self.free: dict[int, list[Slab]] = {}
        self.shape: torch.Size | None = None
        self.streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def begin(self, shape: torch.Size, reserved_bytes: int) -> None:
        """A forward pass over activations of this shape: free slabs of another shape's sizes go."""
        if shape != self.shape:
            self._drop_free()
        self.shape = shape
        self.reserved_bytes = 0
        self._make_room(reserved_bytes)
        self.reserved_bytes = reserved_bytes

    def take(self, nbytes: int, pin: bool) -> Slab:
        """A slab of `nbytes`. Raises HostOutOfMemoryError when the budget or the machine has no room for it."""
        if slabs := self.free.get(nbytes):
            return slabs.pop()
        self._make_room(nbytes)
        slab = Slab(nbytes, pin)
        self.total_bytes += slab.allocated_bytes
        return slab

    def give(self, slab: Slab) -> None:
        self.free.setdefault(slab.bytes.nbytes, []).append(slab)

    def _make_room(self, nbytes: int) -> None:
        if self.budget_bytes is None or nbytes + self.total_bytes + self.reserved_bytes <= self.budget_bytes:
            return
        self._drop_free()
        used = self.total_bytes + self.reserved_bytes
        if nbytes + used > self.budget_bytes:
            raise host.HostOutOfMemoryError(
                f"offload asked for {nbytes} bytes of host memory with {used} of its {self.budget_bytes} bytes in use; "
                "raise host_budget, shorten seq_length or use a mode that keeps less"
            )

    def _drop_free(self) -> None:
        self.total_bytes -= sum(slab.allocated_bytes for slabs in self.free.values() for slab in slabs)
        self.free.clear()

    def copy_streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The streams for copies out of and into the device."""
        if device not in self.streams:
            self.streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self.streams[device]


class Moved:
    """One storage, in host memory or on its way.

    resident: its bytes on the device, while they are there. version: of the saved tensor, as long as `resident` is
    that tensor and not a copy fetched from the host.
    """

    def __init__(self, transfers: "Transfers", tensor: torch.Tensor) -> None:
        self.transfers, self.group = transfers, transfers.group
        self.device, self.dtype = tensor.device, tensor.dtype
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.resident: torch.Tensor | None = tensor.detach().as_strided((count,), (1,), 0)
        self.version: int | None = tensor._version
        self.slab: Slab | None = None

    def copy_out(self) -> None:
        assert self.resident is not None
        self.slab = self.transfers.pool.take(self.resident.nbytes, pin=self.device.type == "cuda")
        self._copy(self.slab, self.slab.bytes.view(self.dtype), self.resident, direction=0)

    def release(self) -> None:
        """Lets the device memory go; what is computed from here on may reuse it once the copy is done."""
        assert self.resident is not None
        self._wait_for_copy()
        if self.resident._version == self.version:  # else the copy may hold either value: `load` will complain
            self.resident = self.version = None

    def copy_in(self) -> None:
        if self.resident is None:
            assert self.slab is not None
            source = self.slab.bytes.view(self.dtype)
            self.resident = torch.empty(len(source), dtype=self.dtype, device=self.device)
            self._copy(self.slab, self.resident, source, direction=1)

    def load(self) -> torch.Tensor:
        """The storage on the device, as a flat tensor."""
        self.transfers.arrive(self.group)
        self.copy_in()
        assert self.resident is not None
        if self.version is not None:
            check_unchanged(self.resident, self.version)
        self._wait_for_copy()
        return self.resident

    def _copy(self, slab: Slab, target: torch.Tensor, source: torch.Tensor, direction: int) -> None:
        if self.device.type != "cuda":
            target.copy_(source)
            return
        stream = self.transfers.pool.copy_streams(self.device)[direction]
        # Out: the kernel that computes the source. In: whoever used the target's memory before.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        # Out: the slab's last reader. In: the copy out.
        if slab.last_copy is not None:
            stream.wait_event(slab.last_copy)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            slab.last_copy = stream.record_event()

    def _wait_for_copy(self) -> None:
        """What the current stream does from here on comes after the last copy."""
        if self.slab is not None and self.slab.last_copy is not None:
            torch.cuda.current_stream(self.device).wait_event(self.slab.last_copy)

    def __del__(self) -> None:
        if self.slab is None or sys.is_finalizing():
            return
        if self.resident is not None:  # its memory is given back: it may have been fetched, and never asked for
            self._wait_for_copy()
        self.transfers.pool.give(self.slab)


class MovedView(Handle):
    """A saved tensor whose storage was moved."""

    __slots__ = ("dtype", "moved", "offset", "size", "stride")

    def __init__(self, moved: Moved, tensor: torch.Tensor) -> None:
        self.moved, self.dtype = moved, tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def get(self) -> torch.Tensor:
        return self.moved.load().view(self.dtype).as_strided(self.size, self.stride, self.offset)


class Transfers:
    """What one forward pass saved and moved, by group of layers in the order of forward.

    x: the input of the layers; fixed: tensors that all layers share, which stay on the device.
    """

    def __init__(
        self, pool: HostPool, x: torch.Tensor, fixed: Sequence[torch.Tensor], groups: int, activity: Activity
    ) -> None:
        self.pool, self.activity = pool, activity
        self.fixed = {storage_key(tensor) for tensor in fixed}
        self.last = groups - 1
        self.group, self.moving = -1, False
        self.saved: dict[StorageWeakRef, weakref.ref[Moved]] = {}
        self.in_flight: list[Moved] = []
        self.by_group: dict[int, list[weakref.ref[Moved]]] = {}
        self.arrived: set[int] = set()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around the layers: at the end all copies must be done before what follows takes the memory."""
        try:
            yield
            self._release(before=self.last + 1)
        finally:
            self.moving = False
            self.in_flight.clear()  # they refer to these transfers
            self.saved.clear()

    def begin(self, group: int, moving: bool) -> None:
        """The next group starts: copies of the one before it go on, those of earlier ones must be done by now."""
        self.group, self.moving = group, moving
        self._release(before=group - 1)

    def _release(self, before: int) -> None:
        while self.in_flight and self.in_flight[0].group < before:
            self.in_flight.pop(0).release()

    def save(self, tensor: torch.Tensor, key: StorageWeakRef) -> MovedView | None:
        """Moves the storage of `tensor`, unless it must or should stay (None)."""
        nbytes = tensor.untyped_storage().nbytes()
        if not self.moving or nbytes < MIN_BYTES or nbytes % tensor.element_size() or key in self.fixed:
            return None
        reference = self.saved.get(key)
        moved = reference() if reference else None
        if moved is None:
            moved = Moved(self, tensor)
            if self.group != self.last:
                moved.copy_out()
                self.in_flight.append(moved)
                self.activity.offloaded_bytes += nbytes
            self.saved[key] = weakref.ref(moved)
            self.by_group.setdefault(self.group, []).append(weakref.ref(moved))
        return MovedView(moved, tensor)

    def arrive(self, group: int) -> None:
        """Backward has reached a group: fetch what is left of it, and start on the next one."""
        if group in self.arrived:
            return
        self.arrived.add(group)
        earlier = [other for other in self.by_group if other < group]
        for wanted in (group, max(earlier, default=None)):
            for reference in reversed(self.by_group.get(wanted, ())):  # type: ignore[arg-type]
                if (moved := reference()) is not None:
                    moved.copy_in()
