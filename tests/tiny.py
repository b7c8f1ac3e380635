"""The smallest run that has everything: shared by the tests of engine, loop and saved state."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from training import recipe
from training.engine import Batch

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


def write_text(folder: Path) -> Path:
    """A few documents to train on."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(40):
        lines = [f"def function_{i}_{j}(x): return x * {j} + {i}  # line {j} of file {i}" for j in range(30)]
        (folder / f"file_{i}.py").write_text("\n".join(lines))
    return folder


def command(*words: str | Path) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *map(str, words)]


def run(*words: str | Path, timeout_s: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python train.py words`, to its end."""
    env = os.environ | environment
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=timeout_s, env=env)
