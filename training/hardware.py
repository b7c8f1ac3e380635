"""What this machine is and how fast it could compute at best: the denominator of MFU."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import torch

from training.planning import gpus


def device_name(device: torch.device) -> str:
    """The GPU's or the CPU's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name()


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown CPU"


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that a perfect program would reach: for a GPU at bf16 what the catalogue says, None if nothing.

    A CPU has no data sheet: the best of a few matrix products stands in.
    """
    if device.type != "cuda":
        return measured_matmul_flops(dtype)
    try:
        gpu = gpus.in_this_machine()
    except ValueError:  # not in the catalogue
        return None
    return gpu.bf16_flops if gpu and dtype == torch.bfloat16 else None


def measured_matmul_flops(dtype: torch.dtype, size: int = 768, tries: int = 4) -> float:
    """FLOP/s of the fastest of `tries` square matrix products on the CPU, after one to warm up."""
    a = torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(tries + 1):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
