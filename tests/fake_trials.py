"""Trials that cost nothing: in place of train.py a formula says what a step holds and how long it takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny

from tools import processes
from tools.measure import Sweep
from tools.sweep_display import Display
from tools.trials import Point, Trials, Variant
from tools.words import label
from training.recipe import Recipe, load

ENVIRONMENT = {
    **{"device": "a test", "device_memory_bytes": None, "cuda": None, "world_size": 1, "threads": "1"},
    **{"python": "3", "torch": "2", "deepspeed": "0"},
}
# Bytes per token that a mode keeps, and what its step costs against none.
KEPT = {"none": 100, "selective": 60, "full": 20, "full+attention": 30, "full+offload": 10}
COST = {"none": 1.0, "selective": 1.1, "full": 1.33, "full+attention": 1.05, "full+offload": 1.4}
BUDGET = 100_000


def peak_bytes(mode: str, tokens: int) -> int:
    return 1000 + KEPT[mode] * tokens


def longest(mode: str, granularity: int) -> int:
    return (BUDGET - 1000) // KEPT[mode] // granularity * granularity


def plain(mode: str, tokens: int, steps: int) -> str:
    """The status of a trial whose memory is the formula's."""
    return "completed" if peak_bytes(mode, tokens) <= BUDGET else "oom"


class FakeTrials:
    """Stands in for tools.processes.run; counts what it was asked and answers with `status(mode, tokens, steps)`."""

    def __init__(self, status: Callable[[str, int, int], str] = plain) -> None:
        self.status = status
        self.asked: list[tuple[str, int, int]] = []

    def __call__(self, command: Any, environment: Any, folder: Path, output: Path, timeout_s: float) -> processes.Ended:
        settings = dict(word.split("=", 1) for word in command if "=" in word and not word.startswith("--"))
        run_dir = Path(command[command.index("--run-dir") + 1])
        mode, steps = settings["recompute"], int(settings["steps"])
        length, batch = int(settings["seq_length"]), int(settings["micro_batch_size"])
        tokens = length * batch
        self.asked.append((mode, tokens, steps))
        status = self.status(mode, tokens, steps)
        output.write_text(f"the last words of {mode}\n")
        if status in ("timeout", "killed"):
            killed = status == "killed"
            return processes.Ended(None, 9 if killed else None, not killed, False, 1.0)
        done = steps if status == "completed" else 0
        time_s = COST[mode] * tokens / 1000
        result = {
            **{"status": status, "steps": done, "tokens_per_s": tokens / time_s, "step_time_s": time_s, "mode": mode},
            **{"peak_device_bytes": peak_bytes(mode, tokens), "after_forward_device_bytes": KEPT[mode] * tokens},
            **{"peak_host_bytes": 0, "peak_op": "an operation", "seq_length": length, "micro_batch_size": batch},
            **{"error": None if done else f"{status}: an error"},
        }
        (run_dir / "result.json").write_text(json.dumps(result))
        lines = [{"step": n, "step_time_s": time_s} for n in range(1, done + 1)]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if settings["log.memory"] == "true" and done:
            (run_dir / "memory.json").write_text(json.dumps(_memory(mode, tokens)))
        return processes.Ended({"completed": 0, "oom": 3, "host_oom": 4}.get(status, 1), None, False, False, 1.0)


def _memory(mode: str, tokens: int) -> dict[str, Any]:
    top = peak_bytes(mode, tokens)
    points = [("forward", 1000), ("backward", top), ("optimizer", 1000)]
    return {
        "step": 5,
        "peak_device_bytes": top,
        "breakdown_bytes": {"parameters": 1000, "activations": top - 1000},
        "after_forward_device_bytes": top,
        "after_forward_breakdown_bytes": {},
        "timeline": [
            {"operation": n, "phase": phase, "module": "layers.0", "live_device_bytes": live}
            for n, (phase, live) in enumerate(points)
        ],
    }


class Guess:
    """Stands in for the planner: says anything."""

    def __init__(self, longest: Callable[[Variant], int | None], axis: str = "seq_length") -> None:
        self._longest, self.axis = longest, axis

    def longest(self, variant: Variant, granularity: int, maximum: int) -> int | None:
        return self._longest(variant)

    def peak(self, point: Point) -> int | None:
        return peak_bytes(point.variant.mode, point.seq_length * point.micro_batch_size)


def recipe(*settings: str, modes: str = "[none, full]") -> Recipe:
    words = [*tiny.SETTINGS, "global_batch_size=1", f"budget={BUDGET}B", f"sweep.modes={modes}", "sweep.granularity=64"]
    return load("quickstart", [*words, "sweep.attention=[]", "sweep.minutes=null", "sweep.seq_max=65536", *settings])


def sweep(
    folder: Path, recipe: Recipe, guess: Any = lambda variant: None, axis: str = "seq_length", code: str = "a version"
) -> Sweep:
    """A sweep in `folder` whose trials need `processes.run` to be replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    (folder / "environment.json").write_text(json.dumps({**ENVIRONMENT, "time": "2026-01-02T03:04:05+00:00"}))
    predictor: Any = Guess(guess, axis)
    attentions = recipe.sweep.attention or (recipe.model.attention,)
    variants = [Variant(a, m) for a in attentions for m in recipe.sweep.modes]
    names = {v: label(v, len(attentions)) for v in variants}
    known = Trials(folder, recipe, ENVIRONMENT, predictor.peak, code=code)
    return Sweep(recipe, variants, known, predictor, Display("a sweep", names, axis))
