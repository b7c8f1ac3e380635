"""Recipe: one strict YAML file -> one frozen object, or an error that says what to write instead."""

from __future__ import annotations

import difflib
import os
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from training import strict_yaml
from training.schema import ROOT, Recipe, RecipeError
from training.sources import no_file
from training.strict_yaml import show
from training.values import Plan, parse_size

__all__ = ["Recipe", "RecipeError", "check_runs_on", "documentation", "load", "names", "parse_size"]

_TOLD = 20  # problems of one recipe that are told at once


def names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))


def load(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read the recipe at `path` (or the shipped one of that name), with `dotted.key=value` overrides on top.

    A value is read as YAML; of two overrides of one key the later counts. Raises RecipeError.
    """
    file = _find(path)
    raw = _read(file)
    overridden: dict[str, str] = {}
    for override in overrides:
        overridden[_apply(raw, override)] = override
    if raw.get("name") in ("", None):
        raw["name"] = file.stem
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        raise RecipeError("\n".join(_explain(error, raw, overridden, file))) from None
    _check_files(recipe)
    return recipe


def check_runs_on(recipe: Recipe, device: str) -> None:
    """Before anything is prepared: RecipeError for what has no kernel on a `device`, which is cuda or cpu."""
    model = recipe.model
    if device == "cpu" and model.attention == "sdpa" and model.attention_dropout:
        problem = "has no fused kernel on a CPU; write 0, or model.attention: unfused"
        raise recipe.error("model.attention_dropout", problem)
    if device == "cpu" and model.attention == "flash_attn":
        raise recipe.error("model.attention", "needs a GPU; write sdpa")


def documentation() -> list[tuple[str, str, str, str]]:
    """(dotted key, type, default, text) of every setting, in the order of declaration."""
    return [
        (key, _type_name(field), _default(field), field.description or "")
        for key, field in _FIELDS.items()
        if _section(field) is None
    ]


def _find(path: str | Path) -> Path:
    text = str(path)
    is_path = "/" in text or text.endswith((".yaml", ".yml"))
    file = Path(path) if is_path else ROOT / "recipes" / f"{text}.yaml"
    if os.path.isfile(file):
        return file
    known = names()
    problem = f"there is no {_short(file)}{_did_you_mean(file.stem, known)}"
    if not text.strip():
        raise RecipeError(f"no recipe is named; write a path or one of the shipped recipes: {' '.join(known)}")
    if is_path and os.path.exists(file):
        problem = f"{no_file(file)}; write the path of a .yaml file"
    raise RecipeError(f"recipe {_cut(text)}: {problem}; shipped recipes: {' '.join(known)}")


def _read(file: Path) -> dict[str, Any]:
    try:
        raw = strict_yaml.read(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise RecipeError(f"{_short(file)}: {_yaml_problem(error)}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{_short(file)}: not UTF-8 text at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{_short(file)}: cannot be read: {error.strerror}") from None
    if not isinstance(raw, dict):
        raise RecipeError(f"{_short(file)}: must be a mapping of settings, such as `seq_length: 512`")
    return raw


def _apply(raw: dict[str, Any], override: str) -> str:
    key, equals, text = override.partition("=")
    key = key.strip()
    shown = f"override {_cut(repr(override))}"
    if not equals or not all(key.split(".")) or key.count(".") > 9:
        raise RecipeError(f"{shown}: write dotted.key=value, for example model.num_layers=4")
    try:
        value = strict_yaml.read(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{shown}: {_yaml_problem(error)}") from None
    *sections, last = key.split(".")
    for depth, section in enumerate(sections, start=1):
        raw = raw.setdefault(section, {})
        if not isinstance(raw, dict):
            at = ".".join(sections[:depth])
            raise RecipeError(f"{shown}: {at} is {show(raw)} here, which has no settings")
    raw[last] = value
    return key


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{place}not a valid recipe: {problem or ' '.join(str(error).split())}"


def _check_files(recipe: Recipe) -> None:
    config = recipe.deepspeed_config_path
    if config is not None and not os.path.isfile(config):
        known = sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json"))
        hint = _did_you_mean(config.stem, known)
        problem = no_file(config) if os.path.exists(config) else f"there is no {_short(config)}{hint}"
        problem += f"; ds_configs/ has {' '.join(known)}"
        raise recipe.error("engine.deepspeed_config", problem)
    if isinstance(recipe.recompute, Plan) and not os.path.isfile(recipe.recompute.plan):
        problem = no_file(recipe.recompute.plan)
        raise recipe.error("recompute.plan", f"{problem}; name an existing plan, or write a mode")


def _explain(error: ValidationError, raw: dict[str, Any], overridden: dict[str, str], file: Path) -> Iterator[str]:
    """pydantic's errors, each as `where: key = value: what is wrong and what to write`."""
    explained: list[str] = []
    for problem in error.errors():  # a list's entries come before the list that they make too short
        kind, context = problem["type"], problem.get("ctx", {})
        parts = context["key"].split(".") if kind == "contradiction" else [str(part) for part in problem["loc"]]
        key = ".".join(parts)
        if len(explained) == _TOLD:
            yield f"{_short(file)}: there are more"
            return
        if any(inner.startswith(f"{key}.") for inner in explained):
            continue
        explained.append(key)
        value = _look_up(raw, parts)
        dotted = kind == "extra_forbidden" and "." in parts[-1]  # only in a file, or inside an override's {}
        place = ".".join(parts[:-1]) if dotted else key
        by = [text for name, text in overridden.items() if f"{place}.".startswith(f"{name}.")]
        if kind == "extra_forbidden" and not dotted:
            by += [text for name, text in overridden.items() if name.startswith(f"{key}.")]
        where = f"override {_cut(repr(by[-1]))}" if by else _short(file)
        shown = "" if kind == "missing" else f" = {show(value)}"
        advice = _nested(key, value) if dotted and key in _FIELDS else _advice(kind, key, value, context)
        yield f"{where}: {_cut(key)}{shown}: {advice or problem['msg']}"


def _look_up(raw: Any, parts: list[str]) -> Any:
    """The value at a key, given as its parts: as written, or else its default."""
    value, key = raw, ".".join(parts)
    for part in parts:
        if isinstance(value, list) and part.isdigit():
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            return _FIELDS[key].default if key in _FIELDS else None
    return value


def _nested(key: str, value: Any) -> str:
    for part in reversed(key.split(".")):
        value = {part: value}
    return f"a dot in a key is for the command line; write it nested: {show(value)[1:-1]}"


def _advice(kind: str, key: str, value: Any, context: dict[str, Any]) -> str:
    if kind == "extra_forbidden":
        return "unknown key" + _nearest_key(key)
    if kind == "missing":
        return f"is missing; write it: {_FIELDS[key].description}"
    if kind == "contradiction":
        return context["problem"]
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        choices = _type_name(_FIELDS[key])
        return f"must be one of {choices}{_did_you_mean(str(value), choices.split(' | '))}"
    if kind == "tuple_type" and isinstance(value, str):
        entries = [entry.strip() for entry in value.split(",") if entry.strip()]
        return f"must be a list; write {show(entries or ['a', 'b'])}"
    if kind == "model_type":
        section = _section(_FIELDS[key])
        return f"must be a section of settings: {' '.join(section.model_fields) if section else ''}"
    advice = _ADVICE.get(kind, "").format(**context)
    if kind in ("int_type", "float_type") and isinstance(value, str):
        advice += " without quotes" if re.fullmatch(r"[-+.0-9eE]+", value) else ""
    if kind != "bool_type" and value in ("none", "None"):
        advice += "; `nothing` is written null"
    return advice


# What a recipe's author needs to hear for each of pydantic's error types.
_ADVICE = {
    "bool_type": "must be true or false (on, off, yes and no are plain words in a recipe)",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text; put it in quotes if it looks like something else",
    "tuple_type": "must be a list, such as [a, b]",
    "too_short": "must have at least one entry",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be {le} or less",
}


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]}?" if match else ""


def _nearest_key(key: str) -> str:
    """The known key most like `key`: in its own section first, then by its last word anywhere."""
    section, _, last = key.rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in _FIELDS if name.rpartition(".")[0] == section}
    anywhere = {name.rpartition(".")[2]: name for name in reversed(_FIELDS)}
    for known, cutoff in ((beside, 0.75), (anywhere, 0.75), (beside, 0.5)):
        match = difflib.get_close_matches(last, list(known), n=1, cutoff=cutoff)
        if match:
            return f"; did you mean {known[match[0]]}?"
    return f"; known here: {' '.join(beside or Recipe.model_fields)}"


def _fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field
        inner = _section(field)
        if inner is not None:
            yield from _fields(inner, f"{prefix}{name}.")


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


_FIELDS = dict(_fields(Recipe))


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else show(field.default)


def _type_name(field: FieldInfo) -> str:
    labels = [label for label in field.metadata if isinstance(label, str)]
    return labels[0] if labels else _annotation_name(field.annotation)


def _annotation_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        labels = [label for label in arguments[1:] if isinstance(label, str)]
        return labels[0] if labels else _annotation_name(arguments[0])
    if origin is typing.Literal:
        return " | ".join(arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_annotation_name(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {_annotation_name(arguments[0])}"
    plain = {int: "whole number", float: "number", str: "text", bool: "true | false", type(None): "null"}
    return plain[annotation]


def _short(file: Path) -> str:
    """Path from the current folder when it lies below it."""
    path = Path(os.path.abspath(file))
    return _cut(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else file))


def _cut(text: str) -> str:
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-50:]}"


def _markdown() -> str:
    lines = [
        "# Recipes",
        "",
        "Every setting of a recipe, from the texts in `training/schema.py`. This page is written by",
        "`python -m training.recipe > docs/recipes.md`.",
        "",
        "| setting | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for key, kind, default, text in documentation():
        cells = (f"`{key}`", kind, default if default == "required" else f"`{default}`", text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(_markdown())
