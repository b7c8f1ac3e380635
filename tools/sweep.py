"""Measure the longest context that fits under a budget, for every memory mode, and what each costs: `make sweep`.

Every trial is train.py itself in a fresh process (tools/trials.py). A planner's prediction is tried first, so that
two trials mostly settle a mode: what fits and what does not. Then speeds are measured, mode after mode at the same
lengths. The folder's trials.jsonl is the state: the same command goes on after Ctrl-C, a kill or a reboot.
"""

from __future__ import annotations

import argparse
import fcntl
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import machine, processes, publish, summary
from tools.predict import Predictor
from tools.search import Boundary, find_boundary
from tools.sweep_display import Display
from tools.timing import Timing, affordable, by_importance
from tools.trials import AXES, TOO_MUCH, Point, Question, Trials, Variant
from tools.words import count, label, size
from training import data, run
from training.recipe import Recipe, RecipeError, load
from training.schema import ROOT

LARGEST_BATCH = 1 << 16


class NoAnswerError(Exception):
    """A trial ended in a way that says nothing about memory; the mode's search ends with it."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(record["error"])
        self.record = record


@dataclass
class Found:
    """What the sweep knows of a variant."""

    predicted: int | None
    boundary: Boundary | None = None
    problem: dict[str, Any] | None = None  # the record that stopped it
    tried: dict[int, dict[str, Any]] = field(default_factory=dict)  # sizes of the search

    @property
    def longest(self) -> int:
        return self.boundary.longest if self.boundary and not self.problem else 0


class Sweep:
    """The search for every variant, then the timing of all; `found` and the trials on record are the result."""

    def __init__(
        self, recipe: Recipe, trials: Trials, predictor: Predictor, display: Display, axis: str = "seq_length"
    ) -> None:
        self.recipe, self.trials, self.predictor, self.display, self.axis = recipe, trials, predictor, display, axis
        lengths = axis == "seq_length"
        self.granularity = recipe.sweep.granularity if lengths else 1
        self.maximum = recipe.sweep.seq_max if lengths else LARGEST_BATCH
        self.found = {v: Found(predictor.longest(v, self.granularity, self.maximum)) for v in variants(recipe)}
        self.left_out: list[Timing] = []
        self._start_s = time.monotonic()

    def run(self) -> None:
        for variant in self.found:
            self.search(variant)
        self.time_all()

    def point(self, variant: Variant, size: int) -> Point:
        other = {"seq_length": self.recipe.seq_length, "micro_batch_size": self.recipe.micro_batch_size}
        return Point(variant, **{**other, self.axis: size})

    def ask(self, question: Question) -> dict[str, Any]:
        """The answer, shown as it comes; NoAnswerError when it is none."""
        if (record := self.trials.known(question)) is None:
            self.display.begin(question, self.left_s())
            record = self.trials.run(question)
            self.display.end(question, record)
        else:
            self.display.seen(question, record)
        if record["status"] not in ("completed", *TOO_MUCH):
            raise NoAnswerError(record)
        return record

    # -- searching -------------------------------------------------------------------------------------------

    def search(self, variant: Variant) -> None:
        """The variant's boundary, from what is on record and as many new trials as it takes."""
        found = self.found[variant]
        guess = found.boundary.longest if found.boundary else found.predicted

        def fits(size: int) -> bool:
            point = self.point(variant, size)
            expected = size == found.predicted  # likely the longest, whose speed is wanted: settle both in one trial
            record = self.ask(self._timing(point, 0) if expected else Question(point, "fit", self.recipe.sweep.steps))
            found.tried[size] = record
            return record["status"] == "completed"

        try:
            start = guess if guess is not None else getattr(self.recipe, self.axis)
            found.boundary = find_boundary(fits, start, self.granularity, self.maximum)
            self.display.found(variant, self._answer(found))
        except NoAnswerError as stop:
            found.problem = stop.record
            self.display.found(variant, f"stopped at {count(stop.record[self.axis])}: {stop}")

    def _answer(self, found: Found) -> str:
        assert found.boundary
        longest, beyond = found.boundary.longest, found.boundary.next_tried
        if not longest:
            return f"nothing fits: {count(beyond)} is too much already"
        if beyond is None:
            return f"{count(longest)} fits, and nothing longer is allowed"
        return f"{count(longest)} fits, {count(beyond)} does not ({found.tried[beyond]['status']})"

    # -- timing ----------------------------------------------------------------------------------------------

    def time_all(self) -> None:
        """Time what the time allows, from the longest size down. A longest size that runs out of memory after more
        steps was none: its search goes on."""
        done: set[Timing] = set()
        while True:
            longest = {v: f.longest for v, f in self.found.items()}
            wanted = by_importance(longest, self.granularity)
            must = {Timing(n, v) for v, n in longest.items() if n}
            chosen = affordable(wanted, must | done, self._cost_s, self._time_left_s()) - done
            if not chosen:
                break
            now = max(timing.size for timing in chosen)
            group = [t for t in chosen if t.size == now]
            group.sort(key=lambda t: list(self.found).index(t.variant))
            for round in range(self.recipe.sweep.timing_rounds):
                for timing in group:
                    self._time(timing, round, memory=now == min(must).size and round == 0)
            done.update(group)
        self.left_out = [t for t in wanted if t not in done]

    def _timing(self, point: Point, round: int) -> Question:
        follow = not machine.has_gpu()  # on a CPU every operation is followed anyway
        return Question(point, "timing", self.recipe.sweep.timing_steps, round, memory=follow)

    def _time(self, timing: Timing, round: int, memory: bool) -> None:
        found = self.found[timing.variant]
        if found.longest < timing.size:
            return
        point = self.point(timing.variant, timing.size)
        try:
            record = self.ask(self._timing(point, round))
            if memory and machine.has_gpu() and record["status"] == "completed":
                self.ask(Question(point, "memory", self.recipe.sweep.steps, memory=True))
        except NoAnswerError as stop:
            found.problem = stop.record
            return
        if record["status"] in TOO_MUCH:
            self.display.say(f"{self.display.names[timing.variant]}: {count(timing.size)} does not last; searching on")
            self.search(timing.variant)

    # -- time ------------------------------------------------------------------------------------------------

    def _time_left_s(self) -> float:
        minutes = self.recipe.sweep.minutes
        return float("inf") if minutes is None else minutes * 60 - self.seconds()

    def _cost_s(self, timing: Timing) -> float:
        """Seconds a timing will take: nothing when it is on record, else scaled from the nearest trial of its kind."""
        steps, rounds = self.recipe.sweep.timing_steps, self.recipe.sweep.timing_rounds
        if self.trials.known(self._timing(self.point(timing.variant, timing.size), rounds - 1)):
            return 0.0
        like = [r for r in self.trials.records if r["mode"] == timing.variant.mode and r["status"] == "completed"]
        like = [r for r in like if r["attention"] == timing.variant.attention] or like
        if not like:
            return 0.0
        near = min(like, key=lambda r: abs(r[self.axis] - timing.size))
        step_s = near["step_time_s"] or 0.0
        rest_s = max(0.0, near["wall_s"] - step_s * near["steps"])
        return rounds * (rest_s + steps * step_s * timing.size / near[self.axis])

    def seconds(self) -> float:
        """Since this sweep was started (the last time, if it was interrupted)."""
        return time.monotonic() - self._start_s

    def left_s(self) -> float | None:
        """A guess at the seconds this sweep will still take; None while nothing is known."""
        ran = [r["wall_s"] for r in self.trials.records[-20:]]
        if not ran:
            return None
        mean_s = sum(ran) / len(ran)
        open_searches = sum(not f.boundary and not f.problem for f in self.found.values())
        longest = {v: f.longest for v, f in self.found.items()}
        timing_s = sum(map(self._cost_s, by_importance(longest, self.granularity)))
        unknown_s = open_searches * mean_s * 5  # two of the search, some of the timing
        return min(2 * open_searches * mean_s + timing_s + unknown_s, max(self._time_left_s(), mean_s))


def variants(recipe: Recipe) -> list[Variant]:
    """Every mode under every attention that the recipe's sweep names."""
    attentions = recipe.sweep.attention or (recipe.model.attention,)
    return [Variant(a, m) for a in dict.fromkeys(attentions) for m in dict.fromkeys(recipe.sweep.modes)]


def prepared(given: argparse.Namespace) -> Recipe:
    """The sweep's recipe: the one named, with everything the command line changes. Raises RecipeError."""
    words = [*given.overrides]
    for key, value in (
        ("budget", given.budget),
        ("host_budget", given.host_budget),
        ("sweep.modes", f"[{', '.join(given.modes.split())}]" if given.modes else None),
        ("sweep.seq_max", given.seq_max),
        ("sweep.granularity", given.granularity),
        ("sweep.steps", given.steps),
    ):
        words += [f"{key}={value}"] if value is not None else []
    recipe = load(given.recipe, words)
    recipe.accumulation_steps(given.processes or machine.ranks())
    if given.gpu:
        if given.budget:
            raise RecipeError("--gpu names a budget: leave out --budget, or --gpu")
        recipe = load(given.recipe, [*words, f"budget={machine.memory_of(given.gpu)}B"])
    elif recipe.budget is None and not machine.has_gpu():
        raise RecipeError(
            "a sweep on a CPU needs a budget: write BUDGET=512MiB, --budget 512MiB, or budget: in the recipe"
        )
    if recipe.sweep.seq_max < recipe.sweep.granularity:
        raise recipe.error("sweep.seq_max", f"is below sweep.granularity = {recipe.sweep.granularity}; write more")
    return recipe


def take(folder: Path, recipe: Recipe) -> Any:
    """Claim the folder for this sweep: one process at a time, and no trial of a killed one still running."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecipeError(
            f"another sweep is running in {folder}; wait for it, or choose another folder with --out"
        ) from None
    processes.end_leftovers(folder)
    run.write_whole(folder / "recipe.yaml", recipe.to_yaml())
    return lock


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sweep.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a name in recipes/, or the path of a YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings of the recipe to change")
    parser.add_argument("--gpu", metavar="NAME", help="take this GPU's memory as the budget")
    parser.add_argument("--budget", metavar="SIZE", help="device memory a run may use, such as 24GiB")
    parser.add_argument("--host-budget", metavar="SIZE", help="host memory that offload may use")
    parser.add_argument("--modes", metavar="'A B'", help="modes to compare; default: the recipe's")
    parser.add_argument("--seq-max", metavar="N", type=int, help="longest length tried, in tokens")
    parser.add_argument("--granularity", metavar="N", type=int, help="lengths tried are multiples of it")
    parser.add_argument("--steps", metavar="N", type=int, help="optimizer steps a length must survive")
    parser.add_argument("--axis", choices=AXES, default=AXES[0], help="what is searched; the other stays as it is")
    parser.add_argument("--processes", metavar="N", type=int, help="ranks; default one per GPU, or one on CPU")
    parser.add_argument("--out", metavar="DIR", type=Path, help="the sweep's folder; default sweeps/<recipe name>")
    parser.add_argument("--publish", action="store_true", help=publish.HELP)
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        recipe = prepared(given)
        default = recipe.name if given.axis == AXES[0] else f"{recipe.name}-{given.axis}"
        folder = given.out or ROOT / "sweeps" / default
        lock = take(folder, recipe)
        vocab_size = data.Dataset(data.prepare(recipe.data, show=True)).vocab_size
        facts = machine.facts(given.processes)
    except (RecipeError, data.DataError, OSError) as error:
        print(error, file=sys.stderr)
        return run.USAGE
    predictor = Predictor(recipe, str(folder / "recipe.yaml"), given.axis, facts, vocab_size)
    trials = Trials(folder, recipe, facts, predictor.peak)
    run.write_json(folder / "environment.json", run.environment() | facts | {"code": trials.code})
    names = {v: label(v, len(recipe.sweep.attention)) for v in variants(recipe)}
    title = f"{recipe.name}: the largest {given.axis} within {size(recipe.budget_bytes)} of {facts['device']}"
    with Display(title, names, given.axis) as display, lock:
        sweep = Sweep(recipe, trials, predictor, display, given.axis)
        try:
            sweep.run()
        except KeyboardInterrupt:
            display.say(f"stopped; the same command goes on from what is in {trials.file}")
            return run.INTERRUPTED
    summary.write(folder, summary.of(sweep))
    return finish(folder, given.publish)


def finish(folder: Path, publishing: bool) -> int:
    from tools import report  # imports matplotlib and TensorBoard

    report.write(folder)
    report.show(folder)
    if publishing:
        print(f"published in {publish.publish(folder)}")
    return summary.exit_code(summary.read(folder))


if __name__ == "__main__":
    sys.exit(main())
