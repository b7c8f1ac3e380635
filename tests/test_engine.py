"""Engines: the same step whoever makes it, nothing that is not finite in the weights, state that comes back."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import tiny
import torch
from tiny import linear_as_it_was  # noqa: F401

from model import recompute
from tools.launch import free_port
from training import build, optimizer, world
from training.engine import Engine, make_engine
from training.engine_deepspeed import merged_config
from training.recipe import RecipeError
from training.run import NOT_FINITE, RunError

ENGINES = ["torch", "zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"]
EVERY = [(name, precision) for name in ENGINES for precision in ("fp32", "bf16")]
SOME = [
    ("torch", "fp32"),
    ("torch", "bf16"),
    ("zero0", "fp32"),
    ("zero1", "bf16"),
    ("zero2", "fp32"),
    ("zero3", "fp32"),
]


def settings(engine: str) -> list[str]:
    if engine == "torch":
        return ["engine.name=torch", "engine.deepspeed_config=null"]
    return ["engine.name=deepspeed", f"engine.deepspeed_config={engine}"]


def make(engine: str, *overrides: str) -> Engine:
    recipe = tiny.load(*settings(engine), *overrides)
    torch.manual_seed(0)
    return make_engine(recipe, build.build_model(recipe), world.join())


def losses(engine: Engine, steps: range, lr: float = 1e-2) -> list[tuple[float, float]]:
    results = [engine.train_step(tiny.batches(s, engine.accumulation), lr) for s in steps]
    return [(r.loss, r.grad_norm) for r in results]


@pytest.mark.parametrize(("name", "precision"), EVERY)
def test_every_engine_makes_the_same_steps(name: str, precision: str) -> None:
    reference = losses(make("torch", "precision=fp32"), range(4), lr=1e-3)
    found = losses(make(name, f"precision={precision}"), range(4), lr=1e-3)
    tolerance = 5e-5 if precision == "fp32" else 1e-2
    assert torch.allclose(torch.tensor(found), torch.tensor(reference), rtol=tolerance), (found, reference)


@pytest.mark.parametrize("name", ["torch", "zero0", "zero1", "zero2", "zero3"])
def test_micro_batches_weigh_every_token_alike(name: str) -> None:
    """4 micro-batches of 1 with different numbers of predicted tokens are one batch of 4."""
    whole = make(name, "micro_batch_size=4")
    parts = make(name)
    for step in range(3):
        cut = list(tiny.batches(step, 4))
        together = tuple(torch.cat(tensors) for tensors in zip(*cut, strict=True))
        one, other = whole.train_step([together], 1e-2), parts.train_step(cut, 1e-2)
        assert one.predicted_tokens == other.predicted_tokens == 4 * 16 - (0 + 1 + 2 + 0)
        assert math.isclose(one.loss, other.loss, rel_tol=1e-6)
        assert math.isclose(one.grad_norm, other.grad_norm, rel_tol=1e-5)


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.inf


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize(("name", "precision"), EVERY)
def test_nothing_that_is_not_finite_reaches_the_weights(name: str, precision: str, what: str) -> None:
    engine = make(name, f"precision={precision}")
    losses(engine, range(2))
    before = {key: tensor.clone() for key, tensor in engine.state().items()}
    forward = engine.forward

    def poisoned(*args: Any) -> torch.Tensor:
        loss = forward(*args)
        return loss * math.nan if what == "loss" else _Poison.apply(loss)

    engine.forward = poisoned  # type: ignore[method-assign]
    with pytest.raises(RunError, match=r"step 3: .*optimizer\.lr") as caught:
        losses(engine, range(2, 3))
    assert caught.value.exit_code == NOT_FINITE
    for key, tensor in engine.state().items():
        assert torch.equal(tensor, before[key]), key


@pytest.mark.parametrize(("name", "precision"), EVERY)
def test_state_comes_back_bit_for_bit(name: str, precision: str) -> None:
    engine = make(name, f"precision={precision}")
    losses(engine, range(2))
    saved = {key: tensor.clone() for key, tensor in engine.state().items()}
    evaluated = engine.eval_loss(tiny.batches(9, 2))
    expected = losses(engine, range(2, 4))
    fresh = make(name, f"precision={precision}", "seed=5")
    losses(fresh, range(20, 21))  # weights and moments of its own
    where = {key: tensor.data_ptr() for key, tensor in fresh.state().items()}
    fresh.load_state(saved)
    assert {key: tensor.data_ptr() for key, tensor in fresh.state().items()} == where  # copied in place
    assert fresh.eval_loss(tiny.batches(9, 2)) == evaluated
    assert losses(fresh, range(2, 4)) == expected


@pytest.mark.parametrize("name", ENGINES)
def test_master_weights_and_moments_are_float32(name: str) -> None:
    engine = make(name, "precision=bf16")
    assert all(p.dtype == torch.bfloat16 for p in engine.model.parameters())
    assert {tensor.dtype for tensor in engine.state().values()} == {torch.float32}


@pytest.mark.parametrize("name", ["torch", "zero1", "zero2", "zero3", "zero3-offload"])
def test_bf16_gradients_of_micro_batches_are_added_in_float32(name: str) -> None:
    """One gradient and 39 of 1/512 of it: added in bf16, each of them would be rounded away."""
    engine = make(name, "precision=bf16", "global_batch_size=40", "optimizer.clip_grad=null")
    batch = next(tiny.batches(0, 1))
    forward, calls = engine.forward, iter(range(40))

    def scaled(*args: Any) -> torch.Tensor:
        return forward(*args) * (1 if next(calls) == 0 else 1 / 512)

    engine.forward = scaled  # type: ignore[method-assign]
    many = engine.train_step([batch] * 40, 0.0).grad_norm * 40
    one = make("torch", "precision=bf16", "global_batch_size=1").train_step([batch], 0.0).grad_norm
    assert math.isclose(many, one * (1 + 39 / 512), rel_tol=2e-3)


@pytest.mark.parametrize("name", ["torch", "zero0", "zero1", "zero2", "zero3"])
def test_a_batch_with_nothing_to_predict_has_loss_zero(name: str) -> None:
    engine = make(name)
    nothing = [(tokens, torch.full_like(targets, -100)) for tokens, targets in tiny.batches(0, 4)]
    assert engine.train_step(nothing, 1e-2) == engine.train_step(nothing, 1e-2)
    assert engine.eval_loss(nothing) == 0.0


def test_evaluation_leaves_the_training_mode_and_random_numbers_alone() -> None:
    engine = make("torch", "model.hidden_dropout=0.5")
    before = torch.get_rng_state()
    first = engine.eval_loss(tiny.batches(0, 2))
    assert engine.eval_loss(tiny.batches(0, 2)) == first
    assert engine.model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_loading_state_of_another_model_names_the_tensor() -> None:
    small, large = make("torch"), make("torch", "model.ffn_hidden_size=128")
    with pytest.raises(RunError, match=r"mlp\.\w+\.weight is \[128, 32\], not \[64, 32\]"):
        small.load_state(large.state())


def test_matrices_decay_and_vectors_do_not_in_every_mode() -> None:
    recipe = tiny.load("model.normalization=layernorm", "model.bias=true")
    found = []
    for mode in ("none", "full", "selective+norm+activation"):
        model = build.build_model(recipe)
        recompute.apply(model, mode)
        decayed, plain = optimizer.parameter_groups(model.parameters(), 0.1)
        names = {p: name for name, p in model.named_parameters()}
        assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
        assert all("norm" in names[p] or names[p].endswith("bias") for p in plain["params"])
        found.append([[names[p] for p in group["params"]] for group in (decayed, plain)])
    assert found[0] == found[1] == found[2]
    assert sum(len(names) for names in found[0]) == len(list(model.parameters()))


def test_learning_rate_schedules() -> None:
    def curve(*overrides: str) -> list[float]:
        recipe = tiny.load("steps=10", "optimizer.lr=1.0", "optimizer.min_lr=0.1", *overrides)
        return [round(optimizer.learning_rate(recipe, step), 6) for step in range(1, 11)]

    assert curve("optimizer.schedule=constant") == [0.5] + [1.0] * 9
    wsd = curve("optimizer.schedule=wsd", "optimizer.decay_steps=3")
    assert wsd == [0.5] + [1.0] * 6 + [0.7, 0.4, 0.1]
    cosine = curve("optimizer.schedule=cosine")
    assert cosine[:2] == [0.5, 1.0]
    assert cosine[5] == 0.55  # half way between step 2 and step 10
    assert cosine[9] == 0.1
    assert cosine == sorted(cosine[:1]) + sorted(cosine[1:], reverse=True)


def test_a_key_that_the_recipe_owns_is_an_error_naming_both_owners(tmp_path: Any) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"gradient_clipping": 1.0}))
    recipe = tiny.load("engine.name=deepspeed", f"engine.deepspeed_config={file}")
    with pytest.raises(RecipeError, match=r"mine\.json has 'gradient_clipping'.*optimizer\.clip_grad"):
        merged_config(recipe, 1, 100)
    file.write_text(json.dumps({"zero_optimisation": {"stage": 1}}))
    with pytest.raises(RecipeError, match=r"unknown key 'zero_optimisation'.*zero_optimization"):
        merged_config(recipe, 1, 100)
    file.write_text(json.dumps({"zero_optimization": {"stage": 1, "overlap_com": True}}))
    with pytest.raises(RecipeError, match=r"unknown key 'overlap_com'.*overlap_comm"):
        make_engine(recipe, build.build_model(recipe), world.join())
    file.write_text("{")
    with pytest.raises(RecipeError, match="cannot be read"):
        merged_config(recipe, 1, 100)


def test_buckets_are_no_larger_than_the_model() -> None:
    config = merged_config(tiny.load(*settings("zero2")), 1, 1001)
    assert config["zero_optimization"]["reduce_bucket_size"] == 1002


TWO_RANKS = """
import json, sys, torch
sys.path[:0] = {path!r}
import test_engine, tiny
from training import world
here = world.join()
found = {{}}
for name, precision in test_engine.{engines}:
    engine = test_engine.make(name, f"precision={{precision}}")
    results = [engine.train_step(tiny.batches(s, 2, here.rank, 2), 1e-2) for s in range(4)]
    evaluated = engine.eval_loss(tiny.batches(9, 2, here.rank, 2))
    saved = {{key: tensor.clone() for key, tensor in engine.state().items()}}
    engine.load_state(saved)
    assert engine.eval_loss(tiny.batches(9, 2, here.rank, 2)) == evaluated
    found[name + " " + precision] = [(r.loss, r.grad_norm) for r in results] + [(evaluated, 0.0)]
if here.is_main:
    print(json.dumps(found))
world.leave()
"""


@pytest.mark.parametrize("engines", ["SOME", pytest.param("EVERY", marks=pytest.mark.slow)])
def test_two_ranks_reproduce_one_ranks_curve_for_the_same_global_batch(tmp_path: Any, engines: str) -> None:
    path = [str(tiny.ROOT), str(tiny.ROOT / "tests")]
    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS.format(path=path, engines=engines))
    store = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env=os.environ | store | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    output, _ = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    found = json.loads(output.decode().splitlines()[-1])
    for name, precision in globals()[engines]:
        engine = make(name, f"precision={precision}")
        one = [*losses(engine, range(4)), (engine.eval_loss(tiny.batches(9, 4)), 0.0)]
        two = found[f"{name} {precision}"]
        tolerance = 2e-6 if precision == "fp32" else 1e-2
        assert torch.allclose(torch.tensor(two), torch.tensor(one), rtol=tolerance), (name, precision, one, two)
