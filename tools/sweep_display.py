"""What a person sees while a sweep runs: a table that is redrawn on a terminal, a line per trial elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

from tools.trials import TOO_MUCH, Question, Variant
from tools.words import count, size
from training.metrics import duration

PURPOSES = {"fit": "does it fit?", "timing": "how fast?", "memory": "what holds the memory?"}


@dataclass
class Row:
    """What is known of a variant: the largest size that fitted, the smallest that did not, what it is doing."""

    fits: int = 0
    too_much: int | None = None
    tokens_per_s: float | None = None
    doing: str = ""
    result: str = "waits"  # shown while nothing is done with it


class Display:
    """Shows trials as they begin and end. Use it as a context manager."""

    def __init__(self, title: str, names: dict[Variant, str], axis: str) -> None:
        self.title, self.names, self.axis = title, names, axis
        self.rows = {variant: Row() for variant in names}
        self.left_s: float | None = None
        self.start_s = time.monotonic()
        self.live: Any = None

    def __enter__(self) -> Display:
        if sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(get_renderable=self._table, refresh_per_second=2)
            self.live.start()
        else:
            print(self.title, flush=True)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def begin(self, question: Question, left_s: float | None) -> None:
        self.left_s = left_s
        point = question.point
        self.rows[point.variant].doing = f"{count(point.size(self.axis))}: {PURPOSES[question.purpose]}"
        if self.live is None:
            print(f"{self._clock()}  {self._trial(question)} ...", end="", flush=True)

    def end(self, question: Question, record: dict[str, Any]) -> None:
        self.seen(question, record)
        if self.live is None:
            peak = size(record["peak_device_bytes"] or None)
            speed = f", {count(record['tokens_per_s'])} tokens/s" if question.purpose == "timing" else ""
            print(f" {record['status']}, peak {peak}{speed}, {record['wall_s']:.1f} s", flush=True)

    def seen(self, question: Question, record: dict[str, Any]) -> None:
        """Take in a record, new or from before."""
        row, tried = self.rows[question.point.variant], question.point.size(self.axis)
        status = record["status"]
        if status == "completed":
            row.fits = max(row.fits, tried)
        elif status in TOO_MUCH:
            row.too_much = min(tried, row.too_much or tried)
        if question.purpose == "timing" and status == "completed":
            row.tokens_per_s = record["tokens_per_s"]
        row.doing = ""

    def found(self, variant: Variant, result: str, text: str) -> None:
        """A mode's answer, in a word and in a line that stays."""
        self.rows[variant].result = result
        self.say(f"{self.names[variant]}: {text}")

    def say(self, text: str) -> None:
        if self.live is not None:
            self.live.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def _trial(self, question: Question) -> str:
        point = question.point
        return f"{self.names[point.variant]} at {count(point.size(self.axis))}: {PURPOSES[question.purpose]}"

    def _clock(self) -> str:
        left = f", about {duration(self.left_s)} left" if self.left_s is not None else ""
        return f"[{duration(time.monotonic() - self.start_s)}{left}]"

    def _table(self) -> Any:
        from rich.table import Table

        table = Table("mode", title=self.title, caption=self._clock())
        for name in ("fits", "too much", "tokens/s"):
            table.add_column(name, justify="right")
        table.add_column("now", min_width=24)
        for variant, row in self.rows.items():
            cells = (count(row.fits or None), count(row.too_much), count(row.tokens_per_s))
            table.add_row(self.names[variant], *cells, row.doing or row.result)
        return table
