"""`recompute: auto` against the fastest fixed mode at lengths that `none` cannot reach, and against what others choose.

    make bench ARGS=auto
    python tools/bench_auto.py [--rounds N] [--lengths N] [--out results/DATE-auto-cpu]

A step is a whole optimizer step of the torch engine in bf16 on one thread, under one budget and without offload, which
on a CPU would only move memory to memory. Variants take turns; figures are medians of the ratios within a turn, of CPU
time, which a busy neighbour does not inflate by much. Peaks are the meter's, weights and optimizer included.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from model import recompute, tiling
from model.gpt import GPT, GPTConfig
from tools import rivals
from training import build
from training.choosing import auto, calibration, layer_plan
from training.engine_torch import TorchEngine
from training.hardware import cpu_name
from training.memory import Meter
from training.planning import planner
from training.recipe import Recipe, load
from training.run import environment
from training.world import join

MIB = 2**20
SETTINGS = (
    *("engine.name=torch", "engine.deepspeed_config=null", "precision=bf16", "host_budget=1KiB"),
    *("micro_batch_size=1", "global_batch_size=1", "tiles.loss_tile_tokens=1024", "data.tokenizer_vocab_size=1024"),
    *("model.num_layers=8", "model.hidden_size=256", "model.num_attention_heads=4", "model.ffn_hidden_size=704"),
    "model.attention=sdpa",
)
GRANULARITY = 128
LEANEST = ("full", "full+sqrt", "full+uniform2")
WORST = 1.02  # step time of auto over the fastest fixed mode's
Switch = Callable[[], None]


class Bench:
    """One model and engine, switched between variants at one length."""

    def __init__(self, budget: str, rounds: int) -> None:
        self.budget, self.rounds = budget, rounds
        self.here = join()
        recipe = self.recipe(GRANULARITY)
        torch.manual_seed(0)
        self.model: GPT = build.build_model(recipe, 1024, self.here.device)
        self.engine = TorchEngine(recipe, self.model, self.here)

    def recipe(self, length: int) -> Recipe:
        return load("quickstart", [*SETTINGS, f"seq_length={length}", f"budget={self.budget}"])

    def longest(self, mode: str) -> int:
        target = planner.device(budget_bytes=self.recipe(GRANULARITY).budget_bytes)
        return planner.Planner(self.recipe(GRANULARITY), mode, target).longest(GRANULARITY, 2**17).longest

    def plan(self, length: int) -> layer_plan.Plan:
        recipe = self.recipe(length)
        config = GPTConfig(**recipe.gpt_fields(1024))
        assert recipe.budget_bytes is not None
        device = self.here.device
        timed = lambda shape, modes: calibration.times(shape, modes, device, None)  # noqa: E731
        place = auto.Place(device, cpu_name(), 1, recipe.budget_bytes, recipe.host_budget_bytes, timed)
        return auto.find_any(recipe, config, place)

    # -- variants --------------------------------------------------------------------------------------------

    def switch(self, modes: Any, tiles: dict[str, Any]) -> Switch:
        """Puts modes and tiles on the model."""

        def on() -> None:
            recompute.apply(self.model, "none")
            self.model.__dict__.pop("run_layers", None)  # a rival's
            tiling.apply(self.model, **tiles)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                recompute.apply(self.model, modes)

        return on

    def rival(self, run_layers: Callable[[GPT], Any]) -> Switch:
        """Puts another way of running the layers on the model, with the recipe's tiles."""
        plain = self.switch("none", self.recipe(GRANULARITY).tiles.model_dump())

        def on() -> None:
            plain()
            self.model.__dict__["run_layers"] = run_layers(self.model)

        return on

    def step(self, length: int) -> None:
        stream = torch.randint(1024, (1, length + 1), generator=torch.Generator().manual_seed(0))
        self.engine.train_step([(stream[:, :-1], stream[:, 1:])], 1e-4)

    def peak(self, on: Switch, length: int) -> int:
        on()
        gc.collect()
        with Meter(model=self.model, optimizer=self.engine.optimizer) as meter:
            self.step(length)
        return meter.peak_bytes

    def times(self, variants: dict[str, Switch], length: int) -> dict[str, list[float]]:
        """CPU seconds of every variant's step, turn by turn; a first turn warms up."""
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(self.rounds + 1):
            for name in list(variants) if turn % 2 else list(reversed(variants)):
                variants[name]()
                gc.collect()
                start = time.process_time()
                self.step(length)
                if turn:
                    seconds[name].append(time.process_time() - start)
        return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[base]))


def at_length(bench: Bench, length: int) -> dict[str, Any]:
    """One point of the curve."""
    plan, tiles = bench.plan(length), bench.recipe(length).tiles.model_dump()
    variants = {"auto": bench.switch(plan.modes, plan.tiles)}
    peaks = {"auto": bench.peak(variants["auto"], length)}
    by_speed = [f.mode for f in sorted(plan.fixed, key=lambda f: f.step_time_s)]
    # The three that should be fastest, and `full`: all that the meter finds within the budget.
    for name in dict.fromkeys([*by_speed, "full"]):
        if "offload" in name or (len(variants) > 3 and name != "full"):
            continue
        switch = bench.switch(name, tiles)
        peak = bench.peak(switch, length)
        if peak <= plan.budget_bytes:
            variants[name], peaks[name] = switch, peak
    seconds = bench.times(variants, length)
    fixed = [name for name in variants if name != "auto"]
    best = min(fixed, key=lambda name: statistics.median(seconds[name]))
    return {
        "seq_length": length,
        "plan": layer_plan.runs_of(plan.modes),
        "tiles": plan.tiles,
        "predicted_peak_bytes": plan.peak_device_bytes,
        "predicted_step_s": plan.step_time_s,
        "more_memory": plan.next_memory(),
        "peak_bytes": peaks,
        "filled": peaks["auto"] / plan.budget_bytes,
        "step_s": {name: statistics.median(each) for name, each in seconds.items()},
        "fastest_fixed": best,
        "auto_over_fixed": ratio(seconds, "auto", best),
        "auto_over_full": ratio(seconds, "auto", "full") if "full" in variants else None,
        "plan_s": plan.seconds,
    }


def against_others(bench: Bench, length: int) -> dict[str, Any]:
    """Auto and other planners at one length and budget, each with the largest target that stays within the budget."""
    plan = bench.plan(length)
    variants, notes = {"auto": bench.switch(plan.modes, plan.tiles)}, {}
    for name, make in rivals.all_of(bench.recipe(length), bench.model, length).items():
        try:
            targets = make()
            found = rivals.largest(targets, lambda layers: bench.peak(bench.rival(layers), length), plan.budget_bytes)
            variants[name], notes[name] = bench.rival(found.run_layers), found.note
        except rivals.NotHereError as error:
            notes[name] = str(error)
    peaks = {name: bench.peak(on, length) for name, on in variants.items()}
    seconds = bench.times(variants, length)
    return {
        "seq_length": length,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": peaks,
        "step_s": {name: statistics.median(each) for name, each in seconds.items()},
        "auto_over": {name: ratio(seconds, "auto", name) for name in variants if name != "auto"},
        "notes": notes,
    }


def report(curve: list[dict[str, Any]], others: dict[str, Any], budget: str) -> list[str]:
    lines = [
        f"### Step time under {budget}, by length",
        "",
        "| length | fastest fixed that fits | auto / that | auto / full | peak of auto | plan |",
        "|---|---|---|---|---|---|",
    ]
    for point in curve:
        plan = ", ".join(f"{count} {mode}" for mode, count in point["plan"])
        full = f"{point['auto_over_full']:.3f}" if point["auto_over_full"] else ""
        lines.append(
            f"| {point['seq_length']:,} | {point['fastest_fixed']} | {point['auto_over_fixed']:.3f} | {full} | "
            f"{point['filled']:.1%} | {plan} |"
        )
    lines += ["", f"### Others at {others['seq_length']:,} tokens", "", "| planner | peak MiB | step, auto / its | |"]
    lines += ["|---|---|---|---|", f"| auto | {others['peak_bytes']['auto'] / MIB:.1f} | 1 | |"]
    for name, note in others["notes"].items():
        if name in others["auto_over"]:
            cost = others["auto_over"][name]
            lines.append(f"| {name} | {others['peak_bytes'][name] / MIB:.1f} | {cost:.3f} | {note} |")
        else:
            lines.append(f"| {name} | - | - | {note} |")
    return lines


def missed(curve: list[dict[str, Any]], others: dict[str, Any]) -> Any:
    for point in curve:
        if point["auto_over_fixed"] > WORST:
            yield f"{point['seq_length']:,}: auto takes {point['auto_over_fixed']:.3f} of {point['fastest_fixed']}"
        if not 0.9 <= point["filled"] <= 1 and "not make it faster" not in point["more_memory"]:
            yield f"{point['seq_length']:,}: auto's peak is {point['filled']:.1%} of the budget"
    for name, cost in others["auto_over"].items():
        if cost > WORST:
            yield f"auto takes {cost:.3f} of {name}"


def draw(curve: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    x = [point["seq_length"] for point in curve]
    speed = lambda point, name: point["seq_length"] / point["step_s"][name]  # noqa: E731
    names = dict.fromkeys(name for point in curve for name in point["step_s"] if name != "auto")
    for name, sign in zip(names, "os^vDPX"):
        points = [point for point in curve if name in point["step_s"]]
        lengths, speeds = [p["seq_length"] for p in points], [speed(p, name) for p in points]
        axes.plot(lengths, speeds, f"{sign}--", color="0.55", label=name, markersize=5, linewidth=0.8)
    axes.plot(x, [speed(point, "auto") for point in curve], "k.-", label="auto", linewidth=1.6)
    axes.set(xlabel="sequence length [tokens]", ylabel="speed [tokens per second of CPU time]")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of every variant (default: 5)")
    parser.add_argument("--lengths", type=int, default=8, help="points of the curve (default: 8)")
    parser.add_argument("--budget", default="160MiB", help="device memory (default: 160MiB)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write record, table and picture there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(given.budget, given.rounds)
    low, high = bench.longest("none"), max(map(bench.longest, LEANEST))
    print(f"none fits to {low:,} tokens, the leanest mode to {high:,}", file=sys.stderr)
    steps = (high - low) / GRANULARITY
    lengths = sorted(
        {low + GRANULARITY * max(1, round(steps * i / given.lengths)) for i in range(1, given.lengths + 1)}
    )
    curve = []
    for length in lengths:
        curve.append(at_length(bench, length))
        print(f"  {length:,}: {curve[-1]['auto_over_fixed']:.3f} of {curve[-1]['fastest_fixed']}", file=sys.stderr)
    others = against_others(bench, lengths[len(lengths) // 2])
    text = report(curve, others, given.budget)
    problems = list(missed(curve, others))
    text += ["", *(f"Missed: {problem}" for problem in problems)] if problems else ["", "Nothing missed."]
    print("\n".join(text))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        record = {"environment": environment(), "budget": given.budget, "curve": curve, "others": others}
        (given.out / "auto.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (given.out / "auto.md").write_text("\n".join(text) + "\n", encoding="utf-8")
        draw(curve, given.out / "auto.png")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
