"""What changed between two sweeps, and whether it got worse: `make compare A=sweeps/x B=sweeps/y`.

Ends with 1 when B is worse than A by more than a tolerance: a mode that was stopped, or that B's recipe asks for and B
has not; a longest size that fell, a speed that fell at the largest size both timed. A mode that B was not asked for is
no regression. A longest size fell only if B tried no more than A's and found it too much; so a coarser granularity
alone is no regression.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import summary
from tools.recommend import longest_of
from tools.trials import Variant
from tools.words import count, label, size
from training.run import FAILED, USAGE

SAME = ("recipe", "budget_bytes", "host_budget_bytes", "device", "world_size", "micro_batch_size", "torch", "deepspeed")


@dataclass(frozen=True)
class Change:
    """One mode in both sweeps. worse: what fell by more than the tolerance, for people; empty when nothing did."""

    name: str
    only_in: str  # "A" or "B"; empty when both have it
    longest: tuple[int | None, int | None]
    at: int | None  # the largest size that both timed
    tokens_per_s: tuple[float | None, float | None]
    peak_device_bytes: tuple[int | None, int | None]  # at that size
    worse: tuple[str, ...]


def changes(
    a: dict[str, Any], b: dict[str, Any], asked: set[Variant] | None, speed: float, length: float
) -> Iterator[Change]:
    """Every mode of `a`, then those only in `b`; the same one is of the same attention, however a sweep names it.

    asked: what `b` was to measure; None: all that `a` did. speed, length: shares that may be lost without being worse.
    """
    names_a, names_b = _names(a), _names(b)
    variants = list(dict.fromkeys([*names_a, *names_b]))
    for variant in variants:
        name_a, name_b = names_a.get(variant), names_b.get(variant)
        old, new = (s["modes"][n] if n else None for s, n in ((a, name_a), (b, name_b)))
        longest = (longest_of(a, name_a) if name_a else None, longest_of(b, name_b) if name_b else None)
        worse = []
        if old and not new and (asked is None or variant in asked):
            worse.append("is not in B")
        if old and new and old["status"] == "completed" != new["status"]:
            worse.append(f"was stopped, {new['status']}: {new['error']}")
        elif old and new and _fell(longest[0] or 0, longest[1] or 0, new["next_tried"], length):
            worse.append(f"reaches {count(longest[1])}, not {count(longest[0])}")
        at, before, after = _at_same_size(a["axis"], old, new)
        speeds = before.get("tokens_per_s"), after.get("tokens_per_s")
        if speeds[0] and speeds[1] and speeds[1] < speeds[0] * (1 - speed):
            worse.append(f"runs at {speeds[1] / speeds[0]:.0%} of its speed at {count(at)}")
        peaks = before.get("peak_device_bytes"), after.get("peak_device_bytes")
        name = label(variant, len({v.attention for v in variants}))
        yield Change(name, "" if old and new else "A" if old else "B", longest, at, speeds, peaks, tuple(worse))


def _names(found: dict[str, Any]) -> dict[Variant, str]:
    return {Variant(mode["attention"], mode["mode"]): name for name, mode in found["modes"].items()}


def asked_for(folder: Path) -> set[Variant] | None:
    """What the recipe of the sweep in `folder` asks for; None when there is no telling."""
    try:  # not loaded as a recipe: one of an older version may have settings that are unknown today
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
        attentions = recipe["sweep"]["attention"] or [recipe["model"]["attention"]]
        return {Variant(attention, mode) for attention in attentions for mode in recipe["sweep"]["modes"]}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return None


def _fell(old: int, new: int, too_much: int | None, tolerance: float) -> bool:
    return new < old * (1 - tolerance) and too_much is not None and too_much <= old


def _at_same_size(axis: str, old: Any, new: Any) -> tuple[int | None, dict[str, Any], dict[str, Any]]:
    before, after = ({t[axis]: t for t in mode["timings"]} if mode else {} for mode in (old, new))
    common = before.keys() & after.keys()
    return (max(common), before[max(common)], after[max(common)]) if common else (None, {}, {})


def differences(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """What is not the same about the two sweeps themselves."""
    for key in SAME:
        if a[key] != b[key]:
            old, new = (size(s[key]) if key.endswith("_bytes") else s[key] for s in (a, b))
            yield f"{key}: {old} there, {new} here"


def show(found: list[Change], axis: str) -> None:
    from rich.console import Console
    from rich.table import Table

    what = "longest context" if axis == "seq_length" else "largest micro-batch"
    table = Table("mode", what, "change", "speed at", "tokens/s", "change", "peak", "change", "")
    for change in found:
        absent = {"A": "not in B", "B": "only in B", "": ""}[change.only_in]
        verdict = ": ".join(filter(None, [absent, "worse" if change.worse else ""]))
        cells = _pair(change.longest, count), [count(change.at)], _pair(change.tokens_per_s, count)
        table.add_row(
            change.name, *(c for part in cells for c in part), *_pair(change.peak_device_bytes, size), verdict
        )
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)


def _pair(values: tuple[Any, Any], text: Any) -> list[str]:
    old, new = values
    return [f"{text(old)} > {text(new)}" if old != new else text(old), f"{new / old - 1:+.1%}" if old and new else "-"]


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:  # nan is not either: nothing would ever be worse by more
        raise argparse.ArgumentTypeError(f"{text}: write a share from 0 to below 1, such as 0.1")
    return value


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A", type=Path, help="folder of the older sweep")
    parser.add_argument("b", metavar="B", type=Path, help="folder of the newer sweep")
    parser.add_argument("--tolerance", type=share, default=0.1, metavar="SHARE", help="speed that may be lost; 0.1")
    parser.add_argument(
        "--length-tolerance", type=share, default=0.0, metavar="SHARE", help="longest size that may be lost; 0"
    )
    given = parser.parse_args(arguments)
    try:
        a, b = summary.read(given.a), summary.read(given.b)
        if a["axis"] != b["axis"]:
            raise ValueError(f"{given.a} swept {a['axis']} and {given.b} {b['axis']}: these cannot be compared")
        if not _names(a).keys() & _names(b).keys():
            raise ValueError(f"{given.a} and {given.b} have no mode under the same attention in common to be compared")
    except ValueError as error:
        print(error, file=sys.stderr)
        return USAGE
    for line in differences(a, b):
        print(f"not the same: {line}")
    found = list(changes(a, b, asked_for(given.b), given.tolerance, given.length_tolerance))
    show(found, a["axis"])
    worse = [f"{change.name} {what}" for change in found for what in change.worse]
    print("\n".join(worse) or f"nothing is worse by more than {given.tolerance:.0%} in speed, or shorter")
    return FAILED if worse else 0


if __name__ == "__main__":
    sys.exit(main())
