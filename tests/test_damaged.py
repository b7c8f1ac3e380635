"""A folder that a disk or a hand has damaged: one clear line, nothing lost, never a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny
from fake_trials import FakeTrials, recipe, sweep

from tools import gate, report, summary, trials
from tools import sweep as sweeps
from training import checkpoint, metrics, records, run
from training.choosing import layer_plan, settle
from training.recipe import RecipeError
from training.run import RunError, RunFolder

GOOD = [{"step": n, "loss": 1.0, "step_time_s": 0.1, **dict.fromkeys(metrics.PEAKS, 5)} for n in (1, 2, 3)]
JUNK = ["5", "[]", '{"step":"x"}', '{"step":2,"loss":null}', "{", "\udcff", "[" * 100_000]


# -- a run's folder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", JUNK)
def test_a_bad_line_is_left_out_with_a_warning_and_the_file_that_had_it_is_kept(tmp_path: Path, junk: str) -> None:
    file, said = tmp_path / "metrics.jsonl", list[str]()
    lines = [json.dumps(record) for record in GOOD]
    text = "\n".join([lines[0], junk, *lines[1:], '{"step": 4, "lo'])
    file.write_text(text, errors="surrogateescape")
    metrics.cut_after(file, 2, said.append)
    assert metrics.read(file) == GOOD[:2]
    assert (tmp_path / "metrics.jsonl.damaged").read_text(errors="surrogateescape") == text
    (told,) = said
    assert "line 2: no record" in told
    metrics.cut_after(file, 2, said.append)
    assert len(said) == 1


def test_a_line_that_a_kill_left_unfinished_is_no_damage(tmp_path: Path) -> None:
    file, said = tmp_path / "metrics.jsonl", list[str]()
    file.write_text(json.dumps(GOOD[0]) + '\n{"step": 2, "lo')
    metrics.cut_after(file, 9, said.append)
    assert metrics.read(file) == GOOD[:1]
    assert not said
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_folder_where_a_file_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    for use in (lambda: metrics.Metrics(tmp_path), lambda: metrics.read(tmp_path / "metrics.jsonl")):
        with pytest.raises(RunError, match=r"metrics\.jsonl: Is a directory; put it right"):
            use()


@pytest.mark.parametrize("content", ["[]", "5", "{}", '{"status": []}', "\udcff"])
def test_a_damaged_result_is_none(tmp_path: Path, content: str) -> None:
    folder = RunFolder(tmp_path)
    folder.result.write_text(content, errors="surrogateescape")
    assert folder.open(recipe()) is None
    folder.close()


@pytest.mark.parametrize("content", ["a: [", "\udcff", "[1, 2]", "", "{}", "5", "\0\0"])
def test_a_damaged_recipe_is_not_trained_over(tmp_path: Path, content: str) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "recipe.yaml").write_text(content, errors="surrogateescape")
    with pytest.raises(RecipeError, match=r"recipe\.yaml: is damaged, .* \(RUN_DIR=, --run-dir\)"):
        folder.open(recipe())
    folder.close()
    assert (tmp_path / "recipe.yaml").read_text(errors="surrogateescape") == content


def test_only_a_name_that_a_checkpoint_gets_is_one(tmp_path: Path) -> None:
    for name in ("step-00000012", "step-²", "step-٣", "step-7", "step-x", "step-"):
        (tmp_path / name).mkdir()
    assert checkpoint.steps_in(tmp_path) == [12]


def test_a_file_in_place_of_the_checkpoints_is_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(RunError, match="checkpoints is no folder"):
        checkpoint.load_latest(tmp_path / "checkpoints", world=_alone(), layout={}, warn=print)


@pytest.mark.parametrize("content", ["[]", "5", '{"made_for": {"a": 1}}', '{"correction_bytes": "x"}'])
def test_a_damaged_correction_is_none(tmp_path: Path, content: str) -> None:
    class Made:
        def model_dump(self) -> dict[str, int]:
            return {"a": 1}

    made: Any = Made()
    (tmp_path / settle.CORRECTION).write_text(content)
    assert settle._noted_correction(tmp_path, made) == 0
    (tmp_path / settle.CORRECTION).write_text('{"correction_bytes": 7, "made_for": {"a": 1}}')
    assert settle._noted_correction(tmp_path, made) == 7


def test_a_plan_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(RunError, match=r"the plan cannot be written: .*plan\.json: Is a directory; put it right"):
        layer_plan.Plan.model_construct(version=1).write(tmp_path)


def _alone() -> Any:
    import torch

    from training.world import World

    return World(0, 1, 0, torch.device("cpu"))


# -- a sweep's folder --------------------------------------------------------------------------------------------


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished sweep."""
    monkeypatch.setattr(trials.processes, "run", FakeTrials())
    _again(tmp_path)
    return tmp_path


def _again(folder: Path) -> int:
    """Trials of the same sweep, run once more, that had to be run."""
    before = len(trials.read(folder / "trials.jsonl"))
    running = sweep(folder, recipe("sweep.minutes=1e-9"))
    running.run()
    summary.write(folder, summary.of(running))
    return len(running.trials.records) - before


def test_lines_that_are_no_trials_are_ignored_and_stay(swept: Path) -> None:
    file = swept / "trials.jsonl"
    first, *others = file.read_text().splitlines()
    lacking = {name: value for name, value in json.loads(first).items() if name != "step_times_s"}
    junk = ['{"key": 1}', "[]", "5", "{", json.dumps(lacking)]
    file.write_text("\n".join([*junk, first, *others]) + "\n")
    assert _again(swept) == 0
    report.write(swept)
    assert file.read_text().splitlines()[:5] == junk


def test_a_folder_in_place_of_the_trials_is_named(tmp_path: Path) -> None:
    (tmp_path / "trials.jsonl").mkdir()
    with pytest.raises(RecipeError, match=r"trials\.jsonl: Is a directory; put it right"):
        sweep(tmp_path, recipe())


@pytest.mark.parametrize("content", [None, "[]", "{}", '{"timeline": [1]}'])
def test_memory_that_is_gone_is_left_out_of_the_pictures(swept: Path, capsys, content: str | None) -> None:
    followed = sorted(swept.glob("trials/*/memory.json"))
    assert followed
    for file in followed:
        file.unlink() if content is None else file.write_text(content)
    assert _again(swept) == 0
    assert "missing or damaged; the pictures of memory lack" in capsys.readouterr().err
    (swept / "memory.json").write_text(content or '{"size": 1, "modes": {"none": {}}}')
    assert not summary.read_memory(swept, summary.read(swept)).get("modes")
    report.write(swept)


@pytest.mark.parametrize("content", ["{}", "[]"])
def test_a_report_of_a_damaged_summary_or_without_its_recipe_says_so(swept: Path, capsys, content: str) -> None:
    whole = (swept / "summary.json").read_text()
    (swept / "summary.json").write_text(content)
    assert report.main([str(swept)]) == run.USAGE
    assert "summary.json: is damaged; run the sweep again" in capsys.readouterr().err
    (swept / "summary.json").write_text(whole)
    (swept / "recipe.yaml").unlink()
    assert report.main([str(swept)]) == run.FAILED
    assert "recipe.yaml: No such file" in capsys.readouterr().err


# -- how a sweep and a gate end ----------------------------------------------------------------------------------

BUDGET = ["quickstart", "budget=200MiB"]


@pytest.mark.parametrize("program", [sweeps, gate])
@pytest.mark.parametrize("number", ["0", "-1"])
def test_ranks_that_cannot_be_are_refused(program: Any, number: str, tmp_path: Path, capsys) -> None:
    assert program.main([*BUDGET, "--processes", number, "--out", str(tmp_path)]) == run.USAGE
    assert f"--processes {number}: write 1" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("program", [sweeps, gate])
def test_a_stop_while_preparing_is_no_fault(program: Any, number: int, monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(sweeps.data, "prepare", lambda *args, **more: os.kill(os.getpid(), number))
    words = [*BUDGET, "targets.overhead=2", "--out", str(tmp_path)]
    before = signal.getsignal(signal.SIGTERM)
    assert program.main(words) == run.INTERRUPTED
    assert "stopped; the same command goes on" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_stop_at_the_end_of_a_sweep_is_no_fault() -> None:
    def stopped() -> int:
        signal.raise_signal(signal.SIGTERM)
        return 0

    assert sweeps.ended(stopped) == run.INTERRUPTED


def test_a_full_disk_is_told_with_its_file_and_ends_with_1(tmp_path: Path, monkeypatch, capsys) -> None:
    with tiny.small_disk(tmp_path / "disk", 1):
        folder = tmp_path / "disk" / "out"
        running = sweep(folder, recipe())
        record = {"key": "x" * 4096}
        with (tmp_path / "disk" / "filler").open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
        assert sweeps.ended(lambda: running.trials._append(record) or 0) == run.FAILED
    said = capsys.readouterr().err
    assert said.strip() == f"{folder / 'trials.jsonl'}: No space left on device; free some, the same command continues"


def test_true_is_no_number() -> None:
    assert records.has_shape({"n": 1.5, "more": 0}, {"n": records.NUMBER})
    assert not records.has_shape({"n": True}, {"n": records.NUMBER})
    assert not records.has_shape({}, {"n": (records.NULL,)})
