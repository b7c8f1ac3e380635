"""What `recompute: auto` and `{plan: FILE}` come to in a run: a plan before the model, checked by the first step.

A plan that was made in a run's folder is used again when the run is continued. A first step that runs out of memory
changes the plan, not the weights: the run starts once more with the difference taken into account.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from model import tiling
from model.gpt import GPTConfig
from training import build, hardware, run
from training.choosing import auto, calibration, compile_budget, layer_plan
from training.choosing.assignment import DoesNotFit
from training.choosing.calibration import Shape
from training.choosing.layer_plan import Plan
from training.memory import Meter
from training.planning.engine_memory import gathers
from training.recipe import Recipe, RecipeError
from training.records import has_shape, read_object
from training.values import Plan as PlanFile
from training.values import size
from training.world import World

Say = Callable[[str], None]

ATTEMPTS = 5  # first steps that may run out of memory
STEP = 0.02  # of the budget, added to what is known to be missing; doubled each time
WORTH_SAYING = 0.05  # of the budget, left over
CORRECTION = "correction.json"


def check(recipe: Recipe, world_size: int) -> None:
    """What can be known before anything is made. Raises RecipeError."""
    if recipe.recompute == "auto" and recipe.budget is None and not torch.cuda.is_available():
        raise recipe.error(
            "budget", "recompute: auto fills a budget, and a CPU has none of its own; write budget: 8GiB (BUDGET=8GiB)"
        )
    if isinstance(recipe.recompute, PlanFile):
        _replayed(recipe)
    elif recipe.recompute != "auto":
        modes = build.layer_modes(recipe)
        if any(mode.offload == "deepspeed" for mode in modes) and gathers(recipe, world_size):
            problem = "DeepSpeed's checkpointing meets weights that ZeRO-3 gave back; write +offload instead"
            raise recipe.error("recompute", problem)
        if modes[0].recompute == "budget" and gathers(recipe, world_size):
            problem = "compiles whole layers, and ZeRO-3 fetches weights in between; use another mode or engine"
            raise recipe.error("recompute", problem)


@dataclass(frozen=True)
class Settled:
    """A recipe as it was written, as it is trained, and the plan between them, if any."""

    written: Recipe
    recipe: Recipe
    plan: Plan | None = None
    attempt: int = 1

    @property
    def is_auto(self) -> bool:
        return self.written.recompute == "auto"

    # -- the first step --------------------------------------------------------------------------------------

    def report(self, measured_bytes: int) -> str:
        """What the first step's peak says of the plan."""
        plan = self.plan
        assert plan is not None
        off = measured_bytes / plan.peak_device_bytes - 1
        left = plan.budget_bytes - measured_bytes
        words = f"plan: measured peak {size(measured_bytes)}, {off:+.1%} from the prediction"
        if left > WORTH_SAYING * plan.budget_bytes:
            words += f"; {size(left)} of the budget ({left / plan.budget_bytes:.0%}) are left: "
            words += plan.next_memory()
        return words

    def after_out_of_memory(self, meter: Meter, here: World, folder: Path, say: Say) -> Settled | None:
        """Another plan when the first step of this one found no memory; None when there is no other.

        With several ranks the others wait in a collective for ever, so nothing can be tried again in this process:
        the correction is left in the run's folder for the next start.
        """
        plan = self.plan
        if plan is None or not self.is_auto or self.attempt >= ATTEMPTS:
            return None
        # The step needed more than the budget; how much more is only known of what forward left behind.
        missing = max(plan.budget_bytes - plan.needed_bytes, meter.after_forward_bytes - plan.after_forward_bytes)
        extra = int(plan.budget_bytes * STEP * 2 ** (self.attempt - 1))
        correction = max(plan.correction_bytes, missing) + extra
        if here.size > 1:
            record = {"correction_bytes": correction, "made_for": plan.made_for.model_dump()}
            run.write_json(folder / CORRECTION, record)
            say("the plan did not fit; the same command starts again with a smaller one")
            return None
        say(
            f"plan: the first step needs more than the budget of {size(plan.budget_bytes)}, not "
            f"{size(plan.needed_bytes)} as predicted; planning again with {size(correction)} less"
        )
        return replace(self, attempt=self.attempt + 1, plan=plan.model_copy(update={"correction_bytes": correction}))


def settle(
    recipe: Recipe,
    vocab_size: int,
    here: World,
    folder: Path,
    say: Say,
    before: Settled | None = None,
) -> Settled:
    """The recipe with modes in place of `auto` or of a plan's file; all ranks call it. `before`: what did not fit.

    Raises RecipeError, and torch.OutOfMemoryError when no plan fits.
    """
    if isinstance(recipe.recompute, PlanFile):
        plan, trained = _replayed(recipe)
        config = GPTConfig(**recipe.gpt_fields(vocab_size))
        made = auto.made_for(recipe, config, here.size, hardware.device_name(here.device))
        for difference in layer_plan.differences(plan, made):
            say(f"warning: the plan was made for {difference}; it need not fit")
        return Settled(recipe, trained, plan)
    if recipe.recompute != "auto":
        return Settled(recipe, _guarded(recipe, vocab_size, here, say))
    budget = _budget(recipe, here)
    problem = text = None
    if here.is_main:
        try:
            text = _made(recipe, vocab_size, here, folder, budget, before).model_dump_json()
        except DoesNotFit as error:
            problem = f"no plan fits in the budget of {size(budget)}: {error}"
        except (ValueError, ImportError) as error:
            raise RecipeError(f"recipe {recipe.name}: {error}") from error
    if problem := here.agree(problem):
        raise torch.OutOfMemoryError(problem)
    plan = Plan.model_validate_json(here.share(text or ""))
    if here.is_main:
        plan.write(folder)
        say(plan.short_text())
    return Settled(recipe, plan.applied_to(recipe), plan, before.attempt if before else 1)


def _guarded(recipe: Recipe, vocab_size: int, here: World, say: Say) -> Recipe:
    """The recipe, whose `budget` mode, if it has one, gives way to another share that peaks lower."""
    modes = build.layer_modes(recipe)
    if modes[0].recompute != "budget":
        return recipe
    config = GPTConfig(**recipe.gpt_fields(vocab_size))
    tiles = tiling.resolve(config, **recipe.tiles.model_dump())
    shape = Shape(config, tiles, build.DTYPES[recipe.precision], recipe.micro_batch_size, recipe.seq_length)
    name = ""
    if here.is_main:
        better, why = compile_budget.guarded(modes[0], shape, config.num_layers, here.device)
        name = str(better)
        if why:
            say(f"warning: {why}")
    return recipe.model_copy(update={"recompute": here.share(name)})


def _budget(recipe: Recipe, here: World) -> int:
    """Bytes that every rank can have: the recipe's, or on a GPU what is free."""
    if here.device.type != "cuda":
        assert recipe.budget_bytes is not None
        return recipe.budget_bytes
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(here.device)[0] + torch.cuda.memory_reserved(here.device)
    free = -int(here.max(-free)[0])
    return free if recipe.budget_bytes is None else min(free, recipe.budget_bytes)


def _made(
    recipe: Recipe, vocab_size: int, here: World, folder: Path, budget_bytes: int, before: Settled | None
) -> Plan:
    config = GPTConfig(**recipe.gpt_fields(vocab_size))
    name = hardware.device_name(here.device)
    cache = calibration.folder(recipe.data.cache_dir)
    place = auto.Place(
        here.device,
        name,
        here.size,
        budget_bytes,
        recipe.host_budget_bytes,
        lambda shape, modes: calibration.times(shape, modes, here.device, cache),
    )
    made = auto.made_for(recipe, config, here.size, name)
    if before is not None and before.plan is not None:
        correction = before.plan.correction_bytes
    else:
        correction = _noted_correction(folder, made)
        earlier = _earlier(folder, recipe, place, made)
        if earlier is not None and earlier.correction_bytes >= correction:
            return earlier
    return auto.find_any(recipe, config, place, correction)


def _earlier(folder: Path, recipe: Recipe, place: auto.Place, made: layer_plan.Made) -> Plan | None:
    """The plan in a run's folder, if it was made for the very same."""
    try:
        plan = layer_plan.read(folder / "plan.json")
    except RecipeError:
        return None
    same = (plan.made_for, plan.budget_bytes, plan.host_budget_bytes) == (made, place.budget_bytes, place.host_bytes)
    return plan if same else None


def _noted_correction(folder: Path, made: layer_plan.Made) -> int:
    record = read_object(folder / CORRECTION)
    known = has_shape(record, {"correction_bytes": (int,)}) and record.get("made_for") == made.model_dump()
    return record["correction_bytes"] if known else 0


def _replayed(recipe: Recipe) -> tuple[Plan, Recipe]:
    """The plan of `recompute: {plan: FILE}` and the recipe with it. Raises RecipeError."""
    assert isinstance(recipe.recompute, PlanFile)
    plan = layer_plan.read(recipe.recompute.plan)
    fields = recipe.gpt_fields(plan.made_for.model["vocab_size"])
    named = tiling.resolve(GPTConfig(**fields), **recipe.tiles.model_dump())
    for name, tile in layer_plan.tiles_of(named).items():
        if tile is not None and tile != plan.tiles[name]:
            raise recipe.error(f"tiles.{name}", f"is {plan.tiles[name]} in the plan; write null, and the plan decides")
    return plan, plan.applied_to(recipe)
