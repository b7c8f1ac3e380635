"""The host pool's books: which storages are host memory, although on CPU they look like device memory.

On CUDA the device tells the two apart. On CPU (and for fake tensors, which are traced on CPU) nothing does,
so whoever moves activations to the host takes the memory from `empty` or allocates it under `allocation()`;
the meter then counts it as host bytes and never as device bytes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch


class HostOutOfMemoryError(MemoryError):
    """The host budget is used up, or the machine has no more host memory."""


class _Entry(weakref.ref):
    __slots__ = ("fake", "key", "nbytes")
    key: int
    nbytes: int
    fake: bool


_entries: dict[int, _Entry] = {}
# Bytes of real and of fake storages: a plan traced beside a run must not mix with it.
_live = {False: 0, True: 0}
_depth = 0  # how many `allocation()` blocks are open

# Called with (nbytes, fake, storage or None) before bytes are added; may raise HostOutOfMemoryError to refuse
# them.
watchers: list[Callable[[int, bool, torch.UntypedStorage | None], None]] = []


def _forget(entry: _Entry) -> None:
    if _entries.pop(entry.key, None) is not None:
        _live[entry.fake] -= entry.nbytes


def register(storage: torch.UntypedStorage) -> None:
    """Count a storage as host memory until it dies (once, however often it is registered).

    Raises HostOutOfMemoryError when a meter's host budget has no room for it.
    """
    key = storage._cdata
    if key in _entries:
        return
    nbytes, fake = storage.nbytes(), storage.device.type == "meta"
    for watch in watchers:
        watch(nbytes, fake, storage)
    entry = _Entry(storage, _forget)
    entry.key, entry.nbytes, entry.fake = key, nbytes, fake
    _entries[key] = entry
    _live[fake] += nbytes


def is_host(storage: torch.UntypedStorage) -> bool:
    """Whether a storage was registered as host memory."""
    return storage._cdata in _entries


def live_bytes(fake: bool = False) -> int:
    """Bytes of host memory registered and still alive."""
    return _live[fake]


def allocating() -> bool:
    """Whether new CPU storages belong to the host pool right now."""
    return _depth > 0


@contextlib.contextmanager
def allocation() -> Iterator[None]:
    """While open, every storage a meter sees being born on the CPU is host memory.

    For code that allocates by itself (DeepSpeed's activation offload); own code calls `empty`.
    """
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def empty(shape: int | Sequence[int], dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
    """An uninitialised CPU tensor in host memory.

    Raises HostOutOfMemoryError when the host budget or the machine has no room for it; an error of pinning
    itself is passed on, so that the caller can fall back to pageable memory.
    """
    with allocation():
        try:
            tensor = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pin_memory)
        except RuntimeError as error:
            if "allocate memory" in str(error) and not pin_memory:  # torch's own allocator names it so
                raise HostOutOfMemoryError(str(error)) from error
            raise
    register(tensor.untyped_storage())
    return tensor
