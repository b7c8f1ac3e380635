"""What is planned for: a GPU of the catalogue, the one in this machine, or this machine's CPU, and what it may use."""

from __future__ import annotations

from dataclasses import dataclass

from training import hardware
from training.planning import cuda_layout, gpus
from training.planning.gpus import find as gpu


@dataclass(frozen=True)
class Device:
    """What is planned for. budget_bytes None: no limit is known."""

    kind: str  # "cpu" or "cuda"
    name: str
    budget_bytes: int | None
    host_budget_bytes: int | None = None
    gpu: gpus.GPU | None = None  # None on a CPU, and for a GPU whose speed nobody asks for


def device(
    gpu_name: str | None = None, budget_bytes: int | None = None, host_budget_bytes: int | None = None
) -> Device:
    """The named GPU, else the one in this machine, else this machine's CPU (which needs a budget).

    A budget for a GPU is what the allocator may reserve, as train.py limits it; without one everything but the CUDA
    context may be reserved. Raises ValueError naming the catalogue.
    """
    found = gpu(gpu_name) if gpu_name else gpus.in_this_machine()
    if found is not None:
        limit = found.memory_bytes - cuda_layout.CONTEXT_BYTES
        limit = limit if budget_bytes is None else min(budget_bytes, limit)
        return Device("cuda", found.name, limit, host_budget_bytes or found.host_bytes, found)
    if budget_bytes is None:
        raise ValueError(
            "no GPU in this machine: name one with GPU= (" + ", ".join(gpus.CATALOGUE) + ") or a budget for this "
            "machine's CPU with BUDGET=24GiB"
        )
    return Device("cpu", hardware.cpu_name(), budget_bytes, host_budget_bytes)
