"""A run that was killed goes on as if nothing had happened, wherever the kill struck."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import tiny
from tiny import linear_as_it_was  # noqa: F401

from training import checkpoint, run

# Runs train.py with a SIGKILL at the n-th call of a function (of module `where`), before or after it.
KILL = """
import os, signal, sys
sys.path[:0] = [{root!r}]
import train
from training import checkpoint, engine, metrics
owner, name, n, after = {owner}, {name!r}, {n}, {after}
original, calls = getattr(owner, name), 0
def killed(*args, **kwargs):
    global calls
    calls += 1
    result = original(*args, **kwargs) if after or calls < n else None
    if calls == n:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, name, killed)
sys.exit(train.main(sys.argv[1:]))
"""
SETTINGS = [*tiny.TORCH, "model.hidden_dropout=0.1", "steps=8", "checkpoint.every_steps=3"]

# (what is called when the kill comes, the how manieth time, before or after, where the run is continued from)
DURING_A_STEP = ("engine.Engine", "train_step", 5, False, 3)
DURING_A_SAVE = ("checkpoint._Writer", "write", 9, True, 3)
MOMENTS = {
    "before any checkpoint": ("engine.Engine", "train_step", 3, False, 0),
    "between record and checkpoint": ("metrics.Metrics", "flush", 2, False, 3),
    "before the manifest": ("checkpoint", "_complete", 2, False, 3),
    "before the rename": ("checkpoint", "_flush_folder", 3, True, 3),
    "before old ones are removed": ("checkpoint", "_remove", 5, False, 6),
    "after a checkpoint": ("checkpoint", "save", 2, True, 6),
    "while evaluating": ("engine.Engine", "eval_loss", 2, False, 3),
    "after the last checkpoint": ("checkpoint", "save", 3, True, 8),
}


def words(run_dir: Path, data: list[str], *overrides: str) -> list[str]:
    return ["quickstart", *tiny.SETTINGS, *data, *SETTINGS, *overrides, "--run-dir", str(run_dir)]


def kill_at(run_dir: Path, data: list[str], owner: str, name: str, n: int, after: bool) -> None:
    script = KILL.format(root=str(tiny.ROOT), owner=owner, name=name, n=n, after=after)
    ended = subprocess.run([sys.executable, "-c", script, *words(run_dir, data)], timeout=120)
    assert ended.returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny.little_data(tmp_path_factory)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, data: list[str]) -> Path:
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    assert tiny.start(run_dir, data, *SETTINGS) == 0
    return run_dir


def check_goes_on(
    run_dir: Path, data: list[str], step: int, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.start(run_dir, data, *SETTINGS) == 0
    said = capsys.readouterr().out
    assert (f"continuing after step {step}\n" in said) == (step > 0)
    assert tiny.curve(run_dir) == tiny.curve(uninterrupted)
    assert checkpoint.steps_in(run_dir / "checkpoints") == [8, 6]
    assert not list((run_dir / "checkpoints").glob(".saving-*"))


def test_killed_in_a_step_and_again_in_a_save_the_curve_is_bitwise_the_uninterrupted_one(
    tmp_path: Path, data: list[str], uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *moment, step = DURING_A_STEP
    kill_at(tmp_path, data, *moment)  # type: ignore[arg-type]
    assert checkpoint.steps_in(tmp_path / "checkpoints") == [step]
    kill_at(tmp_path, data, *DURING_A_SAVE[:4])  # type: ignore[arg-type]
    assert list((tmp_path / "checkpoints").glob(".saving-*/rank-0.pt"))
    check_goes_on(tmp_path, data, 3, uninterrupted, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment(
    tmp_path: Path, data: list[str], uninterrupted: Path, capsys: pytest.CaptureFixture[str], moment: str
) -> None:
    *call, step = MOMENTS[moment]
    kill_at(tmp_path, data, *call)  # type: ignore[arg-type]
    check_goes_on(tmp_path, data, step, uninterrupted, capsys)


@pytest.mark.parametrize(
    ("engine", "precision"), [("zero0", "fp32"), ("zero1", "bf16"), ("zero2", "fp32"), ("zero3", "bf16")]
)
def test_a_stopped_run_goes_on_with_every_engine(tmp_path: Path, data: list[str], engine: str, precision: str) -> None:
    settings = [f"engine.deepspeed_config={engine}", f"precision={precision}", "steps=4"]
    assert tiny.start(tmp_path / "whole", data, *settings) == 0
    assert tiny.interrupted(tmp_path / "parts", data, 3, *settings) == run.INTERRUPTED
    assert tiny.start(tmp_path / "parts", data, *settings) == 0
    assert tiny.curve(tmp_path / "parts") == tiny.curve(tmp_path / "whole")


def test_a_damaged_checkpoint_is_passed_over_and_the_curve_is_the_same(
    tmp_path: Path, data: list[str], uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.interrupted(tmp_path, data, 7, *SETTINGS) == run.INTERRUPTED
    assert checkpoint.steps_in(tmp_path / "checkpoints") == [7, 6]
    os.truncate(tmp_path / "checkpoints/step-00000007/rank-0.pt", 1000)
    check_goes_on(tmp_path, data, 6, uninterrupted, capsys)


def test_a_disk_that_is_full_ends_the_run_with_the_last_checkpoint_intact(
    tmp_path: Path, data: list[str], uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny.small_disk(tmp_path / "disk", 4):
        run_dir = tmp_path / "disk/run"
        assert tiny.interrupted(run_dir, data, 4, *SETTINGS) == run.INTERRUPTED
        filler = tmp_path / "disk/filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        filled = filler.stat().st_size
        for kept in (200 * 1024, 0):  # room for the records but not for a checkpoint; then for nothing at all
            os.truncate(filler, filled - kept)
            capsys.readouterr()
            assert tiny.start(run_dir, data, *SETTINGS) == run.FAILED
            said = capsys.readouterr().err
            assert "No space left on device" in said
            assert "Traceback" not in said
            assert checkpoint.steps_in(run_dir / "checkpoints")[-1] == 3
        filler.unlink()
        check_goes_on(run_dir, data, 4, uninterrupted, capsys)


def test_resuming_fits_the_budget_of_the_start(tmp_path: Path, data: list[str]) -> None:
    """The peak of a run is enough to continue it: nothing is held twice while loading."""
    import json

    assert tiny.start(tmp_path / "measured", data, *SETTINGS) == 0
    peak_bytes = json.loads((tmp_path / "measured/result.json").read_text())["peak_device_bytes"]
    budget = f"budget={peak_bytes}B"
    assert tiny.start(tmp_path / "whole", data, *SETTINGS, budget) == 0
    assert tiny.interrupted(tmp_path / "parts", data, 4, *SETTINGS, budget) == run.INTERRUPTED
    assert tiny.start(tmp_path / "parts", data, *SETTINGS, budget) == 0
    assert tiny.curve(tmp_path / "parts") == tiny.curve(tmp_path / "whole")


@pytest.mark.slow
def test_two_ranks_killed_or_stopped_through_the_launcher_go_on(tmp_path: Path, data: list[str]) -> None:
    settings = ["engine.name=deepspeed", "engine.deepspeed_config=zero2", "steps=20", "checkpoint.every_steps=2"]
    launch = [sys.executable, str(tiny.ROOT / "tools/launch.py"), "--processes", "2"]

    def finish(run_dir: Path) -> None:
        subprocess.run([*launch, *words(run_dir, data, *settings)], check=True, timeout=200)

    finish(tmp_path / "whole")
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        run_dir = tmp_path / signal.Signals(number).name
        started = subprocess.Popen([*launch, *words(run_dir, data, *settings)], start_new_session=True)
        wait_for(lambda where=run_dir: len(checkpoint.steps_in(where / "checkpoints")) == 2)
        if number == signal.SIGKILL:
            for process in [*psutil.Process(started.pid).children(recursive=True), started]:
                process.send_signal(number)
        else:
            os.killpg(started.pid, number) if number == signal.SIGINT else started.send_signal(number)
        assert started.wait(60) != 0
        finish(run_dir)
        assert tiny.curve(run_dir) == tiny.curve(tmp_path / "whole")


def wait_for(condition, timeout_s: float = 120.0) -> None:  # type: ignore[no-untyped-def]
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)
