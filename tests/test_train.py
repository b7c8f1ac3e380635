"""The loop: records, run folder, errors and exit codes; every recipe trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from tiny import curve, interrupted, linear_as_it_was, start  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

import train
from model import recompute, tiling
from tools import launch
from training import build, flops, metrics, recipe, run
from training.engine import Engine

RESULT = (
    "status recipe mode seq_length micro_batch_size world_size device steps loss tokens_per_s step_time_s "
    "peak_device_bytes after_forward_device_bytes peak_host_bytes peak_op error"
).split()
LINE = (
    "step tokens loss lr grad_norm step_time_s tokens_per_s mfu hfu peak_device_bytes "
    "after_forward_device_bytes peak_host_bytes"
).split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny.little_data(tmp_path_factory)


def result(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())


def test_a_run_leaves_all_its_records(tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert start(tmp_path, data) == 0
    lines = metrics.read(tmp_path / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(set(line) == set(LINE) for line in steps)
    assert [line["tokens"] for line in steps] == [64 * step for step in range(1, 7)]
    assert [line["step"] for line in lines if "val_loss" in line] == [3, 6]
    found = result(tmp_path)
    assert set(RESULT) <= set(found)
    assert found | {"status": "completed", "steps": 6, "loss": steps[-1]["loss"], "error": None} == found
    assert found["peak_device_bytes"] >= max(line["peak_device_bytes"] for line in steps)
    assert found["peak_device_bytes"] > found["after_forward_device_bytes"] > 0
    assert found["peak_op"]
    resolved = recipe.load(tmp_path / "recipe.yaml")
    assert resolved.steps == 6
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert os.uname().nodename not in json.dumps(environment)
    assert str(Path.home()) not in json.dumps(environment)
    said = capsys.readouterr().out
    assert "first step done" in said
    assert "step 6/6  loss" in said
    assert "validation loss" in said
    assert "finished 6 steps" in said

    scalars = tensorboard(tmp_path / "tb")
    assert set(scalars) == set(metrics.TAGS)
    assert scalars["train/loss"] == pytest.approx({line["step"]: line["loss"] for line in steps})
    peaks = {line["step"]: line["peak_device_bytes"] / 2**30 for line in steps}
    assert scalars["memory/peak_device_gib"] == pytest.approx(peaks)


def tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_a_finished_run_says_so_and_another_recipe_in_its_folder_is_an_error(
    tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path, data, "steps=2") == 0
    before = (tmp_path / "result.json").read_bytes()
    capsys.readouterr()
    assert start(tmp_path, data, "steps=2") == 0
    assert "2 steps are done" in capsys.readouterr().out
    assert start(tmp_path, data, "steps=2", "optimizer.lr=2e-2", "seed=3") == run.USAGE
    said = capsys.readouterr().err
    assert "seed: 1234 there, 3 now" in said
    assert "optimizer.lr: 0.01 there, 0.02 now" in said
    assert "--run-dir" in said
    assert (tmp_path / "result.json").read_bytes() == before
    assert start(tmp_path, data, "steps=2", "recompute=full", "log.every_steps=2") == 0  # learns the same


@pytest.mark.parametrize("mode", ["none", "full", "selective+norm+activation", "full+offload"])
def test_a_run_may_change_its_memory_mode_on_the_way(tmp_path: Path, data: list[str], mode: str) -> None:
    """Saved state does not notice the mode: half in one mode and half in another is the same curve."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    small = [*tiny.TORCH, "model.num_layers=3", "model.hidden_dropout=0.1", "seq_length=256", "steps=4"]
    assert start(whole, data, *small) == 0
    assert interrupted(parts, data, 2, *small) == run.INTERRUPTED
    assert not (parts / "result.json").exists()
    assert start(parts, data, *small, f"recompute={mode}") == 0
    assert curve(parts) == curve(whole)
    assert result(parts)["mode"] == mode


def test_out_of_memory_is_a_result_with_the_operation(
    tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    long = ("seq_length=2048", "global_batch_size=1", "steps=2")  # scores [2, 2048, 2048]: 32 MiB
    assert start(tmp_path, data, *long, "budget=40MiB") == run.OUT_OF_MEMORY
    found = result(tmp_path)
    assert set(RESULT) <= set(found)
    assert found["status"] == "oom"
    assert "budget of 41,943,040 bytes" in found["error"]
    assert "attention" in found["peak_op"]
    assert found["peak_device_bytes"] <= 40 * 2**20
    said = capsys.readouterr().err
    assert "oom: " in said
    assert "plan: the longest context that should fit with mode none is" in said
    assert "no other mode should fit 2,048 tokens: set tiles.mlp_tile_tokens=auto" in said
    assert "Traceback" not in said
    assert start(tmp_path, data, *long, "budget=1GiB") == 0  # the same folder, with more memory
    assert result(tmp_path)["status"] == "completed"


def test_host_memory_that_runs_out_is_its_own_status(tmp_path: Path, data: list[str]) -> None:
    offload = ("recompute=full+offload", "host_budget=1KiB", "model.num_layers=3", "seq_length=256")
    assert start(tmp_path, data, *offload) == run.HOST_OUT_OF_MEMORY
    assert result(tmp_path)["status"] == "host_oom"


def test_a_loss_that_is_not_finite_stops_the_run(
    tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Engine.train_step

    def poisoned(engine: Engine, batches: Any, *rest: Any) -> Any:
        if engine.step_number == 2:
            inner = engine.forward
            engine.forward = lambda *args: inner(*args) * float("nan")  # type: ignore[method-assign]
        return forward(engine, batches, *rest)

    monkeypatch.setattr(Engine, "train_step", poisoned)
    assert start(tmp_path, data) == run.NOT_FINITE
    said = capsys.readouterr().err
    assert "step 3: the loss is nan" in said
    assert "Traceback" not in said
    found = result(tmp_path)
    assert found["status"] == "failed"
    assert found["steps"] == 2
    assert "step 3" in found["error"]


def test_any_other_error_is_shown_and_recorded_as_failed(
    tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise IndexError("out of memory is not what this is")

    monkeypatch.setattr(Engine, "train_step", broken)
    assert start(tmp_path, data) == run.FAILED
    assert result(tmp_path)["status"] == "failed"
    assert result(tmp_path)["error"] == "IndexError: out of memory is not what this is"
    assert "Traceback" in capsys.readouterr().err


def test_tensorboard_that_fails_loses_no_record(
    tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    assert start(tmp_path, data) == 0
    assert len(metrics.read(tmp_path / "metrics.jsonl")) == 8
    assert capsys.readouterr().out.count("TensorBoard events stop here") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing-like-this"], "shipped recipes"),
        (["quickstart", "stepz=3"], "did you mean steps"),
        (["quickstart", "micro_batch_size=2", "global_batch_size=7"], "global_batch_size = 7"),
        (["quickstart", "recompute=auto", "budget=null"], "write budget: 8GiB"),
        (["quickstart", "data.sources=[/nowhere/at/all]"], "/nowhere/at/all"),
        (["quickstart", "--run-dir", "/dev/null/x"], "--run-dir"),
    ],
)
def test_a_mistake_of_the_user_is_one_message_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [] if "--run-dir" in words else ["--run-dir", str(tmp_path)]
    assert train.main([*words, *where]) == run.USAGE
    said = capsys.readouterr()
    assert message in said.err
    assert "Traceback" not in said.err + said.out


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(["--help"])
    said = capsys.readouterr().out
    for key, kind, default, text in recipe.documentation():
        assert f"{key} ({kind}; {default})" in said
        assert text in said


@pytest.mark.parametrize("name", recipe.names())
def test_every_recipe_trains_for_two_steps(tmp_path: Path, data: list[str], name: str) -> None:
    kept = yaml.safe_load((tiny.ROOT / "recipes" / f"{name}.yaml").read_text())
    overrides = ["steps=2", f"precision={kept.get('precision', 'bf16')}", f"recompute={kept.get('recompute', 'none')}"]
    assert start(tmp_path, data, *overrides, name=name) == 0
    assert result(tmp_path)["steps"] == 2
    assert result(tmp_path)["mode"] == kept.get("recompute", "none")


def test_a_second_process_does_not_train_in_a_folder_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LOCK_WAIT_S", 0.1)
    first, second = run.RunFolder(tmp_path), run.RunFolder(tmp_path)
    assert first.open(tiny.load()) is None
    with pytest.raises(run.RunError, match="another process is training"):
        second.open(tiny.load())


class _Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products, fused attention left out."""

    aten = torch.ops.aten
    PRODUCTS = (aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm)

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in self.PRODUCTS:  # whose last two arguments are the operands
            self.flops += 2.0 * out.numel() * args[-2].shape[-1]
        return out


TILES = [{}, {"loss_tile_tokens": 7}, {"mlp_tile_tokens": 8}, {"attention_head_groups": 2}]
TILES += [{"mlp_tile_tokens": 8, "attention_head_groups": 2}]


@pytest.mark.parametrize("attention", ["unfused", "sdpa"])
@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: "+".join(tiles) or "untiled")
@pytest.mark.filterwarnings("ignore:mode")
def test_hardware_flops_are_those_that_run(attention: str, tiles: dict[str, int]) -> None:
    """Recomputed matrix products by formula equal the ones that run, for every mode."""
    shape = ["seq_length=24", "model.num_layers=4", "model.ffn_hidden_size=72", f"model.attention={attention}"]
    model = build.build_model(tiny.load(*shape))
    tokens = torch.zeros(1, 24, dtype=torch.long)
    for name in [name for name in recompute.MODES if "offload" not in name]:
        recompute.apply(model, "none")
        applied = tiling.apply(model, **tiles)
        recompute.apply(model, name)
        with _Products() as counted:
            model(tokens, tokens).backward()
        modes, causal = [recompute.parse(name)] * 4, 1.0 if attention == "unfused" else 0.0
        formula = 24 * flops.hardware_flops_per_token(model.config, 24, modes, applied, causal)
        assert counted.flops == formula, name


def test_two_ranks_through_the_launcher_make_one_ranks_curve(tmp_path: Path, data: list[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert start(one, data, "steps=4", "engine.deepspeed_config=zero2") == 0
    words = ["quickstart", *tiny.SETTINGS, *data, "steps=4", "engine.deepspeed_config=zero2"]
    command = [sys.executable, str(tiny.ROOT / "tools/launch.py"), *words]
    ran = subprocess.run(
        [*command, "--run-dir", str(two), "--processes", "2"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("finished 4 steps") == 1
    assert result(two)["world_size"] == 2
    for left, right in zip(curve(one), curve(two), strict=True):
        assert [x for x in left if x] == pytest.approx([x for x in right if x], rel=2e-6)


FAIL_ON_RANK_1 = """
import sys
sys.path[:0] = [{root!r}]
import train
from training import engine, world
original = engine.Engine.train_step
def broken(self, *args):
    if self.world.rank == 1 and self.step_number == 1:
        raise MemoryError("7 bytes wanted")
    return original(self, *args)
engine.Engine.train_step = broken
world.end_process(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_the_first_rank_to_fail_writes_the_result_and_decides_the_exit_code(
    tmp_path: Path, data: list[str], engine: str
) -> None:
    script = tmp_path / "fail.py"
    script.write_text(FAIL_ON_RANK_1.format(root=str(tiny.ROOT)))
    words = ["quickstart", *tiny.SETTINGS, *data, f"engine.name={engine}", "--run-dir", str(tmp_path / "run")]
    command = [str(script) if word.endswith("train.py") else word for word in launch.command(words, [], 2)]
    environment = launch.environment([], 2)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == run.HOST_OUT_OF_MEMORY
    assert result(tmp_path / "run")["status"] == "host_oom"
    assert ran.stderr.count("host_oom: 7 bytes wanted") == 1
    assert "Traceback" not in ran.stderr
