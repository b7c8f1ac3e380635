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
    # auto may compute in tiles that none does not have, and be faster.
    fixed = (t for mode in summary["modes"].values() if mode["mode"] != "auto" for t in mode["timings"])
    fastest = min((t["overhead"] for t in fixed if t["overhead"]), default=1.0)
    spread = (
        statistics.median(t["step_time_spread_s"][1] / t["step_time_spread_s"][0] for t in timings) if timings else 1.0
    )
    if fastest >= FASTER_THAN_NONE and spread <= UNSTEADY:
        return None
    return (
        f"The machine was too busy to compare speeds: the slowest step of a timing took {times(spread)} its fastest,"
        f" and one mode {times(fastest)} the step time of `none`, which does the least work. Sizes and memory are right"
        " all the same; for speeds, sweep again on a quiet machine, into another folder (OUT=)."
    )


def lines(summary: dict[str, Any]) -> Iterator[str]:
    """The recommendation, a sentence for each case, with its reason."""
    chosen = choices(summary)
    if chosen and (why := doubt(summary)):
        yield why
        by_reach = sorted(summary["modes"], key=lambda name: -longest_of(summary, name))
        yield (
            "From the longest to the shortest: "
            + ", ".join(f"`{name}` {count(longest_of(summary, name))}" for name in by_reach)
            + "."
        )
        return
    if not chosen:
        yield "Nothing can be recommended: no mode was timed. Raise the budget, or lower the granularity."
        return
    axis = summary["axis"]
    unit, what = ("tokens", "length") if axis == "seq_length" else ("samples", "micro-batch")
    for choice in chosen:
        timing = speed(summary, choice)
        reach = "up to" if choice.begin == 1 else f"{count(choice.begin)} to"
        run = f"{count(timing['tokens_per_s'])} tokens/s at {count(timing[axis])}"
        yield f"For {reach} {count(choice.end)} {unit} use `{choice.mode}`: {run}, {_reason(summary, choice)}."
    covered = sum(choice.end - choice.begin + 1 for choice in chosen)
    if covered < chosen[-1].end:
        yield f"Other {what}s: not enough timings at a common {what} to compare; run the sweep again to add them."
    fastest_first = [(speed(summary, choice), choice) for choice in chosen]
    for i, (timing, choice) in enumerate(fastest_first):
        if all(timing["tokens_per_s"] > later["tokens_per_s"] for later, _ in fastest_first[i + 1 :]):
            yield (
                f"If you need at least {count(timing['tokens_per_s'])} tokens/s: up to {count(timing[axis])} {unit}"
                f" with `{choice.mode}` (peak {size(timing['peak_device_bytes'])})."
            )


def _reason(summary: dict[str, Any], choice: Choice) -> str:
    at = speed(summary, choice)[summary["axis"]]
    where = "there" if choice.at == at else f"at {count(choice.at)}"
    if sum(longest_of(summary, name) >= choice.end for name in summary["modes"]) == 1:
        reason = f"the only mode that reaches {count(choice.end)}"
    elif choice.alike:
        reason = f"among the fastest {where}; about the same: {', '.join(f'`{n}`' for n in choice.alike)}"
    elif choice.at == choice.end:
        reason = "the fastest mode that fits there"
    else:
        reason = f"the fastest {where} of the modes that fit"
    mode = summary["modes"][choice.mode]
    if mode["overhead"] and mode["mode"] != "none":
        reason += f"; a step takes {times(mode['overhead'])} the time of `none` at {count(mode['overhead_at'])}"
    return reason


def order(summary: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """(mode, mode that keeps less, how many times longer that one's context is) for neighbours in the expected order.

    Two modes are neighbours when no third one of those measured stands between them.
    """
    modes = {name: mode for name, mode in summary["modes"].items() if mode["status"] == "completed"}
    beyond = {name: {other for other in modes if _keeps_less(modes[other], modes[name])} for name in modes}
    for name, others in beyond.items():
        if mine := longest_of(summary, name):
            for other in modes:
                if other in others and not any(other in beyond[between] for between in others):
                    yield name, other, longest_of(summary, other) / mine


def _keeps_less(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether `one` must reach as far as `other`, and not the other way round too, as modes that are the same do."""
    if one["attention"] != other["attention"]:
        return False
    a, b, attention = one["mode"], other["mode"], one["attention"]
    return _reaches_as_far(a, b, attention) and not _reaches_as_far(b, a, attention)


def _reaches_as_far(name: str, other: str, attention: str) -> bool:
    """Whether mode `name` is expected to have no shorter longest context than mode `other`."""
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
