"""Numbers and names as people read them: the same in the terminal, in reports and in pictures."""

from __future__ import annotations

from tools.trials import Variant
from training.values import size

__all__ = ["GIB", "MIB", "count", "label", "size", "times", "within"]

GIB, MIB = 2**30, 2**20


def count(number: float | None) -> str:
    """Like 1,088; a dash for nothing."""
    return "-" if number is None else f"{number:,.0f}"


def times(ratio: float | None) -> str:
    """Like x1.28."""
    return "-" if ratio is None else f"x{ratio:.2f}"


def within(budget_bytes: int | None) -> str:
    """Like within 24.00 GiB."""
    return f"within {size(budget_bytes)}" if budget_bytes else "within all memory"


def label(variant: Variant, attentions: int) -> str:
    """The mode, with its attention in front where several are compared."""
    return f"{variant.attention}/{variant.mode}" if attentions > 1 else variant.mode
