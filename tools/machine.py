"""What trials run on, found out without touching a GPU from this process: it would keep memory there."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from typing import Any

from tools import launch
from training.recipe import RecipeError

_ASK = (
    "import json, torch; print(json.dumps([torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1],"
    " torch.version.cuda]))"
)


def has_gpu() -> bool:
    return bool(launch.devices())


def ranks() -> int:
    return len(launch.devices()) or 1


def facts(processes: int | None = None) -> dict[str, Any]:
    """Device, versions and ranks: what a trial's answer depends on besides recipe and code."""
    if has_gpu():
        told = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=120, check=True)
        device, memory_bytes, cuda = json.loads(told.stdout.strip().splitlines()[-1])
    else:
        from training.hardware import cpu_name

        device, memory_bytes, cuda = cpu_name(), None, None
    return {
        "device": device,
        "device_memory_bytes": memory_bytes,
        "cuda": cuda,
        "world_size": processes or ranks(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "deepspeed": importlib.metadata.version("deepspeed"),
    }


def memory_of(gpu: str) -> int:
    """Bytes that a run may use on a GPU, by its name in the planner's catalogue. Raises RecipeError."""
    from training.planning import planner

    try:
        budget_bytes = planner.device(gpu).budget_bytes
    except ValueError as error:
        raise RecipeError(f"--gpu {gpu}: {error}") from None
    assert budget_bytes is not None
    return budget_bytes
