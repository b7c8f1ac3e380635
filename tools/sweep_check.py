"""The sweep that is published for a GPU, sized to end within eight minutes, and the same in small for a CPU."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import summary
from tools.recommend import longest_of
from training.schema import ROOT

# Adam's state of 1.3B parameters alone takes about 27 GiB without offload: within 24 GiB no length fits at all.
GPU = (
    *("gpt-1.3b", "--budget", "32GiB", "--modes", "none full full+attention full+offload", "--granularity", "1024"),
    *("micro_batch_size=1", "global_batch_size=2", "sweep.minutes=6"),
)
SMALL = (
    *("quickstart", "--budget", "24MiB", "--modes", "none full", "--granularity", "64"),
    *("model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=2", "model.ffn_hidden_size=128"),
    *("sweep.attention=[sdpa]", "sweep.minutes=0.01"),
)
PLAN_TOLERANCE = 0.05  # a longest context may be so far from the planned one; on a CPU it is the same


def check(out: Path, small: bool) -> dict[str, Any]:
    """Sweep into `out`; passed when every mode has a boundary and each is where it was planned."""
    command = [sys.executable, str(ROOT / "tools" / "sweep.py"), *(SMALL if small else GPU), "--out", str(out)]
    start_s = time.monotonic()
    code = subprocess.run(command, check=False).returncode
    record: dict[str, Any] = {"check": "sweep", "seconds": time.monotonic() - start_s, "exit_code": code}
    if code:
        return record | {"passed": False}
    found = summary.read(out)
    tolerance = 0.0 if small else PLAN_TOLERANCE
    off = {}
    for name, mode in found["modes"].items():
        longest, planned = longest_of(found, name), mode["predicted_longest_context"]
        off[name] = abs(longest / planned - 1) if planned else 1.0
    worst = max(off.values())
    return record | {"worst_plan_error": worst, "trials": found["trials"], "passed": worst <= tolerance}


if __name__ == "__main__":
    told = check(Path(sys.argv[1]), small="--small" in sys.argv)
    print(told)
    sys.exit(not told["passed"])
