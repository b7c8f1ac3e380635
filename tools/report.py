"""report.md and the table in the terminal."""

from __future__ import annotations
from pathlib import Path
import json
from tools import summary


def write(folder: Path, publish: bool = False) -> None:
    pass


def show(folder: Path) -> None:
    for name, m in summary.read(folder)["modes"].items():
        print(name, {k: v for k, v in m.items() if k not in ("timings",)})
        for t in m["timings"]:
            print("   ", t)
