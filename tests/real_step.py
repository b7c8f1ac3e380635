"""Runs real optimizer steps of a recipe on random tokens and prints what the meter saw, for tests of the planner.

python tests/real_step.py RECIPE.yaml [key=value ...]     (a process for each rank; RANK and WORLD_SIZE tell)
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from training import build, world
from training.engine import make_engine
from training.memory import Meter
from training.recipe import load

STEPS = 3


def main(arguments: list[str]) -> None:
    recipe = load(arguments[0], arguments[1:])
    here = world.join()
    generator = torch.Generator().manual_seed(here.rank)
    shape = (recipe.micro_batch_size, recipe.seq_length)
    steps = []
    with warnings.catch_warnings(), Meter(device=here.device) as meter:
        warnings.simplefilter("ignore")
        model = build.build_model(recipe, recipe.data.tokenizer_vocab_size, here.device)
        engine = make_engine(recipe, model, here)
        meter.track(model)
        for _ in range(STEPS):
            batches = [
                tuple(torch.randint(0, model.config.vocab_size, shape, generator=generator) for _ in range(2))
                for _ in range(engine.accumulation)
            ]
            meter.reset_peak()
            start_bytes = meter.live_bytes
            engine.train_step(batches, 1e-3, meter)
            steps.append(
                {
                    "start_bytes": start_bytes,
                    "peak_device_bytes": meter.peak_bytes,
                    "after_forward_device_bytes": meter.after_forward_bytes,
                    "peak_host_bytes": meter.peak_host_bytes,
                    "peak_op": meter.peak_op,
                    "breakdown_bytes": meter.breakdown_bytes,
                }
            )
    if here.is_main:
        print("RESULT " + json.dumps(steps[-1]), flush=True)
    world.leave()


if __name__ == "__main__":
    main(sys.argv[1:])
