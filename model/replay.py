"""Running code a second time as it ran the first time: random numbers, autocast, and knowing that it is again."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Activity:
    """What a model's mode has done since it was applied."""

    recomputed: int = 0  # second runs, of a module or of a group of layers
    offloaded_bytes: int = 0  # copied to host memory
    compiled: bool = False  # recompute was handed to torch.compile, where nobody counts it


class _Thread(threading.local):
    second_runs = 0


_thread = _Thread()


class second_run:  # noqa: N801 - used like a function
    """While open, code runs a second time for backward; `counted.recomputed` grows by one at each entry."""

    def __init__(self, counted: Activity | None = None) -> None:
        self.counted = counted

    def __enter__(self) -> None:
        _thread.second_runs += 1
        if self.counted is not None:
            self.counted.recomputed += 1

    def __exit__(self, *_: Any) -> None:
        _thread.second_runs -= 1


def is_recomputing() -> bool:
    """Whether the code that asks is being run a second time: counters and logs should stay silent then."""
    return _thread.second_runs > 0


class RandomState:
    """The generators' state on CPU and on `device`, here and now."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


def autocast_state(device_type: str) -> Callable[[], AbstractContextManager]:
    """Captures autocast as it is here, on or off; the result enters it again."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    cache = torch.is_autocast_cache_enabled()

    def enter() -> AbstractContextManager:
        if not enabled and not torch.is_autocast_enabled(device_type):
            return nullcontext()
        return torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache)

    return enter
