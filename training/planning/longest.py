"""The longest context that fits, from a few traced lengths.

Live bytes at any one place of the step are a polynomial in the sequence length (tiles add steps to it): of first
degree, of second with unfused attention. So a few traced lengths tell where the peak meets the budget; the lengths on
both sides of that place are then traced themselves, and the answer is what these two say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

FIRST_LENGTHS = (16384, 65536, 32768)  # long enough that loops over tiles have a first, a middle and a last one


class Found(NamedTuple):
    longest: int  # 0 when nothing fits
    limited_by: str  # device, host or max
    next_tried: int | None  # the shortest length known not to fit


def longest_multiple(
    granularity: int,
    largest: int,
    degree: int,
    candidates: Callable[[int], np.ndarray],
    host_bytes: Callable[[int], int],
    verdict: Callable[[float, float], str],
) -> Found:
    """The largest multiple of `granularity`, up to `largest`, that fits.

    candidates(length): traced bytes wherever they may peak. host_bytes(length): the same for the host. verdict(device
    peak, host peak): "" when that fits, else what is exceeded. One after another traces are made where the polynomial
    through those before expects the limit, until a multiple fits and the next one does not.
    """
    top = largest // granularity
    if top < 1:
        return Found(0, "max", None)
    known: dict[int, tuple[np.ndarray, int]] = {}
    fitting, failing, reason = 0, top + 1, "max"

    def trace(multiple: int) -> None:
        nonlocal fitting, failing, reason
        if multiple in known:
            return
        length = multiple * granularity
        known[multiple] = candidates(length), host_bytes(length)
        exceeded = verdict(float(known[multiple][0].max()), float(known[multiple][1]))
        if not exceeded:
            fitting = max(fitting, multiple)
        elif multiple < failing:
            failing, reason = multiple, exceeded

    for i in range(degree + 1):
        trace(max(1, min(top, FIRST_LENGTHS[i] // granularity)))
    while failing - fitting > 1:
        guess = _expected(known, degree, fitting, failing, verdict)
        trace(guess)
        # The other side of the limit is next to the guess where the guess is right.
        trace(min(max(guess + 1 if guess == fitting else guess - 1, 1), top))
    return Found(fitting * granularity, reason, failing * granularity if failing <= top else None)


def _expected(
    known: dict[int, tuple[np.ndarray, int]],
    degree: int,
    fitting: int,
    failing: int,
    verdict: Callable[[float, float], str],
) -> int:
    """Between `fitting` and `failing`: the last multiple that should fit, by the traced ones nearest to the limit."""
    shape = {len(places) for places, _ in known.values()}
    nearest = sorted(known, key=lambda m: min(abs(m - fitting), abs(m - failing)))[: degree + 1]
    if len(shape) > 1 or len(nearest) < 2:
        return (fitting + failing) // 2

    def fits(multiple: int) -> bool:
        weights = _lagrange(nearest, multiple)
        peak = sum(w * known[m][0] for w, m in zip(weights, nearest))
        host = sum(w * known[m][1] for w, m in zip(weights, nearest))
        return not verdict(float(np.max(peak)), float(host))

    low, high = fitting, failing
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    # A guess at the edge would only narrow the bracket by one: then the middle does better.
    if low == fitting:
        return low + 1
    return low


def _lagrange(points: Sequence[int], at: int) -> list[float]:
    weights = []
    for i, x in enumerate(points):
        weight = 1.0
        for j, other in enumerate(points):
            if i != j:
                weight *= (at - other) / (x - other)
        weights.append(weight)
    return weights
