"""What tiles do to the bytes that are live per token: the table of docs/tiles.md.

    python tools/tiles.py [RECIPE] [key=value ...] [--tokens 1048576]

Traced on fake tensors by the meter, so any model at any length takes seconds and no memory. A row's number is the
growth of the peak from one length to twice that length, per token: weights, gradients and tiles, which do not grow, are
not in it. The peak at `--tokens` with everything in it, and what caused it, is printed for the last row.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model import recompute, tiling
from model.gpt import GPT, GPTConfig
from model.rowwise import rope_table
from training.memory import Meter
from training.recipe import RecipeError, load

LOSS, MLP, ATTENTION = "loss_tile_tokens", "mlp_tile_tokens", "attention_head_groups"
# What is added row by row: name, mode, tiles that are on.
ROWS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("`full`", "full", ()),
    ("`full+offload`", "full+offload", ()),
    ("+ loss tiles", "full+offload", (LOSS,)),
    ("+ MLP tiles", "full+offload", (LOSS, MLP)),
    ("+ attention tiles", "full+offload", (LOSS, MLP, ATTENTION)),
)
TOKENS = 2**20  # long enough that no constant is the peak

Measure = Callable[[GPTConfig, str, dict[str, Any], int], tuple[int, str]]


def layer(config: GPTConfig, mode: str, tiles: dict[str, Any], tokens: int) -> tuple[int, str]:
    """Peak bytes of one layer in forward and backward, its input and its output's gradient included, and the owner."""
    with built(replace(config, num_layers=1), mode, tiles) as model:
        rope = None
        if model.position_embedding is None:
            rope = rope_table(tokens, config.head_dim, config.rope_theta, torch.device("cpu"))
        with Meter(model=model) as meter:
            before = meter.live_bytes
            x = torch.empty(1, tokens, config.hidden_size, requires_grad=True)
            _Rest.apply(model.run_layers(x, rope)).backward()
            return meter.peak_bytes - before, meter.peak_op


def step(config: GPTConfig, mode: str, tiles: dict[str, Any], tokens: int) -> tuple[int, str]:
    """Peak bytes of forward and backward of the whole model, weights and their gradients included, and the owner."""
    with built(config, mode, tiles) as model, Meter(model=model) as meter:
        others = meter.live_bytes - sum(p.nbytes for p in model.parameters())  # of this process, e.g. torch.compile's
        model(*(torch.zeros(1, tokens, dtype=torch.long) for _ in range(2))).backward()
        return meter.peak_bytes - others, meter.peak_op


def per_token(measure: Measure, config: GPTConfig, mode: str, tiles: dict[str, Any], tokens: int = TOKENS) -> float:
    """Bytes that the peak grows by with each token."""
    short, long = (measure(config, mode, tiles, n)[0] for n in (tokens, 2 * tokens))
    return (long - short) / tokens


class _Rest(torch.autograd.Function):
    """The network behind a layer: makes the gradient of the layer's output, and holds nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.like = x.shape, x.dtype
        return x.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.new_empty(ctx.like[0], dtype=ctx.like[1])


@contextmanager
def built(config: GPTConfig, mode: str, tiles: dict[str, Any]) -> Iterator[GPT]:
    """The model in bfloat16, of fake tensors, with its tiles and mode."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = GPT(config)
            tiling.apply(model, **tiles)
            recompute.apply(model, mode)
            yield model
    finally:
        torch.set_default_dtype(dtype)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", nargs="?", default="llama-8b")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--tokens", type=int, default=2**20, help="length of the step whose peak is printed")
    options = parser.parse_args(arguments)
    try:
        recipe = load(options.recipe, options.overrides)
        fields = recipe.gpt_fields()
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 2
    if fields["position_embedding"] == "learned":
        fields["max_position_embeddings"] = max(options.tokens, 2 * TOKENS)
    config = GPTConfig(**fields)
    h = config.hidden_size
    print(f"{recipe.name}: {config.num_layers} layers, h = {h}, bfloat16; live bytes per token\n")
    print("| tiles and mode | one layer | whole step |\n|---|---:|---:|")
    for name, mode, on in ROWS:
        tiles = dict.fromkeys(on, "auto")
        numbers = [per_token(measure, config, mode, tiles) / h for measure in (layer, step)]
        print(f"| {name} | {numbers[0]:.2f}h | {numbers[1]:.2f}h |", flush=True)
    peak, owner = step(config, mode, tiles, options.tokens)
    print(f"\nA step at {options.tokens:,} tokens, last row: peak {peak / 2**30:.2f} GiB, caused by {owner}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
