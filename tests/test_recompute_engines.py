"""Modes under the engines: the same steps, bit by bit, as mode `none` makes under the same engine."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tiny
import torch
from test_engine import free_port, settings
from tiny import linear_as_it_was  # noqa: F401

from model import offload, recompute
from training import build, world
from training.engine import make_engine

ENGINES = ["torch", "zero0", "zero1", "zero2", "zero3"]
MODES = [
    "selective+norm+activation",
    "mlp",
    "full",
    "full+uniform2",
    "full+attention",
    "full+qkv+projection",
    "none+offload",
    "norm+activation+offload",
    "full+offload",
    "full+attention+offload",
    "full+deepspeed_offload",
    "[none,full+attention+offload,norm+offload]",
]
# What is frozen: nothing; what the first layer gets needs no gradient; parts of layers (DeepSpeed issue 8148).
FROZEN: list[tuple[str, ...]] = [
    (),
    ("embedding",),
    ("embedding", "layers.0.mlp", "layers.1.attention", "layers.2.input_norm"),
]


CASES = [(frozen, "fp32") for frozen in FROZEN] + [((), "bf16")]


def steps(engine, mode, frozen=(), precision="fp32", folder=Path("/tmp")):
    """Three optimizer steps with dropout and accumulation: what they reported, the state after, the bytes moved."""
    if engine == "zero3":  # the recipe's own configuration leaves parameters whole that are as small as these
        engine = folder / "zero3.json"
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
        engine.write_text(json.dumps({"zero_optimization": zero}))
    fields = ["model.num_layers=3", "model.hidden_dropout=0.1", "model.attention=sdpa", f"precision={precision}"]
    recipe = tiny.load(*settings(str(engine)), *fields, f"recompute={mode}")
    torch.manual_seed(0)
    model = build.build_model(recipe)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    here = world.join()
    trainer = make_engine(recipe, model, here)
    torch.manual_seed(here.rank)
    reports = []
    for number in range(3):
        report = trainer.train_step(tiny.batches(number, trainer.accumulation, here.rank, here.size), 1e-2)
        reports.append((report.loss, report.grad_norm))
    build.check_mode_works(model, recipe)
    state = {name: tensor.clone() for name, tensor in trainer.state().items()}
    return reports, state, recompute.activity(model).offloaded_bytes


def compare(engine, modes, frozen=(), precision="fp32", folder=Path("/tmp")):
    """Every mode makes the steps of `none`; returns how much each moved."""
    moved = {}
    reports, state, _ = steps(engine, "none", frozen, precision, folder)
    assert state
    for mode in modes:
        ours, weights, moved[mode] = steps(engine, mode, frozen, precision, folder)
        assert ours == reports, (engine, mode)
        for name, tensor in state.items():
            assert torch.equal(weights[name], tensor), (engine, mode, name)
    return moved


@pytest.fixture(autouse=True)
def small_things_move_and_warnings_are_silent(monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("engine", ["torch", "zero3"])
def test_modes_make_the_same_steps_and_move_the_same_bytes(engine, tmp_path):
    modes = ["selective+norm+activation", "full+attention+offload", "full+deepspeed_offload"]
    moved = compare(engine, modes, FROZEN[2], folder=tmp_path)
    inputs = 3 * 4 * 16 * 32 * 4  # steps, micro-batches, tokens, hidden size, float32
    assert moved["full+deepspeed_offload"] == 3 * inputs
    logsumexp = inputs * 2 // 32
    assert moved["full+attention+offload"] == 2 * (2 * inputs + logsumexp)


@pytest.mark.slow
@pytest.mark.parametrize(("frozen", "precision"), CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_mode_makes_the_same_steps_under_every_engine(engine, frozen, precision, tmp_path):
    moved = compare(engine, MODES, frozen, precision, tmp_path)
    if engine != "torch":  # gathered or not, parameters are no activations
        assert moved == compare("torch", MODES, frozen, precision, tmp_path)


TWO_RANKS = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = {path!r}
from pathlib import Path
import test_recompute_engines as tests
from model import offload
from training import world
offload.MIN_BYTES = 1
here = world.join()
folder = Path({folder!r}) / str(here.rank)
folder.mkdir()
for frozen, precision in tests.CASES:
    tests.compare({engine!r}, tests.MODES, frozen, precision, folder)
print("the same")
world.leave()
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_every_mode_makes_the_same_steps_on_two_ranks(engine, tmp_path):
    """FSDP2 under `torch`."""
    script = tmp_path / "two.py"
    path = [str(tiny.ROOT), str(tiny.ROOT / "tests")]
    script.write_text(TWO_RANKS.format(path=path, folder=str(tmp_path), engine=engine))
    store = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env=os.environ | store | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=1200) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for out, error in outputs:
        assert out.endswith("the same\n"), error[-3000:]
