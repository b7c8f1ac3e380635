"""Trials: one question about a size, answered by train.py itself in a fresh process and kept in trials.jsonl.

A trial is what `make train` would run: the same launcher, engine and data, for a few steps, under the recipe's
budget. What it was is read from its result.json and from how its process ended, never from its words. Finished
trials are never run twice while recipe, code and environment stay the same.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import launch, processes
from training import metrics
from training.recipe import Recipe, RecipeError, load
from training.records import NULL, NUMBER, Fields, has_shape, read_lines, read_object
from training.schema import ROOT

AXES = ("seq_length", "micro_batch_size")
TOO_MUCH = ("oom", "host_oom")  # the only statuses that say a size is too large
ANSWERS = ("completed", *TOO_MUCH)  # what is kept; failed and timeout are tried again
# What a trial's recipe may differ in without asking another question.
IRRELEVANT = ("name", "steps", "sweep", "targets", "evaluation", "checkpoint", "log")
RESULT = (
    *("recipe", "mode", "seq_length", "micro_batch_size", "world_size", "device", "steps", "loss", "tokens_per_s"),
    *("step_time_s", "peak_device_bytes", "after_forward_device_bytes", "peak_host_bytes", "peak_op", "error"),
)
# What of a trial's record is used again; of one that completed, MEASURED too.
RECORD: Fields = {
    **dict.fromkeys(("key", "code", "status", "mode", "attention", "purpose", "run"), (str,)),
    **dict.fromkeys(("seq_length", "micro_batch_size", "steps", "round", "trial"), (int,)),
    **{"memory": (bool,), "wall_s": NUMBER, "step_times_s": (list,), "error": (str, NULL)},
    "predicted_peak_device_bytes": (int, NULL),
}
PEAKS = dict.fromkeys(metrics.PEAKS, NUMBER)
MEASURED: Fields = {"tokens_per_s": NUMBER, "step_time_s": NUMBER, "peak_op": (str, NULL), **PEAKS}
TAIL = 2000  # characters of a failed trial's last words that its record shows


@dataclass(frozen=True, order=True)
class Variant:
    """What is compared: a memory mode under one attention code."""

    attention: str
    mode: str


@dataclass(frozen=True)
class Point:
    """What a trial tries."""

    variant: Variant
    seq_length: int
    micro_batch_size: int

    def size(self, axis: str) -> int:
        return getattr(self, axis)


@dataclass(frozen=True)
class Question:
    """What a trial is for: whether a size fits ("fit"), how fast it is ("timing"), what holds the memory ("memory").

    steps: optimizer steps to survive. round: which of several timings of the same. memory: also write memory.json.
    """

    point: Point
    purpose: str
    steps: int
    round: int = 0
    memory: bool = False


class Trials:
    """All trials of a sweep's folder: those on record, and new ones.

    environment: what the answers depend on besides recipe and code (device, versions, ranks).
    predicted_peak: device bytes that the planner expects at a point, or None.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        environment: dict[str, Any],
        predicted_peak: Callable[[Point], int | None] = lambda point: None,
        code: str | None = None,
    ) -> None:
        self.folder, self.recipe, self.environment = folder, recipe, environment
        self.predicted_peak = predicted_peak
        self.code = code or code_version()
        self.file = folder / "trials.jsonl"
        self.records = read(self.file)
        self._keys: dict[Point, str] = {}

    # -- what is known ---------------------------------------------------------------------------------------

    def known(self, question: Question) -> dict[str, Any] | None:
        """The record that answers it already: any of running out of memory, else one of as many steps and like."""
        key = self.key(question.point)
        mine = [r for r in self.records if r["key"] == key and r["status"] in ANSWERS]
        too_much = [r for r in mine if r["status"] in TOO_MUCH]
        enough = [r for r in mine if self._answers(r, question)]
        return next(iter([*too_much, *enough]), None)

    def _answers(self, record: dict[str, Any], question: Question) -> bool:
        if question.purpose == "fit":
            return record["steps"] >= question.steps
        asked = (question.purpose, question.steps, question.round)
        return (record["purpose"], record["steps"], record["round"]) == asked

    def key(self, point: Point) -> str:
        """The same for trials that must give the same answer."""
        if point not in self._keys:
            self._keys[point] = self._key(point)
        return self._keys[point]

    def _key(self, point: Point) -> str:
        recipe = self.recipe_at(point).model_dump(mode="json", exclude=set(IRRELEVANT))
        config = self.recipe.deepspeed_config_path
        facts = [recipe, self.code, self.environment, config.read_text() if config else None]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def recipe_at(self, point: Point) -> Recipe:
        return load(self.folder / "recipe.yaml", overrides(self.recipe, point, self.environment["world_size"]))

    # -- a new one -------------------------------------------------------------------------------------------

    def run(self, question: Question) -> dict[str, Any]:
        """The answer: the record on file, or else a new trial's."""
        record = self.known(question)
        if record is None:
            record = self._run(question)
            self._append(record)
        return record

    def _run(self, question: Question) -> dict[str, Any]:
        point, steps = question.point, question.steps
        number = 1 + max((r["trial"] for r in self.records), default=0)
        words = (point.variant.attention, point.variant.mode, f"{point.seq_length}x{point.micro_batch_size}")
        run_dir = self.folder / "trials" / re.sub(r"[^\w.+-]+", "_", f"{number:04}-{'-'.join(words)}")
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        gpus, ranks = launch.devices(), self.environment["world_size"]
        environment = launch.environment(gpus, ranks)
        settings = [*overrides(self.recipe, point, ranks), *steps_overrides(self.recipe, steps)]
        settings.append(f"log.memory={str(question.memory).lower()}")
        ended = processes.run(
            launch.command([str(self.folder / "recipe.yaml"), *settings, "--run-dir", str(run_dir)], gpus, ranks),
            environment,
            self.folder,
            run_dir / "output.txt",
            self.recipe.sweep.trial_timeout_s,
        )
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        status, result, error = outcome(run_dir, ended, steps)
        return {
            **dict.fromkeys(RESULT),
            "recipe": self.recipe.name,
            "mode": point.variant.mode,
            "seq_length": point.seq_length,
            "micro_batch_size": point.micro_batch_size,
            "world_size": ranks,
            "steps": 0,
            **result,
            "status": status,
            "error": error,
            "attention": point.variant.attention,
            "budget_bytes": self.recipe.budget_bytes,
            "host_budget_bytes": self.recipe.host_budget_bytes,
            "predicted_peak_device_bytes": self.predicted_peak(point),
            "wall_s": ended.wall_s,
            "exit_code": ended.exit_code,
            "signal": ended.signal,
            "step_times_s": step_times(run_dir),
            "trial": number,
            "purpose": question.purpose,
            "round": question.round,
            "memory": question.memory,
            "code": self.code,
            "run": str(run_dir.relative_to(self.folder)),
            "key": self.key(point),
        }

    def _append(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        torn = self.file.exists() and self.file.read_bytes()[-1:] not in (b"", b"\n")
        try:
            with self.file.open("a", encoding="utf-8") as file:
                file.write("\n" * torn + json.dumps(record) + "\n")
        except OSError as error:  # a full disk's names no file
            raise OSError(error.errno, error.strerror, str(self.file)) from None


def outcome(run_dir: Path, ended: processes.Ended, steps: int) -> tuple[str, dict[str, Any], str | None]:
    """(status, content of result.json, error) of a trial.

    A record of running out of memory is believed whatever the exit code. Any other way to end than with all steps
    done, a record of it and exit code 0 is a fault, except that the system's own lack of memory is `host_oom`.
    """
    result = read_object(run_dir / "result.json")
    said = result.get("status")
    if said in TOO_MUCH:
        return said, result, result.get("error")
    if ended.timed_out:
        return "timeout", result, str(ended)
    if ended.killed_for_memory:
        return "host_oom", result, str(ended)
    if said == "completed" and ended.exit_code == 0 and result.get("steps") == steps:
        return "completed", result, None
    told = result.get("error") or _last_words(run_dir / "output.txt")
    return "failed", result, f"{ended}: {told}" if told else str(ended)


def overrides(recipe: Recipe, point: Point, ranks: int) -> list[str]:
    """What turns the sweep's recipe into a trial's. Accumulation is cut to two micro-batches, which peak as more do."""
    accumulation = min(2, recipe.accumulation_steps(ranks))
    words = [
        f"seq_length={point.seq_length}",
        f"micro_batch_size={point.micro_batch_size}",
        f"global_batch_size={point.micro_batch_size * ranks * accumulation}",
        f"model.attention={point.variant.attention}",
        f"recompute={point.variant.mode}",
    ]
    if recipe.model.position_embedding == "learned":
        words.append("model.max_position_embeddings=null")  # as many rows as the length needs
    return words


def steps_overrides(recipe: Recipe, steps: int) -> list[str]:
    """So many steps of the recipe's own warmup, and nothing beside them."""
    optimizer = recipe.optimizer
    share = steps / max(steps, optimizer.warmup_steps)
    return [
        f"steps={steps}",
        f"optimizer.lr={optimizer.lr * share!r}",
        "optimizer.min_lr=null",
        "optimizer.schedule=constant",
        "optimizer.decay_steps=null",
        f"optimizer.warmup_steps={steps if optimizer.warmup_steps else 0}",
        "evaluation.batches=0",
        "evaluation.every_steps=null",
        "checkpoint.keep=0",
        "checkpoint.every_steps=null",
        "log.every_steps=1",
        "log.advice=false",
    ]


def code_version() -> str:
    """A hash of everything that runs in a trial."""
    files = [ROOT / "train.py", ROOT / "tools" / "launch.py"]
    files += [path for folder in ("model", "training") for path in (ROOT / folder).rglob("*.py")]
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return total.hexdigest()[:16]


def step_times(run_dir: Path) -> list[float]:
    """Seconds of every step but the first, which pays for warming up."""
    return [r["step_time_s"] for r in metrics.read(run_dir / "metrics.jsonl") if r["step"] > 1 and "step_time_s" in r]


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a trials.jsonl; what is none is left out, and asked again. Raises RecipeError for no file."""
    try:
        return read_lines(file, is_record)[0]
    except OSError as error:
        raise RecipeError(f"{file}: {error.strerror}; put it right, or choose another folder with --out") from None


def is_record(value: Any) -> bool:
    return has_shape(value, RECORD) and (value["status"] != "completed" or has_shape(value, MEASURED))


def _last_words(output: Path) -> str:
    """The end of what a trial printed: for people, who must see what went wrong where no record says it."""
    text = output.read_text(encoding="utf-8", errors="replace").strip() if output.exists() else ""
    return text[-TAIL:].replace(f"{ROOT}/", "")
