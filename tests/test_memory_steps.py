"""A step takes the same bytes each time: real and fake, in threads, under every engine."""

import gc
import threading
import weakref

import pytest
import tiny as tiny_run
import torch
from metered import BIG, A, B, C, bump, chain, numbers, tiny, tokens, train
from torch._subclasses.fake_tensor import FakeTensorMode

from model import host
from model.gpt import GPT
from training import build, world
from training.engine import make_engine
from training.memory import Meter

STYLES = {
    "llama, sdpa": {},
    "gpt-2, unfused, dropout": {
        "normalization": "layernorm",
        "position_embedding": "learned",
        "max_position_embeddings": 64,
        "activation": "gelu",
        "bias": True,
        "tied_embeddings": True,
        "attention": "unfused",
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
}


@pytest.mark.parametrize("style", STYLES)
def test_the_same_step_takes_the_same_bytes_and_nothing_stays(style):
    model = tiny(**STYLES[style])
    optimizer = torch.optim.AdamW(model.parameters())
    with Meter(model=model, optimizer=optimizer) as meter:
        seen = []
        gc.disable()
        try:
            for _ in range(6):
                meter.reset_peak()
                train(model, optimizer, meter, said=True)
                seen.append(numbers(meter))
        finally:
            gc.enable()
    assert seen[1:] == seen[1:2] * 5


@pytest.mark.parametrize("style", STYLES)
def test_fake_tensors_take_the_bytes_of_real_ones(style):
    def run(model: GPT) -> tuple:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        with Meter(model=model, optimizer=optimizer) as meter:
            start = meter.live_bytes
            for _ in range(2):
                meter.reset_peak()
                train(model, optimizer, meter, said=True)
        peak, op, after, kinds, after_kinds, live = numbers(meter)
        del kinds["other"], after_kinds["other"]  # tensors of other tests may be alive
        return peak - start, op, after - start, kinds, after_kinds, live - start, meter.kind

    real = run(tiny(**STYLES[style]))
    with FakeTensorMode():
        fake = run(tiny(**STYLES[style]))
    assert real[:-1] == fake[:-1]
    assert (real[-1], fake[-1]) == ("cpu", "fake")


def test_a_fake_meter_counts_no_real_memory_and_the_other_way_round():
    real = torch.zeros(100)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with Meter() as meter:
            assert meter.live_bytes == 0
            assert (real + 1).numel() == 100
            kept = torch.zeros(1 << 40), torch.empty(1 << 40, device="meta")
            assert meter.live_bytes == 4 << 40
            pool = host.empty(1 << 40, torch.uint8)
            assert (meter.live_bytes, meter.host_bytes) == (4 << 40, 1 << 40)
        with pytest.raises(torch.OutOfMemoryError), Meter(budget_bytes=(4 << 40) + 99):
            torch.zeros(100, dtype=torch.uint8)
    with Meter() as meter:
        start = meter.live_bytes, meter.host_bytes
        with mode:
            kept[0].add(1)
        assert (meter.live_bytes, meter.host_bytes) == start
    assert max(start) < 1 << 40
    del pool


def test_the_meter_leaves_no_garbage_and_no_reference_to_itself():
    model = tiny()
    gc.collect()
    gc.disable()
    try:
        with Meter(model=model, timeline=10) as meter:
            for _ in range(3):
                model(*tokens()).backward()
            unreachable = gc.collect()
        gone = weakref.ref(meter)
        del meter
        assert gone() is None
        assert unreachable == 0
    finally:
        gc.enable()


def test_backward_in_threads_of_autograd_is_followed():
    class Deep(torch.autograd.Function):  # past 60 nested backward passes autograd goes on in another thread
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            threads.add(threading.get_ident())
            if ctx.depth == 0:
                bump(BIG)
                kept.append(torch.zeros(25))
                return grad * 1, None
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                Deep.apply(x, ctx.depth - 1).sum().backward()
            return x.grad, None

    threads: set[int] = set()
    kept: list[torch.Tensor] = []
    x = torch.ones(10, requires_grad=True)
    with Meter() as meter:
        start = meter.live_bytes
        Deep.apply(x, 70).sum().backward()
        assert len(threads) > 1
        assert meter.live_bytes == start + 40 + 100  # the gradient, and what was kept
        assert meter.peak_bytes > start + BIG


# Bytes per parameter in bf16 between forward and backward of the last micro-batch. Torch adds gradients up in
# float32; ZeRO 1 holds the float32 master twice while gradients accumulate; ZeRO 3 has no gradients of its own, but
# partitions of them in its optimizer, and a bucket.
STATIC = {"torch": (2, 4, 12), "zero0": (2, 2, 12), "zero1": (2, 2, 16), "zero2": (2, 4, 12)}


@pytest.mark.parametrize("name", ["torch", "zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"])
def test_every_engine_steps_in_the_same_bytes(name):
    torch_engine = ["engine.name=torch", "engine.deepspeed_config=null"]
    zero = ["engine.name=deepspeed", f"engine.deepspeed_config={name}"]
    settings = tiny_run.load(*(torch_engine if name == "torch" else zero), "precision=bf16")
    seen = []
    with Meter() as meter:
        host_before = meter.host_bytes
        model = build.build_model(settings)
        engine = make_engine(settings, model, world.join())
        meter.track(model, engine.optimizer)
        gc.disable()
        try:
            for number in range(4):
                meter.reset_peak()
                engine.train_step(tiny_run.batches(number, engine.accumulation), 1e-3, meter)
                seen.append((numbers(meter), meter.host_bytes, meter.peak_host_bytes))
        finally:
            gc.enable()
    if name in ("torch", "zero0"):
        assert seen[1:] == seen[1:2] * 3
    else:
        # Gloo reduces a bucket in a thread of its own and holds it until that thread is done: on a busy machine the
        # peak may have one bucket more. What is alive between forward and backward, and on the host, is the same.
        at_rest = [(after, kinds, live, *on_host) for (_, _, after, _, kinds, live), *on_host in seen[1:]]
        assert at_rest == at_rest[:1] * 3
        peaks = [peak for (peak, *_), *_ in seen[1:]]
        assert max(peaks) - min(peaks) <= 2.02 * sum(p.numel() for p in model.parameters())
    assert sum(meter.breakdown_bytes.values()) == meter.peak_bytes
    after, parameters = meter.after_forward_breakdown_bytes, sum(p.numel() for p in model.parameters())
    if name in STATIC:
        found = [after[kind] / parameters for kind in ("parameters", "gradients", "optimizer")]
        assert found == pytest.approx(STATIC[name], rel=0.01)  # norms' step counts, padding
    if "offload" in name:
        # Master weights, their gradients and two moments.
        assert meter.host_bytes - host_before == pytest.approx(16 * parameters, rel=0.01)


def test_an_optimizer_within_an_optimizer_is_known():
    model = chain()
    inner = torch.optim.SGD([torch.zeros(3, 4)], momentum=0.9)
    inner.state[inner.param_groups[0]["params"][0]]["momentum_buffer"] = torch.zeros(3, 4)
    outer = torch.optim.SGD(model.parameters())
    outer.optimizer, outer.flat = inner, [torch.zeros(5)]
    with Meter(model=model, optimizer=outer) as meter:
        kinds = meter.breakdown_bytes
    assert kinds["optimizer"] == 2 * 48 + 20
    assert kinds["parameters"] == 4 * (A * B + B * C)


def test_memory_that_another_thread_shows_in_backward_is_ignored_for_good():
    """Gloo copies gradients in threads of its own and frees them at any time: no two steps would agree."""

    class Foreign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            made = []
            thread = threading.Thread(target=lambda: made.append(torch.zeros(BIG)))
            thread.start()
            thread.join()
            kept.append(made[0].view(2, -1))
            return grad * 1

    kept: list[torch.Tensor] = []
    x = torch.ones(10, requires_grad=True)
    with Meter() as meter:
        start = meter.live_bytes
        Foreign.apply(x).sum().backward()
        kept.append(kept[0].t())
        assert meter.live_bytes == start + 40
        assert meter.peak_bytes < start + BIG
        kept.clear()
        assert meter.live_bytes == start + 40
        x.grad = None
        kept.append(torch.zeros(BIG))  # perhaps at the same address
        assert meter.live_bytes == start + 4 * BIG


@pytest.mark.slow
def test_compiled_regions_run_under_a_meter():
    model = tiny()
    compiled = torch.compile(model, backend="aot_eager")
    with Meter(model=model) as plain:
        model(*tokens()).backward()
        model.zero_grad()
    with Meter(model=model) as meter:
        start = meter.live_bytes
        for _ in range(3):
            compiled(*tokens()).backward()
            model.zero_grad()
    assert meter.live_bytes == start
    assert 0.5 < (meter.peak_bytes - start) / (plain.peak_bytes - start) < 1.5
