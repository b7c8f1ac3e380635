"""The Makefile and the launcher: what a newcomer types, and what reaches train.py."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tools import launch
from training.run import INTERRUPTED

# Stands in for train.py: writes down how it was started, then waits to be told to stop.
STUB = """\
import json, os, pathlib, signal, sys, time
if "seed=5" in sys.argv:
    sys.exit(5)
got = []
signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
state = {"words": sys.argv[1:], "env": dict(os.environ)}
pathlib.Path("started.tmp").write_text(json.dumps(state))
os.replace("started.tmp", "started-" + os.environ["RANK"])
deadline = time.monotonic() + 60
while not got and time.monotonic() < deadline:
    time.sleep(0.02)
pathlib.Path("saved-" + os.environ["RANK"]).write_text(str(got))
"""


def run(folder, words):
    """tools/launch.py with the stub for train.py, in a group of its own."""
    (folder / "train.py").write_text(STUB)
    code = (
        "import pathlib, sys\n"
        f"sys.path.insert(0, {str(launch.ROOT)!r})\n"
        "from tools import launch\n"
        "launch.ROOT = pathlib.Path.cwd()\n"
        "sys.exit(launch.main(sys.argv[1:]))\n"
    )
    (folder / "start.py").write_text(code)
    return subprocess.Popen(
        [sys.executable, "start.py", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_sigterm_reaches_every_rank_and_words_arrive_whole(tmp_path):
    words = ["quickstart", "global_batch_size=4", "data.sources=[a b, '*']", "--run-dir", "x y", "--processes", "2"]
    process = run(tmp_path, words)
    try:
        deadline = time.monotonic() + 120
        while not all((tmp_path / f"started-{rank}").exists() for rank in (0, 1)):
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        process.terminate()
        process.wait(timeout=60)
        process.stdout.close()
    for rank in (0, 1):
        assert (tmp_path / f"saved-{rank}").read_text() == f"[{int(signal.SIGTERM)}]"
        started = json.loads((tmp_path / f"started-{rank}").read_text())
        assert started["words"] == [f"--local_rank={rank}", *words[:3], "--run-dir", "x y"]
        assert started["env"]["WORLD_SIZE"] == "2"


def test_the_exit_code_of_training_comes_back(tmp_path):
    process = run(tmp_path, ["quickstart", "seed=5"])
    process.communicate(timeout=120)
    assert process.returncode == 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["quickstart", "steps=x"], "override 'steps=x': steps = x: must be a whole number"),
        (["quikstart"], "did you mean quickstart?"),
        (["quickstart", "--processes", "3"], "write 3"),
        (["quickstart", "--processes", "0"], "--processes 0: write 1"),
    ],
)
def test_a_mistake_ends_with_2_before_anything_starts(words, says, monkeypatch, capsys):
    monkeypatch.setattr(launch, "devices", lambda: [])
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started"))
    assert launch.main(words) == 2
    assert says in capsys.readouterr().err


def test_more_processes_than_gpus_is_a_mistake(monkeypatch, capsys):
    monkeypatch.setattr(launch, "devices", lambda: ["0", "1"])
    assert launch.main(["quickstart", "--processes", "3"]) == 2
    assert "--processes 3: write 1 to 2" in capsys.readouterr().err


def world_of(command):
    (text,) = [word.partition("=")[2] for word in command if word.startswith("--world_info=")]
    return json.loads(base64.urlsafe_b64decode(text))["localhost"]


def test_the_gpus_a_person_chose_are_the_ones_used():
    assert world_of(launch.command(["r"], ["2", "5"], 2)) == [2, 5]
    assert world_of(launch.command(["r"], ["GPU-ab", "GPU-cd"], 1)) == ["GPU-ab"]
    assert world_of(launch.command(["r"], [], 2)) == [0, 1]


def test_without_a_gpu_deepspeed_is_told_so_and_ranks_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    alone, two, gpu = (launch.environment(gpus, n) for gpus, n in (([], 1), ([], 2), (["0"], 1)))
    assert alone["DS_ACCELERATOR"] == "cpu"
    assert alone["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_NUM_THREADS" not in alone
    assert two["OMP_NUM_THREADS"] == "4"
    assert "DS_ACCELERATOR" not in gpu
    assert alone["TORCH_EXTENSIONS_DIR"].startswith(sys.prefix)


def make(repo_root, *words):
    return subprocess.run(["make", *words], cwd=repo_root, capture_output=True, text=True, check=True).stdout


def test_make_alone_explains_every_target_and_variable(repo_root):
    text = (repo_root / "Makefile").read_text()
    told = make(repo_root)
    assert told == make(repo_root, "help")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, flags=re.M)
    used = set(re.findall(r"^([A-Z_]+) :=", text, flags=re.M)) - {"SHELL", "PY", "PIP"}
    for name in {*phony.split(), *used}:
        assert re.search(rf"^  {name} ", told, flags=re.M), name


def test_every_program_a_target_calls_is_there(repo_root):
    for program in re.findall(r"tools/\w+\.py", (repo_root / "Makefile").read_text()):
        assert (repo_root / program).is_file(), program


@pytest.fixture
def told(repo_root, tmp_path):
    """The words each program of a target is called with: the environment's python only writes them down."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\nfor word; do echo "<$word>"; done; echo\n')
    python.chmod(0o755)
    (tmp_path / "installed").touch()

    def words_of(*words: str) -> list[list[str]]:
        calls = make(repo_root, *words, f"VENV={tmp_path}").strip().split("\n\n")
        return [[word.removeprefix("<").removesuffix(">") for word in call.split("\n")] for call in calls]

    return words_of


SET = "SET=steps=3 'data.sources=[a b, *.txt]'"


def test_what_is_set_reaches_every_program_of_train(told):
    prepare, start = told("train", "RECIPE=my recipe.yaml", SET, "BUDGET=24GiB", "RUN_DIR=x y", "NPROC=2")
    words = ["my recipe.yaml", "steps=3", "data.sources=[a b, *.txt]", "budget=24GiB"]
    assert prepare == ["tools/prepare_data.py", *words]
    assert start == ["tools/launch.py", *words, "--run-dir", "x y", "--processes", "2"]


def test_what_is_set_reaches_plan(told):
    (plan,) = told("plan", SET, "GPU=h200", "MODES=none full", "SEQ=9", "WORLD=8", "JSON=x y", "PLOT=p", "SEQ_MAX=5")
    assert plan[:4] == ["tools/plan.py", "quickstart", "steps=3", "data.sources=[a b, *.txt]"]
    options = dict(zip(plan[4::2], plan[5::2], strict=True))
    assert options == {
        "--gpu": "h200",
        "--modes": "none full",
        "--seq-max": "5",
        "--seq": "9",
        "--world": "8",
        "--json": "x y",
        "--plot": "p",
    }


def test_what_is_set_reaches_sweep_and_report(told):
    given = ["BUDGET=24GiB", "HOST_BUDGET=1GiB", "MODES=none full+offload", "SEQ_MAX=9", "GRANULARITY=3", "STEPS=2"]
    (sweep,) = told("sweep", SET, *given, "GPU=h200", "NPROC=2", "OUT=x y")
    assert sweep[:4] == ["tools/sweep.py", "quickstart", "steps=3", "data.sources=[a b, *.txt]"]
    options = dict(zip(sweep[4::2], sweep[5::2], strict=True))
    assert options == {
        "--gpu": "h200",
        "--budget": "24GiB",
        "--host-budget": "1GiB",
        "--modes": "none full+offload",
        "--seq-max": "9",
        "--granularity": "3",
        "--steps": "2",
        "--processes": "2",
        "--out": "x y",
    }
    assert told("report", "RECIPE=recipes/gpt-1.3b.yaml") == [["tools/report.py", "sweeps/gpt-1.3b"]]
    assert told("report", "OUT=x y") == [["tools/report.py", "x y"]]


def test_quotes_reach_programs_as_they_are(told):
    prepare, _ = told("train", "RECIPE=it's", "BUDGET=8'GiB")
    assert prepare == ["tools/prepare_data.py", "it's", "budget=8'GiB"]
    assert told("compare", "A=x y", "B=it's") == [["tools/compare.py", "x y", "it's"]]


def test_a_rank_whose_launcher_died_before_it_could_ask_for_a_signal_ends(repo_root, tmp_path):
    gone = dict(os.environ, WATERLINE_LAUNCHER="1", MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1")
    words = [sys.executable, str(repo_root / "train.py"), "quickstart", "--run-dir", str(tmp_path / "run")]
    assert subprocess.run(words, env=gone, timeout=120, check=False).returncode == INTERRUPTED
    assert not (tmp_path / "run").exists()
