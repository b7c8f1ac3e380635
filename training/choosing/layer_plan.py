"""The plan of a run: a mode for every layer, what it was made for and what it promises; a JSON file, a text, a picture.

`recompute: auto` writes `plan.json`, `plan.txt` and `plan.png` into the run folder; `recompute: {plan: plan.json}`
uses the same modes and tiles again.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from model import tiling
from model.modes import Mode, parse
from training import run
from training.recipe import Recipe, RecipeError
from training.values import Section, size

GIB, MIB = 2**30, 2**20
LINE = 64  # layers shown on a line


class Made(Section):
    """What a plan was made for: another value of any of it, and the plan need not fit."""

    recipe: str
    model: dict[str, Any]
    seq_length: int
    micro_batch_size: int
    accumulation: int
    precision: str
    engine: str
    world_size: int
    device: str


class Layer(Section):
    """One layer's mode and, as modelled, its bytes and seconds."""

    mode: str
    kept_bytes: int
    host_bytes: int
    forward_s: float
    backward_s: float

    @field_validator("mode")
    @classmethod
    def _is_mode(cls, name: str) -> str:
        parse(name)
        return name


class Fixed(Section):
    """One mode for all layers, as modelled, to compare with."""

    mode: str
    peak_device_bytes: int
    peak_host_bytes: int
    step_time_s: float
    fits: bool


class Plan(Section):
    """A plan. All bytes are predictions except the budgets."""

    version: int = Field(1, ge=1, le=1)
    made_for: Made
    budget_bytes: int
    margin_bytes: int  # of the budget, left free on purpose
    correction_bytes: int  # by which a measured step was above its prediction
    host_budget_bytes: int | None
    tiles: dict[str, int | None]
    layers: tuple[Layer, ...] = Field(min_length=1)
    plain_bytes: int  # that a layer keeps under mode none
    peak_device_bytes: int
    after_forward_bytes: int
    needed_bytes: int  # the peak, and on CUDA what fragmentation adds: compared with the budget
    peak_host_bytes: int
    step_time_s: float
    curve: tuple[tuple[int, float], ...]  # (budget, step time), as modelled
    fixed: tuple[Fixed, ...]
    seconds: dict[str, float]  # that making it took

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(layer.mode for layer in self.layers)

    @property
    def room_bytes(self) -> int:
        """What the peak may be."""
        return self.budget_bytes - self.margin_bytes - self.correction_bytes

    def applied_to(self, recipe: Recipe) -> Recipe:
        """The recipe with this plan's modes and tiles in place of `auto` or `{plan: FILE}`. Raises RecipeError."""
        for key, ours in recipe.model.model_dump().items():
            planned = self.made_for.model.get(key, ours)
            if ours is not None and planned is not None and ours != planned and key != "max_position_embeddings":
                problem = f"is {planned!r} in the plan that recompute names; make a new plan with recompute: auto"
                raise recipe.error(f"model.{key}", problem)
        tiles = type(recipe.tiles)(**self.tiles)
        return recipe.model_copy(update={"recompute": self.modes, "tiles": tiles})

    def write(self, folder: Path) -> None:
        """plan.json, plan.txt and plan.png in `folder`. Raises RunError when they cannot be written."""
        try:
            run.write_whole(folder / "plan.json", self.model_dump_json(indent=1) + "\n")
            run.write_whole(folder / "plan.txt", self.text() + "\n")
            draw(self, folder / "plan.png")
        except OSError as error:
            where = error.filename2 or error.filename or folder
            problem = f"the plan cannot be written: {where}: {error.strerror}"
            raise run.RunError(f"{problem}; put it right, or train in another folder (RUN_DIR=, --run-dir)") from None

    # -- for people ------------------------------------------------------------------------------------------

    def text(self) -> str:
        """All of it, as in plan.txt."""
        return "\n".join([self.short_text(), *self._comparison()])

    def short_text(self) -> str:
        """Peak, step time and layers."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        made = self.made_for
        share = self.needed_bytes / self.budget_bytes
        yield f"plan for {made.recipe}: {len(self.layers)} layers, {made.seq_length:,} tokens x {made.micro_batch_size}"
        yield (
            f"predicted peak {size(self.peak_device_bytes)}, {share:.0%} of the budget of {size(self.budget_bytes)}"
            f" (margin {size(self.margin_bytes)}"
            + (f", measured correction {size(self.correction_bytes)}" if self.correction_bytes else "")
            + f"); host {size(self.peak_host_bytes)}"
        )
        yield f"predicted step {_time(self.step_time_s)}; {self.next_memory()}"
        tiles = [f"{name}={number}" for name, number in self.tiles.items() if number]
        yield f"tiles: {', '.join(tiles) or 'none'}"
        yield ""
        letters = dict(zip(dict.fromkeys(self.modes), string.ascii_uppercase + string.ascii_lowercase))
        strip = "".join(letters[mode] for mode in self.modes)
        for start in range(0, len(strip), LINE):
            yield f"  layer {start:>4}  {strip[start : start + LINE]}"
        yield ""
        yield "  mode                                            layers      kept     host  computed again  seconds"
        for mode, letter in letters.items():
            layer = next(one for one in self.layers if one.mode == mode)
            again = max(0, self.plain_bytes - layer.kept_bytes - layer.host_bytes)
            yield (
                f"  {letter} {mode:<45} {self.modes.count(mode):>6} {size(layer.kept_bytes):>9} "
                f"{size(layer.host_bytes):>8} {size(again):>15} {_time(layer.forward_s + layer.backward_s):>8}"
            )

    def _comparison(self) -> Iterator[str]:
        yield ""
        yield "  one mode for all layers, as modelled               peak     host      step"
        for one in self.fixed:
            sign = " " if one.fits else "does not fit"
            yield (
                f"  {one.mode:<45} {size(one.peak_device_bytes):>9} {size(one.peak_host_bytes):>8} "
                f"{_time(one.step_time_s):>9}  {sign}".rstrip()
            )
        yield ""
        yield "  budget      step, as modelled"
        for budget, step_s in self.curve:
            yield f"  {size(budget):<10} {_time(step_s):>9}{'  <- this plan' if budget == self.budget_bytes else ''}"
        yield ""
        yield "made in " + ", ".join(f"{what} {_time(s)}" for what, s in self.seconds.items())

    def next_memory(self) -> str:
        """What more memory would buy, in words."""
        more = [(b, s) for b, s in self.curve if b > self.budget_bytes]
        now = next((s for b, s in self.curve if b == self.budget_bytes), self.step_time_s)
        if not more or min(s for _, s in more) >= now * (1 - 1e-6):
            return "more memory would not make it faster"
        budget, then = more[0]
        gained = now - then
        return f"the next {size(budget - self.budget_bytes)} would save {_time(gained)} ({gained / now:.1%})"


def read(path: str | Path) -> Plan:
    """The plan in a file. Raises RecipeError saying what is wrong with it."""
    try:
        return Plan.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"plan {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RecipeError(f"plan {path}: is not UTF-8 text, so no plan; make a new one with recompute: auto") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole file"
        raise RecipeError(f"plan {path}: {where}: {first['msg']}; make a new one with recompute: auto") from None


def differences(plan: Plan, made: Made) -> list[str]:
    """What a plan was made for and is not used for, in words."""
    ours, theirs = made.model_dump(exclude={"model", "recipe"}), plan.made_for.model_dump(exclude={"model", "recipe"})
    return [f"{key} {theirs[key]} there, {ours[key]} here" for key in ours if ours[key] != theirs[key]]


def runs_of(modes: Sequence[str]) -> list[tuple[str, int]]:
    """(mode, number of layers) of consecutive layers alike."""
    return [(mode, len(list(same))) for mode, same in groupby(modes)]


def draw(plan: Plan, path: Path) -> None:
    """The fate of every layer's activations, and the step time that other budgets would give."""
    from matplotlib.figure import Figure  # here: it takes a second to import

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    kept = [layer.kept_bytes / MIB for layer in plan.layers]
    host = [layer.host_bytes / MIB for layer in plan.layers]
    again = [max(0.0, plan.plain_bytes / MIB - k - h) for k, h in zip(kept, host)]
    x = range(len(kept))
    bottom = [0.0] * len(kept)
    for values, name, colour, hatch in (
        (kept, "kept on the device", "black", ""),
        (host, "moved to the host", "0.75", "///"),
        (again, "computed again", "white", ""),
    ):
        left.bar(x, values, 0.9, bottom, color=colour, edgecolor="black", hatch=hatch, linewidth=0.6, label=name)
        bottom = [b + v for b, v in zip(bottom, values)]
    left.xaxis.get_major_locator().set_params(integer=True)
    left.set(xlabel="layer", ylabel="activations of a layer [MiB]", ylim=(0, 1.25 * max(bottom)))
    left.set_title(
        f"{plan.made_for.recipe}, {plan.made_for.seq_length:,} tokens: peak {size(plan.peak_device_bytes)} "
        f"of {size(plan.budget_bytes)}",
        fontsize=10,
    )
    left.legend(loc="upper right", fontsize=8, ncols=3)
    right.plot([b / GIB for b, _ in plan.curve], [s for _, s in plan.curve], "k.-", label="a mode for each layer")
    shown = [f for f in plan.fixed if f.peak_device_bytes / GIB <= 2 * max(b for b, _ in plan.curve) / GIB]
    for one, sign in zip(shown, "os^vDPX*<>hp"):
        right.plot(one.peak_device_bytes / GIB, one.step_time_s, sign, color="0.4", label=one.mode, markersize=5)
    right.axvline(plan.budget_bytes / GIB, color="black", linestyle=":", linewidth=1)
    right.set(xlabel="device memory [GiB]", ylabel="step time, as modelled [s]")
    right.legend(fontsize=6)
    figure.savefig(path, dpi=120)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def modes_of(plan: Plan) -> tuple[Mode, ...]:
    return tuple(map(parse, plan.modes))


def tiles_of(tiles: tiling.Tiles) -> dict[str, int | None]:
    return {name: getattr(tiles, name) for name in tiles.__dataclass_fields__}
