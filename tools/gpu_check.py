"""Everything that only a GPU can show, in one program of about five minutes; on a CPU it tries itself in small.

    python tools/gpu_check.py [parity offload plan] [--small] [--out results/DATE-gpu]
    python tools/gpu_check.py sweep                 the published sweep, by itself: under eight minutes

parity   every memory mode gives the gradients of `none`, up to the noise of two runs of `none`
offload  no race on the first step, copies that overlap the layers, and the step time they cost
plan     the planner's peak against the allocator's, for each mode at three lengths of two recipes
sweep    tools/sweep.py on gpt-1.3b within 24 GiB

Prints a line for each check and writes all of them to `gpu_check.json`; ends with 1 when one failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from model import offload, recompute
from model.gpt import GPT, GPTConfig
from training import world
from training.build import build_model
from training.engine import make_engine
from training.memory import Meter
from training.planning import planner
from training.recipe import load
from training.run import environment
from training.schema import ROOT

LLAMA = {"num_query_groups": 4}
GPT2 = {
    "normalization": "layernorm",
    "position_embedding": "learned",
    "activation": "gelu",
    "bias": True,
    "tied_embeddings": True,
}
PLANNED = ("none", "selective+norm+activation", "full", "full+attention", "full+offload")
NOISE_FACTOR = 3.0  # a mode may differ from `none` by so many times what two runs of `none` differ
PLAN_TOLERANCE = 0.03
OVERHEAD_LIMIT = 1.05

Record = dict[str, Any]


def shape(small: bool, style: dict[str, Any], length: int, attention: str = "sdpa") -> GPTConfig:
    fields: dict[str, Any] = {"num_layers": 4, "vocab_size": 512 if small else 32768, "attention": attention, **style}
    fields |= (
        {"hidden_size": 64, "num_attention_heads": 4} if small else {"hidden_size": 2048, "num_attention_heads": 16}
    )
    return GPTConfig(**fields, max_position_embeddings=length if style is GPT2 else None)


def gradients(model: GPT, mode: str, tokens: torch.Tensor) -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a fused kernel has nothing to recompute is known here
        recompute.apply(model, mode)
    model.zero_grad()
    torch.manual_seed(1)
    model(tokens, tokens).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def difference(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """Largest distance of two gradients of one parameter, relative to the gradient's norm."""
    return max(float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-12)) for a, b in zip(left, right))


def make_model(config: GPTConfig, device: torch.device) -> GPT:
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(config).to(torch.bfloat16)


def parity(device: torch.device, small: bool) -> Iterator[Record]:
    length = 64 if small else 2048
    for name, style in (("llama", LLAMA), ("gpt2", GPT2)):
        for attention in ("unfused", "sdpa", *(["flash_attn"] if has_flash_attn() else [])):
            model = make_model(shape(small, style, length, attention), device)
            tokens = torch.randint(0, model.config.vocab_size, (2, length), device=device)
            plain = gradients(model, "none", tokens)
            noise = difference(gradients(model, "none", tokens), plain)
            for mode in recompute.MODES:
                if mode.endswith("deepspeed_offload") and not has_deepspeed():
                    print(f"skipped {mode}: the deepspeed package is not installed", flush=True)
                    continue
                found = difference(gradients(model, mode, tokens), plain)
                yield {
                    "check": f"parity {name} {attention} {mode}",
                    "difference": found,
                    "noise": noise,
                    "passed": found <= NOISE_FACTOR * noise,
                }


def has_deepspeed() -> bool:
    from training.engine_deepspeed import import_deepspeed

    try:
        import_deepspeed().init_distributed(auto_mpi_discovery=False, verbose=False)
    except ImportError:
        return False
    return True


def has_flash_attn() -> bool:
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available()


def offloading(device: torch.device, small: bool) -> Iterator[Record]:
    length = 256 if small else 8192
    for mode in ("none", "selective+norm+activation", "full", "full+attention"):
        model = make_model(shape(small, LLAMA, length), device)
        tokens = torch.randint(0, model.config.vocab_size, (1, length), device=device)
        plain = gradients(model, mode, tokens)
        noise = difference(gradients(model, mode, tokens), plain)
        for attempt in range(3):  # each with a pool of its own: every one is a first step
            moved = gradients(model, f"{mode}+offload", tokens)
            found = difference(moved, plain)
            yield {
                "check": f"offload race {mode} {attempt + 1}",
                "difference": found,
                "noise": noise,
                "moved_bytes": recompute.activity(model).offloaded_bytes,
                "passed": found <= NOISE_FACTOR * noise,
            }
        del model
    overrides = SMALL_GPT if small else ["seq_length=32768"]
    recipe = load("gpt-1.3b", [*overrides, *ALONE])
    model = build_model(recipe, device=device)
    tokens = torch.randint(0, model.config.vocab_size, (1, recipe.seq_length), device=device)

    def step() -> None:
        model.zero_grad()
        model(tokens, tokens).backward()

    times = interleaved(model, ("full", "full+offload"), step, rounds=3 if small else 5, device=device)
    ratio = times["full+offload"] / times["full"]
    yield {
        "check": f"offload overhead gpt-1.3b at {recipe.seq_length} tokens",
        "full_s": times["full"],
        "full_offload_s": times["full+offload"],
        "ratio": ratio,
        "passed": small or ratio <= OVERHEAD_LIMIT,
    }
    if device.type == "cuda":
        recompute.apply(model, "full+offload")
        step()
        yield {
            "check": "offload copies overlap computing",
            **(shares := overlap(step)),
            "passed": shares["share"] > 0.8,
        }


def interleaved(
    model: GPT, modes: Sequence[str], step: Callable[[], None], rounds: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of a step under each mode, taken in turn after one step to warm up."""
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    for _ in range(rounds):
        for mode in modes:
            recompute.apply(model, mode)
            step()
            synchronize(device)
            start = time.perf_counter()
            step()
            synchronize(device)
            times[mode].append(time.perf_counter() - start)
    return {mode: statistics.median(values) for mode, values in times.items()}


def overlap(step: Callable[[], None]) -> dict[str, float]:
    """Seconds of copies between host and device in one step, and the share that ran while a kernel ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    copies: list[tuple[float, float]] = []
    kernels: list[tuple[float, float]] = []
    for event in profiled.events():
        if event.device_type.name != "CUDA":
            continue
        span = (event.time_range.start, event.time_range.end)
        moves = "Memcpy" in event.name and ("HtoD" in event.name or "DtoH" in event.name)
        (copies if moves else kernels).append(span)
    kernels.sort()
    covered = total = 0.0
    for start, end in copies:
        total += end - start
        at = start
        for begin, finish in kernels:
            if finish <= at or begin >= end:
                continue
            covered += min(end, finish) - max(at, begin)
            at = max(at, finish)
    return {"copies_s": total / 1e6, "share": covered / total if total else 0.0}


ALONE = ["engine.name=torch", "engine.deepspeed_config=null", "micro_batch_size=1", "global_batch_size=1"]
SMALL_GPT = ["seq_length=256", "model.num_layers=3", "model.hidden_size=64", "model.num_attention_heads=4"]


def planned(device: torch.device, small: bool) -> Iterator[Record]:
    for name, lengths in (("gpt-1.3b", (2048, 4096, 8192)), ("llama-1b", (8192, 16384, 32768))):
        for length in (128, 256, 384) if small else lengths:
            for mode in PLANNED:
                words = [*(SMALL_GPT if small else []), *ALONE, f"seq_length={length}", f"recompute={mode}"]
                if small and name == "llama-1b":
                    words += ["model.num_query_groups=2", "model.ffn_hidden_size=128"]
                yield compared(load(name, words), world.join(), device)


def compared(recipe: Any, here: world.World, device: torch.device) -> Record:
    """The planner's peak and the peak of two real steps of the same recipe."""
    gc.collect()
    target = planner.device(budget_bytes=1 << 50)
    predicted = planner.predict(recipe, target)
    peaks: Record = {}
    try:
        with Meter(device=device) as meter, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = make_engine(recipe, build_model(recipe, device=device), here)
            meter.track(engine.model)
            tokens = torch.zeros(1, recipe.seq_length, dtype=torch.long)
            for _ in range(2):
                engine.train_step([(tokens, tokens)], 1e-4, meter)
            peaks["peak_bytes"] = meter.peak_bytes
            if device.type == "cuda":
                peaks["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    except torch.OutOfMemoryError as error:
        peaks["error"] = str(error)
    engine = None  # type: ignore[assignment]
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    ratio = predicted.peak_device_bytes / peaks["peak_bytes"] if "peak_bytes" in peaks else None
    return {
        "check": f"plan {recipe.name} {recipe.recompute} at {recipe.seq_length} tokens",
        "predicted_peak_bytes": predicted.peak_device_bytes,
        "predicted_reserved_bytes": predicted.reserved_bytes,
        **peaks,
        "ratio": ratio,
        "passed": ratio is not None and abs(ratio - 1) <= PLAN_TOLERANCE,
    }


def sweep(device: torch.device, small: bool) -> Iterator[Record]:
    """tools/sweep.py as a user would run it."""
    command = [sys.executable, str(ROOT / "tools" / "sweep.py")]
    if small:
        command += ["quickstart", *SMALL_GPT, "model.ffn_hidden_size=128", "--modes", "none full"]
        command += ["--budget", "64MiB", "--seq-max", "1024"]
    else:
        command += [
            "gpt-1.3b",
            "--budget",
            "24GiB",
            "--modes",
            "none selective+norm+activation full full+attention full+offload",
        ]
    start = time.perf_counter()
    code = subprocess.run(command, check=False).returncode
    yield {"check": "sweep", "seconds": time.perf_counter() - start, "exit_code": code, "passed": code == 0}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


PARTS = {"parity": parity, "offload": offloading, "plan": planned, "sweep": sweep}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all but sweep")
    parser.add_argument("--small", action="store_true", help="tiny shapes; what a machine without a GPU always does")
    parser.add_argument("--out", type=Path, help="folder for gpu_check.json; default: none is written")
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - PARTS.keys():
        parser.error(f"unknown part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = given.small or device.type == "cpu"
    if small:
        offload.MIN_BYTES = 64  # so that tiny tensors move as well
    world.join()
    records = []
    for part in given.parts or ("parity", "offload", "plan"):
        for record in PARTS[part](device, small):
            records.append(record)
            numbers = "  ".join(f"{k}={v:.4g}" for k, v in record.items() if type(v) in (int, float))
            print(f"{'ok    ' if record['passed'] else 'FAILED'} {record['check']}  {numbers}", flush=True)
    failed = sum(not record["passed"] for record in records)
    print(f"{len(records) - failed} passed, {failed} failed on {device}{', in small' if small else ''}")
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        facts = {"environment": environment(), "device": str(device), "small": small, "checks": records}
        (given.out / "gpu_check.json").write_text(json.dumps(facts, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
