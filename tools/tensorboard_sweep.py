"""A sweep in TensorBoard: a run per mode over the context length, one chart for all, a table, the report's pictures.

<sweep>/tb/<mode>/    scalars sweep/...; the step is the size
<sweep>/tb/report/    pictures, the custom scalar layout, the table of results as text
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tools.recommend import longest_of
from tools.words import GIB

# tag -> (field of a timing, what it is divided by)
TAGS = {
    "sweep/peak_device_gib": ("peak_device_bytes", GIB),
    "sweep/tokens_per_s": ("tokens_per_s", 1),
    "sweep/recompute_overhead": ("overhead", 1),
}
LONGEST = "sweep/longest_context"
LAYOUT = {
    "All modes": {
        "tokens/s against context": ["Multiline", ["sweep/tokens_per_s"]],
        "step time against none": ["Multiline", ["sweep/recompute_overhead"]],
        "peak device memory, GiB": ["Multiline", ["sweep/peak_device_gib"]],
        "longest context": ["Multiline", [LONGEST]],
    }
}


def write(folder: Path, summary: dict[str, Any], figures: dict[str, Figure], table: str = "") -> None:
    """All runs of the sweep in `folder`, anew."""
    from torch.utils.tensorboard import SummaryWriter

    board = folder / "tb"
    shutil.rmtree(board, ignore_errors=True)
    for name, mode in summary["modes"].items():
        with SummaryWriter(str(board / name)) as writer:
            _write_mode(writer, summary, name, mode)
    with SummaryWriter(str(board / "report")) as writer:
        for name, figure in figures.items():
            writer.add_figure(f"report/{name}", figure, close=False)
        writer.add_custom_scalars(LAYOUT)
        if table:
            writer.add_text("results", table)


def _write_mode(writer: Any, summary: dict[str, Any], name: str, mode: dict[str, Any]) -> None:
    from torch.utils.tensorboard.summary import hparams

    longest = longest_of(summary, name)
    settings = {"mode": mode["mode"], "attention": mode["attention"]}
    settings["limited_by"] = mode["limited_by"] or mode["status"]
    for part in hparams(settings, dict.fromkeys([LONGEST, *TAGS])):
        writer.file_writer.add_summary(part)
    for timing in mode["timings"]:
        for tag, (field, unit) in TAGS.items():
            if timing[field] is not None:
                writer.add_scalar(tag, timing[field] / unit, timing[summary["axis"]])
    if mode["status"] == "completed":
        writer.add_scalar(LONGEST, longest, longest)
