"""A sweep's pictures: told apart by marker, line and hatch before colour, so that they can be printed in black."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from tools.recommend import longest_of
from tools.words import GIB, MIB, count, size, within

# Okabe and Ito's colours, which differ in lightness and for the colour-blind; one look per mode, by its place.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)), (0, (3, 3)))
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo", "+++", "---")
KINDS = ("parameters", "optimizer", "gradients", "activations", "loss", "temporary", "other")
AXIS_NAMES = {"seq_length": "context, tokens per sample", "micro_batch_size": "micro-batch, samples"}
PHASES = ("forward", "backward", "optimizer")
TIMELINE_MODES = ("none", "selective", "full", "full+attention", "full+offload")  # the first three that are there
STYLE: Any = {
    "figure.dpi": 130,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
}


def draw(summary: dict[str, Any], memory: dict[str, Any]) -> dict[str, Figure]:
    """Every picture that the records allow, by name; the caller closes them.

    memory: what memory.json of the sweep holds: per mode, at one size, breakdown and timeline of a step.
    """
    figures: dict[str, Figure] = {}
    with plt.rc_context(STYLE):
        figures["longest_context"] = _longest(summary)
        if any(mode["timings"] for mode in summary["modes"].values()):
            figures["speed"] = _curves(summary, "tokens_per_s", "speed, tokens/s")
        if any(t["overhead"] for mode in summary["modes"].values() for t in mode["timings"]):
            figures["overhead"] = _curves(summary, "overhead", "step time / step time of none")
        if memory.get("modes"):
            figures["memory"] = _breakdown(summary, memory)
            figures["timeline"] = _timeline(summary, memory)
    return figures


def save(figures: dict[str, Figure], folder: Path) -> list[str]:
    """Write each as <name>.png into the folder and close it; the file names."""
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", metadata={"Software": None})
        plt.close(figure)
    return [f"{name}.png" for name in figures]


def _attentions(summary: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(mode["attention"] for mode in summary["modes"].values()))


def _modes(summary: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(mode["mode"] for mode in summary["modes"].values()))


def _where(summary: dict[str, Any]) -> str:
    return f"{summary['recipe']}, {within(summary['budget_bytes'])} on {summary['device']}"


def _longest(summary: dict[str, Any]) -> Figure:
    attentions, modes = _attentions(summary), _modes(summary)
    height = 0.8 / len(attentions)
    figure, axes = plt.subplots(
        figsize=(7.2, 1.3 + 0.32 * len(modes) * (1 + len(attentions)) / 1.6), layout="constrained"
    )
    farthest = 1
    for name, entry in summary["modes"].items():
        row, place = modes.index(entry["mode"]), attentions.index(entry["attention"])
        y = row + (place - (len(attentions) - 1) / 2) * height
        value, predicted = longest_of(summary, name), entry["predicted_longest_context"]
        farthest = max(farthest, value, predicted or 0)
        look: Any = {"color": ("white", "#b0c4d8", "#e0c9a6")[place % 3], "hatch": ("///", "", "...")[place % 3]}
        label = f"{entry['attention']} attention" if row == 0 and len(attentions) > 1 else None
        axes.barh(y, value, height * 0.9, edgecolor="black", linewidth=0.8, label=label, **look)
        if predicted:
            axes.plot(predicted, y, "kd", markersize=4, zorder=3, label="planned" if not row and not place else None)
        note = {"device": "", "host": " (host memory)", "max": " (longest tried)", None: f" ({entry['status']})"}
        text = f"  {count(value)}" if value or entry["status"] == "completed" else ""
        axes.text(max(value, predicted or 0), y, text + note[entry["limited_by"]], va="center", fontsize=8)
    axes.set_yticks(range(len(modes)), modes)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, farthest * 1.18)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count(x)))
    lengths = summary["axis"] == "seq_length"
    axes.set_xlabel(f"longest {AXIS_NAMES['seq_length']}" if lengths else f"largest {AXIS_NAMES['micro_batch_size']}")
    title = "Longest context by mode" if lengths else "Largest micro-batch by mode"
    figure.suptitle(f"{title}\n{_where(summary)}", x=0.01, ha="left", fontsize=10)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=4)
    return figure


def _curves(summary: dict[str, Any], what: str, name: str) -> Figure:
    attentions, modes, axis = _attentions(summary), _modes(summary), summary["axis"]
    figure, panels = plt.subplots(
        1,
        len(attentions),
        figsize=(3.2 + 4 * len(attentions), 4.2),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    sizes = [t[axis] for mode in summary["modes"].values() for t in mode["timings"] if t[what]]
    for panel, attention in zip(panels[0], attentions):
        for entry in (e for e in summary["modes"].values() if e["attention"] == attention):
            points = [(t[axis], t[what]) for t in entry["timings"] if t[what]]
            if not points:
                continue
            look = modes.index(entry["mode"])
            x, y = zip(*points)
            colour = COLOURS[look % 8]
            marked = {"marker": MARKERS[look % 8], "markersize": 5, "markerfacecolor": "white"}
            line = LINES[(look + look // 8) % 8]  # beyond eight modes a marker comes again, with another line
            panel.plot(x, y, color=colour, linestyle=line, label=entry["mode"], **marked)
            if what == "tokens_per_s":  # where the mode ends: nothing longer fits
                panel.plot(x[-1], y[-1], marker="|", markersize=16, markeredgewidth=1.5, color=colour, zorder=1.9)
        _size_axis(panel, sizes, axis)
        panel.set_title(attention if len(attentions) > 1 else "", loc="left")
    first = panels[0][0]
    first.set_ylabel(name)
    first.yaxis.set_major_formatter(FuncFormatter(lambda y, _: count(y) if what == "tokens_per_s" else f"x{y:.2f}"))
    if what == "tokens_per_s":
        first.set_ylim(0, 1.1 * max(t[what] for mode in summary["modes"].values() for t in mode["timings"]))
        title = "Speed against context; | marks the longest that fits"
    else:
        costs = [t[what] for mode in summary["modes"].values() for t in mode["timings"] if t[what]]
        first.set_ylim(min(0.8, 0.95 * min(costs)), max(1.2, 1.05 * max(costs)))  # noise shall look like noise
        for panel in panels[0]:
            panel.axhline(1, color="#888888", linewidth=0.8, zorder=1)
        title = "What each mode's step costs against none at the same length"
    handles: dict[str, Any] = {}
    for panel in panels[0]:
        drawn, labels = panel.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn))
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", handlelength=5)
    figure.suptitle(f"{title}\n{_where(summary)}", x=0.01, ha="left", fontsize=10)
    return figure


def _size_axis(axes: Axes, sizes: list[int], axis: str) -> None:
    axes.set_xlabel(AXIS_NAMES[axis])
    if max(sizes) > 4 * min(sizes):
        axes.set_xscale("log", base=2)
        low, high = math.ceil(math.log2(min(sizes))), math.floor(math.log2(max(sizes)))
        axes.set_xticks([2**k for k in range(low, high + 1)])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count(x)))


def _unit(nbytes: float) -> tuple[int, str]:
    return (GIB, "GiB") if nbytes >= GIB else (MIB, "MiB")


def _breakdown(summary: dict[str, Any], memory: dict[str, Any]) -> Figure:
    modes = memory["modes"]
    unit, unit_name = _unit(max(m["peak_device_bytes"] for m in modes.values()))
    figure, axes = plt.subplots(figsize=(7.6, 1.5 + 0.36 * len(modes)), layout="constrained")
    left = dict.fromkeys(modes, 0.0)
    shades = ("#333333", "#777777", "#bbbbbb", "#56B4E9", "#E69F00", "#ffffff", "#eeeeee")
    for kind, shade, hatch in zip(
        KINDS, shades, HATCHES[:1] + HATCHES[4:5] + HATCHES[2:4] + HATCHES[1:2] + HATCHES[5:7]
    ):
        values = [modes[name]["breakdown_bytes"].get(kind, 0) / unit for name in modes]
        if max(values) * unit < 2**-10 * max(m["peak_device_bytes"] for m in modes.values()):
            continue  # too little to be seen
        axes.barh(
            list(modes),
            values,
            0.7,
            left=list(left.values()),
            color=shade,
            hatch=hatch,
            edgecolor="black",
            linewidth=0.6,
            label=kind,
        )
        left = {name: left[name] + value for name, value in zip(modes, values)}
    for row, name in enumerate(modes):
        after = modes[name]["after_forward_device_bytes"] / unit
        for colour, width in (("white", 5), ("black", 2.5)):
            label = "after forward" if row == 0 and colour == "black" else None
            axes.plot([after, after], [row - 0.42, row + 0.42], color=colour, linewidth=width, label=label)
        axes.text(
            left[name],
            row,
            f"  {modes[name]['peak_device_bytes'] / unit:.{2 if unit == GIB else 0}f}",
            va="center",
            fontsize=8,
        )
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, max(left.values()) * 1.1)
    axes.set_xlabel(f"device memory at the peak of a step, {unit_name}")
    what = f"{count(memory['size'])} {'tokens' if summary['axis'] == 'seq_length' else 'samples'}"
    figure.suptitle(f"What holds the memory at {what}\n{_where(summary)}", x=0.01, ha="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def timeline_modes(modes: dict[str, Any], summary: dict[str, Any]) -> list[str]:
    """Up to three modes whose step tells the most, under the attention of which most modes were followed."""
    entries = summary["modes"]
    followed = [entries[name]["attention"] for name in modes]
    most = max(followed, key=followed.count)
    same = [name for name in modes if entries[name]["attention"] == most]
    return sorted(same, key=lambda n: [*TIMELINE_MODES, entries[n]["mode"]].index(entries[n]["mode"]))[:3]


def timeline_caption(summary: dict[str, Any], memory: dict[str, Any]) -> str:
    """Which modes the timeline shows, and why these."""
    names = timeline_modes(memory["modes"], summary)
    return (
        f"Shown: {', '.join(f'`{name}`' for name in names)}; of the modes followed at this size under one attention,"
        f" the first in the order {', '.join(TIMELINE_MODES)}. A trial's step has at most two micro-batches."
    )


def phases(names: list[str]) -> list[tuple[int, str]]:
    """(operation, what begins there): each forward and backward, numbered if a step has several, and the optimizer."""
    begins = [(i, name) for i, name in enumerate(names) if name in PHASES]
    begins = [now for before, now in zip([(0, ""), *begins], begins) if now[1] != before[1]]
    rounds = [name for _, name in begins]
    several = rounds.count("backward") > 1
    return [
        (i, f"{name} {rounds[: n + 1].count(name)}" if several and name != "optimizer" else name)
        for n, (i, name) in enumerate(begins)
    ]


def _timeline(summary: dict[str, Any], memory: dict[str, Any]) -> Figure:
    names = timeline_modes(memory["modes"], summary)
    tops = [memory["modes"][name]["peak_device_bytes"] for name in names]
    unit, unit_name = _unit(max(tops))
    figure, panels = plt.subplots(
        len(names),
        1,
        figsize=(7.6, 1.2 + 1.55 * len(names)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, name in zip(panels[:, 0], names):
        line = memory["modes"][name]["timeline"]
        x, y = line["operation"], [live / unit for live in line["live_device_bytes"]]
        panel.fill_between(x, y, color="#cfd8e3", linewidth=0)
        panel.plot(x, y, color="black", linewidth=0.9)
        for i, phase in phases(line["phase"]):
            panel.axvline(x[i], color="black", linestyle=":", linewidth=0.9)
            panel.text(x[i], max(tops) / unit * 1.28, f" {phase}", fontsize=7, va="top")
        top = max(range(len(y)), key=y.__getitem__)
        panel.plot(x[top], y[top], "kv", markersize=5)
        where = line["module"][top] or line["phase"][top]
        side = "right" if x[top] > x[-1] * 0.6 else "left"
        panel.annotate(
            f"peak {size(y[top] * unit)}: {where}  ",
            (x[top], y[top]),
            (-6 if side == "right" else 6, 2),
            textcoords="offset points",
            ha=side,
            va="bottom",
            fontsize=7,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
        panel.set_title(name, loc="left", fontsize=9, pad=3)
        panel.set_ylabel(unit_name)
    panels[0, 0].set_ylim(0, max(tops) / unit * 1.3)
    panels[-1, 0].set_xlim(left=0)
    panels[-1, 0].set_xlabel("operation of the step, in order")
    what = f"{count(memory['size'])} {'tokens' if summary['axis'] == 'seq_length' else 'samples'}"
    figure.suptitle(f"Live device memory over one step at {what}\n{_where(summary)}", x=0.01, ha="left", fontsize=10)
    return figure
