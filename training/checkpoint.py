"""Saved training state: written whole or not at all, checked by its sums before it is used, the newest few kept.

    <run>/checkpoints/step-00000100/rank-0.pt     tensors and plain values of one rank (torch.save)
                                    rank-1.pt
                                    manifest.json  step, layout, and size and SHA-256 of every rank's file

A folder of this name is complete: it is written under another name, flushed to disk, and renamed at the end.
Loading never runs code: torch.load with weights_only=True.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from training.run import USAGE, RunError
from training.world import World

FORMAT = 1
_CHUNK = 1 << 22


class _Writer:
    """A file that keeps the sum of what passes through, and its own error, which torch.save would hide."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sum = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.sum.update(data)
        self.size += written
        return written

    def flush(self) -> None:
        self.file.flush()


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in `folder`, newest first."""
    digits = [p.name[5:] for p in folder.glob("step-*") if p.is_dir()]
    steps = {int(n) for n in digits if n.isdecimal() and n.isascii() and path_of(folder, int(n)).name == f"step-{n}"}
    return sorted(steps, reverse=True)


def save(folder: Path, step: int, payload: dict[str, Any], *, world: World, layout: dict[str, Any], keep: int) -> Path:
    """Write every rank's `payload` (tensors and plain values) as the checkpoint of `step`; all ranks call it.

    Afterwards the `keep` newest remain; the old ones go only when the new one is safe. Raises RunError, on every
    rank, when the disk is full or not writable; what was there before is then untouched.
    """
    final, temporary = path_of(folder, step), folder / f".saving-step-{step:08d}"
    problem = None
    try:
        if world.is_main:
            _remove(folder.glob(".saving-*"))
            temporary.mkdir(parents=True)
    except OSError as error:
        problem = _explain(error, folder)
    problem = world.agree(problem)
    if problem is None:
        try:
            entry = _write(temporary / f"rank-{world.rank}.pt", payload)
            _write_json(temporary / f"rank-{world.rank}.json", entry)
        except OSError as error:
            problem = _explain(error, folder)
        problem = world.agree(problem)
    if problem is None:
        try:
            if world.is_main:
                _complete(temporary, final, step, layout, world.size)
                _remove(path_of(folder, old) for old in steps_in(folder)[keep:])
                _remove(folder.glob(".damaged-*"))
        except OSError as error:
            problem = _explain(error, folder)
        problem = world.agree(problem)
    if problem is not None:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        left = steps_in(folder)
        kept = f"the checkpoint of step {left[0]} is intact" if left else "there is no earlier checkpoint"
        raise RunError(f"the checkpoint of step {step} could not be saved: {problem}; {kept}")
    return final


def load_latest(
    folder: Path, *, world: World, layout: dict[str, Any], warn: Callable[[str], None]
) -> dict[str, Any] | None:
    """This rank's payload of the newest undamaged checkpoint, its tensors still on disk (mmap); None when there is
    none at all. All ranks call it and get the same step.

    A damaged one is named through `warn` and passed over. Raises RunError when all are damaged, when the newest was
    saved under another layout (engine, ZeRO stage, ranks, precision), or when there can be none.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is no folder, so that nothing can be saved in it; move it away")
    steps = steps_in(folder)
    for step in steps:
        path = path_of(folder, step)
        damage = world.agree(_damage(path, step, world.rank, layout))
        if damage is None:
            file = path / f"rank-{world.rank}.pt"
            with _disable_current_modes():  # a mapped file is no memory of the device: a meter must not see it
                return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        warn(f"checkpoint {path} is damaged ({damage}); using the one before it")
        if world.is_main:
            path.rename(path.with_name(f".damaged-{path.name}"))  # does not count as kept; goes with the next save
    if steps or any(folder.glob(".damaged-*")):
        raise RunError(f"every checkpoint in {folder} is damaged; remove that folder to train from the start")
    return None


def _damage(path: Path, step: int, rank: int, layout: dict[str, Any]) -> str | None:
    """What is wrong with this rank's part, None when nothing is."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        found, entries = manifest["layout"], manifest["files"]
        if manifest["step"] != step or manifest["format"] != FORMAT:
            return f"its manifest is of step {manifest['step']}, format {manifest['format']}"
        if not isinstance(found, dict) or not isinstance(entries, dict):
            return "its manifest is not readable"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its manifest is not readable: {type(error).__name__}"
    if found != layout:
        keys = [k for k in {**found, **layout} if found.get(k) != layout.get(k)]
        differ = ", ".join(f"{k} {found.get(k)} (this run: {layout.get(k)})" for k in keys)
        raise RunError(
            f"checkpoint {path} was saved with {differ}. Continue with the same, or start "
            "anew in another folder (RUN_DIR=, --run-dir).",
            USAGE,
        )
    file = path / f"rank-{rank}.pt"
    try:
        entry = entries[file.name]
        if file.stat().st_size != entry["bytes"]:
            return f"{file.name} has {file.stat().st_size} bytes instead of {entry['bytes']}"
        if _sum(file) != entry["sha256"]:
            return f"{file.name} does not match its checksum"
    except (OSError, KeyError, TypeError) as error:
        return f"{file.name} is not readable: {type(error).__name__}"
    return None


def _write(path: Path, payload: dict[str, Any]) -> dict[str, Any]:
    with path.open("wb") as file:
        writer = _Writer(file)
        try:
            torch.save(payload, cast(BinaryIO, writer))
            file.flush()
            os.fsync(file.fileno())
        except RuntimeError:
            if writer.error is not None:
                raise writer.error from None
            raise
    return {"bytes": writer.size, "sha256": writer.sum.hexdigest()}


def _write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _complete(temporary: Path, final: Path, step: int, layout: dict[str, Any], ranks: int) -> None:
    files = {}
    for rank in range(ranks):
        entry = temporary / f"rank-{rank}.json"
        files[f"rank-{rank}.pt"] = json.loads(entry.read_text(encoding="utf-8"))
        entry.unlink()
    manifest = {"format": FORMAT, "step": step, "layout": layout, "files": files}
    _write_json(temporary / "manifest.json", manifest)
    _flush_folder(temporary)
    temporary.rename(final)
    _flush_folder(final.parent)


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _explain(error: OSError, folder: Path) -> str:
    reason = error.strerror or str(error)
    try:
        free = f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free there"
    except OSError:
        free = "it cannot be read"
    return f"{reason} in {folder} ({free})"


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of the random numbers that dropout draws from on this rank."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"].clone())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].clone(), device)
