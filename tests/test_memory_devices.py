"""The meter against the process it runs in, and on CUDA against a stand-in for the allocator."""

import os
import subprocess
import sys

import pytest
import torch
from metered import A, N, chain
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from model import host
from training.memory import Meter
from training.metering.storages import Storages


class FakeCuda:
    """Statistics as torch.cuda gives them, and an allocator to move them."""

    TOTAL = 10_000

    def __init__(self, monkeypatch) -> None:
        self.stats = {
            f"{kind}_bytes.all.{what}": 0 for kind in ("allocated", "reserved") for what in ("current", "peak")
        }
        self.stats["num_alloc_retries"] = 3
        self.free, self.fraction, self.fractions = 9_000, 0.9, []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: self.stats)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, self.TOTAL))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.reset())
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: self.fraction)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.set_fraction)

    def set_fraction(self, fraction, device) -> None:
        assert isinstance(fraction, float)
        assert 0 <= fraction <= 1
        self.fraction = fraction

    def reset(self) -> None:
        for kind in ("allocated", "reserved"):
            self.stats[f"{kind}_bytes.all.peak"] = self.stats[f"{kind}_bytes.all.current"]

    def take(self, nbytes: int) -> None:
        for kind, size in (("allocated", nbytes), ("reserved", 2 * nbytes)):
            current = self.stats[f"{kind}_bytes.all.current"] = self.stats[f"{kind}_bytes.all.current"] + size
            self.stats[f"{kind}_bytes.all.peak"] = max(self.stats[f"{kind}_bytes.all.peak"], current)


def test_on_cuda_the_allocator_is_read(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    cuda.take(100)
    with Meter() as meter:
        assert meter.kind == "cuda"
        assert len(_get_current_dispatch_mode_stack()) == 0  # no operation pays
        assert (meter.live_bytes, meter.peak_bytes, meter.peak_op) == (100, 100, "")
        with meter.phase("forward"):
            cuda.take(400)
            cuda.take(-100)
        with meter.phase("backward"):
            cuda.take(300)
            cuda.take(-500)
            cuda.stats["num_alloc_retries"] += 2
        with meter.phase("optimizer"):
            cuda.take(50)
        assert meter.after_forward_bytes == 400
        assert (meter.live_bytes, meter.peak_bytes, meter.peak_op) == (250, 700, "(backward)")
        assert (meter.reserved_bytes, meter.peak_reserved_bytes, meter.retries) == (500, 1400, 2)
        assert meter.outside_bytes == cuda.TOTAL - cuda.free - 500
        meter.reset_peak()
        assert (meter.peak_bytes, meter.after_forward_bytes, meter.peak_op) == (250, 0, "")
        pool = host.empty(100, torch.uint8)
        assert meter.host_bytes == host.live_bytes() == meter.peak_host_bytes
        del pool
    cuda.take(1000)
    assert (meter.live_bytes, meter.peak_bytes) == (250, 250)  # as it closed


def test_on_cuda_the_budget_limits_the_allocator_and_is_lifted_again(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    class TooBig(nn.Module):
        def forward(self, x):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = nn.Sequential(nn.Linear(A, A), TooBig())
    with Meter(model=model, device="cuda", budget_bytes=2_500) as meter:
        assert cuda.fraction == 0.25
        with pytest.raises(torch.OutOfMemoryError), meter.phase("forward"):
            model(torch.ones(N, A))
        assert meter.failed_op == "in 1 (forward)"
    assert cuda.fraction == 0.9
    with Meter(device=torch.device("cuda"), budget_bytes=cuda.TOTAL * 2) as meter:
        assert cuda.fraction == 1.0
        with pytest.raises(torch.OutOfMemoryError), meter.phase("backward"):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        assert meter.failed_op == "(backward)"
    assert cuda.fraction == 0.9


def test_on_cuda_operations_may_be_followed_beside_the_allocator(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(Storages, "_is_ours", lambda self, tensor: tensor.is_cpu)
    model = chain()
    with Meter(model=model, device="cuda", operations=True, timeline=100) as meter:
        cuda.take(7)
        model(torch.ones(N, A)).sum().backward()
        assert (meter.live_bytes, meter.peak_bytes) == (7, 7)
        assert meter.peak_op == "aten.threshold_backward in 1 (backward)"
        assert meter.breakdown_bytes["temporary"] > 0
        assert meter.timeline[-1][3] == 7


RESIDENT = """
import torch
from model.gpt import GPT, GPTConfig
from training.memory import Meter
from training.metering.storages import Storages

torch.set_num_threads(1)
shape = dict(num_layers={layers}, hidden_size={width}, num_attention_heads=16, vocab_size=2048, attention="{attention}")
model = GPT(GPTConfig(**shape)).to(torch.{dtype})
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randint(0, 2048, (1, {length}))

def status(field):
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

with Meter(model=model, optimizer=optimizer) as meter:
    for warm in (True, False):
        meter.reset_peak()
        live = meter.live_bytes
        open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts anew
        resident = status("VmRSS")
        model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        grown, counted = status("VmHWM") - resident, meter.peak_bytes - live
print(grown, counted)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's clear_refs")
@pytest.mark.parametrize(
    ("attention", "dtype", "layers", "width", "length"),
    [
        pytest.param("unfused", "float32", 1, 128, 2432),
        pytest.param("sdpa", "bfloat16", 12, 512, 4096, marks=pytest.mark.slow),
    ],
)
def test_the_process_grows_by_what_is_counted(attention, dtype, layers, width, length, repo_root):
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "131072",  # freed memory goes back to the system at once
        "MALLOC_TRIM_THRESHOLD_": "0",
        "MALLOC_ARENA_MAX": "1",
    }
    script = RESIDENT.format(attention=attention, dtype=dtype, layers=layers, width=width, length=length)
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=repo_root, check=True
    )
    grown, counted = map(int, out.stdout.split())
    assert counted > 1 << 30
    print(f"resident over counted bytes: {grown / counted:.4f}")
    assert abs(grown / counted - 1) < 0.1
