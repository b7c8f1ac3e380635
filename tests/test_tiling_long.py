"""Tiles at the lengths they are for: a real step of 131,072 tokens within 2 GiB, and 1,048,576 of llama-8b on paper."""

import os
import warnings

import pytest
import torch

from model import recompute, tiling
from model.gpt import GPT, GPTConfig
from tools.tiles import ATTENTION, LOSS, MLP, step
from training.memory import Meter
from training.recipe import load

AUTO = {LOSS: "auto", MLP: "auto", ATTENTION: "auto"}
BUDGET_BYTES = 2 * 2**30


@pytest.mark.slow
def test_a_real_step_of_131072_tokens_fits_into_2_gib():
    """Two layers of width 128 in float32; the untiled loss alone would take 12 * T * V bytes, 12 GiB."""
    tokens = 131_072
    model = GPT(GPTConfig(2, 128, 2, 8192))
    tiling.apply(model, **AUTO)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recompute.apply(model, "full+attention+offload")
        stream = torch.randint(8192, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
        with Meter(model=model, optimizer=optimizer, budget_bytes=BUDGET_BYTES) as meter:
            loss = model(stream[:, :-1], stream[:, 1:])
            loss.backward()
            optimizer.step()
    finally:
        torch.set_num_threads(threads)
    print(f"\n{tokens:,} tokens: loss {loss.item():.3f}, peak {meter.peak_bytes / 2**20:.0f} MiB by {meter.peak_op}")
    assert meter.peak_bytes <= BUDGET_BYTES
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert abs(loss.item() - 9.0) < 0.3  # ln(V): nothing is learnt yet


@pytest.mark.slow
def test_llama_8b_at_a_million_tokens_on_fake_tensors():
    """T x C is 2^32 elements: beyond any int32."""
    config = GPTConfig(**load("llama-8b").gpt_fields())
    tokens = 1_048_576
    peak, owner = step(config, "full+offload", AUTO, tokens)
    print(f"\n{tokens:,} tokens: peak {peak / 2**30:.2f} GiB by {owner}")
    weights = 2 * 2 * 8_030_261_248  # and their gradients, in bfloat16
    assert peak - weights <= 12 * config.hidden_size * tokens
