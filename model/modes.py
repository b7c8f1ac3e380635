"""The grammar of memory modes: one validated value says what a layer keeps, recomputes and moves to host memory.

A mode is written as words joined by `+`: what is recomputed first, then its details, then offload.

    none   selective   selective+norm+activation   norm+activation   selective+mlp
    full   full+attention   full+uniform2   full+block3   full+sqrt
    none+offload   full+offload   full+attention+offload   full+deepspeed_offload
    budget0.5

`selective` is Megatron-LM's: the core attention. `norm`, `activation` and `mlp` add to it, or stand alone.
`budget0.5` leaves the choice to torch.compile's partitioner, for half of what it would keep.

This file imports no torch, so that a recipe can be checked in milliseconds.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Megatron-LM's --recompute-modules; `selective` alone means core_attn.
RECOMPUTABLE = ("core_attn", "norm", "activation", "mlp")
# Outputs that `full` can keep instead of computing them again in backward.
KEEPABLE = ("attention", "qkv", "projection", "mlp_up")


@dataclass(frozen=True)
class Mode:
    """What one layer remembers.

    recompute   none: what autograd saves; selective: all but the inside of `modules`; full: layer inputs only;
                budget: what torch.compile's partitioner picks for the share `fraction` of what it would keep
    modules     selective: what is recomputed, of RECOMPUTABLE
    keep        full: outputs that are kept all the same, of KEEPABLE
    grouping    full: uniform = groups of `group` layers, block = the first `group` layers, sqrt = about sqrt(L) groups
    offload     where what is kept waits for backward: on the device (None), in host memory by our own asynchronous
                copies (async) or by DeepSpeed's cpu_checkpointing (deepspeed)
    """

    recompute: Literal["none", "selective", "full", "budget"] = "none"
    modules: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    grouping: Literal["uniform", "block", "sqrt"] = "uniform"
    group: int = 1
    offload: Literal["async", "deepspeed"] | None = None
    fraction: float = 1.0

    def __post_init__(self) -> None:
        full, grouped = self.recompute == "full", (self.grouping, self.group) != ("uniform", 1)
        deepspeed = self.offload == "deepspeed"
        problems = {
            "recompute is none, selective, full or budget": self.recompute
            not in ("none", "selective", "full", "budget"),
            "fraction is from 0 to 1, and only budget has one": not 0 <= self.fraction <= 1
            or (self.recompute != "budget" and self.fraction != 1),
            "budget leaves all else to the compiler": self.recompute == "budget" and self.offload is not None,
            "grouping is uniform, block or sqrt": self.grouping not in ("uniform", "block", "sqrt"),
            "offload is None, async or deepspeed": self.offload not in (None, "async", "deepspeed"),
            "selective, and only selective, names modules": (self.recompute == "selective") != bool(self.modules),
            f"modules are of {RECOMPUTABLE}, in this order": not _ordered(self.modules, RECOMPUTABLE),
            f"keep is of {KEEPABLE}, in this order": not _ordered(self.keep, KEEPABLE),
            "only full keeps outputs and groups layers": not full and (bool(self.keep) or grouped),
            "group is a whole number above 0": type(self.group) is not int or self.group < 1,
            "sqrt finds its own group": self.grouping == "sqrt" and self.group != 1,
            "DeepSpeed's offload moves layer inputs only": deepspeed and bool(self.modules or self.keep),
        }
        for rule, broken in problems.items():
            if broken:
                raise ValueError(f"{self!r}: {rule}")

    def __str__(self) -> str:
        if self.recompute == "budget":
            return f"budget{self.fraction:g}"
        words: list[str] = [] if self.modules else [self.recompute]
        words += ["selective" if module == "core_attn" else module for module in self.modules]
        words += self.keep
        if self.grouping != "uniform":
            words.append("sqrt" if self.grouping == "sqrt" else f"block{self.group}")
        elif self.group > 1:
            words.append(f"uniform{self.group}")
        if self.offload:
            words.append("offload" if self.offload == "async" else "deepspeed_offload")
        return "+".join(words)


NAMED = (
    "none",
    "selective",
    "selective+norm",
    "selective+activation",
    "selective+norm+activation",
    "selective+mlp",
    "full",
    "full+uniform2",
    "full+block1",
    "full+sqrt",
    "full+attention",
    "none+offload",
    "selective+norm+activation+offload",
    "full+offload",
    "full+attention+offload",
    "full+deepspeed_offload",
)


def parse(name: str) -> Mode:
    """The mode a name stands for; ValueError says which word is wrong and which ones there are."""
    first, *words = name.split("+")
    if len(name) > 200:
        raise ValueError(f"mode {name[:40]!r}...: is longer than any mode; write one such as full+attention")
    if first.startswith("budget"):
        return _parse_budget(name)
    if first in RECOMPUTABLE:
        first, words = "selective", [first, *words]
    elif first == "selective":
        words = ["core_attn", *words]
    elif first not in ("none", "full"):
        starts = ("none", "selective", "full", "budgetX", *RECOMPUTABLE)
        raise ValueError(f"mode {name!r}: starts with {first!r}, not with one of {', '.join(starts)}{_hint(name)}")
    allowed = ["offload"]
    if first == "selective":
        allowed += RECOMPUTABLE
    if first == "full":
        allowed += (*KEEPABLE, "uniformK", "blockN", "sqrt", "deepspeed_offload")
    modules: list[str] = []
    keep: list[str] = []
    groupings: list[tuple[str, int]] = []
    offload = None
    for word in words:
        number = re.fullmatch(r"(uniform|block)([1-9][0-9]{0,5})", word)
        known = word in allowed and word not in ("uniformK", "blockN")
        if not known and not (number and first == "full"):
            raise ValueError(
                f"mode {name!r}: {first!r} does not take {word!r}; it takes {', '.join(allowed)}{_hint(name)}"
            )
        if number:
            groupings.append((number[1], int(number[2])))
        elif word == "sqrt":
            groupings.append(("sqrt", 1))
        elif word in ("offload", "deepspeed_offload"):
            if offload:
                raise ValueError(f"mode {name!r}: offload is named twice")
            offload = "async" if word == "offload" else "deepspeed"
        else:
            target = modules if first == "selective" else keep
            if word in target:
                raise ValueError(f"mode {name!r}: {word!r} is named twice")
            target.append(word)
    if len(groupings) > 1:
        raise ValueError(f"mode {name!r}: one grouping only (uniformK, blockN or sqrt)")
    grouping, group = groupings[0] if groupings else ("uniform", 1)
    if keep and offload == "deepspeed":
        raise ValueError(f"mode {name!r}: DeepSpeed's offload keeps layer inputs only; use +offload with {keep}")
    modules = [m for m in RECOMPUTABLE if m in modules]
    keep = [k for k in KEEPABLE if k in keep]
    return Mode(first, tuple(modules), tuple(keep), grouping, group, offload)  # type: ignore[arg-type]


def _parse_budget(name: str) -> Mode:
    number = re.fullmatch(r"budget(0|1|[01]?\.[0-9]+)", name)
    if not number or float(number[1]) > 1:
        raise ValueError(
            f"mode {name!r}: write budget and a share from 0 to 1, such as budget0.5, and no other word: what is kept "
            "is the compiler's choice"
        )
    return Mode("budget", fraction=float(number[1]))


def parse_layers(value: str | Mode | Sequence[str | Mode], num_layers: int) -> list[Mode]:
    """One mode per layer, from one mode for all or a list with one for each layer."""
    items = [value] * num_layers if isinstance(value, (str, Mode)) else value
    modes = [item if isinstance(item, Mode) else parse(item) for item in items]
    if len(modes) != num_layers:
        raise ValueError(f"{len(modes)} modes for {num_layers} layers: give one mode, or one for each layer")
    return modes


def _ordered(names: tuple[str, ...], choices: tuple[str, ...]) -> bool:
    return names == tuple(choice for choice in choices if choice in names)


def _hint(name: str) -> str:
    close = difflib.get_close_matches(name, NAMED, n=1)
    return f". Did you mean {close[0]!r}?" if close else ""
