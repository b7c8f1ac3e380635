"""`make compare`: what got worse by more than a tolerance ends with 1, and nothing else does."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from fake_trials import FakeTrials, recipe, sweep

from tools import compare, summary, trials
from training.run import FAILED, USAGE


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("before")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials.processes, "run", FakeTrials())
        running = sweep(folder, recipe())
        running.run()
        return summary.of(running)


def compared(tmp_path: Path, before: dict[str, Any], after: dict[str, Any], *words: str) -> int:
    for name, found in (("a", before), ("b", after)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "summary.json").write_text(json.dumps(found))
    return compare.main([str(tmp_path / "a"), str(tmp_path / "b"), *words])


def slower(found: dict[str, Any], mode: str, share: float) -> None:
    for timing in found["modes"][mode]["timings"]:
        timing["tokens_per_s"] *= 1 - share


def shorter(found: dict[str, Any], mode: str, longest: int, next_tried: int | None) -> None:
    found["modes"][mode] |= {"longest_context": longest, "next_tried": next_tried}


def test_nothing_is_worse_than_itself(tmp_path: Path, before: dict[str, Any], capsys) -> None:
    assert compared(tmp_path, before, before) == 0
    assert "nothing is worse" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words", "told"),
    [
        (lambda f: slower(f, "full", 0.2), [], "full runs at 80% of its speed at 4,928"),
        (lambda f: slower(f, "full", 0.2), ["--tolerance", "0.15"], "80%"),
        (lambda f: shorter(f, "none", 896, 960), [], "none reaches 896, not 960"),
        (lambda f: f["modes"].pop("none"), [], "none is not in B"),
        (lambda f: f["modes"]["none"].update(status="failed", error="boom"), [], "none was stopped, failed: boom"),
    ],
)
def test_what_fell_is_told_and_ends_with_1(tmp_path, before, capsys, change, words, told) -> None:
    after = copy.deepcopy(before)
    change(after)
    assert compared(tmp_path, before, after, *words) == FAILED
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: slower(f, "full", 0.05), []),
        (lambda f: slower(f, "full", 0.2), ["--tolerance", "0.25"]),
        (lambda f: slower(f, "full", -0.5), []),
        (lambda f: shorter(f, "none", 896, 960), ["--length-tolerance", "0.1"]),
        (lambda f: shorter(f, "none", 768, 1024), []),  # a coarser granularity: nothing up to 960 was found too much
        (lambda f: shorter(f, "none", 896, None), []),  # nothing longer was allowed
        (lambda f: f["modes"].update(new=f["modes"]["none"]), []),
    ],
)
def test_what_did_not_fall_by_more_than_the_tolerance_passes(tmp_path, before, change, words) -> None:
    after = copy.deepcopy(before)
    change(after)
    assert compared(tmp_path, before, after, *words) == 0


def test_a_mode_is_the_same_under_the_same_attention_however_it_is_named(tmp_path, before, capsys) -> None:
    two = copy.deepcopy(before)
    two["modes"] = {f"unfused/{name}": mode for name, mode in before["modes"].items()}
    two["modes"] |= {f"sdpa/{name}": {**mode, "attention": "sdpa"} for name, mode in before["modes"].items()}
    assert before["modes"]["none"]["attention"] == "unfused"
    assert compared(tmp_path, before, two) == 0
    assert "only in B" in capsys.readouterr().out
    (tmp_path / "b" / "recipe.yaml").write_text(recipe().to_yaml())
    assert compared(tmp_path, two, before) == 0  # B's recipe does not ask for sdpa
    said = capsys.readouterr().out
    assert "not in B" in said
    assert "worse by more" in said  # nothing is
    (tmp_path / "b" / "recipe.yaml").write_text(recipe("sweep.attention=[unfused, sdpa]").to_yaml())
    assert compared(tmp_path, two, before) == FAILED
    assert "sdpa/none is not in B" in capsys.readouterr().out


@pytest.mark.parametrize("share", ["nan", "inf", "-5", "1", "a lot"])
def test_a_tolerance_that_hides_everything_or_nothing_is_refused(tmp_path, before, capsys, share) -> None:
    for word in ("--tolerance", "--length-tolerance"):
        with pytest.raises(SystemExit) as ended:
            compared(tmp_path, before, before, word, share)
        assert ended.value.code == USAGE
        assert share in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "[]", "5", "{", "\xff"])
def test_a_damaged_summary_is_named(tmp_path: Path, before: dict[str, Any], capsys, text: str) -> None:
    assert compared(tmp_path, before, before) == 0
    (tmp_path / "b" / "summary.json").write_text(text, encoding="latin-1")
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == USAGE
    assert f"{tmp_path / 'b' / 'summary.json'}: is damaged; run the sweep again" in capsys.readouterr().err


def test_what_is_not_the_same_is_said(tmp_path: Path, before: dict[str, Any], capsys) -> None:
    assert compared(tmp_path, before, {**before, "device": "another", "budget_bytes": 2**30}) == 0
    said = capsys.readouterr().out
    assert "device: a test there, another here" in said
    assert "budget_bytes: 97.7 KiB there, 1.00 GiB here" in said


def test_what_cannot_be_compared_is_an_error(tmp_path: Path, before: dict[str, Any], capsys) -> None:
    batches = {name: {**mode, "largest_micro_batch_size": 1} for name, mode in before["modes"].items()}
    assert compared(tmp_path, before, {**before, "axis": "micro_batch_size", "modes": batches}) == USAGE
    assert "cannot be compared" in capsys.readouterr().err
    other = {name: {**mode, "attention": "sdpa"} for name, mode in before["modes"].items()}
    assert compared(tmp_path, before, {**before, "modes": other}) == USAGE
    assert "no mode under the same attention in common" in capsys.readouterr().err
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "nothing")]) == USAGE
    assert "no finished sweep" in capsys.readouterr().err
