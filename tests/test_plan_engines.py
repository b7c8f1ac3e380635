"""Planned bytes against those of real engines, each in processes of its own: DeepSpeed stages 0 to 3, and FSDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.real_step import cases, run
from training import recipe
from training.planning.planner import Device, Planner

CPU = Device("cpu", "cpu", None)
RECIPE = """
seq_length: 64
micro_batch_size: 2
global_batch_size: 4
steps: 10
recompute: full
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, num_query_groups: 2, ffn_hidden_size: 192}
data: {tokenizer_vocab_size: 1000}
tiles: {loss_tile_tokens: 64}
"""
# Small enough to be full several times in a step, and for parameters that do not fit into them.
SMALL: dict[str, dict[str, Any]] = {
    "bucket1": {"stage": 1, "reduce_bucket_size": 20000},
    "bucket2": {"stage": 2, "reduce_bucket_size": 20000},
    "offload2": {"stage": 2, "reduce_bucket_size": 60000, "offload_optimizer": {"device": "cpu"}},
    "gather3": {
        "stage": 3,
        "reduce_bucket_size": 20000,
        "stage3_prefetch_bucket_size": 30000,
        "stage3_param_persistence_threshold": 100,
        "stage3_max_reuse_distance": 1000,
        "stage3_max_live_parameters": 60000,
    },
    "reuse3": {"stage": 3, "reduce_bucket_size": 20000, "stage3_param_persistence_threshold": 100},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(RECIPE)
    for name, zero in SMALL.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"zero_optimization": zero}))
    return tmp_path


def check(folder: Path, groups: list[list[str]], ranks: int, tolerance: float = 1e-3) -> None:
    """Runs each group of overrides and holds the plan's peak, after-forward and host bytes against the meter's."""
    file = str(folder / "small.yaml")
    words = [word.replace("@", str(folder)) for group in groups for word in ("--", *group)]
    results = run(file, words, ranks)
    assert len(results) == len(groups)
    wrong = []
    for case, real in zip(cases(words), results):
        r = recipe.load(file, case)
        planned = Planner(r, r.recompute, CPU, ranks).predict(r.seq_length)  # type: ignore[arg-type]
        for name in ("peak_device_bytes", "after_forward_device_bytes", "peak_host_bytes"):
            off = getattr(planned, name) - real[name]
            if abs(off) > tolerance * max(real[name], 1):
                wrong.append(f"{' '.join(case)}: {name} is {real[name]}, planned {off:+} ({real['peak_op']})")
    assert not wrong, "\n".join(wrong)


def engine(config: str, *words: str) -> list[str]:
    return [f"engine.deepspeed_config={config}", *words]


def test_planned_bytes_are_those_of_deepspeed(folder: Path) -> None:
    groups = [engine(f"zero{stage}", f"global_batch_size={size}") for stage in (0, 1, 2) for size in (2, 6)]
    groups += [engine("zero2-offload"), engine("@/bucket2.json")]
    groups += [engine("zero1", "recompute=full+deepspeed_offload", f"seq_length={length}") for length in (64, 512)]
    groups += [engine("zero3"), engine("zero3-offload"), engine("zero3-offload-params")]
    check(folder, groups, ranks=1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("size", [1, 3])
def test_planned_bytes_are_those_of_deepspeed_on_two_ranks(folder: Path, precision: str, size: int) -> None:
    words = [f"precision={precision}", f"global_batch_size={4 * size}"]
    plain = ("zero0", "zero1", "zero2", "zero2-offload", "@/bucket1.json", "@/bucket2.json", "@/offload2.json")
    groups = [engine(config, *words, f"recompute={mode}") for config in plain for mode in ("none", "full")]
    groups += [engine("zero3", *words, f"recompute={mode}") for mode in ("none", "full", "full+attention")]
    check(folder, groups, ranks=2, tolerance=0.01)


@pytest.mark.slow
@pytest.mark.xfail(reason="what ZeRO-3 fetches ahead into small buckets is up to 4 % more than planned", strict=False)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("config", ["@/gather3.json", "@/reuse3.json"])
def test_planned_bytes_are_those_of_small_fetches_on_two_ranks(folder: Path, config: str, precision: str) -> None:
    words = [f"precision={precision}", "global_batch_size=4"]
    groups = [engine(config, *words, f"recompute={mode}") for mode in ("none", "full", "full+attention")]
    check(folder, groups, ranks=2, tolerance=0.01)


@pytest.mark.slow
def test_planned_bytes_are_those_of_tiles_under_zero_3(folder: Path) -> None:
    tiles = ["tiles.mlp_tile_tokens=64", "tiles.attention_head_groups=2", "model.attention=sdpa", "seq_length=256"]
    groups = [engine("@/gather3.json", *tiles, f"recompute={mode}") for mode in ("none", "full", "full+offload")]
    check(folder, groups, ranks=2)


@pytest.mark.slow
def test_planned_bytes_are_near_those_of_fsdp(folder: Path) -> None:
    groups = [
        ["engine.name=torch", f"recompute={mode}", f"precision={p}"]
        for mode in ("none", "full")
        for p in ("bf16", "fp32")
    ]
    check(folder, groups, ranks=2, tolerance=0.03)
