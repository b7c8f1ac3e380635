"""The guard of mode `budget`: a smaller share of memory can peak higher, and then the larger share is taken.

torch.compile's partitioner counts what is kept, not what backward needs while it computes that again. So one real
layer is run at the share that was asked for and at some above it, and the peak of all layers is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from model.modes import Mode
from training.choosing.calibration import Layer, Shape
from training.memory import Meter

SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0)
TRIES = 3  # shares above the one that was asked for


def guarded(mode: Mode, shape: Shape, num_layers: int, device: torch.device) -> tuple[Mode, str]:
    """The mode with the least peak of those that keep as much or more, and what to say of it ("": nothing)."""
    shares = [mode.fraction, *(share for share in SHARES if share > mode.fraction)][: 1 + TRIES]
    peaks = {}
    with _quiet(device):
        for share in shares:
            kept, extra = layer_bytes(shape, replace(mode, fraction=share), device)
            peaks[share] = num_layers * kept + extra
    best = min(shares, key=lambda share: peaks[share])  # of equals the one that was asked for
    if best == mode.fraction:
        return mode, ""
    better = replace(mode, fraction=best)
    higher = f"{peaks[mode.fraction]:,} bytes of all layers, not {peaks[best]:,}"
    return better, f"mode {mode} would peak above {better}, which computes less again: {higher}; {better} is used"


def layer_bytes(shape: Shape, mode: Mode, device: torch.device) -> tuple[int, int]:
    """What one layer keeps for backward under a mode, and its peak above that."""
    layer = Layer(shape, device)
    with Meter(device=device) as meter:
        before = meter.live_bytes
        meter.reset_peak()
        out = layer.forward(mode)
        kept = meter.live_bytes - before - out.nbytes
        out.backward(layer.gradient)
        peak = meter.peak_bytes - before
    layer.forget()
    return kept, peak - kept


@contextmanager
def _quiet(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    if device.type == "cuda":
        torch.cuda.empty_cache()
