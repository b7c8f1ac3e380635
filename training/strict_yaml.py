"""YAML without its traps: no duplicate keys, 1e-4 is a number, and on/off/yes/no are plain words."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

# YAML 1.1 reads `1e-4` as text, `no` as false, `010` as 8, `1:30` as 90 and `2024-01-01` as a date.
# Here a scalar is a number, true/false, null, or text; nothing else.
_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
}


def _use_scalars(cls: Any) -> None:
    cls.yaml_implicit_resolvers = {}
    for name, (pattern, first) in _SCALARS.items():
        cls.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"^(?:{pattern})$"), list(first))


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if tag := getattr(event, "tag", None):  # `!!bool maybe` is a KeyError inside yaml, and others are like it
            problem = f"a tag ({tag.replace('tag:yaml.org,2002:', '!!')}) has no place here; write the value alone"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            problem = None
            if not isinstance(key, yaml.ScalarNode):
                problem = "a key must be a word"
            elif key.value in lines:
                problem = f"key {key.value!r} is there twice, first on line {lines[key.value]}; keep one"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
            mapping[key.value] = self.construct_object(value, deep=deep)
        return mapping


class _Dumper(yaml.SafeDumper):
    pass


_use_scalars(_Loader)
_use_scalars(_Dumper)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value.replace("_", "")))


def read(text: str) -> Any:
    """The value of one YAML document; yaml.YAMLError with the line when it is not one."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise yaml.YAMLError(str(error)) from None


def write(value: Any) -> str:
    """YAML text that `read` turns back into the same value, keys in their own order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110)


def show(value: Any) -> str:
    """A value as a recipe would spell it, on one line and not too long."""
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**6)
    text = text.removesuffix("...\n").strip()
    if "\n" in text:
        text = json.dumps(value) if isinstance(value, str) else " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."
