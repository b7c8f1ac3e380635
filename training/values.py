"""The kinds of values a recipe holds besides numbers and words: sizes, modes, tiles, lists."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

ATTENTION = ("unfused", "sdpa", "flash_attn")
LARGEST = 2**31 - 1  # of the whole numbers of a recipe: products of a few of them are still a tensor's size
UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "KiB": 2**10, "KB": 10**3, "B": 1}


class Section(BaseModel):
    """Base of everything in a recipe: no conversions, no unknown keys, no changes."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Plan(Section):
    plan: str = Field(description="A plan file, as `recompute: auto` writes it into the run folder.")


def parse_size(text: object) -> int:
    """Bytes of a size such as `24GiB` or `1.5GB`; ValueError for a number without a unit."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", str(text).strip())
    if match and not match[2]:
        raise ValueError(f"has no unit; write {match[1]}GiB, {match[1]}GB or {match[1]}MiB")
    if not match or match[2] not in UNITS:
        raise ValueError(f"is not a size; write a number and one of {' '.join(UNITS)}, for example 24GiB")
    size_bytes = float(match[1]) * UNITS[match[2]]
    if not 1 <= size_bytes < 2**60:
        raise ValueError("must be at least 1 byte, and below 1073741824GiB")
    return int(size_bytes)


def size(nbytes: float | None) -> str:
    """For people: like 512 MiB, 12.3 MiB or 23.45 GiB; a dash for nothing."""
    if nbytes is None:
        return "-"
    for unit in ("GiB", "MiB", "KiB"):
        number = nbytes / UNITS[unit]
        if number >= 1:
            return f"{number:.2f} GiB" if unit == "GiB" else f"{number:.{0 if number >= 100 else 1}f} {unit}"
    return f"{nbytes:.0f} B"


def _size(value: object) -> object:
    if value is None:
        return None
    parse_size(value)
    return str(value).strip()


def _mode(value: str) -> str:
    if value != "auto":
        from model.modes import parse  # here, so that a recipe's schema stands without the model

        parse(value)
    return value


def _recompute(value: object) -> object:
    if isinstance(value, str):
        return _mode(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(mode, str) for mode in value):
        if "auto" in value:
            raise ValueError("auto decides for all layers; write recompute: auto, or name every layer's mode")
        return tuple(_mode(mode) for mode in value)
    if isinstance(value, Plan):
        return value
    if isinstance(value, Mapping) and set(value) == {"plan"} and isinstance(value["plan"], str):
        return Plan(plan=_path(value["plan"]))
    raise ValueError("must be the name of a mode, a list of one mode per layer, {plan: FILE}, or auto")


def _tile(value: object) -> object:
    if value is None or value == "auto" or (type(value) is int and 0 < value <= LARGEST):
        return value
    raise ValueError(f"must be a whole number above 0, auto, or null for no tiles; at most {LARGEST}")


def _attention(value: str) -> str:
    if value not in ATTENTION:
        raise ValueError(f"must be one of {', '.join(ATTENTION)}")
    return value


def _path(value: str) -> str:
    """A path that can be asked for: for others is_file() and mkdir() raise, each in its own way."""
    try:
        parts = os.fsencode(value).split(b"/")
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which no path does; write another") from None
    if not value.strip() or "\0" in value:
        raise ValueError(f"{'holds a NUL' if value.strip() else 'is empty'}; write a path")
    if max(map(len, parts)) > 255 or sum(map(len, parts)) + len(parts) > 1024:  # Path.mkdir recurses by parts
        raise ValueError("is too long for a path (1023 bytes, 255 from slash to slash); write a shorter one")
    return value


def _file_name(value: str) -> str:
    if value in (".", "..") or "/" in value or not value.isprintable() or len(value.encode()) > 200:
        raise ValueError("must name a folder: up to 200 bytes of text, without / and not . or ..")
    return value


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


# The text at the end is what documentation calls the type.
Size = Annotated[str, BeforeValidator(_size), "size such as 24GiB"]
Tile = Annotated[int | str | None, BeforeValidator(_tile), "whole number | auto | null"]
Positive = Annotated[int, Field(gt=0, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Width = Annotated[int, Field(gt=0, le=2**20)]
FileName = Annotated[str, AfterValidator(_file_name)]
PathText = Annotated[str, AfterValidator(_path)]
Paths = Annotated[tuple[PathText, ...], BeforeValidator(_as_tuple)]
ModeNames = Annotated[tuple[Annotated[str, AfterValidator(_mode)], ...], BeforeValidator(_as_tuple), "list of modes"]
Attentions = Annotated[
    tuple[Annotated[str, AfterValidator(_attention)], ...],
    BeforeValidator(_as_tuple),
    f"list of {' | '.join(ATTENTION)}",
]
Recompute = Annotated[
    str | tuple[str, ...] | Plan, BeforeValidator(_recompute), "mode | list of modes | {plan: FILE} | auto"
]
