"""Real sweeps of a tiny recipe: train.py in fresh processes, killed half way, against the plan's word."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_trials import sweep as sweep_with
from test_trials import marked

from model.modes import NAMED
from tools import sweep, sweep_check, trials
from tools.trials import Question, Variant
from training import data, recipe, run
from training.metrics import read
from training.planning import planner

RECIPE = """\
seq_length: 64
global_batch_size: 1
steps: 8
precision: fp32
budget: {budget}
model: {{num_layers: 4, hidden_size: 32, num_attention_heads: 2, ffn_hidden_size: 64}}
tiles: {{loss_tile_tokens: 64}}
data: {{sources: ["{text}"], tokenizer_vocab_size: 300, cache_dir: "{text}/../data", workers: 1}}
engine: {{name: torch}}
sweep: {{modes: [none, full], granularity: 64, minutes: 1e-3}}
"""


@pytest.fixture(scope="module")
def tiny_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with a corpus of a few hundred tokens, shorter than the contexts that fit."""
    folder = tmp_path_factory.mktemp("tiny sweep")
    (folder / "text").mkdir()
    for n in range(3):
        (folder / "text" / f"{n}.txt").write_text(
            f"document {n}: a few words, and a few more words to tell it from others"
        )
    file = folder / "tiny.yaml"
    file.write_text(RECIPE.format(budget="2MiB", text=folder / "text"))
    return file


def start(file: Path, out: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(trials.ROOT / "tools" / "sweep.py"), str(file), *words, "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_sweep_killed_half_way_goes_on_and_finds_what_was_planned(tiny_recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "a sweep"
    killed = start(tiny_recipe, out)
    try:
        _wait(lambda: list((out / "trials").glob("0002-*")) and marked(out), killed)
    finally:
        killed.kill()
        killed.communicate()
    first = list(trials.read(out / "trials.jsonl"))
    assert len(first) == 1

    again = start(tiny_recipe, out)
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert marked(out) == []
    records = list(trials.read(out / "trials.jsonl"))
    assert records[0] == first[0]
    assert [(r["mode"], r["status"]) for r in records] == [
        ("none", "completed"),
        ("none", "oom"),
        ("full", "completed"),
        ("full", "oom"),
    ]
    found = json.loads((out / "summary.json").read_text())
    for entry in found["modes"].values():
        assert entry["longest_context"] == entry["predicted_longest_context"] > 0
        assert entry["next_tried"] == entry["longest_context"] + 64
        assert entry["trials"] == 2
    for record in records[::2]:
        assert record["steps"] == 5
        assert record["peak_device_bytes"] == pytest.approx(record["predicted_peak_device_bytes"], rel=0.01)
    assert "fits," in said
    for name in ("report.md", "longest_context.png", "speed.png", "memory.json"):
        assert (out / name).stat().st_size > 0

    # The corpus is shorter than what fits: it repeats, and caps nothing.
    prepared = data.Dataset(data.prepare(recipe.load(tiny_recipe).data))
    assert len(prepared.tokens) < found["modes"]["full"]["longest_context"]

    # A trial is reproducible: a fresh one, elsewhere, has the same losses and the same bytes.
    full = records[2]
    running = sweep_with(tmp_path / "elsewhere", recipe.load(tiny_recipe))
    point = running.point(Variant(full["attention"], "full"), full["seq_length"])
    fresh = running.trials.run(Question(point, "timing", 5, memory=True))
    for name in ("loss", "peak_device_bytes", "after_forward_device_bytes", "peak_op", "steps"):
        assert fresh[name] == full[name]
    curves = [
        [r["loss"] for r in read(f / "metrics.jsonl")]
        for f in (out / full["run"], tmp_path / "elsewhere" / fresh["run"])
    ]
    assert curves[0] == curves[1]
    assert len(curves[0]) == 5


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["no-such-recipe"], "shipped recipes"),
        (["--modes", "none ful"], "ful"),
        (["budget=null"], "BUDGET=512MiB"),
        (["--budget", "24"], "has no unit"),
        (["--granularity", "0"], "must be above 0"),
        (["--seq-max", "10"], "below sweep.granularity"),
        (["--out", "/dev/null/x"], "--out"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(tiny_recipe: Path, tmp_path: Path, words, told, capsys) -> None:
    given = words if words[0] == "no-such-recipe" else [str(tiny_recipe), *words]
    out = [] if "--out" in words else ["--out", str(tmp_path)]
    assert sweep.main([*given, *out]) == run.USAGE
    said = capsys.readouterr()
    assert told in said.err
    assert "Traceback" not in said.err


def test_two_sweeps_do_not_share_a_folder(
    tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = recipe.load(tiny_recipe)
    with sweep.opened(own, sweep.variants(own), "seq_length", 1, tmp_path):
        assert sweep.main([str(tiny_recipe), "--out", str(tmp_path)]) == run.USAGE
    assert "another sweep runs in" in capsys.readouterr().err


def test_ctrl_c_stops_a_sweep_and_says_how_to_go_on(tiny_recipe: Path, tmp_path: Path) -> None:
    running = start(tiny_recipe, tmp_path)
    _wait(lambda: marked(tmp_path), running)
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == run.INTERRUPTED
    assert "the same command goes on" in said
    assert "Traceback" not in said
    assert marked(tmp_path) == []


@pytest.mark.parametrize(("words", "device"), [(sweep_check.GPU, planner.device("h200")), (sweep_check.SMALL, None)])
def test_some_length_should_fit_in_the_gpu_check(words, device) -> None:
    own = sweep.prepared(sweep.parse(list(words), "", ""))
    target = planner.Device("cpu" if device is None else "cuda", "any", own.budget_bytes, gpu=device and device.gpu)
    assert planner.Planner(own, "none", target).longest(own.sweep.granularity, own.sweep.seq_max).longest > 0


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])  # two at a time: `make test-slow JOBS=2`
def test_every_named_mode_reaches_what_was_planned(tiny_recipe: Path, tmp_path: Path, half: int) -> None:
    modes = " ".join(NAMED[half::2])
    ran = start(tiny_recipe, tmp_path, "--modes", modes, "engine.name=deepspeed", "budget=4MiB")
    said, _ = ran.communicate(timeout=600)
    assert ran.returncode == 0, said
    found = json.loads((tmp_path / "summary.json").read_text())
    assert list(found["modes"]) == modes.split()
    for name, entry in found["modes"].items():
        assert entry["longest_context"] == entry["predicted_longest_context"] > 0, name
        assert entry["next_status"] == "oom"


def _wait(until, process: subprocess.Popen[str], limit_s: float = 120) -> None:
    give_up_s = time.monotonic() + limit_s
    while not until():
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
