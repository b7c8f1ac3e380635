"""What tiles cost in time on this machine's CPU: medians of interleaved runs, untiled and tiled, in CPU seconds.

    python tools/tiles_speed.py [--tokens 8192] [--rounds 5] [loss mlp attention]

One thread and its CPU time, so that a busy machine matters little. MLP and attention: forward and backward of a layer
under `none` and `full`; loss: forward and backward of the head at V = 50,257, and the peak memory of both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from model import recompute, tiling
from model.gpt import GPT, GPTConfig
from model.rowwise import rope_table
from tools.tiles import built
from training.memory import Meter

LLAMA = GPTConfig(1, 512, 8, 256, num_query_groups=8, ffn_hidden_size=1792)
GPT2 = GPTConfig(
    1,
    512,
    8,
    256,
    max_position_embeddings=2**17,
    normalization="layernorm",
    position_embedding="learned",
    activation="gelu",
    bias=True,
)
VOCABULARY = 50257
MEMORY_TOKENS = 131_072

Run = Callable[[], None]


def medians(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each, one after the other in every round, after a round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            start = time.thread_time()
            run()
            if i:
                times[name].append(time.thread_time() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def layer_runs(config: GPTConfig, tokens: int, mode: str, tiles: dict[str, Any]) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    x = torch.randn(1, tokens, config.hidden_size)
    rope = None
    if config.position_embedding == "rope":
        rope = rope_table(tokens, config.head_dim, config.rope_theta, x.device)
    for name, on in (("untiled", {}), ("tiled", tiles)):
        model = GPT(config)
        tiling.apply(model, **on)
        recompute.apply(model, mode)

        def run(model: GPT = model) -> None:
            model.run_layers(x.clone().requires_grad_(), rope).sum().backward()

        runs[name] = run
    return runs


def loss_runs(tokens: int) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    hidden, targets = torch.randn(1, tokens, 512), torch.randint(VOCABULARY, (1, tokens))
    for name, on in (("untiled", None), ("tiled", "auto")):
        model = GPT(GPTConfig(1, 512, 8, VOCABULARY))
        tiling.apply(model, loss_tile_tokens=on)  # type: ignore[arg-type]

        def run(model: GPT = model) -> None:
            model.head.weight.grad = None
            model.head(hidden.clone().requires_grad_(), targets).backward()

        runs[name] = run
    return runs


def loss_peak(tokens: int, loss_tile_tokens: Any) -> int:
    """Bytes that forward and backward of the head take at the most beside its weight and input, on fake tensors."""
    config = GPTConfig(1, 512, 8, VOCABULARY)
    with built(config, "none", {"loss_tile_tokens": loss_tile_tokens}) as model:
        hidden, targets = torch.empty(1, tokens, 512, requires_grad=True), torch.zeros(1, tokens, dtype=torch.long)
        with Meter(model=model) as meter:
            before = meter.live_bytes
            model.head(hidden, targets).backward()
            return meter.peak_bytes - before


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", help="of loss, mlp and attention; all without any")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    known = {"loss", "mlp", "attention"}
    if unknown := set(options.parts) - known:
        parser.error(f"unknown {', '.join(sorted(unknown))}; write some of {', '.join(sorted(known))}")
    parts = options.parts or sorted(known)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{options.tokens:,} tokens, h = 512, float32, {options.rounds} rounds\n")
    print("| tiles | model | mode | untiled s | tiled s | ratio |\n|---|---|---|---:|---:|---:|")
    kinds: dict[str, dict[str, Any]] = {
        "mlp": {"mlp_tile_tokens": "auto"},
        "attention": {"attention_head_groups": "auto"},
    }
    for part in parts:
        if part == "loss":
            _print("loss", f"V = {VOCABULARY:,}", "", medians(loss_runs(options.tokens), options.rounds))
            continue
        for name, config in (("llama", LLAMA), ("gpt", GPT2)):
            for mode in ("none", "full"):
                runs = layer_runs(config, options.tokens, mode, kinds[part])
                _print(part, name, mode, medians(runs, options.rounds))
    if "loss" in parts:
        untiled, tiled = (loss_peak(MEMORY_TOKENS, on) for on in (None, "auto"))
        print(f"\nPeak of the loss at {MEMORY_TOKENS:,} tokens, bfloat16: untiled {untiled / 2**20:,.0f} MiB, ", end="")
        print(f"tiled {tiled / 2**20:,.0f} MiB, {untiled / tiled:.1f} times less")
    return 0


def _print(part: str, name: str, mode: str, taken: dict[str, float]) -> None:
    untiled, tiled = taken["untiled"], taken["tiled"]
    print(f"| {part} | {name} | {mode} | {untiled:.2f} | {tiled:.2f} | {tiled / untiled:.3f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
