"""The sweep against the batch-finder package: same model, budget, axis and mode; answer, trials and seconds of both.

Both must find the longest context of the quickstart recipe to the token. batch-finder takes a module and bisects; so
that it asks the same question, its module is the recipe's model with engine and meter, and a forward pass of it is two
optimizer steps. What a trial costs is left to each: batch-finder's is a spawned Python, ours the whole of train.py
under the launcher.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tools import summary
from tools.trials import ROOT
from training.recipe import load

MODE = "full"
BUDGET = os.environ.get("WATERLINE_BENCH_BUDGET", "256MiB")  # the larger, the less a process's start weighs
SETTINGS = (
    *(f"recompute={MODE}", f"budget={BUDGET}", "model.attention=unfused"),
    *("global_batch_size=1", "engine.name=torch"),
)
LIMIT = 1 / 3  # of batch-finder's time
TRIALS = "WATERLINE_BENCH_TRIALS"  # file to which every trial of batch-finder adds a line


class TwoSteps(torch.nn.Module):
    """The recipe under its budget as a module: a call of `tokens`, int64 [B, T], trains two steps on them."""

    def __init__(self) -> None:
        super().__init__()
        from training import build, world
        from training.engine import make_engine
        from training.memory import Meter

        self.recipe = load("quickstart", SETTINGS)
        here = world.join()
        self.meter = Meter(budget_bytes=self.recipe.budget_bytes).__enter__()
        self.engine = make_engine(self.recipe, build.build_model(self.recipe), here)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with open(os.environ[TRIALS], "a") as file:
            file.write(f"{tokens.shape[1]}\n")
        for _ in range(2):
            self.engine.train_step([(tokens, tokens)], 1e-4, self.meter)
        return torch.zeros((), requires_grad=True)


def theirs(folder: Path) -> dict[str, Any]:
    from batch_finder import find_max_minibatch

    file = folder / "trials"
    os.environ[TRIALS] = str(file)
    found = find_max_minibatch(TwoSteps, input_shapes={"tokens": "(b, t), int", "#constraints": "b=1, t=-1"})
    return {"longest": found, "trials": len(file.read_text().splitlines())}


def ours(folder: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tools" / "sweep.py"), "quickstart", *SETTINGS, "--modes", MODE]
    command += ["--granularity", "1", "sweep.attention=[]", "sweep.minutes=1e-3", "--out", str(folder / "sweep")]
    subprocess.run(command, check=True, stdout=sys.stderr)
    found = summary.read(folder / "sweep")["modes"][MODE]
    return {"longest": found["longest_context"], "trials": found["trials"]}


def measured(who: str) -> dict[str, Any]:
    """One of the two, in a fresh process; its answer and the seconds it took."""
    start_s = time.monotonic()
    done = subprocess.run([sys.executable, __file__, "--only", who], stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) | {"seconds": time.monotonic() - start_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({"ours": ours, "theirs": theirs}[given.only](Path(folder))))
        return 0
    try:
        import batch_finder  # noqa: F401
    except ImportError:
        print("batch-finder is not installed, so there is nothing to compare with: pip install batch-finder")
        return 0
    from training import data

    data.prepare(load("quickstart", SETTINGS).data)  # neither pays for it
    found = {who: measured(who) for who in ("theirs", "ours")}
    print(f"longest context of quickstart, mode {MODE}, within {BUDGET}, to the token:")
    for who, name in (("theirs", "batch-finder"), ("ours", "waterline")):
        told = found[who]
        print(f"  {name:13} {told['longest']} tokens  {told['trials']} trials  {told['seconds']:.0f} s")
    share = found["ours"]["seconds"] / found["theirs"]["seconds"]
    same = found["ours"]["longest"] == found["theirs"]["longest"]
    good = same and share <= LIMIT
    answer = "the same answer" if same else "ANOTHER ANSWER"
    print(f"{'pass' if good else 'FAIL'}: {answer} in {share:.0%} of its time (at most {LIMIT:.0%})")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
