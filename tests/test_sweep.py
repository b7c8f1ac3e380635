"""A sweep's answers are right for any planner, and only running out of memory says that a size is too large."""

from __future__ import annotations

import json
from pathlib import Path

import fake_trials
import pytest
from fake_trials import BUDGET, FakeTrials, longest, plain, recipe, sweep
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tools import summary, trials
from tools.measure import REPORT_S
from tools.timing import Timing, affordable, by_importance
from tools.trials import Variant


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTrials:
    stand_in = FakeTrials()
    monkeypatch.setattr(trials.processes, "run", stand_in)
    return stand_in


def run(folder: Path, *words: str, modes: str = "[none, full]", guess=lambda v: None, **more):
    running = sweep(folder, recipe(*words, modes=modes), guess, **more)
    with running.display:
        running.run()
    return running, summary.of(running)


def test_a_true_plan_costs_two_trials_per_mode_and_both_sides_were_tried(tmp_path: Path, fake: FakeTrials) -> None:
    _, found = run(tmp_path, "sweep.minutes=1e-9", guess=lambda v: longest(v.mode, 64))
    assert fake.asked == [
        *[("none", 960, 5), ("none", 1024, 2)],
        *[("full", 4928, 5), ("full", 4992, 2)],
    ]
    for mode in ("none", "full"):
        entry = found["modes"][mode]
        assert entry["longest_context"] == entry["predicted_longest_context"] == longest(mode, 64)
        assert (entry["next_tried"], entry["next_status"]) == (longest(mode, 64) + 64, "oom")
        assert entry["limited_by"] == "device"
        assert entry["trials"] == 2
    assert found["trials"] == 4
    assert len(found["not_timed"]) > 0


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(-(10**6), 10**6) | st.none())
def test_any_plan_gives_the_same_answer(tmp_path_factory, guess: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials.processes, "run", FakeTrials())
        _, found = run(tmp_path_factory.mktemp("any"), "sweep.minutes=1e-9", guess=lambda v: guess)
    assert {m: e["longest_context"] for m, e in found["modes"].items()} == {"none": 960, "full": 4928}


def test_a_length_that_fits_and_runs_out_some_steps_later_is_not_the_longest(tmp_path: Path, fake: FakeTrials) -> None:
    fake.status = lambda mode, tokens, steps: "oom" if steps > 2 and tokens > 832 else plain(mode, tokens, steps)
    _, found = run(tmp_path, modes="[none]")
    entry = found["modes"]["none"]
    assert (entry["longest_context"], entry["next_tried"], entry["next_status"]) == (832, 896, "oom")
    assert [t["seq_length"] for t in entry["timings"]] == [64, 128, 256, 512, 832]


@pytest.mark.parametrize("status", ["failed", "timeout", "killed"])
def test_a_failure_stops_its_mode_and_is_shown_and_others_go_on(tmp_path: Path, fake, capsys, status: str) -> None:
    fake.status = lambda mode, tokens, steps: status if mode == "none" and tokens > 500 else plain(mode, tokens, steps)
    _, found = run(tmp_path)
    entry = found["modes"]["none"]
    assert entry["status"] == ("failed" if status == "killed" else status)
    assert entry["longest_context"] == 0
    assert entry["limited_by"] is None
    assert {"failed": "an error", "timeout": "time limit", "killed": "SIGKILL"}[status] in entry["error"]
    assert entry["error"].splitlines()[0] in capsys.readouterr().out
    assert found["modes"]["full"]["longest_context"] == longest("full", 64)
    assert summary.exit_code(found) == 1
    fake.status = plain  # the fault is mended: the same command measures that mode
    _, found = run(tmp_path)
    assert found["modes"]["none"]["longest_context"] == longest("none", 64)
    assert summary.exit_code(found) == 0


def test_host_memory_bounds_the_search_too(tmp_path: Path, fake: FakeTrials) -> None:
    fake.status = lambda mode, tokens, steps: "host_oom" if tokens > 300 else "completed"
    _, found = run(tmp_path, modes="[full+offload]")
    entry = found["modes"]["full+offload"]
    assert (entry["longest_context"], entry["limited_by"], entry["next_status"]) == (256, "host", "host_oom")


def test_nothing_fits_and_nothing_longer_is_allowed_are_answers(tmp_path: Path, fake: FakeTrials, capsys) -> None:
    fake.status = lambda mode, tokens, steps: "oom" if mode == "none" else "completed"
    _, found = run(tmp_path, "sweep.seq_max=500")
    none, full = found["modes"]["none"], found["modes"]["full"]
    assert (none["longest_context"], none["limited_by"], none["next_tried"]) == (0, "device", 64)
    assert (full["longest_context"], full["limited_by"], full["next_tried"]) == (448, "max", None)
    said = capsys.readouterr().out
    assert "none: nothing fits: 64 is too much already" in said
    assert "full: 448 fits, and nothing longer is allowed" in said


def test_every_mode_that_fits_is_timed_at_common_lengths_in_turn(tmp_path: Path, fake: FakeTrials) -> None:
    _, found = run(tmp_path, "sweep.timing_rounds=2", guess=lambda v: longest(v.mode, 64))
    sizes = {mode: [t["seq_length"] for t in entry["timings"]] for mode, entry in found["modes"].items()}
    assert sizes == {"none": [256, 512, 960], "full": [256, 512, 960, 1024, 2048, 4096, 4928]}
    at_512 = [mode for mode, tokens, steps in fake.asked if tokens == 512 and steps == 5]
    assert at_512 == ["none", "full", "none", "full"]
    overheads = {t["seq_length"]: t["overhead"] for t in found["modes"]["full"]["timings"]}
    assert overheads[960] == pytest.approx(1.33)
    assert overheads[1024] is None
    assert found["modes"]["full"]["overhead_at"] == 960
    assert found["not_timed"] == []


def test_the_largest_batch_is_found_with_the_same_code(tmp_path: Path, fake: FakeTrials) -> None:
    _, found = run(tmp_path, "seq_length=64", axis="micro_batch_size")
    entry = found["modes"]["full"]
    assert entry["largest_micro_batch_size"] == (BUDGET - 1000) // 20 // 64
    assert entry["next_tried"] == entry["largest_micro_batch_size"] + 1
    assert entry["longest_context"] == 64


def test_both_attentions_have_modes_of_their_own(tmp_path: Path, fake: FakeTrials) -> None:
    _, found = run(tmp_path, "sweep.attention=[unfused, sdpa]", "sweep.minutes=1e-9")
    assert list(found["modes"]) == ["unfused/none", "unfused/full", "sdpa/none", "sdpa/full"]


def test_the_time_left_counts_what_is_still_to_come(tmp_path: Path, fake: FakeTrials) -> None:
    running = sweep(tmp_path, recipe("sweep.minutes=1e-9"), lambda v: longest(v.mode, 64))
    assert running.left_s() is None  # nothing is known yet
    none, full = running.found
    running.search(none)
    assert running.left_s() == REPORT_S + 2.0  # two trials of a second to find the other; no time for more
    running.search(full)
    assert running.left_s() == REPORT_S  # both were timed while they were searched
    unlimited = sweep(tmp_path, recipe(), lambda v: longest(v.mode, 64))
    for variant in unlimited.found:
        unlimited.search(variant)
    left_s = unlimited.left_s()
    assert left_s is not None
    assert left_s > REPORT_S + 5 * 4.096 * 1.33  # `full` at 4,096 is the longest of what is still to be timed
    unlimited.time_all()
    assert unlimited.left_s() == REPORT_S


# -- resuming ----------------------------------------------------------------------------------------------------


def test_a_finished_sweep_runs_nothing_again(tmp_path: Path, fake: FakeTrials) -> None:
    _, first = run(tmp_path)
    asked = len(fake.asked)
    _, second = run(tmp_path)
    assert len(fake.asked) == asked
    assert {**second, "seconds": 0} == {**first, "seconds": 0}


def test_a_line_torn_by_a_kill_costs_that_trial_only(tmp_path: Path, fake: FakeTrials) -> None:
    _, first = run(tmp_path)
    asked = len(fake.asked)
    file = tmp_path / "trials.jsonl"
    file.write_text(file.read_text()[:-30])
    _, second = run(tmp_path)
    assert len(fake.asked) == asked + 1
    assert second["modes"]["full"]["longest_context"] == first["modes"]["full"]["longest_context"]
    lines = file.read_text().splitlines()
    assert json.loads(lines[-1])["status"] == "completed"


@pytest.mark.parametrize("change", ["recipe", "code", "environment", "budget"])
def test_trials_of_another_recipe_code_or_environment_are_not_reused(tmp_path, fake, monkeypatch, change) -> None:
    run(tmp_path, "sweep.minutes=1e-9")
    asked = len(fake.asked)
    words, code = [], "a version"
    if change == "recipe":
        words = ["model.num_layers=3"]
    elif change == "budget":
        words = [f"budget={BUDGET + 1}B"]
    elif change == "code":
        code = "another version"
    else:
        monkeypatch.setattr(fake_trials, "ENVIRONMENT", {**fake_trials.ENVIRONMENT, "torch": "3"})
    run(tmp_path, "sweep.minutes=1e-9", *words, code=code)
    assert len(fake.asked) == 2 * asked


def test_what_a_trial_does_not_depend_on_does_not_matter(tmp_path: Path, fake: FakeTrials) -> None:
    run(tmp_path, "sweep.minutes=1e-9")
    asked = len(fake.asked)
    _, found = run(tmp_path, "sweep.minutes=1e-9", "targets.overhead=2", "log.every_steps=7", modes="[full]")
    assert len(fake.asked) == asked
    assert list(found["modes"]) == ["full"]


# -- trials ------------------------------------------------------------------------------------------------------


def test_a_trial_is_not_told_that_this_process_is_its_launcher(tmp_path: Path, monkeypatch) -> None:
    """Its ranks would take their launcher for dead and leave."""
    answer, told = FakeTrials(), []
    monkeypatch.setattr(trials.processes, "run", lambda *words: told.append(words[1]) or answer(*words))
    run(tmp_path, "sweep.minutes=1e-9", modes="[none]")
    assert told
    assert not any("WATERLINE_LAUNCHER" in environment for environment in told)


def test_records_have_every_field(tmp_path: Path, fake: FakeTrials) -> None:
    run(tmp_path, "sweep.minutes=1e-9")
    for record in trials.read(tmp_path / "trials.jsonl"):
        assert {"status", *trials.RESULT, "budget_bytes", "predicted_peak_device_bytes", "wall_s"} <= set(record)
        assert record["predicted_peak_device_bytes"] == record["peak_device_bytes"]


def test_a_trial_is_the_recipe_but_for_a_few_settings(tmp_path: Path) -> None:
    own = recipe("optimizer.warmup_steps=4", "optimizer.lr=0.02", "global_batch_size=32", "optimizer.schedule=wsd")
    running = sweep(tmp_path, own)
    point = running.point(Variant("sdpa", "full"), 4096)
    words = [*trials.overrides(own, point, 1), *trials.steps_overrides(own, 2)]
    trial = trials.load(tmp_path / "recipe.yaml", words)
    assert (trial.seq_length, trial.recompute, trial.model.attention) == (4096, "full", "sdpa")
    assert (trial.micro_batch_size, trial.global_batch_size) == (1, 2)  # accumulates, but no more than shows
    assert (trial.steps, trial.optimizer.lr, trial.optimizer.warmup_steps) == (2, 0.01, 2)  # the recipe's own ramp
    assert (trial.evaluation.batches, trial.checkpoint.keep) == (0, 0)
    assert trial.engine == own.engine
    assert trial.budget_bytes == own.budget_bytes


def test_learned_positions_grow_with_the_length(tmp_path: Path) -> None:
    own = recipe("model.position_embedding=learned", "model.max_position_embeddings=16")
    running = sweep(tmp_path, own)
    trial = running.trials.recipe_at(running.point(Variant("sdpa", "none"), 4096))
    assert trial.gpt_fields(300)["max_position_embeddings"] == 4096


# -- what is timed -----------------------------------------------------------------------------------------------

sizes = st.dictionaries(
    st.builds(Variant, st.sampled_from(["unfused", "sdpa"]), st.sampled_from(["none", "selective", "full"])),
    st.integers(0, 1000),
    max_size=6,
)


@given(sizes, st.integers(1, 64))
def test_only_what_fits_is_timed_and_every_longest_first(longest: dict[Variant, int], granularity: int) -> None:
    wanted = by_importance(longest, granularity)
    assert len(set(wanted)) == len(wanted)
    assert all(0 < t.size <= longest[t.variant] for t in wanted)
    own = [Timing(n, v) for v, n in longest.items() if n]
    assert wanted[: len(own)] == own
    for size in {t.size for t in wanted}:
        assert {t.variant for t in wanted if t.size == size} == {v for v, n in longest.items() if n >= size}


@given(sizes, st.floats(0, 100))
def test_time_is_kept_to_but_for_what_must_be(longest: dict[Variant, int], left_s: float) -> None:
    wanted = by_importance(longest)
    must = {Timing(n, v) for v, n in longest.items() if n}
    chosen = affordable(wanted, must, lambda t: 1.5, left_s)
    assert must <= chosen <= set(wanted)
    assert len(chosen) * 1.5 <= max(left_s, len(must) * 1.5)
    optional = [t for t in wanted if t not in must]
    assert chosen - must == set(optional[: len(chosen - must)])
