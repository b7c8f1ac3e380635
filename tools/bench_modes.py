"""What memory modes cost and save on a CPU, side by side with what torch and Hugging Face offer for the same.

    make bench ARGS=modes
    python tools/bench_modes.py [--rounds N] [--out results/DATE-modes-cpu]

A step is forward and backward in bf16 on one thread, without optimizer. Variants take turns, and each is compared with
its base in the same turn: the figures are medians of these ratios of CPU time, which a busy neighbour does not inflate
by much. Peak and after-forward bytes are the meter's, of a step by itself, and exact.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective_contexts

from model import recompute
from model.gpt import GPT, GPTConfig
from training.memory import Meter
from training.run import environment

MIB = 2**20
SHORT = GPTConfig(8, 256, 4, vocab_size=1024, ffn_hidden_size=704), 2048
LONG = GPTConfig(2, 128, 2, vocab_size=1024, ffn_hidden_size=384), 8192  # where attention dominates
# Step time over mode none's, at most.
LIMITS = {
    "short": {
        "selective": 1.02,
        "selective+norm+activation": 1.06,
        "full": 1.30,
        "none+offload": 1.10,
        "full+offload": 1.43,  # 1.30 for recompute, and 1.10 for offload on top
    },
    "long": {"full+attention": 1.12},
}
# checkpoint_sequential cuts 8 layers into 2, 2 and 4 and keeps all of the last 4; full+sqrt recomputes all 8.
SEGMENTS = "full+uniform2 of 4 layers"
LISTS = {SEGMENTS: ["full+uniform2"] * 4 + ["none"] * 4}
EXTRA = {"short": ("full+sqrt", "full+attention", SEGMENTS), "long": ("full",)}
# Ours and theirs at equal work: peak and time of the first over the second, at most.
PAIRS = (
    ("full", "torch checkpoint"),
    ("selective+norm+activation", "torch selective policy"),
    (SEGMENTS, "torch checkpoint_sequential"),
    ("full", "Hugging Face checkpointing"),
)
PAIR_LIMIT = 1.02

Step = Callable[[], torch.Tensor]  # forward; returns the loss
KEPT = {
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")
}


def ours(config: GPTConfig, mode: str) -> tuple[torch.nn.Module, Step]:
    model = built(config)
    recompute.apply(model, LISTS.get(mode, mode))
    return model, lambda: model(*inputs)


def built(config: GPTConfig) -> GPT:
    torch.manual_seed(0)
    return GPT(config).to(torch.bfloat16)


def theirs(config: GPTConfig, name: str) -> tuple[torch.nn.Module, Step]:
    """The same model under torch's own means, or Hugging Face's Llama of the same shape."""
    if name.startswith("Hugging Face"):
        return hugging_face(config, checkpointing=name.endswith("checkpointing"))
    model = built(config)

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    def run_layers(x: torch.Tensor, rope: Any) -> torch.Tensor:
        if name == "torch checkpoint_sequential":
            layers: list[Any] = [lambda x, layer=layer: layer(x, rope) for layer in model.layers]
            return checkpoint_sequential(layers, round(math.sqrt(len(layers))), x, use_reentrant=False)
        contexts: dict[str, Any] = {}
        if name == "torch selective policy":
            contexts["context_fn"] = lambda: selective_contexts(policy)
        for layer in model.layers:
            x = checkpoint(layer, x, rope, use_reentrant=False, **contexts)
        return x

    model.run_layers = run_layers  # type: ignore[method-assign]
    return model, lambda: model(*inputs)


def hugging_face(c: GPTConfig, checkpointing: bool) -> tuple[torch.nn.Module, Step]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.ffn_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.query_groups,
        max_position_embeddings=2**14,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).train()
    model.to(torch.bfloat16)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, lambda: model(input_ids=inputs[0], labels=inputs[0]).loss


inputs: tuple[torch.Tensor, torch.Tensor]


def measure(config: GPTConfig, length: int, names: Sequence[str], rivals: Sequence[str], rounds: int) -> dict[str, Any]:
    """Bytes and times of every variant."""
    global inputs
    stream = torch.randint(config.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(0))
    inputs = stream[:, :-1], stream[:, 1:]
    variants = {name: ours(config, name) for name in names} | {name: theirs(config, name) for name in rivals}
    results: dict[str, Any] = {}
    for name, (model, forward) in variants.items():
        with Meter(model=model) as meter:
            base, base_host = meter.live_bytes, meter.host_bytes
            step(model, forward)  # the first, which fills the host pool
        step(model, forward)  # warms up
        results[name] = {
            "peak_bytes": meter.peak_bytes - base,
            "after_forward_bytes": meter.after_forward_bytes - base,
            "peak_host_bytes": meter.peak_host_bytes - base_host if meter.peak_host_bytes else 0,
            "cpu_s": [],
            "wall_s": [],
        }
    for round_ in range(rounds):
        order = list(variants) if round_ % 2 else list(reversed(variants))
        for name in order:
            gc.collect()
            start = time.process_time(), time.perf_counter()
            step(*variants[name])
            results[name]["cpu_s"].append(time.process_time() - start[0])
            results[name]["wall_s"].append(time.perf_counter() - start[1])
        print(f"  round {round_ + 1} of {rounds}", file=sys.stderr, flush=True)
    return results


def step(model: torch.nn.Module, forward: Step) -> None:
    forward().backward()
    model.zero_grad()


def ratio(results: dict[str, Any], name: str, base: str, clock: str = "cpu_s") -> float:
    """Median over turns of the step time of `name` over that of `base`."""
    return statistics.median(a / b for a, b in zip(results[name][clock], results[base][clock]))


def table(title: str, part: str, results: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Lines of Markdown, and what missed its limit."""
    lines = [
        f"### {title}",
        "",
        "| variant | peak MiB | after forward MiB | host MiB | step / none | limit |",
        "|---|---|---|---|---|---|",
    ]
    missed = []
    for name, found in results.items():
        sizes = (found[key] / MIB for key in ("peak_bytes", "after_forward_bytes", "peak_host_bytes"))
        cost, limit = ratio(results, name, "none"), LIMITS[part].get(name)
        lines.append(f"| {name} | {' | '.join(f'{n:.1f}' for n in sizes)} | {cost:.3f} | {limit or ''} |")
        if limit and cost > limit:
            missed.append(f"{part}: {name} costs {cost:.3f}, more than {limit}")
    pairs = [(a, b) for a, b in PAIRS if a in results and b in results]
    if pairs:
        lines += ["", "| ours | theirs | peak, ours / theirs | step, ours / theirs |", "|---|---|---|---|"]
    for a, b in pairs:
        peak, cost = results[a]["peak_bytes"] / results[b]["peak_bytes"], ratio(results, a, b)
        lines.append(f"| {a} | {b} | {peak:.3f} | {cost:.3f} |")
        for what, value in (("peak", peak), ("step", cost)):
            if value > PAIR_LIMIT:
                missed.append(f"{part}: {what} of {a} over {b} is {value:.3f}, more than {PAIR_LIMIT}")
    return [*lines, ""], missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of every variant (default: 5)")
    parser.add_argument("--out", type=Path, help="folder for table.md and record.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rivals = [*dict.fromkeys(b for _, b in PAIRS)]
    try:
        import transformers  # noqa: F401
    except ImportError:
        print('Hugging Face is left out: pip install -e ".[hf]"', file=sys.stderr)
        rivals = [name for name in rivals if not name.startswith("Hugging Face")]
    record: dict[str, Any] = {"environment": environment(), "threads": 1, "rounds": given.rounds}
    lines: list[str] = []
    missed: list[str] = []
    for part, (config, length) in {"short": SHORT, "long": LONG}.items():
        names = ["none", *LIMITS[part], *EXTRA[part]]
        results = measure(config, length, names, rivals if part == "short" else (), given.rounds)
        shape = f"{config.num_layers} layers of {config.hidden_size}, {length} tokens"
        more, late = table(f"{part}: {shape}, bf16", part, results)
        lines, missed = lines + more, missed + late
        record[part] = {"seq_length": length, "model": vars(config), "variants": results}
    lines += ["Within all limits." if not missed else "Missed:", *(f"- {text}" for text in missed)]
    print("\n".join(lines))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        record["missed"] = missed
        (given.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
        (given.out / "table.md").write_text("\n".join(["# Memory modes on a CPU", "", *lines]) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
