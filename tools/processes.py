"""A child that leaves nothing behind: it runs in a session of its own and ends with everything it started.

Linux's /proc tells who belongs to a session, who was started on behalf of a folder, and whether the kernel's
out-of-memory killer was at work. Elsewhere the child's process group is all that is known.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "WATERLINE_TRIAL_OF"  # in the environment of every child: the folder it was started for
GONE_WAIT_S = 20.0

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Ended:
    """How a child ended. exit_code: None when a signal ended it; signal: its number, else None.

    killed_for_memory: it got SIGKILL while the kernel's count of out-of-memory kills grew.
    """

    exit_code: int | None
    signal: int | None
    timed_out: bool
    killed_for_memory: bool
    wall_s: float

    def __str__(self) -> str:
        if self.timed_out:
            return f"ended after {self.wall_s:.0f} s, its time limit"
        if self.killed_for_memory:
            return "killed by the system, which had no memory left"
        if self.signal is not None:
            return f"killed by signal {self.signal} ({signal.Signals(self.signal).name})"
        return f"exit code {self.exit_code}"


def run(command: Sequence[str], environment: Mapping[str, str], folder: Path, output: Path, timeout_s: float) -> Ended:
    """Run `command` to its end, its words going to `output`, on behalf of `folder`.

    However this returns or raises (Ctrl-C included), the child and all its descendants are gone by then.
    """
    before = _memory_kills()
    start = time.monotonic()
    timed_out = False
    with output.open("wb") as file:
        child = subprocess.Popen(
            command,
            env={**environment, MARK: str(folder.resolve())},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end_session(child.pid)
            child.wait()
    number = None if timed_out else ended_by(child.returncode)
    return Ended(
        exit_code=None if timed_out or number is not None else child.returncode,
        signal=number,
        timed_out=timed_out,
        killed_for_memory=number == signal.SIGKILL and _memory_kills() > before,
        wall_s=time.monotonic() - start,
    )


def ended_by(returncode: int) -> int | None:
    """The signal behind a return code: the child's own, or one that a launcher passes on as sys.exit(-signal)."""
    number = -returncode if returncode < 0 else 256 - returncode
    return number if number in set(signal.Signals) else None


def end_leftovers(folder: Path) -> int:
    """End what an earlier, killed program left running on behalf of `folder`; how many processes that were."""
    mark = f"{MARK}={folder.resolve()}".encode()
    left = [pid for pid in _pids() if mark in _read(pid, "environ").split(b"\0") and pid != os.getpid()]
    _kill(left)
    _wait_until_gone(lambda: [pid for pid in left if _is_alive(pid)])
    return len(left)


def _end_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _end_session(session: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
    _wait_until_gone(lambda: _kill(_members(session)))


def _members(session: int) -> list[int]:
    return [pid for pid in _pids() if (fields := _stat(pid)) and fields[3] == str(session) and fields[0] != "Z"]


def _kill(pids: list[int]) -> list[int]:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return pids


def _wait_until_gone(left: Callable[[], list[int]]) -> None:
    """Their memory is free only when they are gone."""
    give_up_s = time.monotonic() + GONE_WAIT_S
    while left() and time.monotonic() < give_up_s:
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z"


def _pids() -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*") if sys.platform == "linux" else ():
        yield int(entry.name)


def _stat(pid: int) -> list[str]:
    """State, parent, process group, session, ... of /proc/PID/stat; empty when there is no such process."""
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _memory_kills() -> int:
    """How often the kernel has killed a process for want of memory since the machine started."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
