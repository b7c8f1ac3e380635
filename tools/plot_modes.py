"""Draw docs/modes.png and print the tables of docs/modes.md: what modes keep, and compute again, at any context.

    python tools/plot_modes.py [--out docs/modes.png]

Nothing is measured: bytes are model/kept.py's, FLOPs are training/flops.py's, and tests hold both to what runs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from model.gpt import GPTConfig, flops_per_token
from model.kept import kept_bytes
from model.modes import parse
from tools.figures import COLOURS, LINES, STYLE
from training.flops import recomputed_flops_per_token

LLAMA_8B = GPTConfig(32, 4096, 32, vocab_size=128256, num_query_groups=8, ffn_hidden_size=14336)
GPT_LAYER = GPTConfig(
    32,
    4096,
    32,
    vocab_size=50304,
    max_position_embeddings=2**20,
    normalization="layernorm",
    position_embedding="learned",
    activation="gelu",
    bias=True,
)
ROWS = (
    "none",
    "selective",
    "norm+activation",
    "selective+norm+activation",
    "mlp",
    "full",
    "full+attention",
)
CURVES: tuple[tuple[str, Any], ...] = (
    ("selective", "unfused"),
    ("mlp", "sdpa"),
    ("full", "sdpa"),
    ("full+attention", "sdpa"),
)
LENGTHS = [2**k for k in range(11, 21)]


def overhead(config: GPTConfig, mode: str, length: int) -> float:
    """Recomputed FLOPs over those of forward and backward; causal attention counts half of its square."""
    modes = [parse(mode)] * config.num_layers
    return recomputed_flops_per_token(config, modes, length) / flops_per_token(config, length)


def draw() -> plt.Figure:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
        for i, (mode, attention) in enumerate(CURVES):
            config = replace(LLAMA_8B, attention=attention)
            shares = [100 * overhead(config, mode, length) for length in LENGTHS]
            label = f"{mode} ({attention} attention)" if attention == "unfused" else mode
            axes.plot(LENGTHS, shares, color=COLOURS[i], linestyle=LINES[i], marker="osD^"[i], ms=3.5, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(LENGTHS, [f"{n // 1024}k" if n < 2**20 else "1M" for n in LENGTHS])
        axes.set_ylim(0, 42)
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("recomputed FLOPs, % of forward and backward")
        axes.set_title("What recompute costs a Llama-3-8B, by context")
        axes.legend(loc="upper left", ncols=2)
    return figure


def units(config: Any, mode: str, length: int = 8192) -> str:
    """Bytes per token and layer over the hidden size, in bf16."""
    return f"{sum(kept_bytes(config, parse(mode), 1, length).values()) / length / config.hidden_size:.1f}h"


def tables() -> list[str]:
    lines = ["| mode | GPT, fused | GPT, unfused, 8k | Llama-3-8B, fused |", "|---|---|---|---|"]
    for mode in ROWS:
        unfused = "–" if mode == "full+attention" else units(replace(GPT_LAYER, attention="unfused"), mode)
        lines.append(f"| `{mode}` | {units(GPT_LAYER, mode)} | {unfused} | {units(LLAMA_8B, mode)} |")
    lengths = (8192, 32768, 131072, 524288)
    lines += ["", f"| mode | {' | '.join(f'{n // 1024}k' for n in lengths)} |", "|---|---|---|---|---|"]
    for mode, attention in CURVES:
        config = replace(LLAMA_8B, attention=attention)
        cells = (f"{overhead(config, mode, n):.1%}" for n in lengths)
        lines.append(f"| `{mode}`{' (unfused)' if attention == 'unfused' else ''} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "modes.png")
    given = parser.parse_args()
    draw().savefig(given.out, dpi=130, metadata={"Software": None})
    print("\n".join(tables()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
