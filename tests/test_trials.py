"""How a trial ended is read from its record and its exit, and nothing of it survives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tools import processes, trials
from tools.processes import MARK, Ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is tested is read from Linux's /proc")


def ended(code: int | None = 0, number: int | None = None, timed_out: bool = False, memory: bool = False) -> Ended:
    return Ended(code, number, timed_out, memory, 12.0)


DONE = {"status": "completed", "steps": 2}
OOM = {"status": "oom", "steps": 0, "error": "no memory"}
FAILED = {"status": "failed", "steps": 1, "error": "RuntimeError: CUDA error: out of memory is not what this is"}


@pytest.mark.parametrize(
    ("record", "how", "status"),
    [
        (DONE, ended(), "completed"),
        (OOM, ended(3), "oom"),
        (OOM, ended(0), "oom"),  # a child that dies of it and ends with 0
        ({**OOM, "status": "host_oom"}, ended(4), "host_oom"),
        (FAILED, ended(1), "failed"),  # whatever its words say
        (FAILED, ended(3), "failed"),
        (None, ended(3), "failed"),  # an exit code alone is no record
        (None, ended(0), "failed"),
        (None, ended(None, signal.SIGKILL), "failed"),
        (None, ended(None, signal.SIGKILL, memory=True), "host_oom"),
        (None, ended(None, signal.SIGSEGV), "failed"),
        (None, ended(None, timed_out=True), "timeout"),
        (DONE, ended(None, timed_out=True), "timeout"),  # it hung at its end
        (DONE, ended(1), "failed"),
        (DONE, ended(None, signal.SIGABRT), "failed"),
        ({"status": "completed", "steps": 1}, ended(), "failed"),  # not all that was asked
        ({"status": "a new word", "steps": 2}, ended(), "failed"),
        ("{torn", ended(), "failed"),
    ],
)
def test_a_trial_is_classified_by_record_and_exit(tmp_path: Path, record: Any, how: Ended, status: str) -> None:
    (tmp_path / "output.txt").write_text("torch.OutOfMemoryError: out of memory\n")
    if record is not None:
        (tmp_path / "result.json").write_text(record if isinstance(record, str) else json.dumps(record))
    found, _, error = trials.outcome(tmp_path, how, 2)
    assert found == status
    assert (error is None) == (status == "completed")
    if status in ("failed", "timeout"):
        assert str(how) in str(error)


def test_a_failure_without_a_record_shows_the_last_words(tmp_path: Path) -> None:
    (tmp_path / "output.txt").write_text("x" * 5000 + f"IndexError in {trials.ROOT}/model/gpt.py\n")
    _, _, error = trials.outcome(tmp_path, ended(1), 2)
    assert error is not None
    assert error.startswith("exit code 1: xxx")
    assert error.endswith("IndexError in model/gpt.py")
    assert len(error) < 2100


# -- processes ---------------------------------------------------------------------------------------------------


def start(code: str, folder: Path, timeout_s: float = 60) -> Ended:
    command = [sys.executable, "-c", code, str(folder)]
    return processes.run(command, dict(os.environ), folder, folder / "output.txt", timeout_s)


def marked(folder: Path) -> list[int]:
    """Processes that were started on behalf of `folder` and are alive."""
    mark = f"{MARK}={folder.resolve()}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('hello')", "exit code 0"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9 (SIGKILL)"),
        ("import sys; sys.exit(-9)", "killed by signal 9 (SIGKILL)"),  # how a launcher passes on a rank's signal
        ("import os; os.abort()", "killed by signal 6 (SIGABRT)"),
    ],
)
def test_how_a_child_ended_is_told_as_it_was(tmp_path: Path, code: str, told: str) -> None:
    assert str(start(code, tmp_path)) == told


STUBBORN = """
import pathlib, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1], "started").touch()
time.sleep(600)
"""


def test_a_child_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    how = start(STUBBORN, tmp_path, timeout_s=3)
    assert how.timed_out
    assert (tmp_path / "started").exists()
    assert marked(tmp_path) == []


def test_a_child_that_ends_takes_its_children_along(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert start(code, tmp_path).exit_code == 0
    assert marked(tmp_path) == []


def test_what_the_kernel_kills_for_memory_is_host_oom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter([7, 8])
    monkeypatch.setattr(processes, "_memory_kills", lambda: next(kills))
    how = start("import os; os.kill(os.getpid(), 9)", tmp_path)
    assert how.killed_for_memory
    assert trials.outcome(tmp_path, how, 2)[0] == "host_oom"


PARENT = """
import os, pathlib, sys
sys.path.insert(0, {root!r})
from tools import processes
folder = pathlib.Path(sys.argv[1])
processes.run([sys.executable, "-c", {code!r}, str(folder)], dict(os.environ), folder, folder / "output.txt", 600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_child_outlives_a_sweep_that_is_killed(tmp_path: Path, number: int) -> None:
    """SIGKILL ends the child; a grandchild that goes on is ended by the next sweep in the folder."""
    program = PARENT.format(root=str(trials.ROOT), code=STUBBORN)
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.DEVNULL)
    _wait(lambda: (tmp_path / "started").exists())
    parent.send_signal(number)
    parent.wait(30)
    _wait(lambda: len(marked(tmp_path)) <= (number == signal.SIGKILL))
    processes.end_leftovers(tmp_path)
    assert marked(tmp_path) == []


def test_leftovers_of_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: str(tmp_path / "other")})
    try:
        assert processes.end_leftovers(tmp_path / "mine") == 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def _wait(until: Any, limit_s: float = 60) -> None:
    give_up_s = time.monotonic() + limit_s
    while not until():
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
