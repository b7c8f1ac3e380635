"""How far the planner can be trusted: plans beside real steps, sweeps and published numbers, in docs/accuracy.md.

    python tools/accuracy.py [--out docs/accuracy.md]

Real steps are small and run on the CPU, DeepSpeed's in processes of their own. Takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from model.gpt import GPTConfig
from model.modes import NAMED, parse_layers
from tools.real_step import real_step, run
from training import world
from training.planning import planner
from training.planning.planner import Device, Planner
from training.planning.trace import Job, trace
from training.recipe import ROOT, Recipe, load

CPU = Device("cpu", "cpu", None)
SMALL = (
    *("micro_batch_size=2", "global_batch_size=4", "model.num_layers=3", "model.hidden_size=64"),
    *("model.num_attention_heads=4", "model.ffn_hidden_size=160", "data.tokenizer_vocab_size=300", "budget=null"),
)
STYLES = {
    "GPT-2": (
        *("model.normalization=layernorm", "model.position_embedding=learned", "model.activation=gelu"),
        *("model.bias=true", "model.hidden_dropout=0.1"),
    ),
    "Llama": ("model.num_query_groups=2",),
}
LENGTHS = (96, 384)
ENGINE_MODES, DEEPSPEEDS = ("none", "full", "full+attention+offload"), "full+deepspeed_offload"
NUMBERS = ("peak_device_bytes", "after_forward_device_bytes", "peak_host_bytes")
ENGINES = ("zero0", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload", "zero3-offload-params")
# ALST (arXiv 2506.13996): Llama-3.1-8B on one H100 of 80 GB, "500K" tokens: everything recomputed, layer inputs and
# optimizer in host memory, loss and MLP in tiles; attention is not cut into groups of heads.
ALST_TOKENS = 500_000
ALST = (
    *("tiles.attention_head_groups=null", "global_batch_size=1", "recompute=full+offload"),
    "engine.deepspeed_config={config}",
)
ALST_HOST = 1900 * 2**30


# Real steps on this machine's CPU


@dataclass
class Compared:
    """Planned bytes minus real ones, of `peak_device_bytes` and the like."""

    words: tuple[str, ...]
    real: dict[str, Any]
    off: dict[str, int]

    @property
    def share(self) -> float:
        """The worst of them, relative to the real number."""
        return max(abs(self.off[name]) / max(1, self.real[name]) for name in NUMBERS)


def compared(recipe: Recipe, words: Sequence[str], real: dict[str, Any], ranks: int = 1) -> Compared:
    planned = Planner(recipe, recipe.recompute, CPU, ranks).predict(recipe.seq_length)  # type: ignore[arg-type]
    return Compared(tuple(words), real, {name: getattr(planned, name) - real[name] for name in NUMBERS})


def of_modes() -> dict[str, list[Compared]]:
    """By mode: torch engine, both attentions, styles, dtypes and lengths."""
    here = world.World(0, 1, 0, torch.device("cpu"))
    result: dict[str, list[Compared]] = {}
    for mode in (name for name in NAMED if "deepspeed" not in name):  # which needs DeepSpeed's process group
        for attention in ("unfused", "sdpa"):
            for style in STYLES.values():
                for precision in ("bf16", "fp32"):
                    for length in LENGTHS:
                        words = (f"recompute={mode}", f"model.attention={attention}", f"precision={precision}", *style)
                        recipe = load("quickstart", [*SMALL, "engine.name=torch", *words, f"seq_length={length}"])
                        result.setdefault(mode, []).append(compared(recipe, words, real_step(recipe, here, 2)))
    return result


def of_engines() -> Iterator[tuple[str, int, list[Compared]]]:
    """(engine, ranks, cases): every ZeRO stage, on one rank and on two, modes and both dtypes."""
    for ranks in (1, 2):
        for config in ENGINES:
            groups = [
                [f"engine.deepspeed_config={config}", f"precision={precision}", f"recompute={mode}"]
                for precision in ("bf16", "fp32")
                for mode in (*ENGINE_MODES, *(() if "zero3" in config else (DEEPSPEEDS,)))  # it fails under ZeRO-3
            ]
            words = [*SMALL, "seq_length=96", "model.attention=sdpa"]
            real = run("quickstart", [*words, *(word for group in groups for word in ("--", *group))], ranks)
            yield (
                config,
                ranks,
                [compared(load("quickstart", [*words, *g]), g, r, ranks) for g, r in zip(groups, real, strict=True)],
            )


# Published numbers


def korthikanti(mode: str) -> float:
    """Bytes that a layer keeps, in units of s * b * h, as table 2 of Korthikanti et al. (2022) counts them at t = 1:
    masks of one byte, no LayerNorm statistics; a * s / h = 8.
    """
    tokens, hidden = 512, 256
    style: dict[str, Any] = {"normalization": "layernorm", "position_embedding": "learned", "activation": "gelu"}
    style |= {"bias": True, "hidden_dropout": 0.1, "attention_dropout": 0.1, "attention": "unfused"}
    style |= {"ffn_hidden_size": None, "max_position_embeddings": tokens, "vocab_size": 300}
    config = GPTConfig(4, hidden, 4, **style)
    traced = trace(Job(config, tuple(parse_layers(mode, 4)), torch.bfloat16, 1, tokens, cuda=True))
    starts = {part.mark[1]: part.start_bytes for part in traced.intervals if part.mark[0] == "forward"}
    statistics = 0 if mode == "full" else 2 * 2 * 4 * tokens  # of two LayerNorms
    return (starts[2] - starts[1] - statistics) / (tokens * hidden)


KORTHIKANTI = {"none": 34 + 5 * 8, "selective": 34, "full": 2}


def alst(config: str) -> planner.ModePlan:
    """The longest context of ALST's recipe on its GPU."""
    recipe = load("llama-8b", [word.format(config=config) for word in ALST])
    target = replace(planner.device("h100-80gb"), host_budget_bytes=ALST_HOST)
    return planner.plan_mode(recipe, target, "full+offload", granularity=1000)


def alive(longest: planner.ModePlan) -> float:
    """Bytes per token at the peak beside weights, gradients and optimizer, in units of the hidden size."""
    step = longest.step
    held = sum(step.breakdown_bytes[kind] for kind in ("parameters", "gradients", "optimizer"))
    return (step.peak_device_bytes - held) / longest.longest_context / load("llama-8b").model.hidden_size


# The page


def page() -> Iterator[str]:
    yield HEAD
    modes = of_modes()
    yield "| mode | cases | worst difference, bytes | relative to the number |\n|---|---:|---:|---:|"
    for mode, cases in modes.items():
        worst = max(abs(off) for case in cases for off in case.off.values())
        yield f"| `{mode}` | {len(cases)} | {worst:,} | {max(case.share for case in cases):.4%} |"
    yield ENGINE_HEAD
    for config, ranks, cases in of_engines():
        one = max(cases, key=lambda case: case.share)
        name = max(NUMBERS, key=lambda name: abs(one.off[name]) / max(1, one.real[name]))
        words = " ".join(word.split("=")[1] for word in one.words[1:])
        yield f"| {config} | {ranks} | {len(cases)} | {one.share:.3%} | {name.removesuffix('_bytes')}, {words} |"
    yield SWEEP_HEAD
    for file in sorted((ROOT / "results").glob("*/summary.json")):
        summary = json.loads(file.read_text(encoding="utf-8"))
        if summary["axis"] != "seq_length":
            continue
        for name, mode in summary["modes"].items():
            planned = mode["predicted_longest_context"]
            if planned is not None:
                yield f"| {file.parent.name} | `{name}` | {planned:,} | {mode['longest_context']:,} |"
    yield KORTHIKANTI_HEAD
    for mode, published in KORTHIKANTI.items():
        yield f"| `{mode}` | {published:g} | {korthikanti(mode):g} |"
    yield ALST_HEAD
    for config, where in (("zero3-offload", "on the GPU"), ("zero3-offload-params", "in host memory")):
        longest = alst(config)
        ratio = longest.longest_context / ALST_TOKENS - 1
        peak, host = longest.step.reserved_bytes / 2**30, longest.step.peak_host_bytes / 2**30
        tokens, limit = longest.longest_context, longest.limited_by
        yield f"| {where} | {tokens:,} | {ratio:+.1%} | {peak:.1f} | {host:.0f} | {limit} |"
    yield WRONG.format(alive=alive(longest))  # of the last: with the weights away, little else is there


HEAD = """# How far to trust a plan

Made by `python tools/accuracy.py`; do not edit. The planner runs the model's own code on tensors without content, so
what it says of activations cannot drift from what is trained. What an engine holds, and what CUDA adds, is modelled,
and this page says how well.

## Against real steps, on the CPU

Peak, after-forward and host bytes of a plan against those that the meter counts in a real optimizer step of the torch
engine: both attentions, GPT-2 with dropout and Llama style, bf16 and fp32, 96 and 384 tokens. A few scalars are not
modelled (the sum of losses, norms of gradients).
"""
ENGINE_HEAD = """
The same for DeepSpeed, whose bookkeeping (partitions, buckets, gathers, copies on the host) is modelled; processes of
their own, on one rank and two, modes `none`, `full`, `full+attention+offload` and, but for ZeRO-3, under which
it fails, `full+deepspeed_offload`:

| ZeRO | ranks | cases | worst | which |
|---|---:|---:|---:|---|"""
SWEEP_HEAD = """
## Against sweeps

Longest context as planned, and as measured by fresh processes of `train.py` that were given the budget:

| sweep | mode | planned | measured |
|---|---|---:|---:|"""
KORTHIKANTI_HEAD = """
## Against published numbers

Korthikanti et al. (2022), table 2: bytes that a layer keeps, in units of s·b·h, t = 1, a·s/h = 8 (masks of one byte, as
CUDA keeps them; the paper leaves out LayerNorm's statistics, which are counted and taken off here):

| mode | the paper | traced |
|---|---:|---:|"""
ALST_HEAD = """
ALST (Snowflake, 2025): Llama-3.1-8B on one H100 of 80 GB trains 500K tokens, with everything recomputed, layer inputs
and optimizer in host memory, loss and MLP in tiles. The same ingredients here, 1,900 GiB of host memory:

| weights | planned longest | against 500K | GPU GiB | host GiB | limited by |
|---|---:|---:|---:|---:|---|"""
WRONG = """
The plan is above the published number by more than the 10 % that were hoped for, and what that says is not settled:
500K is a round number (at steps of 100K the plan for weights on the GPU would be 600K), ALST reports about 28h bytes
alive per token where this model, with fused norms and rotation, has {alive:.0f}h, and where ALST kept the weights is
not known here.

## Where it is wrong, or may be

- **No GPU was at hand.** Nothing on this page was measured on CUDA. Its context, library workspaces, allocator
  fragmentation and kernel workspaces are assumptions, which `make plan` prints one by one with every answer; the band
  of +-5 % is a guess until `python tools/gpu_check.py plan` has run.
- **Time** is a roofline with assumed efficiencies: +-30 % on a GPU, +-50 % on a CPU. It orders modes; it does not
  replace `make sweep`.
- **ZeRO-3 on several ranks** whose file asks for small buckets and short reuse fetches parameters ahead in ways that
  are not wholly modelled: up to 4 % too low. With the files of `ds_configs/` it is exact.
- **FSDP** (the torch engine on more than one rank) is within 3 %, not 1 %: its streams free gathered parameters at
  times that are not modelled.
- **Mode `budget`** cannot be planned: what it keeps is the compiler's choice.
- **Communication** between ranks costs neither time nor NCCL's buffers here.
- **The tokenizer** may find fewer tokens than `data.tokenizer_vocab_size`; the plan takes the recipe's number."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "accuracy.md")
    given = parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lines = []
        for line in page():
            print(line, flush=True)
            lines.append(line)
    given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
