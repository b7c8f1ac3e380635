"""What the CUDA allocator and the driver say of one device, and a limit for the allocator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class CudaMemory:
    """One device's memory in bytes; after `freeze` the numbers stay as they were then."""

    def __init__(self, device: torch.device) -> None:
        self.peak_phase = ""  # the phase in which the peak rose last
        self._device = device
        self._seen_peak = 0
        self._frozen: dict[str, int] | None = None
        self._first_retries = self._statistic("num_alloc_retries")

    def read(self, name: str) -> int:
        """One of: live, peak (given out by the allocator), reserved, peak_reserved (held by it), retries
        (since this object was made), outside (in use on the device, but not held by this process's
        allocator)."""
        if self._frozen is not None:
            return self._frozen[name]
        if name == "outside":
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free - self.read("reserved")
        if name == "retries":
            return self._statistic("num_alloc_retries") - self._first_retries
        kind = "reserved_bytes" if "reserved" in name else "allocated_bytes"
        return self._statistic(f"{kind}.all.{'peak' if 'peak' in name else 'current'}")

    def _statistic(self, name: str) -> int:
        return torch.cuda.memory_stats(self._device).get(name, 0)  # empty before CUDA is first used

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._seen_peak, self.peak_phase = self.read("live"), ""

    def end_phase(self, phase: str) -> None:
        """Take note of a phase's end: the peak was its doing if it has risen."""
        if (peak := self.read("peak")) > self._seen_peak:
            self._seen_peak, self.peak_phase = peak, phase

    def freeze(self) -> None:
        names = ("live", "peak", "reserved", "peak_reserved", "retries", "outside")
        self._frozen = {name: self.read(name) for name in names}

    @contextlib.contextmanager
    def limited(self, budget_bytes: int | None) -> Iterator[None]:
        """Keep what the allocator reserves within a budget; at the end restore the earlier limit."""
        if budget_bytes is None:
            yield
            return
        total = torch.cuda.mem_get_info(self._device)[1]
        before = torch.cuda.get_per_process_memory_fraction(self._device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), self._device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self._device)
