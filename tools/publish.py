"""Publishing a sweep: a dated folder under results/, and its recommendation at the end of results/DECISIONS.md."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from tools import recommend, summary
from tools.words import within
from training.records import read_object
from training.schema import ROOT

HELP = "copy the sweep to results/<date>-<recipe>-<device>/ and append what it recommends to results/DECISIONS.md"
RECORDS = ("report.md", "summary.json", "trials.jsonl", "memory.json", "recipe.yaml", "environment.json")
HEAD = """# Decisions

What was measured, what follows from it, and what would change it; newest last. Written by `make sweep PUBLISH=1` and
by hand.
"""


def publish(folder: Path, results: Path = ROOT / "results") -> Path:
    """The sweep's records and pictures in a dated folder, replaced if it is there; its decision appended, once."""
    found, environment = summary.read(folder), read_object(folder / "environment.json")
    date = environment["time"][:10]
    kind = "cpu" if found["cuda"] is None else re.sub(r"[^a-z0-9]+", "-", found["device"].lower()).strip("-")
    axis = "" if found["axis"] == "seq_length" else "-micro-batch"
    target = results / f"{date}-{found['recipe']}-{kind}{axis}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in [*(folder / name for name in RECORDS), *folder.glob("*.png")]:
        if file.exists():
            shutil.copyfile(file, target / file.name)
    decisions = results / "DECISIONS.md"
    text = decisions.read_text(encoding="utf-8") if decisions.exists() else HEAD
    heading = f"## {date}: {found['recipe']} {within(found['budget_bytes'])} on {found['device']}{axis}"
    kept = [part for part in re.split(r"(?m)^(?=## )", text) if not part.startswith(heading + "\n")]
    decisions.write_text("".join(kept).rstrip() + "\n\n" + _decision(heading, target.name, found), encoding="utf-8")
    return target


def _decision(heading: str, name: str, found: dict[str, Any]) -> str:
    lines = "\n".join(f"- {line}" for line in recommend.lines(found))
    axis = "context" if found["axis"] == "seq_length" else "micro-batch"
    return f"""{heading}

{lines}

Evidence: [{name}]({name}/report.md), {found["trials"]} trials; torch {found["torch"]}, deepspeed {found["deepspeed"]},
code {found["code"]}.

What would change it: another budget or device; a longest {axis} that moves by a granule ({found["granularity"]}) or
speeds that change places, which `make compare` shows for a newer sweep; another torch or deepspeed.
"""
