"""The GPUs that `make plan` knows, each number with its source.

Memory is what CUDA or ROCm reports as the device's total, as users' machines show it: less than the data sheet's round
size by what the driver and error correction keep. Compute is dense bf16 with float32 accumulation, without sparsity;
speeds are the data sheet's.
Host memory is no property of a GPU: it is what machines and cloud instances around one such GPU typically have, per
GPU, and is only a default for `HOST_BUDGET=`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

GIB, MIB, GB = 2**30, 2**20, 10**9

# NVIDIA, "NVIDIA H100 Tensor Core GPU" data sheet, and the others likewise, as published on nvidia.com and amd.com.
PCIE4_X16, PCIE5_X16 = 25 * GB, 50 * GB  # bytes/s each way that copies reach of 31.5 and 63 GB/s; about +-15%


@dataclass(frozen=True)
class GPU:
    """One accelerator. Speeds are peaks; what kernels reach of them is in training/planning/roofline.py."""

    name: str
    title: str  # as torch.cuda.get_device_name contains it
    memory_bytes: int  # in total, as CUDA or ROCm reports it
    bf16_flops: float  # FLOP/s, dense
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to host memory, one direction, pinned
    host_bytes: int  # typical host memory for each GPU
    source: str


CATALOGUE = {
    gpu.name: gpu
    for gpu in (
        GPU("rtx-3090", "RTX 3090", int(23.69 * GIB), 71e12, 936e9, PCIE4_X16, 64 * GIB,
            "NVIDIA Ampere GA102 whitepaper v2: 24 GB, 71 TFLOPS bf16 with fp32 accumulate, 936 GB/s, PCIe 4.0 x16"),
        GPU("rtx-4090", "RTX 4090", int(23.64 * GIB), 165.2e12, 1008e9, PCIE4_X16, 64 * GIB,
            "NVIDIA Ada whitepaper v2: 24 GB, 165.2 TFLOPS bf16 with fp32 accumulate, 1008 GB/s, PCIe 4.0 x16"),
        GPU("rtx-5090", "RTX 5090", int(31.36 * GIB), 209.5e12, 1792e9, PCIE5_X16, 64 * GIB,
            "NVIDIA RTX Blackwell whitepaper: 32 GB, 209.5 TFLOPS bf16 with fp32 accumulate, 1792 GB/s, PCIe 5.0 x16"),
        GPU("l40s", "L40S", int(44.42 * GIB), 362e12, 864e9, PCIE4_X16, 128 * GIB,
            "NVIDIA L40S data sheet: 48 GB with ECC, 362 TFLOPS bf16 dense, 864 GB/s, PCIe 4.0 x16"),
        GPU("a100-40gb", "A100-SXM4-40GB", int(39.39 * GIB), 312e12, 1555e9, PCIE4_X16, 128 * GIB,
            "NVIDIA A100 data sheet: 40 GB HBM2, 312 TFLOPS bf16 dense, 1555 GB/s, PCIe 4.0 x16"),
        GPU("a100-80gb", "A100-SXM4-80GB", int(79.15 * GIB), 312e12, 2039e9, PCIE4_X16, 128 * GIB,
            "NVIDIA A100 data sheet (SXM): 80 GB HBM2e, 312 TFLOPS bf16 dense, 2039 GB/s, PCIe 4.0 x16"),
        GPU("h100-80gb", "H100", int(79.11 * GIB), 989.4e12, 3350e9, PCIE5_X16, 224 * GIB,
            "NVIDIA H100 data sheet (SXM): 80 GB HBM3, 989.4 TFLOPS bf16 dense, 3.35 TB/s, PCIe 5.0 x16"),
        GPU("h200", "H200", int(139.81 * GIB), 989.4e12, 4800e9, PCIE5_X16, 224 * GIB,
            "NVIDIA H200 data sheet (SXM): 141 GB HBM3e, 989.4 TFLOPS bf16 dense, 4.8 TB/s, PCIe 5.0 x16"),
        GPU("b200", "B200", int(178.35 * GIB), 2250e12, 8000e9, PCIE5_X16, 224 * GIB,
            "NVIDIA DGX B200 data sheet: 8 x 180 GB HBM3e, 72 PFLOPS fp8 sparse = 2.25 bf16 dense each, 64 TB/s"),
        GPU("mi300x", "MI300X", int(191.98 * GIB), 1307.4e12, 5300e9, PCIE5_X16, 224 * GIB,
            "AMD Instinct MI300X data sheet: 192 GB HBM3, 1307.4 TFLOPS bf16 dense, 5.3 TB/s, PCIe 5.0 x16"),
    )
}  # fmt: skip


def find(name: str) -> GPU:
    """The catalogue's entry; ValueError lists them all and names the nearest."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key in CATALOGUE:
        return CATALOGUE[key]
    alike = [known for known in CATALOGUE if known.startswith(key)]
    near = alike or difflib.get_close_matches(key, CATALOGUE, n=1, cutoff=0.3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    known = ", ".join(CATALOGUE)
    raise ValueError(f"GPU {name!r} is not in the catalogue{hint} Known: {known}. For any other, write BUDGET=24GiB")


def in_this_machine() -> GPU | None:
    """The GPU here, with the memory that it really has; None without one. ValueError when its speed is not known."""
    import torch  # here, so that a wrong name is answered without waiting for it

    if not torch.cuda.is_available():
        return None
    title, total = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
    alike = [gpu for gpu in CATALOGUE.values() if gpu.title.split("-")[0] in title]
    if not alike:
        raise ValueError(f"this machine's {title} is not in the catalogue ({', '.join(CATALOGUE)}); name the nearest")
    nearest = min(alike, key=lambda gpu: abs(gpu.memory_bytes - total))
    return GPU(**{**vars(nearest), "memory_bytes": total})
