"""A run's numbers: metrics.jsonl first, TensorBoard second, a progress line for whoever watches."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from training.records import NUMBER, has_shape, read_lines
from training.run import RunError
from training.values import size

GIB = 2**30
PEAKS = ("peak_device_bytes", "after_forward_device_bytes", "peak_host_bytes")
STEP = dict.fromkeys(("loss", "step_time_s", *PEAKS), NUMBER)  # what a run that goes on needs of a step's record

# TensorBoard tag -> (field of metrics.jsonl, what the field is divided by)
TAGS = {
    "train/loss": ("loss", 1),
    "train/lr": ("lr", 1),
    "train/grad_norm": ("grad_norm", 1),
    "val/loss": ("val_loss", 1),
    "perf/tokens_per_s": ("tokens_per_s", 1),
    "perf/mfu": ("mfu", 1),
    "perf/hfu": ("hfu", 1),
    "perf/step_time_s": ("step_time_s", 1),
    "memory/peak_device_gib": ("peak_device_bytes", GIB),
    "memory/after_forward_gib": ("after_forward_device_bytes", GIB),
    "memory/peak_host_gib": ("peak_host_bytes", GIB),
}


class Metrics:
    """Appends records to <folder>/metrics.jsonl and mirrors them to TensorBoard events in <folder>/tb.

    `start_step` drops what an interrupted run wrote after the checkpoint that is continued from. TensorBoard is
    a view: when it fails, one warning is given and the records go on. `write` is False on all ranks but one.
    Raises RunError when the records cannot be written.
    """

    def __init__(
        self, folder: Path, start_step: int = 0, *, warn: Callable[[str], None] = print, write: bool = True
    ) -> None:
        self.warn = warn
        self.path = folder / "metrics.jsonl"
        self.file: TextIO | None = None
        self.board: Any = None
        if not write:
            return
        try:
            cut_after(self.path, start_step, warn)
            self.file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise _unusable(self.path, error) from None
        try:
            from torch.utils.tensorboard import SummaryWriter

            purge_step = start_step + 1 if start_step else None
            self.board = SummaryWriter(str(folder / "tb"), purge_step=purge_step)
        except Exception as error:
            self._board_failed(error)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record, which has a `step`; a kill right after this loses nothing of it."""
        if self.file is None:
            return
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.board is not None:
            try:
                for tag, (field, unit) in TAGS.items():
                    if record.get(field) is not None:
                        self.board.add_scalar(tag, record[field] / unit, record["step"])
            except Exception as error:
                self._board_failed(error)

    def flush(self) -> None:
        """Bring everything to the disk itself."""
        if self.file is not None:
            os.fsync(self.file.fileno())
        self._ask_board("flush")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.file is not None:
            self.file.close()
        self._ask_board("close")

    def _ask_board(self, method: str) -> None:
        try:
            if self.board is not None:
                getattr(self.board, method)()
        except Exception as error:
            self._board_failed(error)

    def _board_failed(self, error: Exception) -> None:
        self.board = None
        self.warn(f"TensorBoard events stop here ({type(error).__name__}: {error}); {self.path} goes on")


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; lines that are none are left out. Raises RunError when it cannot be read."""
    try:
        return read_lines(path, is_record)[0]
    except OSError as error:
        raise _unusable(path, error) from None


def is_record(value: Any) -> bool:
    """Whether a line is a step's record, or says only some of it, as that of an evaluation does."""
    if not has_shape(value, {"step": (int,)}):
        return False
    return has_shape(value, STEP if "loss" in value else {n: NUMBER for n in ("val_loss", "step_time_s") if n in value})


def cut_after(path: Path, step: int, warn: Callable[[str], None]) -> None:
    """Remove records of later steps than `step`, in one move: a kill leaves the old file or the new one.

    Lines that are no records go too, with a warning; the file that had them is kept.
    """
    if not path.exists():
        return
    found, bad = read_lines(path, is_record)
    if bad:
        kept = path.with_name(f"{path.name}.damaged")
        with kept.open("ab") as file:  # behind what an earlier damage left there
            file.write(path.read_bytes())
        lines = ", ".join(map(str, bad[:5])) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        warn(f"warning: {path}: line {lines}: no record of a step, left out; the file as it was is in {kept.name}")
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(r) + "\n" for r in found if r["step"] <= step), encoding="utf-8")
    os.replace(new, path)


def _unusable(path: Path, error: OSError) -> RunError:
    return RunError(f"{path}: {error.strerror}; put it right, or train in another folder (RUN_DIR=, --run-dir)")


class Progress:
    """One line about the run: redrawn in place on a terminal, printed now and then elsewhere.

    `show` is False on all ranks but one: they are silent.
    """

    def __init__(self, steps: int, *, show: bool = True, every_s: float = 10.0) -> None:
        self.steps = steps
        self.every_s = every_s
        self.shown = show
        self.live: Any = None
        self._next_s = float("-inf")

    def __enter__(self) -> Progress:
        if self.shown and sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(auto_refresh=False)
            self.live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def show(self, record: dict[str, Any], left_s: float) -> None:
        """Show a record of metrics.jsonl; plain output has one line per `every_s`, and the last step's."""
        if self.live is not None:
            from rich.text import Text

            self.live.update(Text(self._line(record, left_s)), refresh=True)
            return
        now_s = time.monotonic()
        if self.shown and (now_s >= self._next_s or record["step"] >= self.steps):
            self._next_s = now_s + self.every_s
            print(self._line(record, left_s), flush=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.live is not None:
            self.live.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif self.shown:
            print(text, flush=True)

    def _line(self, record: dict[str, Any], left_s: float) -> str:
        mfu = "" if record.get("mfu") is None else f"  mfu {record['mfu']:.1%}"
        return (
            f"step {record['step']}/{self.steps}  loss {record['loss']:.4f}  "
            f"{record['tokens_per_s']:,.0f} tokens/s{mfu}  "
            f"peak {size(record['peak_device_bytes'])}  {duration(left_s)} left"
        )


def duration(seconds: float) -> str:
    """Like 2h05m, 3m20s or 45s."""
    minutes, s = divmod(int(seconds + 0.5), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02}m" if hours else f"{m}m{s:02}s" if m else f"{s}s"
