"""`make gate`: target by target, from what was measured, and no more is run than the targets ask for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_trials import BUDGET, FakeTrials, longest, plain

from tools import gate, sweep, trials
from training import run


class Planned:
    """Stands in for tools.predict.Predictor."""

    def __init__(self, recipe: Any, file: str, axis: str, facts: Any, vocab_size: int) -> None:
        self.axis = axis

    def longest(self, variant: Any, granularity: int, maximum: int) -> int:
        return longest(variant.mode, granularity)

    def peak(self, point: Any) -> None:
        return None


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTrials:
    stand_in = FakeTrials()
    monkeypatch.setattr(trials.processes, "run", stand_in)
    monkeypatch.setattr(sweep, "Predictor", Planned)
    return stand_in


def gated(tmp_path: Path, targets: dict[str, float], *words: str) -> int:
    text = tmp_path / "text"
    text.mkdir(exist_ok=True)
    for n in range(3):
        (text / f"{n}.txt").write_text(f"document {n}: a few words, and a few more words to tell it from others")
    settings = {
        **{"seq_length": 64, "global_batch_size": 1, "steps": 8, "precision": "fp32", "budget": f"{BUDGET}B"},
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2},
        "data": {"sources": [str(text)], "tokenizer_vocab_size": 300, "cache_dir": str(tmp_path / "data")},
        **{"recompute": "full", "sweep": {"granularity": 64}, "targets": targets},
    }
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(settings))
    return gate.main([str(file), *words, "--out", str(tmp_path / "out")])


def test_all_targets_reached(tmp_path: Path, fake: FakeTrials, capsys: pytest.CaptureFixture[str]) -> None:
    targets = {"longest_context_tokens": 4928, "tokens_per_s": 700.0, "overhead": 1.34, "peak_device_gib": 0.1}
    assert gated(tmp_path, targets) == 0
    said = capsys.readouterr().out
    assert said.count("pass") == 4
    assert "pass  longest_context_tokens: at least 4,928, is 4,928, +0.0%" in said
    assert "4 of 4 targets reached" in said
    verdicts = json.loads((tmp_path / "out" / "gate.json").read_text())
    assert {v["target"]: v["passed"] for v in verdicts} == dict.fromkeys(targets, True)
    assert fake.asked.count(("none", 64, 5)) == fake.asked.count(("full", 64, 5)) == 3  # in turn, three times
    assert fake.asked.count(("full", 4992, 2)) == 1


@pytest.mark.parametrize(
    ("target", "value", "told"),
    [
        ("longest_context_tokens", 4992, "FAIL  longest_context_tokens: at least 4,992, is 4,928, -1.3%"),
        ("tokens_per_s", 800.0, "FAIL  tokens_per_s: at least 800, is 751.88, -6.0%"),
        ("overhead", 1.3, "FAIL  overhead: at most 1.3, is 1.33, +2.3%"),
        ("peak_device_gib", 1e-9, "FAIL  peak_device_gib"),
    ],
)
def test_a_target_that_is_missed_fails_and_says_by_how_much(tmp_path, fake, capsys, target, value, told) -> None:
    assert gated(tmp_path, {target: value}) == run.FAILED
    assert told in capsys.readouterr().out


def test_only_what_the_targets_need_is_run(tmp_path: Path, fake: FakeTrials) -> None:
    assert gated(tmp_path, {"tokens_per_s": 1.0}) == 0
    assert fake.asked == [("full", 64, 5)]


def test_what_cannot_be_measured_fails_with_its_reason(tmp_path, fake, capsys) -> None:
    fake.status = lambda mode, tokens, steps: "oom" if mode == "none" else plain(mode, tokens, steps)
    assert gated(tmp_path, {"overhead": 1.5}) == run.FAILED
    assert "not measured: none at 64: oom" in capsys.readouterr().out
    fake.status = lambda mode, tokens, steps: "failed"
    assert gated(tmp_path, {"longest_context_tokens": 64, "tokens_per_s": 1.0}, "seq_length=128") == run.FAILED
    said = capsys.readouterr().out
    assert "longest_context_tokens: at least 64, is not measured: failed: exit code 1" in said
    assert "tokens_per_s: at least 1, is not measured: failed: exit code 1" in said


def test_validation_loss_needs_the_whole_run(tmp_path: Path, fake: FakeTrials, monkeypatch, capsys) -> None:
    commands = []

    original = gate.subprocess.run

    def trained(command: list[str], **more: Any) -> Any:
        if "--run-dir" not in command:
            return original(command, **more)
        commands.append(command)
        run_dir = Path(command[command.index("--run-dir") + 1])
        run_dir.mkdir(parents=True)
        result = {"val_loss": 5.5, "tokens_per_s": 10.0, "status": "completed", "error": None}
        (run_dir / "result.json").write_text(json.dumps(result))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(gate.subprocess, "run", trained)
    assert gated(tmp_path, {"val_loss": 5.6, "tokens_per_s": 11.0}, "steps=7") == run.FAILED
    said = capsys.readouterr().out
    assert "pass  val_loss: at most 5.6, is 5.5" in said
    assert "FAIL  tokens_per_s: at least 11, is 10" in said  # of the same run
    assert len(commands) == 1
    assert "steps=7" in commands[0]
    assert fake.asked == []


def test_a_recipe_without_targets_is_told_so(tmp_path: Path, fake: FakeTrials, capsys) -> None:
    assert gated(tmp_path, {}) == run.USAGE
    assert "targets: {longest_context_tokens: 8192}" in capsys.readouterr().err
