"""What to use, from what a sweep measured: the fastest mode for a wanted context, the longest context for a speed.

Only measured points count: nothing is read between or beyond them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from model.modes import Mode, parse
from tools.words import count, size, times

ALIKE = 0.03  # a mode whose fastest step takes at most so much longer than the best mode's median is called alike
FASTER_THAN_NONE = 0.9  # a step that does more work cannot take so little of `none`'s time
UNSTEADY = 1.3  # the longest step of a timing over its shortest, in the middle of all timings


@dataclass(frozen=True)
class Choice:
    """The fastest mode for every size from `begin` to `end`, compared with all that fit there at the size `at`."""

    mode: str
    begin: int
    end: int
    at: int
    alike: tuple[str, ...]  # modes whose steps are about as fast


def choices(summary: dict[str, Any]) -> list[Choice]:
    """What to use, by rising size. Sizes at which the modes that fit were never timed together are left out."""
    axis, modes = summary["axis"], summary["modes"]
    timed = {name: {t[axis]: t for t in mode["timings"]} for name, mode in modes.items()}
    found: list[Choice] = []
    begin = 1
    for end in sorted({longest_of(summary, name) for name in modes} - {0}):
        fitting = [name for name in modes if longest_of(summary, name) >= end]
        common = [at for at in timed[fitting[0]] if at <= end and all(at in timed[name] for name in fitting)]
        if common:
            at = max(common)
            best_s = min(timed[name][at]["step_time_s"] for name in fitting)
            alike = [n for n in fitting if timed[n][at]["step_time_spread_s"][0] <= best_s * (1 + ALIKE)]
            name, *others = alike  # of equals the first, which does the least
            if found and found[-1].mode == name:
                begin = found.pop().begin
            found.append(Choice(name, begin, end, at, tuple(others)))
        begin = end + 1
    return found


def speed(summary: dict[str, Any], choice: Choice) -> dict[str, Any]:
    """The timing of a choice's mode at the largest timed size up to its end."""
    timings = summary["modes"][choice.mode]["timings"]
    return max((t for t in timings if t[summary["axis"]] <= choice.end), key=lambda t: t[summary["axis"]])


def longest_of(summary: dict[str, Any], name: str) -> int:
    """The largest size of a mode, on the sweep's axis; 0 when none fits."""
    mode = summary["modes"][name]
    return mode["largest_micro_batch_size"] if summary["axis"] == "micro_batch_size" else mode["longest_context"]


def doubt(summary: dict[str, Any]) -> str | None:
    """Why the speeds are no ground for a choice; None when they are. Sizes and bytes do not depend on it."""
    timings = [t for mode in summary["modes"].values() for t in mode["timings"]]
    fastest = min((t["overhead"] for t in timings if t["overhead"]), default=1.0)
    spread = (
        statistics.median(t["step_time_spread_s"][1] / t["step_time_spread_s"][0] for t in timings) if timings else 1.0
    )
    if fastest >= FASTER_THAN_NONE and spread <= UNSTEADY:
        return None
    return (
        f"The machine was too busy to compare speeds: steps of one trial differ by {times(spread)}, and a mode took"
        f" {times(fastest)} of the time of `none`, which does least. Sizes and bytes stand; for speeds, sweep again."
    )


def lines(summary: dict[str, Any]) -> Iterator[str]:
    """The recommendation, a sentence for each case, with its reason."""
    chosen = choices(summary)
    if chosen and (why := doubt(summary)):
        yield why
        by_reach = sorted(summary["modes"], key=lambda name: -longest_of(summary, name))
        yield "By reach alone: " + ", ".join(f"`{name}` {count(longest_of(summary, name))}" for name in by_reach) + "."
        return
    if not chosen:
        yield "Nothing can be recommended: no mode was timed. Raise the budget, or lower the granularity."
        return
    axis = summary["axis"]
    what, unit = ("A context of", " tokens") if axis == "seq_length" else ("A micro-batch of", " samples")
    for i, choice in enumerate(chosen):
        timing = speed(summary, choice)
        reach = "up to" if choice.begin == 1 else f"{count(choice.begin)} to"
        run = f"{count(timing['tokens_per_s'])} tokens/s at {count(timing[axis])}"
        reason = _reason(summary, choice, chosen[i - 1] if i else None)
        yield f"{what} {reach} {count(choice.end)}{unit}: `{choice.mode}`, {run}. {reason}"
    covered = sum(choice.end - choice.begin + 1 for choice in chosen)
    if covered < chosen[-1].end:
        yield "Other sizes: what fits there was not timed at one size that all share; the sweep goes on when run again."
    fastest_first = [(speed(summary, choice), choice) for choice in chosen]
    for i, (timing, choice) in enumerate(fastest_first):
        if all(timing["tokens_per_s"] > later["tokens_per_s"] for later, _ in fastest_first[i + 1 :]):
            yield (
                f"At least {count(timing['tokens_per_s'])} tokens/s: up to {count(timing[axis])}{unit} with"
                f" `{choice.mode}`, at a peak of {size(timing['peak_device_bytes'])}."
            )


def _reason(summary: dict[str, Any], choice: Choice, before: Choice | None) -> str:
    reasons = []
    if before:
        reasons.append(f"`{before.mode}` ends at {count(longest_of(summary, before.mode))}")
    reasons.append(f"of what fits, nothing is faster at {count(choice.at)}")
    if choice.alike:
        reasons.append(f"about as fast there: {', '.join(f'`{n}`' for n in choice.alike)}")
    mode = summary["modes"][choice.mode]
    if mode["overhead"] and mode["mode"] != "none":
        reasons.append(f"its step takes {times(mode['overhead'])} of `none`'s at {count(mode['overhead_at'])}")
    text = "; ".join(reasons)
    return f"{text[0].upper()}{text[1:]}."


def order(summary: dict[str, Any]) -> Iterator[tuple[str, str, float | None]]:
    """(mode, mode that keeps no more, how many times longer that one's context is), where theory tells the order."""
    modes = summary["modes"]
    for name, entry in modes.items():
        for other, beyond in modes.items():
            if name == other or entry["attention"] != beyond["attention"]:
                continue
            if _reaches_as_far(beyond["mode"], entry["mode"], entry["attention"]):
                mine, theirs = longest_of(summary, name), longest_of(summary, other)
                yield name, other, theirs / mine if mine else None


def _reaches_as_far(name: str, other: str, attention: str) -> bool:
    """Whether theory says that mode `name` has no shorter longest context than mode `other`."""
    if name == "auto":  # it chooses among all others
        return other != "auto"
    if other == "auto" or "budget" in (parse(name).recompute, parse(other).recompute):  # a compiler's choice
        return False
    return _keeps_no_more(parse(name), parse(other), attention)


def _keeps_no_more(a: Mode, b: Mode, attention: str) -> bool:
    """Whether `a` keeps a part of what `b` keeps on the device, by what the modes mean (groups are left out)."""
    if attention == "unfused" and "attention" in a.keep and "core_attn" in b.modules:
        return False  # to keep unfused attention is to keep its scores, which b does not
    if any((m.grouping, m.group) != ("uniform", 1) for m in (a, b)) or (b.offload and not a.offload):
        return False
    rank = {"none": 0, "selective": 1, "full": 2}
    if rank[a.recompute] != rank[b.recompute]:
        return rank[a.recompute] > rank[b.recompute]
    return set(a.modules) >= set(b.modules) and set(a.keep) <= set(b.keep)
