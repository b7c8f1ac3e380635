"""Make real optimizer steps of a recipe on random tokens and print what the meter saw: what a plan is compared with.

    python tools/real_step.py RECIPE key=value ... -- key=value ... -- ...

Each group behind `--` is a case of its own, on top of the first words; one JSON line per case. RANK and WORLD_SIZE
tell of other ranks, as a launcher sets them. DeepSpeed's ZeRO-3 exchanges functions of torch for good: no other case
should come after it.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tools.launch import free_port
from training import build, world
from training.engine import make_engine
from training.memory import Meter
from training.recipe import Recipe, load

STEPS = 3  # a first one may differ: DeepSpeed learns the order of parameters in it


def real_step(recipe: Recipe, here: world.World, steps: int = STEPS) -> dict[str, Any]:
    """Bytes of the last of a few steps, without what was there before the model."""
    generator = torch.Generator().manual_seed(here.rank)
    shape = (recipe.micro_batch_size, recipe.seq_length)
    result: dict[str, Any] = {}
    with warnings.catch_warnings(), Meter(device=here.device) as meter:
        warnings.simplefilter("ignore")
        before_bytes = meter.live_bytes
        before_host_bytes = meter.host_bytes
        model = build.build_model(recipe, recipe.data.tokenizer_vocab_size, here.device)
        engine = make_engine(recipe, model, here)
        meter.track(model)
        for _ in range(steps):
            batches = [
                tuple(torch.randint(0, model.config.vocab_size, shape, generator=generator) for _ in range(2))
                for _ in range(engine.accumulation)
            ]
            meter.reset_peak()
            engine.train_step(batches, 1e-3, meter)  # type: ignore[arg-type]
        result = {
            "peak_device_bytes": meter.peak_bytes - before_bytes,
            "after_forward_device_bytes": meter.after_forward_bytes - before_bytes,
            "peak_host_bytes": meter.peak_host_bytes - before_host_bytes,
            "peak_op": meter.peak_op,
        }
    return result


def cases(words: Sequence[str]) -> Iterator[list[str]]:
    """The groups of words between `--`, each behind those before the first one."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            groups.append([])
        else:
            groups[-1].append(word)
    common, *others = groups
    for group in others or [[]]:
        yield common + group


def run(recipe: str, words: Sequence[str], ranks: int = 1, timeout_s: float = 600.0) -> list[dict[str, Any]]:
    """This program in processes of its own; rank 0's results. Raises RuntimeError with the error's last lines."""
    port = free_port()
    processes = []
    for rank in range(ranks):
        environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, str(Path(__file__).resolve()), recipe, *words]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        ends = (f"exit code {p.returncode}: {error[-1000:]}" for p, (_, error) in zip(processes, outputs))
        raise RuntimeError("\n".join(ends))
    return [json.loads(line[7:]) for line in outputs[0][0].splitlines() if line.startswith("RESULT ")]


def main(arguments: Sequence[str]) -> None:
    recipe, *words = arguments
    here = world.join()
    for case in cases(words):
        result = real_step(load(recipe, case), here)
        gc.collect()
        if here.is_main:
            print("RESULT " + json.dumps(result), flush=True)
    world.leave()


if __name__ == "__main__":
    main(sys.argv[1:])
