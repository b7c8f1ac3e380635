"""Predict the longest context, peak memory and speed of every memory mode, on any GPU, in seconds: `make plan`.

Nothing is trained. The model's own code is traced on tensors without content, and what the engine holds is added up;
docs/accuracy.md says how far to trust it. A plan is for one optimizer step: no evaluation, no saving, no data loading.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from model.modes import parse
from training.planning import gpus
from training.recipe import Recipe, RecipeError, load, parse_size

if TYPE_CHECKING:  # they import torch, which takes seconds: what a person wrote is checked before
    from training.planning.planner import Device, ModePlan

PIPED_WIDTH = 160


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", metavar="RECIPE", help="a name in recipes/ or a path")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="recipe settings to change")
    parser.add_argument("--gpu", metavar="NAME", help="a GPU of the catalogue; default the one in this machine")
    parser.add_argument("--budget", metavar="SIZE", help="device memory the run may use, such as 24GiB")
    parser.add_argument("--host-budget", metavar="SIZE", help="host memory that offload may use, such as 64GiB")
    parser.add_argument("--world", metavar="N", type=int, default=1, help="ranks that share the training state")
    parser.add_argument("--seq", metavar="TOKENS", type=int, help="also say what a step of this length needs")
    parser.add_argument("--modes", metavar='"A B"', help="memory modes to plan; default all named ones")
    parser.add_argument("--granularity", metavar="TOKENS", type=int, help="lengths are multiples of it")
    parser.add_argument("--seq-max", metavar="TOKENS", type=int, help="longest length considered")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the numbers here")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the longest contexts into this PNG")
    return parser.parse_intermixed_args(arguments)


def size_of(option: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise RecipeError(f"{option} {text}: {error}") from None


def target(given: argparse.Namespace, recipe: Recipe) -> Device:
    """The device to plan for. Raises RecipeError."""
    budget = size_of("--budget", given.budget) or recipe.budget_bytes
    host_budget = size_of("--host-budget", given.host_budget) or recipe.host_budget_bytes
    from training.planning import planner

    try:
        return planner.device(given.gpu, budget, host_budget)
    except ValueError as error:
        raise RecipeError(str(error)) from None


def checked(given: argparse.Namespace) -> Recipe:
    recipe = load(given.recipe, given.overrides)
    for name in ("world", "seq", "granularity", "seq_max"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise RecipeError(f"--{name.replace('_', '-')} {value}: must be a whole number above 0")
    granularity, longest = given.granularity or recipe.sweep.granularity, given.seq_max or recipe.sweep.seq_max
    if granularity > longest:
        raise RecipeError(f"--seq-max {longest} is below the granularity of {granularity}: no length would be tried")
    recipe.accumulation_steps(given.world)
    writable("--json", given.json, ".json")
    writable("--plot", given.plot, ".png")
    if given.gpu:
        gpus.find(given.gpu)
    for mode in (given.modes or "").split():
        if mode == "auto":
            raise RecipeError("--modes: auto is chosen by `make train` and `make sweep`; a plan names fixed modes")
        try:
            parse(mode)
        except ValueError as error:
            raise RecipeError(f"--modes: {error}") from None
    return recipe


def writable(option: str, file: Path | None, suffix: str) -> None:
    """Before seconds are spent on planning: RecipeError when the file could not be written."""
    if file is None:
        return
    if file.suffix != suffix:
        raise RecipeError(f"{option} {file}: write a name that ends with {suffix}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a"):
            pass
    except OSError as error:
        raise RecipeError(f"{option} {file}: {error.strerror}") from None


def record(plans: Sequence[ModePlan], recipe: Recipe, target: Device, world: int, seconds: float) -> dict[str, Any]:
    return {
        "recipe": recipe.name,
        "device": target.name,
        "device_kind": target.kind,
        "budget_bytes": target.budget_bytes,
        "host_budget_bytes": target.host_budget_bytes,
        "world_size": world,
        "micro_batch_size": recipe.micro_batch_size,
        "attention": recipe.model.attention,
        "modes": {one.mode: one.record() for one in plans},
        "seconds": seconds,
    }


def draw(plans: Sequence[ModePlan], title: str, file: Path) -> None:
    """Bars of the longest context of each mode, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = list(reversed(plans))
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(shown) + 1.4), dpi=120, layout="constrained")
    lengths = [max(one.longest_context, 1) for one in shown]
    hatch = {"device": "", "host": "///", "max": "..."}
    for row, (one, length) in enumerate(zip(shown, lengths)):
        label = f"limited by {one.limited_by}"
        axes.barh(row, length, color="#9ecae1", edgecolor="black", hatch=hatch[one.limited_by], label=label)
        axes.annotate(f" {one.longest_context:,}", (length, row), va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), [one.mode for one in shown])
    axes.set_xscale("log")
    axes.set_xlim(right=max(lengths) * 4)
    axes.set_xlabel("predicted longest context, tokens (log scale)")
    axes.set_title(title, fontsize=10)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
    axes.legend(handles.values(), handles.keys(), fontsize=8, loc="lower right")
    figure.savefig(file)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None, workers: int = 1) -> int:
    given = parse_arguments(arguments)
    try:
        recipe = checked(given)
        from tools import plan_table
        from training import run
        from training.planning import planner

        started_s = time.perf_counter() - run.age_s()  # imports are part of the time a plan takes
        aim = target(given, recipe)
        plans = planner.plan(
            recipe,
            aim,
            (given.modes or "").split() or None,
            given.world,
            given.granularity,
            given.seq_max,
            given.seq,
            workers,
        )
    except ValueError as error:  # RecipeError, and what the model code itself rejects
        print(error, file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH, highlight=False)
    limits = plan_table.limits(aim)
    title = f"{recipe.name} on {aim.name}" + (f" x {given.world}" if given.world > 1 else "")
    console.print(
        f"[bold]{title}[/]: {limits}; {recipe.model.attention} attention, micro-batch {recipe.micro_batch_size}"
    )
    console.print(plan_table.table(plans, given.seq, console.width))
    shortest = given.granularity or recipe.sweep.granularity
    for line in plan_table.explanation(plans, recipe, aim, given.world, shortest, console.width):
        console.print(line, markup=False)
    if given.plot:
        draw(plans, f"{title}, {limits}", given.plot)
        console.print(f"drawn into {given.plot}")
    seconds = time.perf_counter() - started_s
    if given.json:
        given.json.write_text(json.dumps(record(plans, recipe, aim, given.world, seconds), indent=1) + "\n")
    console.print(f"planned in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(workers=min(2, os.cpu_count() or 1)))  # this process is fresh, and can be forked
