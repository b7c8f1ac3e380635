"""What a person gets from a sweep: a table in the terminal, report.md with pictures, TensorBoard, a recommendation.

    make report OUT=sweeps/quickstart

makes all of it again from the sweep's records; nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import publish, recommend, summary, trials
from tools.words import count, size, times, within
from training.metrics import duration
from training.records import read_object
from training.run import FAILED, USAGE, write_whole

COLUMNS = (
    *("mode", "longest context", "limit", "planned", "peak", "after forward", "host", "tokens/s", "step, s"),
    *("x none", "at", "trials"),
)
PICTURES = {
    "longest_context": "Longest context by mode",
    "speed": "Speed against context",
    "overhead": "Step time against none",
    "memory": "What holds the memory at the peak",
    "timeline": "Live memory over one step",
}


def rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """COLUMNS for every mode, as text."""
    for name, mode in found["modes"].items():
        longest, planned = recommend.longest_of(found, name), mode["predicted_longest_context"]
        stopped = mode["status"] != "completed"
        yield (
            name,
            mode["status"] if stopped else count(longest) if longest else "nothing fits",
            mode["limited_by"] or "-",
            "-" if planned is None else count(planned) + (" =" if planned == longest and not stopped else ""),
            size(mode["peak_device_bytes"]),
            size(mode["after_forward_device_bytes"]),
            size(mode["peak_host_bytes"]) if mode["peak_host_bytes"] else "-",
            count(mode["tokens_per_s"]),
            "-" if mode["step_time_s"] is None else f"{mode['step_time_s']:.2f}",
            times(mode["overhead"]),
            count(mode["overhead_at"]),
            str(mode["trials"]),
        )


def columns(found: dict[str, Any]) -> tuple[str, ...]:
    batch = found["axis"] == "micro_batch_size"
    return tuple("largest micro-batch" if batch and name == "longest context" else name for name in COLUMNS)


def show(folder: Path) -> None:
    """The table and the recommendation, in the terminal."""
    from rich.console import Console
    from rich.table import Table

    found = summary.read(folder)
    wide = sys.stdout.isatty()
    console = Console(width=None if wide else 160, highlight=False)
    table = Table(title=_title(found), title_justify="left")
    for i, name in enumerate(columns(found)):
        table.add_column(name, justify="right" if i else "left", overflow="fold", no_wrap=not i)
    for row in rows(found):
        table.add_row(*row)
    console.print(table)
    for name, mode in found["modes"].items():
        if mode["error"]:
            console.print(f"{name}: {mode['status']}: {mode['error']}", markup=False, soft_wrap=True)
    if found["not_timed"]:
        left = len(found["not_timed"])
        console.print(f"{left} speeds were left out for want of time (sweep.minutes); the same command measures on.")
    for line in recommend.lines(found):
        console.print(line.replace("`", ""), markup=False, soft_wrap=True)
    console.print(f"Report, pictures and records: {folder}; `make tensorboard LOGDIR={folder}/tb`", soft_wrap=True)


def write(folder: Path) -> None:
    """report.md, the pictures and the TensorBoard runs of the sweep in `folder`."""
    from tools import figures, tensorboard_sweep

    found = summary.read(folder)
    memory = summary.read_memory(folder, found)
    drawn = figures.draw(found, memory)
    tensorboard_sweep.write(folder, found, drawn, "\n".join(_table(columns(found), rows(found))))
    figures.save(drawn, folder)
    write_whole(folder / "report.md", "\n".join(_report(folder, found, memory, list(drawn))) + "\n")


def _title(found: dict[str, Any]) -> str:
    what = "Longest context" if found["axis"] == "seq_length" else "Largest micro-batch"
    return f"{what} of {found['recipe']} {within(found['budget_bytes'])} on {found['device']}"


def _report(folder: Path, found: dict[str, Any], memory: dict[str, Any], drawn: list[str]) -> Iterator[str]:
    from tools import figures  # imports matplotlib

    environment = read_object(folder / "environment.json")
    yield f"# {_title(found)}"
    yield ""
    yield from _facts(found, environment)
    yield ""
    yield "## Results"
    yield ""
    yield from _table(columns(found), rows(found))
    yield ""
    yield "Peak and after-forward are live device bytes. `x none` is the step time relative to mode `none` under the"
    yield "same attention and at the same size (`at`); no fixed mode does less work than `none`, so that less than"
    yield "x1.00 is noise (`auto` may take tiles, and be faster). `=`: the plan said just that."
    yield from _problems(found)
    yield ""
    yield "## What to use"
    yield ""
    yield from (f"- {line}" for line in recommend.lines(found))
    yield ""
    yield from _order(found)
    for name in drawn:
        yield f"## {PICTURES[name]}"
        yield ""
        yield f"![{PICTURES[name]}]({name}.png)"
        yield ""
        if name == "timeline":
            yield figures.timeline_caption(found, memory)
            yield ""
    yield from _speeds(found)
    yield from _too_much(folder, found)
    yield "## Environment"
    yield ""
    yield from _table(("", ""), ((f"`{key}`", f"`{json.dumps(value)}`") for key, value in environment.items()))
    yield ""
    yield "## Recipe"
    yield ""
    yield "```yaml"
    yield (folder / "recipe.yaml").read_text(encoding="utf-8", errors="replace").strip()
    yield "```"


def _facts(found: dict[str, Any], environment: dict[str, Any]) -> Iterator[str]:
    lengths = found["axis"] == "seq_length"
    fixed = f"micro-batch {found['micro_batch_size']}" if lengths else f"context {count(found['seq_length'])}"
    yield (
        f"{found['trials']} trials took {duration(found['seconds'])}, each a fresh process of `train.py`; {fixed};"
        f" {found['world_size']} rank{'s' if found['world_size'] > 1 else ''}; torch {found['torch']}, deepspeed"
        f" {found['deepspeed']}; {str(environment.get('time', ''))[:10]}. A size is the longest when it survived its"
        f" optimizer steps and the next multiple of {found['granularity']} was tried and did not."
    )


def _problems(found: dict[str, Any]) -> Iterator[str]:
    for name, mode in found["modes"].items():
        if mode["error"]:
            yield ""
            yield f"`{name}` was stopped, {mode['status']}:"
            yield from ("", "```", str(mode["error"]), "```")


def _order(found: dict[str, Any]) -> Iterator[str]:
    pairs = list(recommend.order(found))
    if not pairs:
        return
    yield "## Expected order"
    yield ""
    yield "A mode that keeps less on the device must reach at least as far. Neighbours in this order, measured:"
    yield ""
    verdict = lambda ratio: "longer" if ratio > 1 else "the same" if ratio == 1 else "shorter: not expected"  # noqa: E731
    table = ((f"`{b}`", f"`{a}`", times(ratio), verdict(ratio)) for a, b, ratio in pairs)
    yield from _table(("keeps less", "keeps more", "context", ""), table)
    yield ""


def _speeds(found: dict[str, Any]) -> Iterator[str]:
    axis = found["axis"]
    sizes = sorted({t[axis] for mode in found["modes"].values() for t in mode["timings"]})
    if not sizes:
        return
    yield "## Speeds, tokens/s"
    yield ""
    yield "In brackets the step time relative to `none`; `-`: does not fit; empty: not timed."
    yield ""
    table = []
    for name, mode in found["modes"].items():
        timed = {t[axis]: t for t in mode["timings"]}
        cells = [_speed(timed.get(at), at <= recommend.longest_of(found, name)) for at in sizes]
        table.append((f"`{name}`", *cells))
    yield from _table(("mode", *map(count, sizes)), table)
    yield ""
    if found["not_timed"]:
        yield f"Left out for want of time: {len(found['not_timed'])} timings (`sweep.minutes`)."
        yield "The same sweep, run again, goes on with them."
        yield ""


def _speed(timing: dict[str, Any] | None, fits: bool) -> str:
    if timing is None:
        return "" if fits else "-"
    return count(timing["tokens_per_s"]) + (f" ({times(timing['overhead'])})" if timing["overhead"] else "")


def _too_much(folder: Path, found: dict[str, Any]) -> Iterator[str]:
    records = [r for r in trials.read(folder / "trials.jsonl") if r["status"] != "completed"]
    if not records:
        return
    yield "## Trials that did not complete"
    yield ""
    head = ("mode", "attention", "size", "status", "planned peak", "what happened")
    table = (
        (
            *(f"`{r['mode']}`", r["attention"], count(r[found["axis"]]), r["status"]),
            *(size(r["predicted_peak_device_bytes"]), (str(r["error"]).strip().splitlines() or [""])[-1]),
        )
        for r in records
    )
    yield from _table(head, table)
    yield ""


def _table(head: tuple[str, ...], body: Any) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in body:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", metavar="DIR", type=Path, help="the sweep's folder")
    parser.add_argument("--publish", action="store_true", help=publish.HELP)
    given = parser.parse_args(arguments)
    try:
        write(given.sweep)
        show(given.sweep)
        if given.publish:
            print(f"published in {publish.publish(given.sweep)}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return USAGE
    except OSError as error:
        print(f"{error.filename or given.sweep}: {error.strerror}; put it right, and run this again", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
