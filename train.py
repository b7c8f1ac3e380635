"""Train a GPT as a recipe says.

The DeepSpeed launcher starts this program once for every rank (`make train RECIPE=...`); by itself,
`python train.py RECIPE`, it is a run with one rank. Records, TensorBoard events and checkpoints go to the run's
folder, and the same command continues a run that was stopped. docs/training.md explains folder and exit codes.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from model.gpt import GPT
from training import build, checkpoint, data, hardware, run, world
from training.choosing.settle import Settled, check, settle
from training.engine import make_engine
from training.memory import Meter
from training.metrics import Metrics, Progress, read
from training.optimizer import learning_rate
from training.planning import planner
from training.recipe import Recipe, RecipeError, check_runs_on, documentation, load
from training.record import Tally
from training.run import RunError, RunFolder
from training.schema import ROOT

TIMELINE_POINTS = 2000  # of memory.json


def train(
    settled: Settled, dataset: data.Dataset, here: world.World, folder: RunFolder, tally: Tally, progress: Progress
) -> int:
    """The whole run, from prepared data to result; returns the exit code."""
    recipe, say, meter = settled.recipe, progress.say, tally.meter

    # Any micro-batch can be had by its number.
    cut = (recipe.seq_length, recipe.micro_batch_size, recipe.seed, here.rank, here.size)
    batches = data.Batches(dataset, "train", *cut)
    validation = data.Batches(dataset, "validation", *cut)

    # The model with its tiles and memory modes, and the engine around it.
    torch.manual_seed(recipe.seed)  # the same weights on every rank
    model = built_model(recipe, dataset, here, say)
    torch.manual_seed(recipe.seed + 1 + here.rank)  # but dropout of its own on each
    engine = make_engine(recipe, model, here)
    meter.track(model, engine.optimizer)

    # The newest good checkpoint, if any. What a step depends on is in it, or follows from the step's number.
    layout = engine.layout() | {"data": dataset.folder.name}
    saved = checkpoint.load_latest(folder.checkpoints, world=here, layout=layout, warn=say)
    start = 0
    if saved:
        start = engine.step_number = saved["step"]
        engine.load_state(saved["state"])
        checkpoint.set_random_state(saved["random"], here.device)
        del saved
        say(f"continuing after step {start}")

    with Metrics(folder.path, start, warn=say, write=here.is_main) as log, run.Stopper() as stopper:
        tally.start(model, build.layer_modes(recipe), read(log.path))
        for step in range(start + 1, recipe.steps + 1):
            first = (step - 1) * engine.accumulation
            micro_batches = [batches.batch(first + i) for i in range(engine.accumulation)]
            lr = learning_rate(recipe, step)
            try:
                result = engine.train_step(micro_batches, lr, meter)
            except torch.OutOfMemoryError:
                engine.release()  # another plan may be tried
                raise
            tally.count(step, result)
            if tally.first_step_s is None:
                build.check_mode_works(model, recipe)
                if settled.plan:
                    say(settled.report(int(here.max(meter.peak_bytes)[0])))
                tally.first_step_s = run.age_s()
                say(f"first step done {tally.first_step_s:.1f} s after the start")

            last = step == recipe.steps
            if last or is_due(step, recipe.log.every_steps):
                record = tally.record(result, lr)
                log.write(record)
                progress.show(record, left_s=(recipe.steps - step) * record["step_time_s"])

            if recipe.evaluation.batches and (last or is_due(step, recipe.evaluation.every_steps)):
                count = min(len(validation), max(1, recipe.evaluation.batches // here.size))
                tally.val_loss = engine.eval_loss(validation.batch(i) for i in range(count))
                tally.see_peaks()
                log.write({"step": step, "val_loss": tally.val_loss})
                say(f"step {step}: validation loss {tally.val_loss:.3f}")
                tally.resume_clock()

            stopped = any(here.max(stopper.signal))
            if recipe.checkpoint.keep and (last or stopped or is_due(step, recipe.checkpoint.every_steps)):
                state = {"step": step, "state": engine.state(), "random": checkpoint.random_state(here.device)}
                log.flush()  # first, so that a resumed run has every record up to its checkpoint
                keep = recipe.checkpoint.keep
                checkpoint.save(folder.checkpoints, step, state, world=here, layout=layout, keep=keep)
                tally.resume_clock()
            if stopped and not last:
                saved_too = " and saved" if recipe.checkpoint.keep else ""
                say(f"stopped{saved_too} after step {step}; the same command continues from what was saved last")
                return run.INTERRUPTED

    if here.is_main:
        if tally.memory:
            run.write_json(folder.path / "memory.json", tally.memory)
        folder.write_result(tally.result("completed"))
    if tally.val_loss is not None:
        say(
            f"validation loss {tally.val_loss:.3f} nats per token; the unigram baseline (how often each token occurs, "
            f"and nothing else) is {dataset.unigram_entropy():.3f}"
        )
    logdir = "" if folder.path.parent == ROOT / "runs" else f" LOGDIR={folder.path}"
    say(f"finished {recipe.steps} steps; everything is in {folder.path}; `make tensorboard{logdir}` shows the curves")
    return 0


def is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0


def prepared_data(recipe: Recipe, here: world.World) -> data.Dataset:
    problem, path = None, Path()
    try:
        path = data.prepare(recipe.data, show=here.is_main)
    except data.DataError as error:
        problem = str(error)
    if problem := here.agree(problem):
        raise RecipeError(problem)
    return data.Dataset(path)


def built_model(recipe: Recipe, dataset: data.Dataset, here: world.World, say: Callable[[str], None]) -> GPT:
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", UserWarning)
        model = build.build_model(recipe, dataset.vocab_size, here.device)
    for text in dict.fromkeys(str(note.message) for note in notes):
        say(f"warning: {text}")
    return model


def instruments(recipe: Recipe, here: world.World) -> tuple[Meter, Tally]:
    meter = Meter(
        device=here.device,
        budget_bytes=recipe.budget_bytes,
        host_budget_bytes=recipe.host_budget_bytes,
        timeline=TIMELINE_POINTS if recipe.log.memory else 0,
        operations=True if recipe.log.memory else None,
    )
    return meter, Tally(recipe, here, meter)


def claim(folder: RunFolder, recipe: Recipe, here: world.World) -> bool:
    """Take the run folder for this recipe, and describe the machine in it. False: that run is finished."""
    problem = finished = None
    if here.is_main:
        try:
            finished = folder.open(recipe)
        except (RecipeError, RunError) as error:
            problem = str(error)
    if problem := here.agree(problem):
        raise RecipeError(problem)
    if any(here.max(finished is not None)):
        if here.is_main:
            print(f"{folder.path}: {recipe.steps} steps are done; remove it, or name another (RUN_DIR=, --run-dir)")
        return False
    if here.is_main:
        folder.write_environment(
            device=hardware.device_name(here.device),
            cpu=hardware.cpu_name(),
            cuda=torch.version.cuda,
            world_size=here.size,
            threads=torch.get_num_threads(),
        )
    return True


def parse(arguments: list[str]) -> argparse.Namespace:
    fields = "\n".join(f"  {key} ({kind}; {default})\n      {text}" for key, kind, default, text in documentation())
    parser = argparse.ArgumentParser(
        prog="train.py",
        description=__doc__,
        epilog=f"settings of a recipe (type; default):\n{fields}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a name in recipes/, or the path of a YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings of the recipe to change")
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="the run's folder; default runs/<name>")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the launcher adds it
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    run.end_with_launcher()
    rank, size, _ = world.place()
    meter = None
    try:
        recipe = load(given.recipe, given.overrides)
        recipe.accumulation_steps(size)
        check(recipe, size)
        here = world.join()
        check_runs_on(recipe, here.device.type)
        folder = RunFolder(given.run_dir or ROOT / "runs" / recipe.name)
        if not claim(folder, recipe, here):
            return 0
        meter, tally = instruments(recipe, here)
        # Data, tokenised once by whoever comes first.
        dataset = prepared_data(recipe, here)
        settled = None
        while True:
            with Progress(recipe.steps, show=here.is_main) as progress:
                # What `recompute: auto` means here; a plan whose first step finds no memory is made anew.
                settled = settle(recipe, dataset.vocab_size, here, folder.path, progress.say, before=settled)
                with meter:
                    try:
                        return train(settled, dataset, here, folder, tally, progress)
                    except torch.OutOfMemoryError:
                        done = tally.first_step_s is not None
                        again = None if done else settled.after_out_of_memory(meter, here, folder.path, progress.say)
                        if again is None:
                            raise
            settled = again
            gc.collect()  # the model and engine of the attempt
            meter, tally = instruments(recipe, here)
    except RecipeError as error:
        if rank == 0:
            print(error, file=sys.stderr)
        return run.USAGE
    except KeyboardInterrupt:
        return run.INTERRUPTED
    except Exception as error:
        if meter is None:
            raise
        code = run.report_failure(error, folder, tally.result)
        if code == run.OUT_OF_MEMORY and here.is_main and recipe.log.advice:
            print(f"plan: {planner.advice(recipe, world_size=size) or 'nothing known'}", file=sys.stderr)
        return code


if __name__ == "__main__":
    world.end_process(main(sys.argv[1:]))
