"""A sweep's work: every variant's boundary searched, then speeds measured at sizes that all share.

The planner's prediction is tried first, so that two trials mostly settle a variant: what fits, which is timed at once,
and what does not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tools import machine
from tools.predict import Predictor
from tools.search import Boundary, find_boundary
from tools.sweep_display import Display
from tools.timing import Timing, affordable, by_importance
from tools.trials import TOO_MUCH, Point, Question, Trials, Variant
from tools.words import count
from training.recipe import Recipe

LARGEST_BATCH = 1 << 16
TRIALS_OF_SEARCH, TRIALS_OF_TIMING = 2, 3  # what a variant takes as a rule, before anything is known of it
REPORT_S = 5.0  # table, pictures and TensorBoard at the end


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
        return self.boundary.longest if self.boundary else 0


class Sweep:
    """The search for every variant, then the timing of all; `found` and the trials on record are the result."""

    def __init__(
        self, recipe: Recipe, variants: Sequence[Variant], trials: Trials, predictor: Predictor, display: Display
    ) -> None:
        self.recipe, self.trials, self.predictor, self.display = recipe, trials, predictor, display
        self.axis = axis = predictor.axis
        lengths = axis == "seq_length"
        self.granularity = recipe.sweep.granularity if lengths else 1
        self.maximum = recipe.sweep.seq_max if lengths else LARGEST_BATCH
        self.found = {v: Found(predictor.longest(v, self.granularity, self.maximum)) for v in variants}
        self.left_out: list[Timing] = []
        self._start_s = time.monotonic()

    def run(self) -> None:
        for variant in self.found:
            self.search(variant)
        self.time_all()

    def settle(self, variant: Variant) -> Found:
        """The search for one variant, its answer confirmed over as many steps as a timing has."""
        self.search(variant)
        found = self.found[variant]
        while found.longest and not found.problem:
            before = found.longest
            self._time(Timing(before, variant), 0, memory=False)
            if found.longest == before:
                break
        return found

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
            self.display.found(variant, "found", self._answer(found))
        except NoAnswerError as stop:
            self._stop(variant, stop)

    def _stop(self, variant: Variant, stop: NoAnswerError) -> None:
        record = self.found[variant].problem = stop.record
        self.display.found(
            variant, record["status"], f"stopped at {count(record[self.axis])}, {record['status']}: {stop}"
        )

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
            longest = self._longest()
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

    def _longest(self) -> dict[Variant, int]:
        return {v: 0 if f.problem else f.longest for v, f in self.found.items()}

    def _timing(self, point: Point, round: int) -> Question:
        follow = not machine.has_gpu()  # on a CPU every operation is followed anyway
        return Question(point, "timing", self.recipe.sweep.timing_steps, round, memory=follow)

    def _followed(self, point: Point) -> Question:
        return Question(point, "memory", self.recipe.sweep.steps, memory=True)

    def _time(self, timing: Timing, round: int, memory: bool) -> None:
        found = self.found[timing.variant]
        if found.longest < timing.size:
            return
        point = self.point(timing.variant, timing.size)
        try:
            record = self.ask(self._timing(point, round))
            if memory and machine.has_gpu() and record["status"] == "completed":
                self.ask(self._followed(point))
        except NoAnswerError as stop:
            self._stop(timing.variant, stop)
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
        if not self.trials.records:
            return None
        longest = self._longest()
        usual_s = {v: self._usual_s(v) for v, f in self.found.items() if not f.boundary and not f.problem}
        search_s = sum(s * max(1, TRIALS_OF_SEARCH - len(self.found[v].tried)) for v, s in usual_s.items())
        must = {Timing(n, v) for v, n in longest.items() if n}
        for_timing_s = self._time_left_s() - search_s  # what must be timed, and all of the search, take what they take
        chosen = affordable(by_importance(longest, self.granularity), must, self._cost_s, for_timing_s)
        timing_s = sum(map(self._cost_s, chosen))
        later_s = min(TRIALS_OF_TIMING * sum(usual_s.values()), max(0.0, for_timing_s - timing_s))
        asked = [self._followed(self.point(t.variant, min(must).size)) for t in must if machine.has_gpu()]
        memory_s = sum(self._usual_s(q.point.variant) for q in asked if not self.trials.known(q))
        return search_s + timing_s + later_s + memory_s + REPORT_S

    def _usual_s(self, variant: Variant) -> float:
        """Seconds of a mean trial of this mode, else of any: auto, which times its choices, takes longer than none."""
        of_mode = [r["wall_s"] for r in self.trials.records if r["mode"] == variant.mode]
        ran = of_mode or [r["wall_s"] for r in self.trials.records]
        return sum(ran) / len(ran)
