"""Modes under torch.compile: whole graphs where torch can trace them, eager layers with a warning where it cannot.

The backends compile nothing to C++, and differ from eager code in what they fuse and save only.
"""

import warnings

import pytest
import torch
from torch._dynamo.utils import counters

from model import offload, recompute
from model.kept import kept_bytes
from tests.mode_steps import gradients, make
from tests.shapes import batch

# With decompositions, torch.compile draws other random numbers than eager code does, in mode none as well.
CASES = (("aot_eager", 0.0), ("aot_eager", 0.1), ("aot_eager_decomp_partition", 0.0))
WHOLE = ("none", "selective", "mlp", "selective+mlp", "full", "full+uniform2", "full+sqrt", "full+block1")
EAGER = ("norm", "selective+norm+activation", "full+attention", "full+qkv", "none+offload", "full+offload")


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mode |torch.compile|.*is deprecated")
        yield
    torch._dynamo.reset()


def run(mode, compiled, dropout=0.0, attention="unfused"):
    """Two steps' gradients; `compiled` takes the model and returns what is called."""
    model = make("llama", attention, dropout, num_layers=2)
    recompute.apply(model, mode)
    call = compiled(model)
    for seed in (1, 2):
        torch.manual_seed(seed)
        call(*batch(2, 9, seed=seed)).backward()
    recompute.require_active(model, mode)
    return gradients(model)


def assert_close(mode, compiled, dropout=0.0):
    ours, theirs = run(mode, compiled, dropout), run("none", lambda model: model, dropout)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6, msg=f"{mode}: {name}")


def whole(backend):
    return lambda model: torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.parametrize(
    ("mode", "backend", "dropout"),
    [
        pytest.param(mode, backend, dropout, marks=() if (mode, dropout) == ("full", 0.1) else pytest.mark.slow)
        for mode in WHOLE
        for backend, dropout in CASES
    ],
)
def test_these_modes_compile_as_one_graph(mode, backend, dropout):
    assert_close(mode, whole(backend), dropout)


@pytest.mark.parametrize("mode", [EAGER[2], *(pytest.param(m, marks=pytest.mark.slow) for m in EAGER if m != EAGER[2])])
def test_the_others_run_their_layers_eagerly_and_say_so(mode):
    with pytest.warns(UserWarning, match="torch.compile cannot trace"):
        assert_close(mode, lambda model: torch.compile(model, backend="aot_eager"))
    assert counters["graph_break"]


def test_asked_for_one_graph_they_are_an_error():
    with pytest.raises(torch._dynamo.exc.Unsupported):
        run("full+attention", whole("aot_eager"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["none", "mlp", "norm+activation", "full", "full+attention", "none+offload", "full+offload"]
)
def test_layers_compiled_one_by_one_keep_their_mode(mode):
    def compiled(model):
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        return model

    assert_close(mode, compiled)


@pytest.mark.slow
def test_compiled_recompute_keeps_less_by_what_eager_recompute_does():
    def kept(mode):
        model = make("llama", num_layers=4)
        recompute.apply(model, mode)
        loss = torch.compile(model, backend="aot_eager", fullgraph=True)(*batch(2, 64))
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in loss.grad_fn.saved_tensors}
        return sum(nbytes for pointer, nbytes in saved.items() if pointer not in parameters)

    eager = [
        sum(kept_bytes(make("llama").config, recompute.parse(mode), 2, 64, 4).values()) for mode in ("none", "full")
    ]
    assert kept("none") - kept("full") > 0.8 * 4 * (eager[0] - eager[1])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["norm+activation", "full", "full+attention+offload"])
def test_a_deepcopy_and_a_pickle_of_a_compiled_models_layers_still_train(mode):
    import copy

    model = make("llama", num_layers=2)
    recompute.apply(model, mode)
    other = copy.deepcopy(model)
    torch.compile(other, backend="aot_eager")(*batch(2, 9)).backward()
    assert not gradients(model)
    model(*batch(2, 9)).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradients(other)[name], gradient, rtol=1e-5, atol=1e-6)
