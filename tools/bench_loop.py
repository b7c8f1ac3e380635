"""What the training loop adds around forward, backward and the optimizer step: data, meter, metrics. Wanted: <= 3%.

The same engine makes steps in turn bare and as train.py makes them; the ratio is of medians, in CPU time (which a
busy neighbour does not inflate) and in wall time.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training import build, data, world
from training.engine import make_engine
from training.memory import Meter
from training.metrics import Metrics, Progress
from training.recipe import load
from training.record import Tally

LENGTH, ROUNDS, STEPS = 2048, 10, 1


def main() -> int:
    recipe = load(
        "quickstart",
        [f"seq_length={LENGTH}", "budget=null", "model.attention=sdpa", "micro_batch_size=1", "global_batch_size=1"],
    )
    dataset = data.Dataset(data.prepare(recipe.data))
    here = world.join()
    model = build.build_model(recipe, dataset.vocab_size)
    engine = make_engine(recipe, model, here)
    batches = data.Batches(dataset, "train", recipe.seq_length, recipe.micro_batch_size, recipe.seed)
    fixed = [batches.batch(0)]
    times: dict[str, list[tuple[float, float]]] = {"bare": [], "loop": []}
    with tempfile.TemporaryDirectory() as folder, Metrics(Path(folder), 0, warn=print) as log:
        for round_ in range(ROUNDS + 1):
            for name, values in times.items():
                if name == "bare":
                    start = clocks()
                    for _ in range(STEPS):
                        engine.train_step(fixed, 1e-4)
                    spent = since(start)
                else:
                    with Meter(device=here.device) as meter, Progress(10**6, show=False) as progress:
                        meter.track(model, engine.optimizer)
                        tally = Tally(recipe, here, meter)
                        tally.start(model, build.layer_modes(recipe))
                        start = clocks()
                        for step in range(STEPS):
                            result = engine.train_step([batches.batch(round_ * STEPS + step)], 1e-4, meter)
                            tally.count(step, result)
                            record = tally.record(result, 1e-4)
                            log.write(record)
                            progress.show(record, left_s=1.0)
                        spent = since(start)
                if round_:  # the first warms up
                    values.append(spent)
    for i, clock in enumerate(("CPU time", "wall time")):
        bare, loop = (statistics.median(value[i] for value in times[name]) / STEPS for name in ("bare", "loop"))
        print(f"{clock:<10}bare {bare:.4f} s  loop {loop:.4f} s  ratio {loop / bare:.3f}  (a step of {LENGTH} tokens)")
    world.leave()
    return 0


def clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def since(start: tuple[float, float]) -> tuple[float, float]:
    now = clocks()
    return now[0] - start[0], now[1] - start[1]


if __name__ == "__main__":
    sys.exit(main())
