"""The smallest run that has everything: shared by the tests of engine, loop and saved state."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from training import metrics, recipe
from training.engine import Batch, Engine

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 300
# Overrides that make any recipe tiny.
SETTINGS = (
    "seq_length=16",
    "micro_batch_size=1",
    "global_batch_size=4",
    "steps=6",
    "precision=fp32",
    "budget=null",
    "recompute=none",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.num_query_groups=null",
    "model.ffn_hidden_size=64",
    "model.vocab_size=null",
    f"data.tokenizer_vocab_size={VOCAB}",
    "data.workers=1",
    "optimizer.lr=1e-2",
    "optimizer.warmup_steps=2",
    "evaluation.every_steps=3",
    "evaluation.batches=2",
    "checkpoint.every_steps=2",
)


TORCH = ("engine.name=torch", "engine.deepspeed_config=null")


def load(*overrides: str, name: str = "quickstart") -> recipe.Recipe:
    return recipe.load(name, [*SETTINGS, *overrides])


def batches(step: int, accumulation: int, rank: int = 0, size: int = 1, length: int = 16) -> Iterator[Batch]:
    """Random micro-batches, the same over all ranks for any number of them; some positions predict nothing."""
    for j in range(accumulation):
        number = j * size + rank
        random = torch.Generator().manual_seed(1000 * step + number)
        stream = torch.randint(0, 50, (1, length + 1), generator=random)
        targets = stream[:, 1:].clone()
        targets[:, : number % 3] = -100
        yield stream[:, :-1], targets


@pytest.fixture(autouse=True)
def linear_as_it_was() -> Iterator[None]:
    """ZeRO-3 exchanges torch's linear for its own, for the rest of the process."""
    before = torch.nn.functional.linear
    yield
    torch.nn.functional.linear = before


_data: list[str] = []


def little_data(temporary: pytest.TempPathFactory) -> list[str]:
    """Overrides for a few documents to train on, written once."""
    if not _data:
        folder = temporary.mktemp("little")
        text = folder / "text"
        text.mkdir()
        for i in range(40):
            lines = [f"def function_{i}_{j}(x): return x * {j} + {i}  # line {j} of {i}" for j in range(30)]
            (text / f"file_{i}.py").write_text("\n".join(lines))
        _data.extend([f"data.sources=[{text}]", f"data.cache_dir={folder / 'cache'}"])
    return _data


@contextlib.contextmanager
def small_disk(path: Path, size_mib: int) -> Iterator[None]:
    """A disk of its own at `path`; skips the test where there is no right to mount one."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(path)]
    try:
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("no right to mount a small disk here")
    except FileNotFoundError:
        pytest.skip("no mount command here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def start(run_dir: Path, data: list[str], *overrides: str, name: str = "quickstart") -> int:
    """`train.py` in this process; returns the exit code."""
    return train.main([name, *SETTINGS, *data, *overrides, "--run-dir", str(run_dir)])


def interrupted(run_dir: Path, data: list[str], step: int, *overrides: str) -> int:
    """The same, with a SIGTERM during step `step`."""
    original = Engine.train_step

    def stepped(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        if engine.step_number + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(engine, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "train_step", stepped)
        return start(run_dir, data, *overrides)


def curve(run_dir: Path) -> list[tuple[Any, ...]]:
    """What two runs that are the same agree on, line by line."""
    keys = ("step", "tokens", "loss", "lr", "grad_norm", "val_loss")
    return [tuple(line.get(key) for key in keys) for line in metrics.read(run_dir / "metrics.jsonl")]
