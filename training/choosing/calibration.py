"""What a layer's modes cost in time on this device: a real layer, run a few times under each, and remembered on disk.

Of several runs the fastest counts: other programs on the machine only ever add time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from model import recompute, tiling
from model.gpt import GPT, GPTConfig
from model.modes import Mode, parse
from model.rowwise import rope_table
from training import hardware, run
from training.schema import ROOT

ROUNDS = 5  # that count, after one to warm up
ENOUGH_S = 8.0  # no further round is begun after so many seconds, once two are done
COPY_BYTES = 64 * 2**20
ADAM_ELEMENTS = 2**22


@dataclass(frozen=True)
class Times:
    """Seconds on one device for one shape.

    layers: forward and backward of one layer by mode; head: forward and backward of norm, head and loss.
    copy: a byte from the device to the host or back, the slower of the two. adam: a parameter in the optimizer step.
    """

    layers: dict[str, tuple[float, float]]
    head_s: float
    copy_s_per_byte: float
    adam_s_per_element: float
    copies_overlap: bool


@dataclass(frozen=True)
class Shape:
    """What is timed: one layer of `config`, under tiles."""

    config: GPTConfig
    tiles: tiling.Tiles
    dtype: torch.dtype
    micro_batch_size: int
    seq_length: int

    def facts(self, device: torch.device) -> dict[str, Any]:
        """All that the times depend on."""
        return {
            "config": asdict(replace(self.config, num_layers=1)),
            "tiles": asdict(self.tiles),
            "dtype": str(self.dtype),
            "shape": [self.micro_batch_size, self.seq_length],
            "device": hardware.device_name(device),
            "threads": torch.get_num_threads() if device.type == "cpu" else None,
            "torch": torch.__version__,
            "code": _code(),
        }


def times(shape: Shape, modes: Sequence[Mode], device: torch.device, cache: Path | None) -> Times:
    """Times of one layer under each of `modes`, on `device`: from `cache`, a folder, or measured and put there.

    A mode that finds no memory is left out. What is measured fills no gradient and no generator of the caller.
    """
    facts = shape.facts(device)
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    file = cache / f"{key}.json" if cache else None
    known = _read(file)
    missing = [mode for mode in modes if str(mode) not in known.get("layers", {})]
    if missing or not known:
        measured = _measure(shape, missing, device)
        layers = {**known.get("layers", {}), **measured.pop("layers")}
        known = {"facts": facts, **measured, **{k: v for k, v in known.items() if k != "facts"}, "layers": layers}
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            run.write_json(file, known)
    return Times(
        {name: (forward, backward) for name, (forward, backward) in known["layers"].items()},
        known["head_s"],
        known["copy_s_per_byte"],
        known["adam_s_per_element"],
        device.type == "cuda",
    )


def _read(file: Path | None) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError):
        return {}


def _code() -> str:
    """A hash of the code that is timed."""
    total = hashlib.sha256()
    for path in sorted((ROOT / "model").glob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def _measure(shape: Shape, modes: Sequence[Mode], device: torch.device) -> dict[str, Any]:
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = Layer(shape, device)
        seconds: dict[str, list[tuple[float, float]]] = {str(mode): [] for mode in modes}
        head: list[float] = []
        start = time.perf_counter()
        for number in range(1 + ROUNDS):
            if number > 2 and time.perf_counter() - start > ENOUGH_S:
                break
            for name in list(seconds):
                try:
                    seconds[name].append(layer.run(parse(name)))
                except torch.OutOfMemoryError:
                    del seconds[name]
                    layer.forget()
            try:
                head.append(layer.run_head())
            except torch.OutOfMemoryError:
                layer.forget()
        layers = {name: [min(s[i] for s in each[1:]) for i in (0, 1)] for name, each in seconds.items()}
        del layer
        facts = {
            "layers": layers,
            "head_s": min(head[1:], default=0.0),
            "copy_s_per_byte": _copy_s(device) / COPY_BYTES,
            "adam_s_per_element": _adam_s(device) / ADAM_ELEMENTS,
        }
    if cuda:
        torch.cuda.empty_cache()
    return facts


class Layer:
    """A model of one layer and the tensors around it."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.device = device
        before = torch.get_default_dtype()
        torch.set_default_dtype(shape.dtype)
        try:
            with torch.device(device):
                self.model = GPT(replace(shape.config, num_layers=1))
        finally:
            torch.set_default_dtype(before)
        tiling.apply(self.model, **asdict(shape.tiles))
        size = (shape.micro_batch_size, shape.seq_length, shape.config.hidden_size)
        self.x = torch.randn(size, dtype=shape.dtype, device=device).requires_grad_()
        self.gradient = torch.randn_like(self.x)
        self.targets = torch.zeros(size[:2], dtype=torch.long, device=device)
        self.rope = None
        if shape.config.position_embedding == "rope":
            self.rope = rope_table(shape.seq_length, shape.config.head_dim, shape.config.rope_theta, device)

    def run(self, mode: Mode) -> tuple[float, float]:
        try:
            start = self._now()
            out = self.forward(mode)
            middle = self._now()
            out.backward(self.gradient)
            return middle - start, self._now() - middle
        finally:
            self.forget()

    def forward(self, mode: Mode) -> torch.Tensor:
        recompute.apply(self.model, mode)
        return self.model.run_layers(self.x, self.rope)

    def run_head(self) -> float:
        start = self._now()
        self.model.head(self.model.norm(self.x), self.targets).backward()
        end = self._now()
        self.forget()
        return end - start

    def forget(self) -> None:
        self.x.grad = None
        self.model.zero_grad(set_to_none=True)
        recompute.apply(self.model, "none")

    def _now(self) -> float:
        return _now(self.device)


def _now(device: torch.device) -> float:
    """A clock that what is timed moves, and other programs do not: on a CPU the seconds this thread had of it."""
    if device.type != "cuda":
        return time.thread_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def _fastest(function: Callable[[], Any], device: torch.device, tries: int = 4) -> float:
    best = float("inf")
    for _ in range(tries):
        start = _now(device)
        function()
        best = min(best, _now(device) - start)
    return best


def _copy_s(device: torch.device) -> float:
    cuda = device.type == "cuda"
    there = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    here = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=cuda)
    out = _fastest(lambda: here.copy_(there, non_blocking=True), device)
    back = _fastest(lambda: there.copy_(here, non_blocking=True), device)
    return max(out, back)


def _adam_s(device: torch.device) -> float:
    weight = torch.ones(ADAM_ELEMENTS, device=device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    adam = torch.optim.AdamW([weight], fused=True)
    return _fastest(adam.step, device)


def folder(cache_dir: str) -> Path:
    """Where measured times are kept, beside the prepared data."""
    path = Path(os.path.expanduser(cache_dir))
    return (path if path.is_absolute() else ROOT / path) / "calibration"
