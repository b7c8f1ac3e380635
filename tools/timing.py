"""Which sizes are timed for which variants, when time may be short: a choice made of the most telling ones.

Speeds are compared at a common set of sizes: each variant's longest and the powers of two below. All variants that
fit are timed at a size one after the other, so that they share the machine's noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tools.trials import Variant

POWERS_BELOW = 5  # powers of two below the longest of all


class Timing(NamedTuple):
    """One variant timed at one size."""

    size: int
    variant: Variant


def bases(variants: Iterable[Variant]) -> dict[Variant, Variant]:
    """For each variant the one it is compared with: mode none under the same attention, where that is there."""
    every = list(variants)
    plain = {v.attention: v for v in every if v.mode == "none"}
    return {v: plain[v.attention] for v in every if v.attention in plain}


def by_importance(longest: Mapping[Variant, int], granularity: int = 1) -> list[Timing]:
    """Every timing that is wanted, the most telling first; none is smaller than the granularity.

    1. each variant at its own longest, which also confirms it; 2. all at the longest that all fit, the one size where
    everything compares; 3. what each mode costs: all at the longest of the `none` they are compared with; 4. curves:
    powers of two from above; 5. all at each other's longest.
    """
    fits = {v: n for v, n in longest.items() if n > 0}
    if not fits:
        return []
    base = bases(fits)
    top = max(fits.values())
    powers = [1 << k for k in range(top.bit_length() - 1, -1, -1) if 1 << k >= granularity][:POWERS_BELOW]
    sizes = sorted(set(fits.values()), reverse=True)
    wanted = [Timing(n, v) for v, n in fits.items()] + [Timing(sizes[-1], v) for v in fits]
    wanted += [Timing(fits[base[v]], v) for v in fits if v in base and fits[base[v]] <= fits[v]]
    wanted += [Timing(n, v) for n in [*powers, *sizes] for v in fits if n <= fits[v]]
    return list(dict.fromkeys(wanted))


def affordable(
    wanted: list[Timing], must: set[Timing], cost_s: Callable[[Timing], float], left_s: float
) -> set[Timing]:
    """As many of `wanted`, in this order, as `left_s` seconds allow; `must` in any case."""
    left_s -= sum(cost_s(t) for t in wanted if t in must)
    chosen = {t for t in wanted if t in must}
    for timing in wanted:
        if timing in chosen:
            continue
        left_s -= cost_s(timing)
        if left_s < 0:
            break
        chosen.add(timing)
    return chosen
