"""What to use, from what a sweep measured: the fastest mode for a wanted context, the longest context for a speed.

Only measured points count: nothing is read between or beyond them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from model.modes import Mode, parse
from tools.words import count, size, times

ALIKE = 0.03  # a mode whose fastest step takes at most so much longer than the best mode's median is called alike


@dataclass(frozen=True)
class Choice:
    """A mode at a size: the fastest that fits there."""

    mode: str
    at: int  # size, on the sweep's axis
    tokens_per_s: float
    peak_device_bytes: int
    alike: tuple[str, ...]  # modes whose steps are about as fast


def by_size(summary: dict[str, Any]) -> list[Choice]:
    """For every size at which all modes that fit were timed, the fastest; by rising size."""
    axis, modes = summary["axis"], summary["modes"]
    longest = {name: longest_of(summary, name) for name in modes}
    speeds: dict[int, dict[str, dict[str, Any]]] = {}
    for name, mode in modes.items():
        for timing in mode["timings"]:
            speeds.setdefault(timing[axis], {})[name] = timing
    choices = []
    for at in sorted(speeds):
        fitting = {name for name, end in longest.items() if end >= at}
        if fitting - speeds[at].keys():
            continue  # a faster one may be among those not timed here
        best_s = min(t["step_time_s"] for t in speeds[at].values())
        alike = [n for n, t in speeds[at].items() if t["step_time_spread_s"][0] <= best_s * (1 + ALIKE)]
        name, *others = sorted(alike, key=list(modes).index)  # of equals the first, which does the least
        timing = speeds[at][name]
        choices.append(Choice(name, at, timing["tokens_per_s"], timing["peak_device_bytes"], tuple(others)))
    return choices


def frontier(summary: dict[str, Any]) -> list[Choice]:
    """The points that no other beats in both size and speed, from the fastest to the largest."""
    best: list[Choice] = []
    for choice in reversed(by_size(summary)):
        if not best or choice.tokens_per_s > best[-1].tokens_per_s:
            best.append(choice)
    return best[::-1]


def longest_of(summary: dict[str, Any], name: str) -> int:
    """The largest size of a mode, on the sweep's axis; 0 when none fits."""
    mode = summary["modes"][name]
    return mode["largest_micro_batch_size"] if summary["axis"] == "micro_batch_size" else mode["longest_context"]


def lines(summary: dict[str, Any]) -> Iterator[str]:
    """The recommendation, a sentence for each case, with its reason."""
    chosen = by_size(summary)
    if not chosen:
        yield "Nothing can be recommended: no mode was timed. Raise the budget, or lower the granularity."
        return
    batch = summary["axis"] == "micro_batch_size"
    what = "A micro-batch of" if batch else "A context of"
    unit = "" if batch else " tokens"
    begin = 0
    for i, choice in enumerate(chosen):
        following = chosen[i + 1] if i + 1 < len(chosen) else None
        if following and following.mode == choice.mode:
            continue
        reach = f"up to {count(choice.at)}{unit}" if not begin else f"{count(begin)} to {count(choice.at)}{unit}"
        speed = f"{count(choice.tokens_per_s)} tokens/s there"
        yield f"{what} {reach}: `{choice.mode}`, {speed}. {_reason(summary, choice)}"
        begin = choice.at + 1
    for choice in frontier(summary):
        yield (
            f"At least {count(choice.tokens_per_s)} tokens/s: {count(choice.at)}{unit} with `{choice.mode}`,"
            f" at a peak of {size(choice.peak_device_bytes)}."
        )


def _reason(summary: dict[str, Any], choice: Choice) -> str:
    gone = [name for name in summary["modes"] if longest_of(summary, name) < choice.at]
    reasons = []
    if choice.alike:
        reasons.append(f"about as fast: {', '.join(f'`{n}`' for n in choice.alike)}")
    if gone:
        ends = ", ".join(f"`{n}` ends at {count(longest_of(summary, n))}" for n in gone)
        reasons.append(f"too long for others ({ends})" if len(gone) < len(summary["modes"]) else ends)
    overhead = summary["modes"][choice.mode]["overhead"]
    if overhead and summary["modes"][choice.mode]["mode"] != "none":
        at = summary["modes"][choice.mode]["overhead_at"]
        reasons.append(f"its step takes {times(overhead)} of `none` at {count(at)}")
    text = "; ".join(reasons) or "no mode that fits is faster"
    return text[0].upper() + text[1:] + "."


def order(summary: dict[str, Any]) -> Iterator[tuple[str, str, float | None]]:
    """(mode, mode that keeps no more, how many times longer that one's context is), where theory tells the order."""
    modes = summary["modes"]
    for name, entry in modes.items():
        for other, beyond in modes.items():
            same = entry["attention"] == beyond["attention"]
            if name != other and same and _keeps_no_more(parse(beyond["mode"]), parse(entry["mode"])):
                mine, theirs = longest_of(summary, name), longest_of(summary, other)
                yield name, other, theirs / mine if mine else None


def _keeps_no_more(a: Mode, b: Mode) -> bool:
    """Whether `a` keeps a part of what `b` keeps on the device, by what the modes mean (groups are left out)."""
    if any((m.grouping, m.group) != ("uniform", 1) for m in (a, b)) or (b.offload and not a.offload):
        return False
    rank = {"none": 0, "selective": 1, "full": 2}
    if rank[a.recompute] != rank[b.recompute]:
        return rank[a.recompute] > rank[b.recompute]
    return set(a.modules) >= set(b.modules) and set(a.keep) <= set(b.keep)
