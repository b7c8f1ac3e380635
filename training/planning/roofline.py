"""Step time from the FLOPs and bytes of a trace: what the slower of arithmetic and memory needs, by class of kernel.

Nothing here is fitted to a measurement of ours. The shares of peak that kernels reach are round numbers from published
measurements of large shapes; small shapes, launch latency, data loading and communication between GPUs are left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from training.hardware import measured_matmul_flops
from training.planning.work import Work

# What kernels reach of the peak. gemm: cuBLAS on large bf16 shapes. attention: FlashAttention-2, Dao 2023
# (arXiv:2307.08691), figures 4 to 6: up to 73% of an A100's peak forward and 63% backward, and about half of that
# share on an H100, whose peak it was not written for. memory: STREAM-like kernels.
EFFICIENCY = {"gemm": 0.70, "attention": 0.55, "attention_backward": 0.45, "memory": 0.80}
HOPPER_ATTENTION = {"attention": 0.40, "attention_backward": 0.35}
HOPPER = ("h100-80gb", "h200", "b200")
CPU_ADAM_BYTES_PER_S = 20e9  # AdamW on the host reads and writes about 28 bytes per parameter; one socket's share
GPU_ERROR, CPU_ERROR = 0.30, 0.50  # of step time, up or down, on a machine that nothing else uses
LEFT_OUT = "kernel launches, small-shape inefficiency, data loading, communication between ranks, clock throttling"


@dataclass(frozen=True)
class Speed:
    """What a device does in a second."""

    flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float | None  # None: host memory is the device's own
    efficiency: Mapping[str, float]
    error: float  # relative error band of a step time


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, and where they go."""

    compute_s: float
    stalled_s: float  # copies to and from the host that nothing hides
    optimizer_s: float
    by_kernel_s: dict[str, float]

    @property
    def step_s(self) -> float:
        return self.compute_s + self.stalled_s + self.optimizer_s


@lru_cache(maxsize=4)
def cpu_speed(dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s of the best of a few matrix products and bytes/s of the best of a few copies, measured here and now."""
    source = torch.ones(2**24, dtype=torch.uint8)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(5):
        start_s = time.perf_counter()
        target.copy_(source)
        best_s = min(best_s, time.perf_counter() - start_s)
    return measured_matmul_flops(dtype), 2 * source.numel() / best_s


def kernel_seconds(work: Mapping[str, Work], speed: Speed) -> dict[str, float]:
    """Seconds by kernel class: the larger of arithmetic and memory traffic."""
    memory = speed.memory_bytes_per_s * speed.efficiency["memory"]
    return {
        kind: max(w.flops / (speed.flops * speed.efficiency[kind]) if w.flops else 0.0, w.nbytes / memory)
        for kind, w in work.items()
    }


def step_time(
    work: Mapping[str, Mapping[str, Work]],
    passes: int,
    offloaded_bytes: float,
    optimizer_bytes: float,
    optimizer_link_bytes: float,
    optimizer_on_host: bool,
    speed: Speed,
) -> StepTime:
    """The time of a step of `passes` micro-batches.

    offloaded_bytes: activations copied out in forward and back in backward, in each pass, beside the computation of
    the same phase. optimizer_bytes: read and written by the update. optimizer_link_bytes: gradients out, weights in.
    """
    by_kernel: dict[str, float] = {}
    phase_s = {}
    for phase, kernels in work.items():
        seconds = kernel_seconds(kernels, speed)
        phase_s[phase] = sum(seconds.values())
        for kind, s in seconds.items():
            by_kernel[kind] = by_kernel.get(kind, 0.0) + s * passes
    forward, backward = phase_s.get("forward", 0.0), phase_s.get("backward", 0.0) + phase_s.get("recompute", 0.0)
    copy_s = offloaded_bytes / speed.link_bytes_per_s if speed.link_bytes_per_s else 0.0
    stalled = max(0.0, copy_s - forward) + max(0.0, copy_s - backward)
    if optimizer_on_host and speed.link_bytes_per_s:
        optimizer = optimizer_bytes / CPU_ADAM_BYTES_PER_S + optimizer_link_bytes / speed.link_bytes_per_s
    else:
        optimizer = optimizer_bytes / (speed.memory_bytes_per_s * speed.efficiency["memory"])
    return StepTime((forward + backward) * passes, stalled * passes, optimizer, by_kernel)
