"""DeepSpeed's activation offload on the CPU: the same gradients, its host memory counted, its traps avoided."""

import gc
import subprocess
import sys
import warnings

import pytest
import torch

from model import host, recompute
from tests.mode_steps import assert_same, gradients, make, step, train
from tests.shapes import batch
from training import world
from training.choosing.settle import check
from training.memory import Meter
from training.recipe import RecipeError, load

MODES = ["full+deepspeed_offload", "full+uniform2+deepspeed_offload", "full+sqrt+deepspeed_offload"]
MIXED = [
    ["full+deepspeed_offload", "none", "full+deepspeed_offload"],
    ["norm+activation", "full+deepspeed_offload", "full+attention"],
    ["none+offload", "full+deepspeed_offload", "full+deepspeed_offload"],
]


@pytest.fixture(autouse=True)
def process_group():
    world.join()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("style", ["gpt2", "llama"])
@pytest.mark.parametrize("attention", ["unfused", "sdpa"])
def test_it_trains_bitwise_as_none_does(style, attention, monkeypatch):
    monkeypatch.setattr("model.offload.MIN_BYTES", 1)
    model = make(style, attention, 0.1)
    expected = train(model, "none", steps=2)
    for mode in [*MODES, *MIXED, "full+block1+deepspeed_offload"]:
        assert_same(train(model, mode, steps=2), expected, mode)


@pytest.mark.parametrize("settings", [{"autocast": True}, {"accumulation": 2}], ids=str)
def test_autocast_is_replayed_and_gradients_add_up(settings):
    model = make("llama", "unfused", 0.1)
    assert_same(train(model, "full+deepspeed_offload", steps=1, **settings), train(model, "none", steps=1, **settings))


def test_no_gradient_is_lost_when_the_embedding_is_frozen():
    model = make("llama", dropout=0.1)
    model.embedding.requires_grad_(False)
    assert_same(train(model, "full+deepspeed_offload"), train(model, "none"))


def test_the_rotary_tables_are_left_as_they_are():
    """DeepSpeed takes every float argument for an activation, and would empty a table after the first layer."""
    model, tables = make("llama"), []
    recompute.apply(model, "full+deepspeed_offload")
    run = model.run_layers
    model.run_layers = lambda x, rope: run(x, tables.extend(rope) or rope)
    step(model)
    assert [table.shape for table in tables] == [(9, 4)] * 2
    assert tables[0][0].eq(1).all()


def test_evaluation_is_plain():
    model = make("llama", dropout=0.1)
    done = recompute.apply(model, "full+deepspeed_offload")
    with torch.no_grad():
        loss = model.eval()(*batch(2, 9))
    assert done == recompute.Activity()
    assert torch.equal(loss, make("llama").eval()(*batch(2, 9)).detach())


def test_every_step_counts_recomputed_groups_and_moved_bytes():
    model = make("llama")
    done = recompute.apply(model, "full+uniform2+deepspeed_offload")
    for number in (1, 2):
        step(model, number)
        assert done.recomputed == 2 * number
        assert done.offloaded_bytes == 2 * number * 2 * 9 * model.config.hidden_size * 4
    recompute.require_active(model, "full+uniform2+deepspeed_offload")


def test_its_host_memory_is_counted_as_such_and_the_device_has_none_of_it():
    size = 2 * 9 * make().config.hidden_size * 4
    gc.collect()
    before = host.live_bytes()

    def measured(mode):
        model = make("llama")
        recompute.apply(model, mode)
        with Meter(model=model) as meter:
            others = meter.host_bytes  # of engines of other tests, which autograd may keep for ever
            loss = model(*batch(2, 9))
            at_rest = meter.live_bytes, meter.host_bytes - others
            loss.backward()
        return at_rest

    device, on_host = measured("full")
    assert on_host == 0
    left, moved = measured("full+deepspeed_offload")
    assert moved == 3 * size
    # Every layer's input has gone, and left an element and its shape behind.
    assert 3 * size - (device - left) == 3 * (4 + 3 * 8)
    gc.collect()
    assert host.live_bytes() == before


def test_a_meters_host_budget_stops_it():
    model = make("llama")
    recompute.apply(model, "full+deepspeed_offload")
    with Meter(model=model, host_budget_bytes=5000), pytest.raises(host.HostOutOfMemoryError):
        step(model)


def test_the_host_budget_stops_it_before_anything_is_moved():
    model = make("llama")
    need = 3 * 2 * 9 * model.config.hidden_size * 4
    recompute.apply(model, "full+deepspeed_offload", host_budget_bytes=need - 1)
    with pytest.raises(host.HostOutOfMemoryError, match=f"{need} bytes"):
        step(model)
    recompute.apply(model, "full+deepspeed_offload", host_budget_bytes=need)
    step(model)


def test_two_backward_passes_and_two_forwards():
    results = []
    for name in ("none", "full+deepspeed_offload"):
        model = make("llama", dropout=0.1)
        recompute.apply(model, name)
        torch.manual_seed(0)
        first, second = model(*batch(2, 9, seed=1)), model(*batch(2, 9, seed=2))
        (first * 3 + second).backward(retain_graph=True)
        second.backward()
        results.append(gradients(model))
    assert_same(*results)


PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from model import recompute
from tests.mode_steps import make, step
{prepare}
model = make("llama")
recompute.apply(model, "full+deepspeed_offload")
try:
    step(model)
except RuntimeError as error:
    print("refused:", error)
else:
    print("trained")
"""
CONFIGURE = """
from training import world
world.join()
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
deepspeed.checkpointing.configure(None, {})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "answer"),
    [
        ("", "refused: deepspeed_offload needs a process group"),
        ("from training import world; world.join()", "trained"),
        (CONFIGURE.format("checkpoint_in_cpu=True, partition_activations=True"), "trained"),
        (CONFIGURE.format("checkpoint_in_cpu=True"), "refused: DeepSpeed's activation checkpointing is configured"),
        (CONFIGURE.format("partition_activations=True"), "without cpu_checkpointing and partition_activations"),
    ],
)
def test_deepspeeds_switches_of_the_process_are_respected_or_refused(prepare, answer, repo_root):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(prepare=prepare)], cwd=repo_root, capture_output=True, text=True
    )
    assert answer in ran.stdout, ran.stdout + ran.stderr


def test_weights_that_come_and_go_are_refused_before_anything_is_made():
    zero3 = load("quickstart", ["recompute=full+deepspeed_offload", "engine.deepspeed_config=zero3"])
    with pytest.raises(RecipeError, match=r"ZeRO-3 gave .* write \+offload instead"):
        check(zero3, 1)
    check(load("quickstart", ["recompute=full+deepspeed_offload", "engine.deepspeed_config=zero2"]), 1)
