"""A run's folder and the ways a run ends: recipe, environment, lock, result; signals and exit codes."""

from __future__ import annotations

import datetime
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch
import yaml

from training import strict_yaml
from training.recipe import Recipe, RecipeError
from training.records import read_object
from training.schema import ROOT

# Exit codes, documented in docs/training.md.
FAILED = 1  # a fault: of the machine (disk full, a damaged checkpoint) or of the program
USAGE = 2  # a setting that cannot be used; nothing was started
OUT_OF_MEMORY = 3  # device memory, status oom
HOST_OUT_OF_MEMORY = 4  # host memory, status host_oom
NOT_FINITE = 5  # loss or gradient is NaN or infinite; the weights are those before the step
INTERRUPTED = 6  # SIGTERM or Ctrl-C; the state was saved

# What may differ when a run is continued: none of it changes what is learned.
FREE_KEYS: tuple[str, ...] = ("name", "recompute", "tiles", "budget", "host_budget", "evaluation", "checkpoint", "log")
FREE_KEYS += ("sweep", "targets", "data.cache_dir", "data.workers")
PACKAGES = ("torch", "deepspeed", "sentencepiece", "tensorboard", "pydantic", "numpy")
LOCK_WAIT_S = 60.0


class RunError(RuntimeError):
    """A failure whose message says all there is to say: no traceback is shown. `exit_code` ends the process."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RunFolder:
    """runs/<id>: recipe.yaml, environment.json, metrics.jsonl, tb/, checkpoints/, result.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.result = path / "result.json"
        self._lock: TextIO | None = None

    def open(self, recipe: Recipe) -> dict[str, Any] | None:
        """Claim the folder for this recipe, by one process only; the result if the run is finished, else None.

        Raises RecipeError when the folder holds a run of another recipe or cannot be written, RunError when another
        process keeps training in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._check_recipe(recipe)
            finished = self.finished(recipe)
            if finished is None:
                self.result.unlink(missing_ok=True)
                write_whole(self.path / "recipe.yaml", recipe.to_yaml())
            return finished
        except OSError as error:
            problem = f"run folder {self.path}: {error.strerror}; RUN_DIR= (--run-dir) chooses another"
            raise RecipeError(problem) from None

    def close(self) -> None:
        """Let another process train here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def finished(self, recipe: Recipe) -> dict[str, Any] | None:
        result = read_object(self.result)
        done = result.get("status") == "completed" and result.get("steps") == recipe.steps
        return result if done else None

    def write_environment(self, **facts: Any) -> None:
        write_json(self.path / "environment.json", environment() | facts)

    def write_result(self, record: dict[str, Any]) -> bool:
        """Write result.json unless another rank has: the first to fail knows the cause. Whether it was this one."""
        mine = self.path / f".result-{os.getpid()}"
        try:
            write_json(mine, record)
            os.link(mine, self.result)
        except FileExistsError:
            return False
        finally:
            mine.unlink(missing_ok=True)
        return True

    def _take_lock(self) -> None:
        self._lock = (self.path / ".lock").open("w")
        give_up_s = time.monotonic() + LOCK_WAIT_S
        waiting = False
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > give_up_s:
                    message = f"another process is training in {self.path}; stop it, or set RUN_DIR= (--run-dir)"
                    raise RunError(message, USAGE) from None
            if not waiting:
                print(f"waiting for another process that is still training in {self.path}", flush=True)
            waiting = True
            time.sleep(0.5)

    def _check_recipe(self, recipe: Recipe) -> None:
        file = self.path / "recipe.yaml"
        if not file.exists():
            return
        try:
            kept = strict_yaml.read(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            kept = None
        if not (kept and isinstance(kept, dict)):
            raise RecipeError(
                f"{file}: is damaged, so that nobody knows what was trained here. Put a copy of it there, train in "
                "another folder (RUN_DIR=, --run-dir), or remove the folder."
            )
        old, new = flat(kept), flat(recipe.model_dump(mode="json"))
        # A key that the old file lacks is younger than the file.
        changed = [k for k in old if old[k] != new.get(k) and not _is_free(k)]
        if changed:
            shown = "\n".join(f"  {k}: {_show(old[k])} there, {_show(new.get(k))} now" for k in changed)
            raise RecipeError(
                f"{self.path} holds a run of another recipe:\n{shown}\n"
                "Train in another folder (RUN_DIR=, --run-dir), put the values back, or remove the folder."
            )


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping by dotted keys."""
    if not isinstance(value, dict):
        return {prefix: value}
    parts = [flat(inner, f"{prefix}.{key}" if prefix else str(key)) for key, inner in value.items()]
    return {key: inner for part in parts for key, inner in part.items()}


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)


def _show(value: Any) -> str:
    return strict_yaml.show(value)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """What ran here, without the names of machines or people."""
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "cpu_cores": os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str | None:
    if not (ROOT / ".git").exists():
        return None
    try:
        run = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def classify(error: BaseException) -> tuple[str, int]:
    """(status of the result, exit code) of an error, by its type and never by words that may be in it."""
    if isinstance(error, torch.OutOfMemoryError):
        return "oom", OUT_OF_MEMORY
    # The one exception: torch has no type for a CPU allocation that fails, only its allocator's own wording.
    cpu_allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)
    if isinstance(error, MemoryError) or cpu_allocator:
        return "host_oom", HOST_OUT_OF_MEMORY
    return "failed", error.exit_code if isinstance(error, RunError) else FAILED


def report_failure(error: BaseException, folder: RunFolder, result: Callable[[str, str], dict[str, Any]]) -> int:
    """Write result.json and say what went wrong, once for all ranks: the first to fail knows the cause.

    `result(status, message)` makes the record. Returns the exit code.
    """
    status, code = classify(error)
    disk_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    foreseen = isinstance(error, RunError) or status != "failed" or disk_full
    message = str(error) if foreseen and str(error) else f"{type(error).__name__}: {error}"
    where = f"recorded in {folder.result}"
    try:
        if not folder.write_result(result(status, message)):
            first = read_object(folder.result).get("status")
            return {"oom": OUT_OF_MEMORY, "host_oom": HOST_OUT_OF_MEMORY}.get(str(first), code)
    except OSError as problem:
        where = f"not recorded: {folder.result} cannot be written ({problem.strerror})"
    finally:
        folder.close()
    if not foreseen:
        traceback.print_exception(error)
    print(f"{status}: {message}\n{where}", file=sys.stderr, flush=True)
    return code


class Stopper:
    """Turns SIGTERM and Ctrl-C into a wish that the loop grants at the end of a step; a second Ctrl-C quits."""

    def __init__(self) -> None:
        self.signal = 0

    def __enter__(self) -> Stopper:
        self._before = {n: signal.signal(n, self._wish) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _wish(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


def end_with_launcher() -> None:
    """Ask Linux to send SIGTERM when the launcher dies, so that no rank trains on without it."""
    if "MASTER_ADDR" in os.environ and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        parent = str(os.getppid())
        if os.environ.get("WATERLINE_LAUNCHER", parent) != parent:
            sys.exit(INTERRUPTED)  # it died while this process was still importing


def age_s() -> float:
    """Seconds since this process started, its imports included."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED_S


_IMPORTED_S = time.perf_counter()
