"""Activation offload: what is kept for backward waits in host memory.

`Transfers` moves what autograd saves in one forward pass. Copies out overlap the next layer's forward, copies in are
started one layer ahead in backward; the last layer, needed first, is not moved. A storage is moved once however many
views of it are saved. On CUDA copies run on streams of their own from and to pinned memory. On CPU the same code
copies into a host pool that the meter counts apart, so that its order, bytes and gradients can be tested anywhere.
"""

import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from model import host
from model.region import Handle, StorageWeakRef, autocast_state, second_run, storage_key

MIN_BYTES = 16 * 1024  # below, starting a copy costs more than it frees


class Buffer:
    """A slab of host memory, pinned when the device is CUDA and the system allows it."""

    pinning_failed = False

    def __init__(self, nbytes: int, pin: bool) -> None:
        self.bytes = host.empty(nbytes, torch.uint8)
        self.read: torch.cuda.Event | None = None  # when the last copy out of this slab to the device is done
        self.pinned = pin and self._pin()

    def _pin(self) -> bool:
        # Registered by hand: torch's pinned allocator rounds every size up to a power of two.
        try:
            error = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0)
            torch.cuda.check_error(error)
            return True
        except RuntimeError as error:
            if not Buffer.pinning_failed:
                Buffer.pinning_failed = True
                warnings.warn(
                    f"host memory cannot be pinned ({error}): offload copies through pageable memory, which is slower "
                    "and does not overlap; raise `ulimit -l`",
                    stacklevel=2,
                )
            return False

    def __del__(self) -> None:
        if getattr(self, "pinned", False) and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())


class HostPool:
    """Slabs of exact sizes that are used again in the next step, within a budget of host bytes."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.total_bytes = 0
        self.free: dict[int, list[Buffer]] = {}
        self.streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def take(self, nbytes: int, pin: bool) -> Buffer:
        """A slab of `nbytes`. Raises HostOutOfMemoryError when the budget or the machine has no room for it."""
        if slabs := self.free.get(nbytes):
            return slabs.pop()
        if self.budget_bytes is not None and self.total_bytes + nbytes > self.budget_bytes:
            self._drop_free()
            if self.total_bytes + nbytes > self.budget_bytes:
                raise host.HostOutOfMemoryError(
                    f"offload asked for {nbytes} bytes of host memory with {self.total_bytes} of its "
                    f"{self.budget_bytes} bytes in use; raise host_budget, shorten seq_length or use a mode that "
                    "keeps less"
                )
        buffer = Buffer(nbytes, pin)
        self.total_bytes += nbytes
        return buffer

    def give(self, buffer: Buffer) -> None:
        self.free.setdefault(buffer.bytes.numel(), []).append(buffer)

    def _drop_free(self) -> None:
        self.total_bytes -= sum(size * len(slabs) for size, slabs in self.free.items())
        self.free.clear()

    def copy_streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if device not in self.streams:
            self.streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self.streams[device]


class Moved:
    """One storage in host memory. `resident` is its copy on the device, while there is one."""

    def __init__(self, transfers: "Transfers", tensor: torch.Tensor) -> None:
        self.transfers, self.group = transfers, transfers.group
        self.version = tensor._version
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.resident: torch.Tensor | None = tensor.detach().as_strided((count,), (1,), 0)
        self.buffer: Buffer | None = None
        self.copied: torch.cuda.Event | None = None  # the copy in flight, out or in

    def copy_out(self) -> None:
        assert self.resident is not None
        transfers = self.transfers
        self.device, self.dtype = self.resident.device, self.resident.dtype
        self.buffer = transfers.pool.take(self.resident.nbytes, pin=transfers.cuda)
        self.on_host = self.buffer.bytes.view(self.dtype)
        if not transfers.cuda:
            self.on_host.copy_(self.resident)
            return
        stream = transfers.pool.copy_streams(self.device)[0]
        stream.wait_stream(torch.cuda.current_stream(self.device))  # what computes it
        if self.buffer.read is not None:
            stream.wait_event(self.buffer.read)
        with torch.cuda.stream(stream):
            self.on_host.copy_(self.resident, non_blocking=True)
            self.copied = stream.record_event()

    def release(self) -> None:
        """Lets the device memory go; what is computed from here on may reuse it once the copy is done."""
        assert self.resident is not None
        if self.resident._version != self.version:
            raise RuntimeError(
                f"a tensor of {self.resident.nbytes} bytes that backward needs was modified in place while it was "
                "copied to host memory; change a clone instead"
            )
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)
        self.resident = None

    def copy_in(self) -> None:
        if self.resident is not None:
            return
        assert self.buffer is not None
        self.resident = torch.empty(len(self.on_host), dtype=self.dtype, device=self.device)
        if not self.transfers.cuda:
            self.resident.copy_(self.on_host)
            return
        stream = self.transfers.pool.copy_streams(self.device)[1]
        stream.wait_stream(torch.cuda.current_stream(self.device))  # whoever had this device memory before
        if self.copied is not None:
            stream.wait_event(self.copied)
        with torch.cuda.stream(stream):
            self.resident.copy_(self.on_host, non_blocking=True)
            self.copied = self.buffer.read = stream.record_event()

    def load(self) -> torch.Tensor:
        """The storage on the device, as a flat tensor."""
        self.transfers.arrive(self.group)
        self.copy_in()
        assert self.resident is not None
        if self.buffer is not None and self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)
        return self.resident

    def __del__(self) -> None:
        if self.buffer is None or sys.is_finalizing():
            return
        if self.copied is not None and self.resident is not None:  # fetched, but never asked for
            torch.cuda.current_stream(self.device).wait_event(self.copied)
        self.transfers.pool.give(self.buffer)


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
        self, pool: HostPool, x: torch.Tensor, fixed: Sequence[torch.Tensor], groups: int, activity: Any
    ) -> None:
        self.pool, self.cuda, self.activity = pool, x.is_cuda, activity
        self.fixed = {storage_key(tensor) for tensor in fixed}
        self.last = groups - 1
        self.group, self.moving = -1, False
        self.saved: dict[StorageWeakRef, weakref.ref[Moved]] = {}
        self.in_flight: list[Moved] = []
        self.by_group: dict[int, list[weakref.ref[Moved]]] = {}
        self.arrived: set[int] = set()

    def begin(self, group: int, moving: bool) -> None:
        """The next group starts: copies of the one before it go on, those of earlier ones must be done by now."""
        self.group, self.moving = group, moving
        self._release(before=group - 1)

    def finish(self) -> None:
        """Forward is over: all copies must be done before what follows takes the memory."""
        self.moving = False
        self._release(before=self.last + 1)
        self.saved.clear()

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
            self.saved[key] = weakref.ref(moved)
            self.by_group.setdefault(self.group, []).append(weakref.ref(moved))
            if self.group != self.last:
                moved.copy_out()
                self.in_flight.append(moved)
                self.activity.offloaded_bytes += nbytes
        return MovedView(moved, tensor)

    def arrive(self, group: int) -> None:
        """Backward has reached a group: fetch what is left of it, and start on the next one."""
        if group in self.arrived:
            return
        self.arrived.add(group)
        earlier = [other for other in self.by_group if other < group]
        for wanted in (group, max(earlier, default=None)):
            for reference in self.by_group.get(wanted, ()):  # type: ignore[arg-type]
                if (moved := reference()) is not None:
                    moved.copy_in()


def deepspeed_checkpoint(function: Any, x: torch.Tensor, activity: Any) -> torch.Tensor:
    """Runs `function(x)` under DeepSpeed's activation checkpointing, which moves x to host memory.

    Raises RuntimeError when DeepSpeed's switches, which belong to the process, were set otherwise.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing as ds

    if not ds.CPU_CHECKPOINT:
        # On CPU, cpu_checkpointing alone aliases its argument and then empties it; partitioning makes it copy.
        ds.configure(None, partition_activations=not x.is_cuda, checkpoint_in_cpu=True)
    autocast = autocast_state(x.device.type)  # DeepSpeed does not replay it
    first = True

    def run(x: torch.Tensor) -> torch.Tensor:
        nonlocal first
        if first:
            first = False
            return function(x)
        with second_run(activity), autocast():
            return function(x)

    activity.offloaded_bytes += x.nbytes
    return ds.non_reentrant_checkpoint(run, x)
