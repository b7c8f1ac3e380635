"""The planner's word on where to look first: the longest size that should fit, and the peak a trial should have."""

from __future__ import annotations

from functools import cache
from typing import Any

from tools.search import find_boundary
from tools.trials import Point, Variant, overrides
from training.planning import cuda_layout
from training.planning.planner import Device, Planner
from training.recipe import Recipe, load

LEANEST = ("full", "full+sqrt", "full+offload")  # what `auto` comes down to where hardly anything fits


class Predictor:
    """Predictions for a sweep's trials; None where the planner has none. A search is right without them, but longer.

    file: the sweep's resolved recipe. facts: of tools.machine. vocab_size: the prepared data's.
    """

    def __init__(self, recipe: Recipe, file: str, axis: str, facts: dict[str, Any], vocab_size: int) -> None:
        self.recipe, self.file, self.axis, self.facts = recipe, file, axis, facts
        self.vocab = f"model.vocab_size={recipe.model.vocab_size or vocab_size}"
        self.problems: dict[str, str] = {}  # by mode: why there is no prediction

    def longest(self, variant: Variant, granularity: int, maximum: int) -> int | None:
        """The largest size that should fit."""
        if variant.mode == "auto":  # which also takes tiles of which the recipe says nothing
            tiles = tuple(f"tiles.{name}=auto" for name, tile in self.recipe.tiles.model_dump().items() if tile is None)
            known = [self._longest(Variant(variant.attention, m), granularity, maximum, tiles) for m in LEANEST]
            return max((size for size in known if size is not None), default=None)
        return self._longest(variant, granularity, maximum)

    def _longest(self, variant: Variant, granularity: int, maximum: int, words: tuple[str, ...] = ()) -> int | None:
        first = Point(variant, self.recipe.seq_length, self.recipe.micro_batch_size)
        try:
            if self.axis == "seq_length":
                return self._planner(variant, first.micro_batch_size, words).longest(granularity, maximum).longest
            fits = lambda size: not self._planner(variant, size, words).fits(self.recipe.seq_length)  # noqa: E731
            return find_boundary(fits, self.recipe.micro_batch_size, granularity, maximum).longest
        except Exception as error:  # whatever is wrong with a plan, measuring goes on without it
            self.problems[variant.mode] = f"{type(error).__name__}: {error}"
            return None

    def peak(self, point: Point) -> int | None:
        """Device bytes at the peak of a step."""
        if point.variant.mode in ("auto", *self.problems):  # a plan fills the budget, whatever the size
            return None
        try:
            planner = self._planner(point.variant, point.micro_batch_size)
            return int(planner.candidates(point.seq_length).max())
        except Exception as error:
            self.problems[point.variant.mode] = f"{type(error).__name__}: {error}"
            return None

    @cache  # noqa: B019 (as long-lived as the sweep)
    def _planner(self, variant: Variant, micro_batch_size: int, more: tuple[str, ...] = ()) -> Planner:
        facts, recipe = self.facts, self.recipe
        words = overrides(recipe, Point(variant, recipe.seq_length, micro_batch_size), facts["world_size"])
        kind = "cuda" if facts["device_memory_bytes"] else "cpu"
        budget_bytes = recipe.budget_bytes
        if kind == "cuda":  # what the driver keeps for itself cannot be had
            free_bytes = facts["device_memory_bytes"] - cuda_layout.CONTEXT_BYTES
            budget_bytes = min(budget_bytes or free_bytes, free_bytes)
        device = Device(kind, facts["device"], budget_bytes, recipe.host_budget_bytes)
        return Planner(load(self.file, [*words, self.vocab, *more]), variant.mode, device, facts["world_size"])
