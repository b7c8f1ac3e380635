"""A plan as people read it: the table of `make plan`, and the lines under it that say what its numbers mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.table import Table

from tools.words import count, size
from training.planning import cuda_layout, planner, roofline
from training.planning.planner import Device, ModePlan, Planner
from training.recipe import Recipe

WIDE, NARROW = 150, 90  # columns of a terminal: all is shown from the first on, the least below the second
ONLY_WIDE = ("after forward", "HFU", "recompute", "peak at")
LONG_NAME = 20  # of a mode: on two lines where there is little room


def seconds(s: float) -> str:
    """Like 1,340 s or 0.43 s."""
    return f"{s:,.0f} s" if s >= 100 else f"{s:.1f} s" if s >= 10 else f"{s:.2f} s" if s >= 0.1 else f"{s:.2g} s"


def share(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def cells(one: ModePlan, seq: int | None, short_name: bool) -> dict[str, str]:
    """A row of the table, by the name of its column."""
    step, name = one.step, one.mode
    if short_name and len(name) > LONG_NAME:
        cut = name.rfind("+", 0, LONG_NAME) + 1
        name = f"{name[:cut]}\n{name[cut:]}"
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    return {
        "mode": name,
        "longest context": count(one.longest_context or None),
        "limited by": one.limited_by,
        **({f"{seq:,} tokens": "fits" if one.fits else "too long"} if seq else {}),
        "peak": size(step.peak_device_bytes),
        "after forward": size(step.after_forward_device_bytes),
        "host memory": size(step.peak_host_bytes or None),
        "step time": seconds(step.step_time_s),
        "tokens/s": count(step.tokens_per_s),
        "MFU": share(step.mfu),
        "HFU": share(step.hfu),
        "recompute": share(step.recompute_overhead),
        "peak at": step.peak_op.replace(attention, "attention").removeprefix("aten."),
    }


def left_out(width: int) -> tuple[str, ...]:
    return () if width >= WIDE else ONLY_WIDE if width >= NARROW else ("MFU", *ONLY_WIDE)


def table(plans: Sequence[ModePlan], seq: int | None, width: int) -> Table:
    """Modes that are the same as another have no row; what a narrow terminal has no room for has no column."""
    hidden = left_out(width)
    rows = [cells(one, seq, width < NARROW) for one in plans if not one.same_as]
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in (name for name in rows[0] if name not in hidden):
        widest = max(len(line) for row in rows for line in row[name].split("\n"))
        fold = {"overflow": "fold"} if name == "peak at" else {"no_wrap": True, "min_width": widest}
        left = name in ("mode", "peak at")
        header = name if left else name.replace(" ", "\n")
        grid.add_column(header, justify="left" if left else "right", **fold)
    for row in rows:
        grid.add_row(*(cell for name, cell in row.items() if name not in hidden))
    return grid


def limits(target: Device) -> str:
    device = f"{size(target.budget_bytes)} of device memory" if target.budget_bytes else "no device limit"
    host = f"{size(target.host_budget_bytes)} of host memory" if target.host_budget_bytes else "no host limit"
    typical = target.gpu is not None and target.host_budget_bytes == target.gpu.host_bytes
    return f"{device}, {host}" + (" (typical beside such a GPU; override with HOST_BUDGET=)" if typical else "")


def explanation(
    plans: Sequence[ModePlan], recipe: Recipe, target: Device, world: int, shortest: int, width: int
) -> Iterator[str]:
    """What is not in the table, what its numbers mean, what they assume, and how far off they may be."""
    yield from same(plans, recipe, target)
    yield from too_large(plans, recipe, target, world, shortest)
    if hidden := left_out(width):
        yield f"Not shown below {WIDE} columns: {', '.join(hidden)}. JSON=plan.json writes everything."
    step = max((one.step for one in plans), key=lambda step: step.peak_device_bytes)
    yield (
        f"A plan is for one optimizer step ({recipe.global_batch_size} sequences of the row's length). recompute: "
        "FLOPs done again, relative to the model's; causal attention counts half of the square."
    )
    yield (
        f"Error band: peak +-{step.memory_error:.0%}, step time +-{step.time_error:.0%} (not included: "
        f"{roofline.LEFT_OUT})."
    )
    if target.gpu is None:
        yield "Planned for this machine's CPU, in bytes as the meter counts them. For a GPU write GPU=NAME."
    else:
        named = (f"{name.replace('_', ' ')} {size(nbytes)}" for name, nbytes in step.allowances_bytes.items())
        yield (
            f"Assumed for CUDA, at the largest peak above: {', '.join(named)}. Not measured on any GPU yet; override "
            f"with BUDGET=. {cuda_layout.LAYOUTS}"
        )
        kernels = ", ".join(
            f"{kernel.replace('_', ' ')} {part:.0%}"
            for kernel, part in planner.speed_of(target, recipe).efficiency.items()
        )
        link = f"{target.gpu.link_bytes_per_s / 1e9:.0f} GB/s"
        yield f"{target.gpu.title}: {target.gpu.source}. Assumed of peak: {kernels}; copies to the host at {link}."
    yield from merged((one.mode, note) for one in plans if not one.same_as for note in one.step.notes)


def same(plans: Sequence[ModePlan], recipe: Recipe, target: Device) -> Iterator[str]:
    """A line for the modes that are the same as another, and why."""
    lines: dict[tuple[str, str], list[str]] = {}
    for one in plans:
        if one.same_as:
            own, other = (Planner(recipe, mode, target).effective_modes() for mode in (one.mode, one.same_as))
            idle = "fused attention and tiles leave them nothing to do"
            why = idle if own == other else "all that is predicted is the same"
            lines.setdefault((one.same_as, why), []).append(one.mode)
    for (first, why), modes in lines.items():
        yield f"As {first} here: {', '.join(modes)}: {why}."


def too_large(plans: Sequence[ModePlan], recipe: Recipe, target: Device, world: int, shortest: int) -> Iterator[str]:
    """A line for the modes under which no length fits: what the leanest of them needs, and what to change."""
    failing = [one for one in plans if not one.longest_context and one.limited_by != "max" and not one.same_as]
    if not failing:
        return
    leanest = min(failing, key=lambda one: one.step.reserved_bytes)
    step = planner.predict(recipe, target, leanest.mode, shortest, world)
    held_bytes = sum(step.breakdown_bytes[kind] for kind in ("parameters", "gradients", "optimizer"))
    if leanest.limited_by == "host":
        wants = f"{size(step.peak_host_bytes)} of host memory, where {size(target.host_budget_bytes)} are"
        change = "HOST_BUDGET=, a mode that offloads less, or an engine.deepspeed_config without offload"
    else:
        wants = f"{size(step.reserved_bytes)}, where {size(target.budget_bytes)} are; its parameters, gradients and "
        wants += f"optimizer take {size(held_bytes)}"
        change = f"{', '.join(remedies(recipe, step.breakdown_bytes, held_bytes))} or BUDGET="
    where = f"at {shortest:,} tokens, the shortest length"
    which = "every mode" if len(failing) == len([one for one in plans if not one.same_as]) else "modes with -"
    yield f"Too large {where}, in {which}: {leanest.mode} needs {wants}. Try {change}."


def remedies(recipe: Recipe, breakdown_bytes: Mapping[str, int], held_bytes: int) -> list[str]:
    """Settings that need less of the device, the most promising first."""
    config = "zero2-offload" if breakdown_bytes["optimizer"] else "zero3-offload-params"
    engine = ["engine.name=deepspeed"] if recipe.engine.name != "deepspeed" else []
    engine = [" ".join([*engine, f"engine.deepspeed_config={config}"])]
    engine = [] if recipe.engine.deepspeed_config == "zero3-offload-params" else engine
    tiles = [f"tiles.{name}=auto" for name, value in recipe.tiles.model_dump().items() if value is None]
    ways = [*engine, *tiles] if 2 * held_bytes > sum(breakdown_bytes.values()) else [*tiles, *engine]
    return [*ways, *(["a smaller micro_batch_size"] if recipe.micro_batch_size > 1 else [])]


def merged(notes: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Notes of modes, those with equal words in one line."""
    modes: dict[str, list[str]] = {}
    for mode, note in notes:
        modes.setdefault(re.sub(r"^mode \S+: ", "", note), []).append(mode)
    for text, names in modes.items():
        yield f"Note: mode{'s' if len(names) > 1 else ''} {', '.join(names)}: {text}"
