"""Does a recipe reach its targets? `make gate RECIPE=x` runs what is needed and passes or fails target by target.

    longest_context_tokens   the search of a sweep, for the recipe's own mode
    overhead                 a few steps of the recipe and of the same with mode none, in turn
    val_loss                 the whole training run
    tokens_per_s, peak_device_gib   the training run where there is one, else a few steps

Ends with 0 when all are reached, 1 when one is not, 2 when there is nothing to measure.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.measure import NoAnswerError, Sweep
from tools.sweep import ended, opened, parse, prepared
from tools.trials import Question, Variant
from training import run
from training.recipe import Recipe, RecipeError
from training.records import NUMBER, has_shape, read_object
from training.schema import ROOT

GIB = 2**30
OVERHEAD_ROUNDS = 3
AT_LEAST = ("longest_context_tokens", "tokens_per_s")  # the others are limits from above


@dataclass(frozen=True)
class Verdict:
    """One target: wanted and measured in the target's own unit; measured None: it could not be, `why` says it."""

    target: str
    wanted: float
    measured: float | None
    why: str = ""

    @property
    def passed(self) -> bool:
        if self.measured is None:
            return False
        return self.measured >= self.wanted if self.target in AT_LEAST else self.measured <= self.wanted

    def __str__(self) -> str:
        bound = "at least" if self.target in AT_LEAST else "at most"
        told = f"{self.measured:,.6g}" if self.measured is not None else "not measured"
        by = f", {self.measured / self.wanted - 1:+.1%}" if self.measured is not None else ""
        why = f": {self.why}" if self.why else ""
        return f"{'pass' if self.passed else 'FAIL'}  {self.target}: {bound} {self.wanted:,.6g}, is {told}{by}{why}"


class Gate:
    """Measures what the targets ask for, each thing once."""

    def __init__(self, recipe: Recipe, sweep: Sweep, variant: Variant, words: list[str], folder: Path) -> None:
        self.recipe, self.sweep, self.variant, self.words, self.folder = recipe, sweep, variant, words, folder

    def verdicts(self) -> Iterator[Verdict]:
        wanted = {k: v for k, v in self.recipe.targets.model_dump().items() if v is not None}
        result: dict[str, Any] = {}
        if wanted.keys() & {"tokens_per_s", "peak_device_gib", "val_loss"}:
            result = self._trained() if "val_loss" in wanted else self._steps(self.variant, 0)
            if result.get("status") != "completed":
                result = {"error": f"{result.get('status', 'failed')}: {result.get('error')}"}
        for target, value in wanted.items():
            if target == "longest_context_tokens":
                yield self._longest(value)
            elif target == "overhead":
                yield self._overhead(value)
            elif target == "peak_device_gib":
                known = has_shape(result, {"peak_device_bytes": NUMBER})
                peak = result["peak_device_bytes"] / GIB if known else None
                yield Verdict(target, value, peak or None, result.get("error") or "")
            else:
                measured = result[target] if has_shape(result, {target: NUMBER}) else None
                yield Verdict(target, value, measured, result.get("error") or "")

    def _longest(self, wanted: float) -> Verdict:
        found = self.sweep.settle(self.variant)
        error = f"{found.problem['status']}: {found.problem['error']}" if found.problem else ""
        return Verdict("longest_context_tokens", wanted, None if error else found.longest, error)

    def _overhead(self, wanted: float) -> Verdict:
        if self.variant.mode == "none":
            return Verdict("overhead", wanted, 1.0)
        times_s: dict[Variant, list[float]] = {self.variant: [], Variant(self.variant.attention, "none"): []}
        for round in range(OVERHEAD_ROUNDS):
            for variant, times in times_s.items():
                record = self._steps(variant, round)
                if record["status"] != "completed":
                    why = f"{variant.mode} at {self.recipe.seq_length}: {record['status']}: {record['error']}"
                    return Verdict("overhead", wanted, None, why)
                times += record["step_times_s"]
        mine, none = map(statistics.median, times_s.values())
        return Verdict("overhead", wanted, mine / none)

    def _steps(self, variant: Variant, round: int) -> dict[str, Any]:
        point = self.sweep.point(variant, self.recipe.seq_length)
        try:
            return self.sweep.ask(Question(point, "timing", self.recipe.sweep.timing_steps, round))
        except NoAnswerError as stop:
            return stop.record

    def _trained(self) -> dict[str, Any]:
        run_dir = self.folder / "run"
        command = [sys.executable, str(ROOT / "tools" / "launch.py"), *self.words, "--run-dir", str(run_dir)]
        trained = subprocess.run(command, check=False)
        result = read_object(run_dir / "result.json")
        return result or {"error": f"training ended with exit code {trained.returncode} and no result"}


def mode_text(recipe: Recipe) -> str:
    """The recipe's own mode, as an override is written. Raises RecipeError where it belongs to one length."""
    if isinstance(recipe.recompute, str):
        return recipe.recompute
    if isinstance(recipe.recompute, tuple):
        return f"[{', '.join(recipe.recompute)}]"
    raise recipe.error("recompute", "is a plan for one length; a gate needs a mode, or auto")


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments, __doc__ or "", "gate.py")
    return ended(lambda: _gated(given))


def _gated(given: argparse.Namespace) -> int:
    recipe = prepared(given)
    if not any(value is not None for value in recipe.targets.model_dump().values()):
        hint = "write for example targets: {longest_context_tokens: 8192}"
        raise RecipeError(f"recipe {recipe.name}: sets no targets, so nothing can be missed; {hint}")
    folder = given.out or ROOT / "sweeps" / f"{recipe.name}-gate"
    own = Variant(recipe.model.attention, mode_text(recipe))
    verdicts = []
    compared = list(dict.fromkeys([own, Variant(own.attention, "none")]))
    with opened(recipe, compared, "seq_length", given.processes, folder) as sweep:
        words = [given.recipe, *given.overrides, *_budgets(given)]
        for verdict in Gate(recipe, sweep, own, words, folder).verdicts():
            verdicts.append(verdict)
            sweep.display.say(str(verdict))
    run.write_json(folder / "gate.json", [vars(v) | {"passed": v.passed} for v in verdicts])
    print(f"{own.mode}: {sum(v.passed for v in verdicts)} of {len(verdicts)} targets reached")
    return 0 if all(v.passed for v in verdicts) else run.FAILED


def _budgets(given: argparse.Namespace) -> list[str]:
    named = {"budget": given.budget, "host_budget": given.host_budget}
    return [f"{key}={value}" for key, value in named.items() if value]


if __name__ == "__main__":
    sys.exit(main())
