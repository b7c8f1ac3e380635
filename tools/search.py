"""The search for the largest size that fits: a boundary confirmed on both sides, in as few trials as a guess allows.

It knows nothing of models. A size is a multiple of the granularity, a trial says whether one fits, and the guess may
come from anywhere: a good one costs two trials, a lying one costs about twice the logarithm of its error.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Boundary:
    """longest: the largest size that fits, 0 when none does. next_tried: the next multiple, which was tried and did
    not fit; None when `longest` is the largest size allowed, so that nothing is known beyond it."""

    longest: int
    next_tried: int | None


def find_boundary(fits: Callable[[int], bool], guess: int, granularity: int, maximum: int) -> Boundary:
    """The boundary between sizes that fit and sizes that do not, among the multiples of `granularity` up to `maximum`.

    `fits(size)` is called at most once for a size. Whatever `guess` is, the answer's size was tried and fitted, and
    the next multiple was tried and did not. Raises ValueError when no multiple lies within `maximum`; what `fits`
    raises ends the search.
    """
    count = maximum // granularity if granularity > 0 else 0
    if count < 1:
        raise ValueError(f"no multiple of the granularity, {granularity}, is within the maximum, {maximum}")
    low, high = 0, count + 1  # multiples known to fit and not to fit; the ends are known without a trial

    def probe(multiple: int) -> bool:
        nonlocal low, high
        fitting = fits(multiple * granularity)
        if fitting:
            low = multiple
        else:
            high = multiple
        return fitting

    step, up = 1, probe(min(max(guess // granularity, 1), count))
    # The usual case ends after the neighbour. Else the guess is off by an unknown amount: go on in doubling steps.
    while high - low > 1:
        target = low + step if up else high - step
        if not low < target < high:
            break
        if probe(target) != up:
            break
        step *= 2
    while high - low > 1:
        probe((low + high) // 2)
    return Boundary(low * granularity, high * granularity if high <= count else None)
