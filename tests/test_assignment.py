"""The assignment of modes to layers is exact: it equals brute force over every assignment in every order."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.choosing.assignment import Assignment, Choice, DoesNotFit, Limits, assign, evaluate, fits

bytes_ = st.integers(0, 60)
seconds = st.integers(0, 20).map(float)


@st.composite
def small_cases(draw):
    layers = draw(st.integers(1, 5))
    choices = [
        Choice(
            str(i),
            draw(st.sampled_from([1, 1, 2])),
            draw(bytes_),
            draw(bytes_),
            draw(bytes_),
            *draw(st.tuples(seconds, seconds, seconds)),
        )
        for i in range(draw(st.integers(1, 4)))
    ]
    host = draw(st.none() | st.integers(0, 150))
    return choices, Limits(layers, draw(st.integers(1, 300)), host, draw(bytes_), draw(st.integers(0, 30)))


def every_assignment(choices, layers):
    for length in range(1, layers + 1):
        for candidate in itertools.product(choices, repeat=length):
            if sum(choice.span for choice in candidate) == layers:
                yield candidate


@settings(max_examples=150, deadline=None)
@given(small_cases())
def test_no_assignment_in_any_order_that_fits_is_faster(case):
    choices, limits = case
    fitting = [a for c in every_assignment(choices, limits.num_layers) if fits(a := evaluate(c, limits), limits)]
    if not fitting:
        with pytest.raises(DoesNotFit):
            assign(choices, limits)
        return
    found = assign(choices, limits)
    assert fits(found, limits)
    assert sum(choice.span for choice in found.choices) == limits.num_layers
    assert found.step_s == pytest.approx(min(a.step_s for a in fitting), abs=1e-4)


KEEP = Choice("none", 1, 32, 8, 0, 1.0, 2.0, 0.0)
FULL = Choice("full", 1, 2, 40, 0, 1.0, 3.0, 0.0)


def test_the_budget_is_filled_and_no_layer_recomputed_that_need_not_be():
    limits = Limits(10, 200, None, 0, 0)
    found = assign([KEEP, FULL], limits)
    kept = sum(choice is KEEP for choice in found.choices)
    one_more = evaluate([FULL] * (10 - kept - 1) + [KEEP] * (kept + 1), limits)
    assert 0 < kept < 10
    assert fits(found, limits)
    assert not fits(one_more, limits)


def test_layers_with_large_transients_come_first_where_least_is_beside_them():
    found = assign([KEEP, FULL], Limits(10, 200, None, 0, 0))
    names = [choice.name for choice in found.choices]
    assert names == sorted(names, key=["full", "none"].index)


def test_a_full_host_link_is_priced_as_the_time_it_takes():
    moved = Choice("offload", 1, 0, 8, 32, 1.0, 2.0, 4.0)
    everything_moved = evaluate([moved] * 4, Limits(4, 100, None, 0, 0))
    assert everything_moved.step_s == 16 + 16
    # Moving a part of the layers hides behind the others' work; the solver moves no more than that needs.
    found = assign([moved, FULL], Limits(4, 60, None, 0, 0))
    assert found.step_s < everything_moved.step_s


def test_the_host_budget_holds():
    moved = Choice("offload", 1, 0, 8, 32, 1.0, 2.0, 0.0)
    found = assign([moved, FULL], Limits(10, 60, 100, 0, 0))
    assert found.host_bytes <= 100
    assert sum(choice is moved for choice in found.choices) == 3


def test_more_memory_never_makes_the_plan_slower():
    times = []
    for budget in range(60, 400, 7):
        try:
            times.append(assign([KEEP, FULL], Limits(12, budget, None, 5, 3)).step_s)
        except DoesNotFit:
            assert not times, "a larger budget fits less"
    assert times == sorted(times, reverse=True)


def test_126_layers_and_24_choices_take_less_than_2_seconds():
    choices = [
        Choice(str(i), 1 + i % 3, 10**9 // (i + 1), 10**8 * (i + 1), 10**9 * (i % 2), 1.0, 2.0 + 0.1 * i, 0.3 * (i % 2))
        for i in range(24)
    ]
    start_s = time.perf_counter()
    found = assign(choices, Limits(126, 40 * 10**9, 500 * 10**9, 10**9, 10**8))
    assert time.perf_counter() - start_s < 2
    assert isinstance(found, Assignment)
