"""Records as they are read back: in the shape they were written in, or not at all: a disk or a hand may spoil them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Fields = Mapping[str, tuple[type, ...]]
NUMBER = (int, float)
NULL = type(None)


def has_shape(value: Any, fields: Fields) -> bool:
    """Whether `value` is an object with all these fields, each of one of its types: exactly, so true is no number."""
    return isinstance(value, dict) and all(n in value and type(value[n]) in kinds for n, kinds in fields.items())


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is none, whatever else may be there."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path, is_record: Callable[[Any], bool]) -> tuple[list[dict[str, Any]], list[int]]:
    """The records of a file of JSON lines, and the numbers of the lines that are none. Raises OSError.

    A last line that a kill left unfinished is in neither.
    """
    if not path.exists():
        return [], []
    found, bad = [], []
    *lines, unfinished = path.read_bytes().split(b"\n")
    for number, line in enumerate([*lines, unfinished], 1):
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError):
            record = None
        if is_record(record):
            found.append(record)
        elif line.strip() and number <= len(lines):
            bad.append(number)
    return found, bad
