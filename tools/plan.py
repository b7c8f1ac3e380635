"""Predict the longest context, peak memory and speed of every memory mode, on any GPU, in seconds: `make plan`.

Nothing is trained. The model's own code is traced on tensors without content, and what the engine holds is added up;
docs/accuracy.md says how far to trust it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from model.modes import parse
from training import run
from training.planning import cuda_layout, planner, roofline
from training.planning.planner import Device, ModePlan
from training.recipe import Recipe, RecipeError, load, parse_size

START_S = time.perf_counter() - run.age_s()  # imports are part of the time a plan takes
GIB = 2**30


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
    recipe.accumulation_steps(given.world)
    for mode in (given.modes or "").split():
        try:
            parse(mode)
        except ValueError as error:
            raise RecipeError(f"--modes: {error}") from None
    return recipe


def table(plans: Sequence[ModePlan], seq: int | None) -> Table:
    grid = Table(title=None, header_style="bold", pad_edge=False)
    for name in ("mode", "longest context", "limited by"):
        grid.add_column(name, justify="left" if name == "mode" else "right")
    if seq:
        grid.add_column(f"{seq:,} tokens", justify="right")
    for name in ("peak GiB", "after fwd GiB", "host GiB", "step s", "tokens/s", "MFU", "HFU", "again"):
        grid.add_column(name, justify="right")
    grid.add_column("who causes the peak", overflow="fold")
    for one in plans:
        if one.same_as:
            grid.add_row(one.mode, f"as {one.same_as}")
            continue
        s = one.step
        cells = [one.mode, f"{one.longest_context:,}" if one.longest_context else "none fits", one.limited_by]
        if seq:
            cells.append("fits" if one.fits else "too long")
        cells += [f"{nbytes / GIB:.2f}" for nbytes in (s.peak_device_bytes, s.after_forward_device_bytes)]
        cells += [f"{s.peak_host_bytes / GIB:.1f}", f"{s.step_time_s:.3g}", f"{s.tokens_per_s:,.0f}"]
        cells += ["-" if share is None else f"{share:.0%}" for share in (s.mfu, s.hfu, s.recompute_overhead)]
        grid.add_row(*cells, s.peak_op.replace("aten._scaled_dot_product_flash_attention_for_cpu", "attention"))
    return grid


def explanation(plans: Sequence[ModePlan], recipe: Recipe, target: Device) -> list[str]:
    """What the numbers mean, what they assume, and how far off they may be."""
    step = max((one.step for one in plans), key=lambda step: step.peak_device_bytes)
    lines = [
        f"The numbers behind a length are of one optimizer step at that length ({recipe.global_batch_size} sequences)."
        f" `again`: share of the FLOPs that are recompute. Causal attention counts half of the square.",
        f"Error band: peak +-{step.memory_error:.0%}, step time +-{step.time_error:.0%} (not included: "
        f"{roofline.LEFT_OUT}).",
    ]
    if target.gpu is not None:
        named = ", ".join(
            f"{name.replace('_', ' ')} {nbytes / 2**20:,.0f} MiB" for name, nbytes in step.allowances_bytes.items()
        )
        lines += [
            f"Assumed for CUDA, at the largest peak above: {named}. Not measured on any GPU yet; disagree with "
            f"--budget. {cuda_layout.LAYOUTS}",
            f"{target.gpu.title}: {target.gpu.source}.",
        ]
        kernels = ", ".join(f"{k} {v:.0%}" for k, v in planner.speed_of(target, recipe).efficiency.items())
        lines.append(f"Assumed of peak: {kernels}; copies to the host at {target.gpu.link_bytes_per_s / 1e9:.0f} GB/s.")
    else:
        lines.append("Planned for this machine's CPU, in bytes as the meter counts them. For a GPU write GPU=NAME.")
    if any(one.same_as for one in plans):
        lines.append("`as`: the mode does just what that one does; fused attention and tiles leave it nothing to do.")
    notes = dict.fromkeys(note for one in plans if not one.same_as for note in one.step.notes)
    return lines + [f"Note: {note}" for note in notes]


def limits(target: Device) -> str:
    device = f"{target.budget_bytes / GIB:.2f} GiB of device memory" if target.budget_bytes else "no device limit"
    host = f"{target.host_budget_bytes / GIB:.0f} GiB of host memory" if target.host_budget_bytes else "no host limit"
    return f"{device}, {host}"


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
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse_arguments(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200)
    try:
        recipe = checked(given)
        aim = target(given, recipe)
        plans = planner.plan(
            recipe,
            aim,
            (given.modes or "").split() or None,
            given.world,
            given.granularity,
            given.seq_max,
            given.seq,
        )
    except ValueError as error:  # RecipeError, and what the model code itself rejects
        print(error, file=sys.stderr)
        return 2
    title = f"{recipe.name} on {aim.name}" + (f" x {given.world}" if given.world > 1 else "")
    console.print(
        f"[bold]{title}[/]: {limits(aim)}; {recipe.model.attention} attention, micro-batch {recipe.micro_batch_size}"
    )
    console.print(table(plans, given.seq))
    for line in explanation(plans, recipe, aim):
        console.print(line, highlight=False, markup=False)
    if given.plot:
        draw(plans, f"{title}, {limits(aim)}", given.plot)
        console.print(f"drawn into {given.plot}", highlight=False)
    seconds = time.perf_counter() - START_S
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(record(plans, recipe, aim, given.world, seconds), indent=1) + "\n")
    console.print(f"planned in {seconds:.1f} s", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
