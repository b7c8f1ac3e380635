"""The planner's word on where to look first: the longest size that should fit, and the peak a trial should have."""

from __future__ import annotations

from typing import Any

from tools.trials import Point, Variant
from training.recipe import Recipe


class Predictor:
    """Predictions for a sweep's variants; None where there are none. A search is right without them, and longer."""

    def __init__(self, recipe: Recipe, axis: str, facts: dict[str, Any]) -> None:
        self.recipe, self.axis, self.facts = recipe, axis, facts

    def longest(self, variant: Variant) -> int | None:
        """The largest size that should fit."""
        return None

    def peak(self, point: Point) -> int | None:
        """Device bytes at the peak of a step."""
        return None
