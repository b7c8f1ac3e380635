"""Surroundings of every test: the CPU unless there is a GPU, one thread, nothing inherited or left behind."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.launch import devices

# A shell's background job ignores Ctrl-C, and one under nohup the end of its terminal; tests are about these signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Before torch or deepspeed is imported anywhere; child processes inherit it.
for name in (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MAKEFLAGS",
    "MFLAGS",
    "MAKELEVEL",
):
    os.environ.pop(name, None)
os.environ["OMP_NUM_THREADS"] = "1"  # pytest-xdist runs as many tests at a time as there are cores
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
if not devices():
    os.environ["DS_ACCELERATOR"] = "cpu"
# The shared folder may hold the lock file of a killed build, which the next one waits for without end.
os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp(prefix="torch_extensions_")
atexit.register(shutil.rmtree, os.environ["TORCH_EXTENSIONS_DIR"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _linear_as_it_was() -> Iterator[None]:
    """ZeRO-3 exchanges torch's linear for its own, for the rest of the process: a test's engine is no other test's."""
    functional = sys.modules.get("torch.nn.functional")
    before = functional.linear if functional else None
    yield
    if functional:
        functional.linear = before


@pytest.fixture(autouse=True)
def _engines_released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hooks that autograd holds keep a ZeRO engine's tensors alive for ever, and a meter would count them."""
    engine = sys.modules.get("training.engine")
    made: list[weakref.ref[Any]] = []  # what goes by itself is to go
    if engine:
        plain = engine.Engine.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            made.append(weakref.ref(self))
            plain(self, *args, **kwargs)

        monkeypatch.setattr(engine.Engine, "__init__", init)
    yield
    for one in made:
        if (alive := one()) is not None:
            with contextlib.suppress(Exception):  # one that was never whole, or is released
                alive.release()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parents[1]
