"""A run with `recompute: auto`: planned, checked by its first step, planned again when that fails, and replayed."""

from __future__ import annotations

import contextlib
import io
import json
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import train
from model.modes import Mode
from tests import tiny
from training import run
from training.choosing import calibration, layer_costs, layer_plan
from training.choosing.calibration import Shape, Times
from training.engine import Engine, make_engine
from training.recipe import RecipeError

BASE = ("engine.name=torch", "engine.deepspeed_config=null", "seq_length=256", "model.num_layers=6")
BASE += ("model.hidden_size=64", "model.attention=sdpa", "global_batch_size=1", "steps=2", "optimizer.warmup_steps=1")
BASE += ("evaluation.batches=0", "evaluation.every_steps=null", "checkpoint.every_steps=null", "checkpoint.keep=0")
AUTO = ("recompute=auto", "budget=5000KiB", "host_budget=1KiB")
ZERO2 = ("engine.name=deepspeed", "engine.deepspeed_config=zero2")


def quick_times(shape: Shape, modes: Sequence[Mode], device: object, cache: object) -> Times:
    tiled = 1.5 * bool(shape.tiles.mlp_tile_tokens or shape.tiles.attention_head_groups)
    again = {str(m): 0.1 * len(m.modules) + (m.recompute == "full") * (1 - 0.3 * len(m.keep)) for m in modes}
    seconds = {name: (1.0, 2.0 + tiled + extra) for name, extra in again.items()}
    return Times(seconds, 0.5, 1e-8, 1e-9, copies_overlap=False)


@pytest.fixture(autouse=True)
def no_calibration(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is timed, and no engine of an earlier run is still in memory when the next one is metered."""
    engines: weakref.WeakSet[Engine] = weakref.WeakSet()

    def recorded(*args: Any) -> Engine:
        engine = make_engine(*args)
        engines.add(engine)
        return engine

    monkeypatch.setattr(calibration, "times", quick_times)
    monkeypatch.setattr(train, "make_engine", recorded)
    yield
    for engine in engines:
        engine.release()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny.little_data(tmp_path_factory)


@pytest.fixture(scope="module")
def finished(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run with `auto`, and what it said."""
    folder, said = tmp_path_factory.mktemp("auto"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(calibration, "times", quick_times)
        assert tiny.start(folder, data, *BASE, *AUTO) == 0
    return folder, said.getvalue()


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def plan(folder: Path) -> layer_plan.Plan:
    return layer_plan.read(folder / "plan.json")


def lie(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Every prediction is too low by a factor."""
    honest = layer_costs.Tracer._trace

    def lying(self: layer_costs.Tracer, modes: tuple[Mode, ...]) -> layer_costs.Traced:
        true = honest(self, modes)
        low = {name: int(getattr(true, name) * factor) for name in ("peak_bytes", "needed_bytes")}
        return replace(true, **low)

    monkeypatch.setattr(layer_costs.Tracer, "_trace", lying)


def test_auto_trains_fills_the_budget_and_leaves_its_plan(finished: tuple[Path, str]) -> None:
    folder, said = finished
    made, record = plan(folder), result(folder)
    assert record["mode"] == "auto"
    assert len(set(made.modes)) > 1
    assert record["peak_device_bytes"] == pytest.approx(made.peak_device_bytes, rel=0.01)
    assert 0.9 * made.budget_bytes <= record["peak_device_bytes"] <= made.budget_bytes
    assert "predicted peak" in said
    assert "plan: measured peak" in said
    text = (folder / "plan.txt").read_text()
    assert "the next" in text
    assert all(mode in text for mode in made.modes)
    assert (folder / "plan.png").stat().st_size > 10_000


def test_a_plan_file_gives_the_same_run_and_both_the_losses_of_none(
    finished: tuple[Path, str], tmp_path: Path, data: list[str]
) -> None:
    folder, _ = finished
    file = f"recompute={{plan: {folder / 'plan.json'}}}"
    assert tiny.start(tmp_path / "again", data, *BASE, file, "budget=5000KiB") == 0
    assert result(tmp_path / "again")["mode"] == "plan"
    assert result(tmp_path / "again")["peak_device_bytes"] == result(folder)["peak_device_bytes"]
    tiles = [f"tiles.{name}={json.dumps(tile)}" for name, tile in plan(folder).tiles.items()]
    assert tiny.start(tmp_path / "none", data, *BASE, *tiles, "recompute=none") == 0
    assert tiny.curve(folder) == tiny.curve(tmp_path / "again") == tiny.curve(tmp_path / "none")


def test_a_run_that_goes_on_keeps_its_plan(tmp_path: Path, data: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    saved = ("checkpoint.every_steps=1", "checkpoint.keep=1", "steps=3")
    assert tiny.interrupted(tmp_path, data, 2, *BASE, *AUTO, *saved) == run.INTERRUPTED
    before = (tmp_path / "plan.json").read_text()
    monkeypatch.delattr(calibration, "times")  # nothing is timed again
    assert tiny.start(tmp_path, data, *BASE, *AUTO, *saved) == 0
    assert (tmp_path / "plan.json").read_text() == before


@pytest.mark.parametrize("engine", [(), pytest.param(ZERO2, marks=pytest.mark.slow)], ids=["torch", "zero2"])
def test_a_first_step_that_runs_out_of_memory_is_planned_again(
    engine: tuple[str, ...],
    tmp_path: Path,
    data: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lie(monkeypatch, 0.9)
    budget = "5400KiB" if engine else "5000KiB"
    assert tiny.start(tmp_path, data, *BASE, *engine, "recompute=auto", "host_budget=1KiB", f"budget={budget}") == 0
    made, record = plan(tmp_path), result(tmp_path)
    assert "planning again" in capsys.readouterr().out
    assert made.correction_bytes > 0
    # Nothing of the first attempt is left in memory.
    assert record["peak_device_bytes"] == pytest.approx(made.peak_device_bytes / 0.9, rel=0.02)
    assert record["peak_device_bytes"] <= made.budget_bytes


def test_a_length_for_which_no_plan_fits_ran_out_of_memory(
    tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.start(tmp_path, data, *BASE, "recompute=auto", "budget=1MiB") == run.OUT_OF_MEMORY
    assert result(tmp_path)["status"] == "oom"
    assert "no plan fits" in result(tmp_path)["error"]


def test_what_is_left_is_said(tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.start(tmp_path, data, *BASE, "recompute=auto", "budget=64MiB") == 0
    said = capsys.readouterr().out
    assert "of the budget" in said
    assert "more memory would not make it faster" in said
    assert set(plan(tmp_path).modes) == {"none"}


# Plan files


def test_a_plan_file_that_is_wrong_or_of_another_model_is_refused(
    finished: tuple[Path, str], tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = finished[0] / "plan.json"
    good = file.read_text()
    wrong = {
        "{": "Invalid JSON",
        good.replace('"version": 1', '"version": 2'): "version",
        good.replace('"margin_bytes"', '"margin"'): "margin",
        good.replace(plan(file.parent).modes[0], "nonsense"): "nonsense",
    }
    for text, message in wrong.items():
        other = tmp_path / "other.json"
        other.write_text(text)
        with pytest.raises(RecipeError, match=message):
            layer_plan.read(other)
        assert tiny.start(tmp_path / "run", data, *BASE, f"recompute={{plan: {other}}}") == run.USAGE
        assert "Traceback" not in capsys.readouterr().err
    for override in ("model.num_layers=5", "model.hidden_size=32"):
        assert tiny.start(tmp_path / "run", data, *BASE, override, f"recompute={{plan: {file}}}") == run.USAGE
        assert override.split("=")[0] in capsys.readouterr().err


def test_a_plan_used_for_another_length_says_so(
    finished: tuple[Path, str], tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = finished[0] / "plan.json"
    capsys.readouterr()
    assert tiny.start(tmp_path / "run", data, *BASE, "seq_length=128", f"recompute={{plan: {file}}}") == 0
    assert "the plan was made for seq_length 256 there, 128 here" in capsys.readouterr().out


# Calibration


def test_times_are_measured_once_and_kept_by_all_they_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    import torch

    from model.gpt import GPTConfig
    from model.modes import parse
    from model.tiling import Tiles

    config = GPTConfig(num_layers=3, hidden_size=32, num_attention_heads=2, vocab_size=50)
    shape, device = Shape(config, Tiles(), torch.float32, 1, 64), torch.device("cpu")
    modes = [parse("none"), parse("full")]
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = calibration.times(shape, modes, device, tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert 0 < first.layers["none"][0] < 1
    assert first.head_s > 0 < first.copy_s_per_byte
    with monkeypatch.context() as patch:
        patch.delattr(calibration, "Layer")  # nothing is timed again
        assert calibration.times(shape, modes, device, tmp_path) == first
        assert calibration.times(replace(shape, config=replace(config, num_layers=9)), modes, device, tmp_path) == first
        with pytest.raises(NameError):
            calibration.times(replace(shape, seq_length=128), modes, device, tmp_path)
    more = calibration.times(shape, [*modes, parse("norm")], device, tmp_path)
    assert more.layers["none"] == first.layers["none"]
    assert set(more.layers) == {"none", "full", "norm"}
