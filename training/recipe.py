"""Recipe: one strict YAML file -> one frozen object, or an error that says what to write instead."""

from __future__ import annotations

import difflib
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
from training.schema import ROOT, Recipe, RecipeError, parse_size, show

__all__ = ["Recipe", "RecipeError", "documentation", "load", "names", "parse_size"]


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
    if not raw.get("name"):
        raw["name"] = file.stem
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        problems = [_explain(problem, raw, overridden, file) for problem in error.errors()]
        raise RecipeError("\n".join(problems)) from None
    _check_files(recipe)
    return recipe


def documentation() -> list[tuple[str, str, str, str]]:
    """(dotted key, type, default, text) of every setting, in the order of declaration."""
    return [
        (key, _type_name(field.annotation, field), _default(field), field.description or "")
        for key, field in _fields(Recipe)
        if _section(field) is None
    ]


def _find(path: str | Path) -> Path:
    text = str(path)
    if "/" in text or text.endswith((".yaml", ".yml")):
        file = Path(path)
    else:
        file = ROOT / "recipes" / f"{text}.yaml"
    if file.is_file():
        return file
    known = names()
    raise RecipeError(
        f"recipe {text}: no such file{_nearest(text, known)}; shipped recipes: {' '.join(known)}"
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        raw = strict_yaml.read(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{_short(file)}: not valid YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise RecipeError(f"{_short(file)}: cannot be read: {error.strerror}") from None
    if not isinstance(raw, dict):
        raise RecipeError(f"{_short(file)}: must be a mapping of settings, such as `seq_length: 512`")
    return raw


def _apply(raw: dict[str, Any], override: str) -> str:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise RecipeError(f"override {override!r}: write dotted.key=value, for example model.num_layers=4")
    try:
        value = strict_yaml.read(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: not valid YAML: {' '.join(str(error).split())}") from None
    *sections, last = key.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        if not isinstance(raw, dict):
            raise RecipeError(
                f"override {override!r}: {section} is {show(raw)} in the recipe and has no settings"
            )
    raw[last] = value
    return key


def _check_files(recipe: Recipe) -> None:
    config = recipe.engine.deepspeed_config
    path = recipe.deepspeed_config_path()
    if path is not None and not path.is_file():
        known = sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json"))
        raise recipe.error(
            "engine.deepspeed_config",
            f"no such file{_nearest(str(config), known)}; ds_configs/ has {' '.join(known)}",
        )
    plan = getattr(recipe.recompute, "plan", None)
    if plan is not None and not Path(plan).is_file():
        raise recipe.error("recompute", "no such plan file; write the path of an existing one, or a mode")


def _explain(problem: Any, raw: dict[str, Any], overridden: dict[str, str], file: Path) -> str:
    """One pydantic error as `where: key = value: what is wrong and what to write`."""
    kind, context = problem["type"], problem.get("ctx", {})
    key = context["key"] if kind == "contradiction" else ".".join(str(part) for part in problem["loc"])
    value: Any = raw
    given = True
    for part in key.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, (list, tuple)) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            given = False
            break
    by = [text for name, text in overridden.items() if key == name or key.startswith(f"{name}.")]
    where = f"override {by[-1]!r}" if by else _short(file)
    if not given:
        value = dict(_defaults()).get(key)
    shown = "" if kind == "missing" else f" = {show(value)}"
    return f"{where}: {key}{shown}: {_advice(kind, key, value, context, problem['msg'])}"


def _advice(kind: str, key: str, value: Any, context: dict[str, Any], message: str) -> str:
    field = dict(_fields(Recipe)).get(key)
    if kind == "extra_forbidden":
        return "unknown key" + _nearest_key(key)
    if kind == "missing":
        return f"is missing; {field.description if field else 'it has no default'}"
    if kind == "contradiction":
        return context["problem"]
    if kind == "value_error":
        return str(context["error"])
    if kind in ("bool_type", "bool_parsing"):
        return "must be true or false (on, off, yes, no are plain words in a recipe)"
    if kind == "int_type":
        hint = " without quotes" if isinstance(value, str) and value.strip().isdigit() else ""
        return f"must be a whole number{hint}"
    if kind == "float_type":
        return "must be a number" + (" without quotes" if _is_number(value) else "")
    if kind == "string_type":
        return f"must be text{_nothing(value)}"
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
        return f"must be one of {' '.join(choices)}{_nearest(str(value), choices)}"
    if kind in ("tuple_type", "too_short"):
        return "must be a list with at least one entry, such as [a, b]"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        section = "" if field is None else _section(field)
        return (
            f"must be a section with settings such as {', '.join(section.model_fields) if section else '...'}"
        )
    bounds = {
        "greater_than": "must be above {gt}",
        "greater_than_equal": "must be {ge} or more",
        "less_than": "must be below {lt}",
        "less_than_equal": "must be {le} or less",
        "finite_number": "must be a finite number",
    }
    return bounds[kind].format(**context) if kind in bounds else message


def _nothing(value: object) -> str:
    return "; put it in quotes" if value is not None else ""


def _is_number(value: object) -> bool:
    try:
        float(str(value))
    except ValueError:
        return False
    return isinstance(value, str)


def _nearest(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]}?" if match else ""


def _nearest_key(key: str) -> str:
    """The known key most like `key`: in its own section first, then by its last word anywhere."""
    keys = [name for name, _ in _fields(Recipe)]
    section, _, last = key.rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in keys if name.rpartition(".")[0] == section}
    anywhere = {name.rpartition(".")[2]: name for name in reversed(keys)}
    for known, cutoff in ((beside, 0.75), (anywhere, 0.75), (beside, 0.5)):
        match = difflib.get_close_matches(last, list(known), n=1, cutoff=cutoff)
        if match:
            return f"; did you mean {known[match[0]]}?"
    return f"; known here: {' '.join(beside)}" if beside else ""


def _fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field
        inner = _section(field)
        if inner is not None:
            yield from _fields(inner, f"{prefix}{name}.")


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _defaults() -> Iterator[tuple[str, Any]]:
    return ((key, None if field.is_required() else field.default) for key, field in _fields(Recipe))


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else show(field.default)


def _type_name(annotation: Any, field: FieldInfo | None = None) -> str:
    for label in (*getattr(field, "metadata", ()), *getattr(annotation, "__metadata__", ())):
        if isinstance(label, str):
            return label
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is typing.Literal:
        return " | ".join(arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    plain = {int: "whole number", float: "number", str: "text", bool: "true | false", type(None): "null"}
    return plain[annotation]


def _short(file: Path) -> str:
    """Path from the current folder when it lies below it."""
    try:
        return str(file.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(file)


def _markdown() -> str:
    lines = [
        "# Recipes",
        "",
        "Every setting of a recipe. This page is written by `python -m training.recipe > docs/recipes.md` from the",
        "texts in `training/schema.py`.",
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
