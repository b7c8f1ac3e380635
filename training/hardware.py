"""What this machine is and how fast it could compute at best: the denominator of MFU."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import torch

# Dense bf16 tensor core FLOP/s without sparsity, from the makers' data sheets; the first name found in the
# device's name counts.
PEAK_BF16_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "MI300X": 1307e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


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
    """FLOP/s that a perfect program would reach: from the data sheet for a known GPU at bf16, else None.

    A CPU has no such sheet: the best of a few matrix products stands in.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = next((flops for part, flops in PEAK_BF16_FLOPS.items() if part in name), None)
        return known if dtype == torch.bfloat16 else None
    return measured_matmul_flops(dtype)


def measured_matmul_flops(dtype: torch.dtype, size: int = 768, tries: int = 4) -> float:
    """FLOP/s of the fastest of `tries` square matrix products on the CPU, after one to warm up."""
    a = torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(tries + 1):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
