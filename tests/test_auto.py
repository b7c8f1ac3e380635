"""`recompute: auto`: what it chooses from, what that costs, and that its choice fills the budget and is not beaten."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from model import recompute
from model.gpt import GPT, GPTConfig
from model.modes import Mode, parse
from model.tiling import Tiles
from tests import tiny
from training.choosing import auto
from training.choosing.assignment import DoesNotFit, evaluate
from training.choosing.calibration import Times
from training.choosing.candidates import Candidates, groups, modes
from training.choosing.layer_costs import Tracer
from training.planning.trace import Job

LAYERS = 10
CONFIG = GPTConfig(num_layers=LAYERS, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, vocab_size=300)
TORCH = ("engine.name=torch", "engine.deepspeed_config=null", "global_batch_size=1", "seq_length=512")
# A layer that takes 3 seconds, and what each mode repeats on top: about as it is measured on a CPU.
EXTRA = {"none": 0.0, "norm": 0.03, "activation": 0.05, "norm+activation": 0.08, "mlp": 0.3, "norm+mlp": 0.33}
EXTRA |= {"full": 0.95, "full+attention": 0.6}


def fake_times(shape: object, wanted: list[Mode]) -> Times:
    return Times({str(m): (1.0, 2.0 + EXTRA[str(m)]) for m in wanted}, 0.5, 1e-8, 1e-9, copies_overlap=False)


def make_tracer(layers: int = LAYERS) -> Tracer:
    job = Job(replace(CONFIG, num_layers=layers), (), torch.float32, 1, 512)
    return Tracer(tiny.load(*TORCH, f"model.num_layers={layers}"), job, 1)


@pytest.fixture(scope="module")
def candidates() -> Candidates:
    tracer = make_tracer()
    return Candidates(tracer, fake_times(None, modes(CONFIG, Tiles())), host_bytes=0)


@pytest.fixture(scope="module")
def moving(candidates: Candidates) -> Candidates:
    return Candidates(candidates.tracer, candidates.times, host_bytes=None)


def rooms(candidates: Candidates, number: int) -> list[int]:
    """Budgets between what the leanest mode for all layers needs and what none needs."""
    needs = [auto.predicted(candidates, candidates.for_all(c)).needed_bytes for c in candidates.choices]
    low, high = min(needs), max(needs)
    return [low + (high - low) * i // (number - 1) for i in range(number)]


def test_every_kind_of_mode_is_looked_at() -> None:
    fused = set(map(str, modes(CONFIG, Tiles())))
    assert fused == set(EXTRA)
    unfused = set(map(str, modes(replace(CONFIG, attention="unfused"), Tiles())))
    assert {"none", "selective", "selective+norm+activation", "selective+norm+mlp", "full"} <= unfused
    assert "full+attention" not in unfused
    tiled = set(map(str, modes(CONFIG, Tiles(mlp_tile_tokens=64))))
    assert tiled == {"none", "norm", "full", "full+attention"}
    assert groups(LAYERS) == [2, 3, 4]
    assert groups(1) == []


@pytest.mark.parametrize("name", ["full+uniform2", "full+uniform3", "full+attention+uniform2", "full+uniform4"])
def test_a_group_costs_what_its_own_trace_says(candidates: Candidates, name: str) -> None:
    """Bytes of a group follow from those of one layer."""
    tracer, mode = candidates.tracer, parse(name)
    layers = 5 * mode.group
    choices = [candidates.choice(mode)] * 5
    model = evaluate(choices, replace(candidates.limits(0, None), num_layers=layers))
    whole = tracer.of((mode,) * layers)
    around = tracer.surroundings(layers)
    assert whole.peak_bytes == pytest.approx(around.base_bytes + model.peak_bytes, rel=0.02)


def test_one_mode_for_all_layers_is_predicted_as_modelled(candidates: Candidates) -> None:
    for choice in candidates.choices:
        found = auto.predicted(candidates, candidates.for_all(choice))
        assert abs(found.correction_bytes) <= 0.02 * found.needed_bytes or found.correction_bytes > 0, choice.name


def test_offload_costs_two_groups_in_flight(moving: Candidates) -> None:
    for name in ("none+offload", "full+attention+offload"):
        choice = next(c for c in moving.choices if c.name == name)
        found = auto.predicted(moving, [choice] * LAYERS)
        assert choice.kept_bytes == 0
        # The last layer is not moved, and tensors of a few kilobytes are not.
        assert found.host_bytes == pytest.approx((LAYERS - 1) * choice.host_bytes, rel=0.05)
        assert abs(found.correction_bytes) <= 0.03 * found.needed_bytes


def test_the_plan_fits_fills_the_budget_and_no_fixed_mode_is_faster(candidates: Candidates) -> None:
    limits = candidates.limits(0, None)
    fastest = min(evaluate(candidates.for_all(c), limits).step_s for c in candidates.choices)
    times = []
    for room in rooms(candidates, 9):
        found = auto.solve(candidates, room, 0)
        assert found.needed_bytes <= room
        # More memory would help: then it is used.
        assert found.needed_bytes >= 0.9 * room or found.layers_s == pytest.approx(fastest)
        for choice in candidates.choices:
            fixed = auto.predicted(candidates, candidates.for_all(choice))
            assert fixed.needed_bytes > room or fixed.layers_s >= found.layers_s - 1e-9
        times.append(found.layers_s)
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.05 * times[-1]


def test_a_plan_between_two_modes_is_faster_than_the_leaner_one(candidates: Candidates) -> None:
    by_name = {c.name: auto.predicted(candidates, candidates.for_all(c)) for c in candidates.choices}
    lean, rich = by_name["full+attention"], by_name["norm+activation"]
    room = (lean.needed_bytes + rich.needed_bytes) // 2
    found = auto.solve(candidates, room, 0)
    # In proportion to the memory that is filled, up to one layer's share.
    assert found.layers_s <= (lean.layers_s + rich.layers_s) / 2 + (lean.layers_s - rich.layers_s) / LAYERS


def test_what_cannot_fit_is_said_with_what_it_needs(candidates: Candidates) -> None:
    with pytest.raises(DoesNotFit, match="weights, gradients, optimizer"):
        auto.solve(candidates, candidates.around.outside_bytes - 1, 0)
    with pytest.raises(DoesNotFit, match="the leanest mode needs"):
        auto.solve(candidates, candidates.around.outside_bytes, 0)


def test_the_host_budget_holds_for_the_whole_step(moving: Candidates) -> None:
    free = auto.solve(moving, rooms(moving, 5)[1], None)
    assert free.host_bytes > 0
    tight = auto.solve(moving, rooms(moving, 5)[1], free.host_bytes // 2)
    assert tight.host_bytes <= free.host_bytes // 2
    assert tight.layers_s >= free.layers_s


@pytest.mark.parametrize("host", [0, None])
def test_gradients_of_a_plan_equal_those_of_none_bit_by_bit(candidates: Candidates, host: int | None) -> None:
    chosen = Candidates(candidates.tracer, candidates.times, host)
    found = auto.solve(chosen, rooms(candidates, 9)[3], host)
    layers = auto.spread(found.choices)
    assert len(set(layers)) > 1
    torch.manual_seed(0)
    model = GPT(replace(CONFIG, hidden_dropout=0.1))
    tokens = torch.randint(0, 300, (1, 512))
    gradients = []
    for modes_ in ("none", layers):
        recompute.apply(model, modes_)
        torch.manual_seed(1)
        model(tokens, tokens).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad(set_to_none=True)
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_126_layers_are_planned_in_2_seconds_beside_traces() -> None:
    tracer = make_tracer(layers=126)
    many = Candidates(tracer, fake_times(None, modes(CONFIG, Tiles())), host_bytes=None)
    low, *_, high = rooms(many, 3)
    spent_s = tracer.seconds
    start = time.process_time()
    found = auto.solve(many, (low + high) // 2, None)
    assert time.process_time() - start - (tracer.seconds - spent_s) < 2
    assert len(auto.spread(found.choices)) == 126


def test_tiles_are_switched_on_where_nothing_else_fits() -> None:
    """A large vocabulary: without loss tiles the logits alone are above the budget."""
    config = replace(CONFIG, vocab_size=20_000, num_layers=2)
    recipe = tiny.load(*TORCH, "seq_length=8192", "model.num_layers=2", "tiles.loss_tile_tokens=null")
    tiles = list(auto.tile_variants(recipe, config))
    assert tiles[0] == Tiles()
    assert tiles[1].loss_tile_tokens is not None
    assert tiles[1].mlp_tile_tokens is None
    place = auto.Place(torch.device("cpu"), "a CPU", 1, 600 * 2**20, 0, fake_times)
    assert auto.find(recipe, config, place).tiles["loss_tile_tokens"]
    plenty = replace(place, budget_bytes=64 * 2**30)
    assert not any(auto.find(recipe, config, plenty).tiles.values())
