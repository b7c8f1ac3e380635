"""From a recipe to the model that is trained: what is computed, then what is remembered of it, in this order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from model import recompute, tiling
from model.gpt import GPT, GPTConfig
from model.modes import Mode, parse_layers
from training.recipe import Recipe, RecipeError
from training.run import USAGE, RunError
from training.values import Plan

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def layer_modes(recipe: Recipe) -> list[Mode]:
    """One memory mode per layer, as `recompute` asks for it. Raises RecipeError."""
    if recipe.recompute == "auto" or not isinstance(recipe.recompute, (str, tuple)):
        raise recipe.error("recompute", "stands for a plan, which is not made here (training/choosing/settle.py)")
    return parse_layers(recipe.recompute, recipe.model.num_layers)


def mode_name(recipe: Recipe) -> str:
    """The mode's name; of a list, its distinct names in order of first use; auto, or plan for a file of one."""
    if recipe.recompute == "auto" or isinstance(recipe.recompute, Plan):
        return "auto" if recipe.recompute == "auto" else "plan"
    return " ".join(dict.fromkeys(str(mode) for mode in layer_modes(recipe)))


def check_mode_works(model: GPT, recipe: Recipe) -> None:
    """After a first step: RunError when the mode did nothing of what its name promises."""
    try:
        recompute.require_active(model, layer_modes(recipe))
    except RuntimeError as error:
        raise RunError(str(error), USAGE) from None


def build_model(
    recipe: Recipe, tokenizer_vocab_size: int | None = None, device: torch.device | str | None = None
) -> GPT:
    """The recipe's model with its tiles and memory modes. Raises RecipeError."""
    config = GPTConfig(**recipe.gpt_fields(tokenizer_vocab_size))
    try:
        # Made in its dtype and in its place: a float32 copy on the way would need twice the memory.
        with _default_dtype(DTYPES[recipe.precision]), torch.device(device or "cpu"):
            model = GPT(config)
        tiling.apply(model, **recipe.tiles.model_dump())
        recompute.apply(model, layer_modes(recipe), host_budget_bytes=recipe.host_budget_bytes)
    except (ValueError, ImportError) as error:
        raise RecipeError(f"recipe {recipe.name}: {error}") from error
    return model


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
