"""Measure the longest context that fits under a budget, for every memory mode, and what each costs: `make sweep`.

Every trial is train.py itself in a fresh process (tools/trials.py). A planner's prediction is tried first, so that
two trials mostly settle a mode: what fits and what does not. Then speeds are measured, mode after mode at the same
lengths. The folder's trials.jsonl is the state: the same command goes on after Ctrl-C, a kill or a reboot.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import launch, machine, processes, publish, summary
from tools.measure import Sweep
from tools.predict import Predictor
from tools.sweep_display import Display
from tools.trials import AXES, Trials, Variant
from tools.words import label, within
from training import data, run
from training.recipe import Recipe, RecipeError, load
from training.schema import ROOT


def variants(recipe: Recipe) -> list[Variant]:
    """Every mode under every attention that the recipe's sweep names."""
    attentions = recipe.sweep.attention or (recipe.model.attention,)
    return [Variant(a, m) for a in dict.fromkeys(attentions) for m in dict.fromkeys(recipe.sweep.modes)]


def prepared(given: argparse.Namespace) -> Recipe:
    """The sweep's recipe: the one named, with everything the command line changes. Raises RecipeError."""
    words = [*given.overrides]
    for key, value in (
        ("budget", given.budget),
        ("host_budget", given.host_budget),
        ("sweep.modes", f"[{', '.join(given.modes.split())}]" if given.modes else None),
        ("sweep.seq_max", given.seq_max),
        ("sweep.granularity", given.granularity),
        ("sweep.steps", given.steps),
    ):
        words += [f"{key}={value}"] if value is not None else []
    gpus, ranks = len(launch.devices()), machine.ranks() if given.processes is None else given.processes
    if ranks < 1 or 0 < gpus < ranks:
        raise RecipeError(f"--processes {ranks}: write 1{f' to {gpus}' if gpus else ' or more'}")
    recipe = load(given.recipe, words)
    recipe.accumulation_steps(ranks)
    if given.gpu:
        if given.budget:
            raise RecipeError("--gpu names a budget: leave out --budget, or --gpu")
        recipe = load(given.recipe, [*words, f"budget={machine.memory_of(given.gpu)}B"])
    elif recipe.budget is None and not machine.has_gpu():
        raise RecipeError(
            "a sweep on a CPU needs a budget: write BUDGET=512MiB, --budget 512MiB, or budget: in the recipe"
        )
    if recipe.sweep.seq_max < recipe.sweep.granularity:
        raise recipe.error("sweep.seq_max", f"is below sweep.granularity = {recipe.sweep.granularity}; write more")
    return recipe


@contextlib.contextmanager
def opened(recipe: Recipe, variants: Sequence[Variant], axis: str, ranks: int | None, folder: Path) -> Iterator[Sweep]:
    """A sweep ready to run in `folder`, which is its own until it is left. Raises RecipeError and DataError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise RecipeError(f"{folder}: {error.strerror}; choose another folder with --out") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(f"another sweep runs in {folder}: wait for it, or choose another with --out") from None
        processes.end_leftovers(folder)
        vocab_size = data.Dataset(data.prepare(recipe.data, show=True)).vocab_size
        run.write_whole(folder / "recipe.yaml", recipe.to_yaml())
        facts = machine.facts(ranks)
        predictor = Predictor(recipe, str(folder / "recipe.yaml"), axis, facts, vocab_size)
        trials = Trials(folder, recipe, facts, predictor.peak)
        run.write_json(folder / "environment.json", run.environment() | facts | {"code": trials.code})
        names = {v: label(v, len({v.attention for v in variants})) for v in variants}
        title = f"{recipe.name}: the largest {axis} {within(recipe.budget_bytes)} on {facts['device']}"
        with Display(title, names, axis) as display:
            try:
                yield Sweep(recipe, variants, trials, predictor, display)
            except (KeyboardInterrupt, OSError):
                display.say("")  # ends the line of a trial that has begun
                raise


def parse(arguments: list[str] | None, text: str, program: str) -> argparse.Namespace:
    """The words that sweeps and gates take."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=program, description=text, formatter_class=raw)
    parser.add_argument("recipe", metavar="RECIPE", help="a name in recipes/, or the path of a YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings of the recipe to change")
    parser.add_argument("--gpu", metavar="NAME", help="take this GPU's memory as the budget")
    parser.add_argument("--budget", metavar="SIZE", help="device memory a run may use, such as 24GiB")
    parser.add_argument("--host-budget", metavar="SIZE", help="host memory that offload may use")
    parser.add_argument("--modes", metavar="'A B'", help="modes to compare; default: the recipe's")
    parser.add_argument("--seq-max", metavar="N", type=int, help="longest length tried, in tokens")
    parser.add_argument("--granularity", metavar="N", type=int, help="lengths tried are multiples of it")
    parser.add_argument("--steps", metavar="N", type=int, help="optimizer steps a length must survive")
    parser.add_argument("--axis", choices=AXES, default=AXES[0], help="what is searched; the other stays as it is")
    parser.add_argument("--processes", metavar="N", type=int, help="ranks; default one per GPU, or one on CPU")
    parser.add_argument("--out", metavar="DIR", type=Path, help="the folder; default sweeps/<recipe name>")
    parser.add_argument("--publish", action="store_true", help=publish.HELP)
    return parser.parse_intermixed_args(arguments)


def ended(work: Callable[[], int]) -> int:
    """The exit code of `work`; of whatever else ends it, told in a line: a setting, SIGTERM or Ctrl-C, a full disk."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return work()
    except (RecipeError, data.DataError) as error:
        print(error, file=sys.stderr)
        return run.USAGE
    except KeyboardInterrupt:
        print("stopped; the same command goes on, finished trials are not repeated", flush=True)
        return run.INTERRUPTED
    except OSError as error:
        where = error.filename2 or error.filename or "a file"
        free = "free some, " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        print(f"{where}: {error.strerror or error}; {free}the same command continues", file=sys.stderr)
        return run.FAILED
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments, __doc__ or "", "sweep.py")
    return ended(lambda: _swept(given))


def _swept(given: argparse.Namespace) -> int:
    recipe = prepared(given)
    default = recipe.name if given.axis == AXES[0] else f"{recipe.name}-{given.axis}"
    folder = given.out or ROOT / "sweeps" / default
    with opened(recipe, variants(recipe), given.axis, given.processes, folder) as sweep:
        sweep.run()
        sweep.display.say("all trials are done; writing summary, pictures and TensorBoard ...")
        summary.write(folder, summary.of(sweep))
    return finish(folder, given.publish)


def finish(folder: Path, publishing: bool) -> int:
    from tools import report  # imports matplotlib and TensorBoard

    report.write(folder)
    report.show(folder)
    if publishing:
        print(f"published in {publish.publish(folder)}")
    return summary.exit_code(summary.read(folder))


if __name__ == "__main__":
    sys.exit(main())
