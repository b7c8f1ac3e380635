"""The search is right for any predictor, and cheap for a good one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.search import Boundary, find_boundary


class Oracle:
    def __init__(self, fits):
        self.fits, self.tried = fits, []

    def __call__(self, size):
        assert size not in self.tried, "a size is tried twice"
        self.tried.append(size)
        return self.fits(size)


@given(st.integers(0, 4000), st.integers(-(10**9), 10**9), st.integers(1, 300), st.integers(0, 4000))
def test_any_guess_gives_the_boundary(truth, guess, granularity, above):
    maximum = granularity + above
    oracle = Oracle(lambda size: size <= truth)
    found = find_boundary(oracle, guess, granularity, maximum)
    expected = min(truth, maximum) // granularity * granularity
    assert found.longest == expected
    assert found.next_tried == (expected + granularity if expected + granularity <= maximum else None)


@given(st.sets(st.integers(1, 60)), st.integers(-5, 70))
def test_even_where_fitting_is_not_monotonic_both_sides_were_tried(fitting, guess):
    oracle = Oracle(lambda size: size in fitting)
    found = find_boundary(oracle, guess, 1, 60)
    assert found.longest == 0 or (found.longest in oracle.tried and found.longest in fitting)
    if found.next_tried is None:
        assert found.longest == 60
    else:
        assert found.next_tried == found.longest + 1
        assert found.next_tried in oracle.tried
        assert found.next_tried not in fitting


@given(st.integers(1, 10**6))
def test_a_true_prediction_costs_two_trials(truth):
    oracle = Oracle(lambda size: size <= truth * 256)
    assert find_boundary(oracle, truth * 256, 256, 2 * 10**9) == Boundary(truth * 256, truth * 256 + 256)
    assert oracle.tried == [truth * 256, truth * 256 + 256]


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_lying_prediction_costs_about_twice_the_logarithm_of_its_error(truth, guess):
    oracle = Oracle(lambda size: size <= truth)
    find_boundary(oracle, guess, 1, 10**6 + 2)
    assert len(oracle.tried) <= 3 + 2 * max(1, abs(truth - guess)).bit_length()


def test_the_first_length_tried_is_too_long_and_the_answer_lies_below():
    assert find_boundary(lambda size: size <= 300, 1024, 100, 2000) == Boundary(300, 400)


def test_nothing_fits():
    assert find_boundary(lambda size: False, 1024, 256, 4096) == Boundary(0, 256)


def test_everything_fits_up_to_the_maximum():
    assert find_boundary(lambda size: True, 256, 256, 4100) == Boundary(4096, None)


def test_an_error_in_a_trial_ends_the_search_and_is_seen():
    def broken(size):
        raise IndexError("not a question of memory")

    with pytest.raises(IndexError, match="not a question of memory"):
        find_boundary(broken, 512, 256, 4096)


@pytest.mark.parametrize(("granularity", "maximum"), [(256, 255), (0, 100), (-1, 100)])
def test_no_multiple_within_the_maximum_is_an_error(granularity, maximum):
    with pytest.raises(ValueError, match="no multiple"):
        find_boundary(lambda size: True, 1, granularity, maximum)
