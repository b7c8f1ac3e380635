"""RMSNorm and rotation by tiles equal torch's own, gradients too, and phases are right to a million positions."""

import math

import pytest
import torch
import torch.nn.functional as F

from model import rowwise
from model.gpt import GPT, GPTConfig
from model.rowwise import RMSNorm, rms_norm, rms_norm_backward, rope_table, rotate, turn

CPU = torch.device("cpu")
# As a fraction of the largest value: rounding of the result itself, and a little for float32 sums.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
LAYOUTS = {
    "contiguous": lambda *shape: torch.randn(*shape),
    "transposed": lambda *shape: torch.randn(*reversed(shape)).permute(*reversed(range(len(shape)))),
    "sliced": lambda *shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., 1::2],
    "expanded": lambda *shape: torch.randn(1, *shape[1:]).expand(*shape),
}


@pytest.fixture(params=[2**18, 64 * 3, 64, 1], ids=lambda elements: f"tile{elements}")
def tile(request, monkeypatch):
    """Whole tensors, several rows with a ragged end, one row, and less than a row."""
    monkeypatch.setattr(rowwise, "CPU_TILE", request.param)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within rounding of the expected float64 value, which was computed from the same rounded inputs."""
    assert actual.shape == expected.shape
    limit = TOLERANCE[actual.dtype] * expected.abs().max()
    assert (actual.double() - expected).abs().max() <= limit


def gradients(function, inputs, grad):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    return out.detach(), torch.autograd.grad(out, inputs, grad)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 7, 64), (1, 64), (64,)], ids=str)
def test_rms_norm_equals_torch_in_value_and_gradients(shape, layout, dtype):
    torch.manual_seed(0)
    x, grad = LAYOUTS[layout](*shape).to(dtype), LAYOUTS[layout](*shape).to(dtype)
    norm = RMSNorm(64, 1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)

    def ours(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, x)

    before = grad.clone()
    out, grads = gradients(ours, (x, norm.weight), grad)
    expected, expected_grads = gradients(
        lambda x, w: F.rms_norm(x, (64,), w, 1e-5), (x.double(), norm.weight.double()), grad.double()
    )
    assert torch.equal(grad, before)
    for ours_, theirs in zip((out, *grads), (expected, *expected_grads)):
        assert ours_.dtype == dtype
        assert_close(ours_, theirs)


def reference_rotation(x, cos, sin):
    """Llama's rotate_half form, as in the published code of the model."""
    cos, sin = (torch.cat((t, t), -1)[:, None].to(x.dtype) for t in (cos, sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 7, 3, 16), (1, 1, 1, 2)], ids=str)
def test_rotation_equals_its_reference_in_value_and_gradient(shape, layout, dtype):
    torch.manual_seed(0)
    table = rope_table(shape[1], shape[-1], 10000.0, CPU)
    x, grad = LAYOUTS[layout](*shape).to(dtype), LAYOUTS[layout](*shape).to(dtype)
    before = grad.clone()
    out, (dx,) = gradients(lambda x: rotate(x, *table), (x,), grad)
    expected, (expected_dx,) = gradients(lambda x: reference_rotation(x, *table), (x.double(),), grad.double())
    assert torch.equal(grad, before)
    assert out.dtype == dx.dtype == dtype
    assert_close(out, expected)
    assert_close(dx, expected_dx)


@pytest.mark.parametrize("shape", [(0, 5, 64), (5, 0, 64), (0, 64)], ids=str)
def test_nothing_in_gives_nothing_out(shape):
    norm = RMSNorm(64, 1e-5)
    x = torch.empty(shape, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.shape == shape
    assert norm.weight.grad.count_nonzero() == 0
    heads = torch.empty(*shape[:2], 2, 8) if len(shape) == 3 else torch.empty(1, 0, 2, 8)
    assert rotate(heads, *rope_table(heads.shape[1], 8, 1e4, CPU)).shape == heads.shape


def test_a_frozen_norm_or_input_leaves_the_other_gradient_as_it_is():
    torch.manual_seed(0)
    x, weight, grad = torch.randn(5, 64), torch.randn(64), torch.randn(5, 64)
    _, (dx, dweight) = gradients(lambda x, w: rowwise._RMSNorm.apply(x, w, 1e-5), (x, weight), grad)
    _, (only_dx,) = gradients(lambda x: rowwise._RMSNorm.apply(x, weight, 1e-5), (x,), grad)
    _, (only_dweight,) = gradients(lambda w: rowwise._RMSNorm.apply(x, w, 1e-5), (weight,), grad)
    assert torch.equal(dx, only_dx)
    assert torch.equal(dweight, only_dweight)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_each_is_one_operator_whose_fake_allocates_what_the_real_one_does(dtype):
    x, weight = torch.randn(2, 3, 64).to(dtype), torch.ones(64, dtype=dtype)
    q = torch.randn(2, 3, 4, 16).to(dtype)
    calls = [
        (rms_norm, (x, weight, 1e-5)),
        (rms_norm_backward, (x, x.transpose(0, 1).contiguous().transpose(0, 1), weight, torch.ones(6, 1))),
        (turn, (q, *rope_table(3, 16, 1e4, CPU), -1)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norm_keeps_its_input_and_a_number_per_row_and_rotation_only_the_shared_table(dtype):
    kept = []
    x = torch.randn(2, 3, 64, dtype=dtype, requires_grad=True)
    norm, table = RMSNorm(64, 1e-5).to(dtype), rope_table(3, 16, 1e4, CPU)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x)
        rotate(x.unflatten(-1, (4, 16)), *table)
    assert [t.data_ptr() for t in kept if t.dim() == 3] == [x.data_ptr()]
    assert next(t.shape for t in kept if t.dim() == 2) == (6, 1)
    assert [t.data_ptr() for t in kept[-2:]] == [t.data_ptr() for t in table]
    assert len(kept) == 5  # x, weight, 1 / rms; cos, sin


@pytest.fixture(scope="module")
def million():
    return rope_table(2**20, 16, 500000.0, CPU)


def test_phases_of_a_million_positions_agree_with_float64(million):
    cos, sin = million
    assert cos.dtype == sin.dtype == torch.float32
    for position in (0, 1, 255, 256, 257, 15_936, 15_962, 2**14, 2**17 + 1, 1_048_575):
        for i in range(8):
            phase = position * 500000.0 ** (-2 * i / 16)
            assert cos[position, i] == pytest.approx(math.cos(phase), abs=1e-6)
            assert sin[position, i] == pytest.approx(math.sin(phase), abs=1e-6)


@pytest.mark.parametrize(("one", "other"), [(256, 257), (15_962, 15_936), (1_048_574, 1_048_575)])
def test_positions_that_bfloat16_cannot_tell_apart_turn_differently(million, one, other):
    assert torch.tensor(one, dtype=torch.bfloat16) == torch.tensor(other, dtype=torch.bfloat16)
    cos, sin = million
    x = torch.ones(1, 1, 1, 16, dtype=torch.bfloat16)
    turned = [rotate(x, cos[p : p + 1], sin[p : p + 1]) for p in (one, other)]
    assert (turned[0] - turned[1]).abs().max() > 0.1


def test_a_bfloat16_model_turns_by_float32_phases():
    torch.manual_seed(0)
    config = GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=8)
    model, seen = GPT(config).bfloat16(), []
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args))
    model.logits(torch.zeros(1, 300, dtype=torch.long))
    x, (cos, sin) = seen[0]
    assert (x.dtype, cos.dtype, sin.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(cos, rope_table(300, 8, 10000.0, CPU)[0])


@pytest.mark.parametrize("distance", [0, 1, 100, 65_536])
def test_scores_depend_on_the_distance_of_positions_alone(million, distance):
    torch.manual_seed(0)
    cos, sin = million
    q, k = torch.randn(2, 1, 1, 1, 16)

    def score(position):
        at, before = slice(position, position + 1), slice(position - distance, position - distance + 1)
        return (rotate(q, cos[at], sin[at]) * rotate(k, cos[before], sin[before])).sum()

    first = score(distance)
    for shift in (1, 255, 256, 10_000, 2**20 - 1 - distance):
        assert score(distance + shift) == pytest.approx(first.item(), abs=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_gpu_computes_what_the_cpu_computes(dtype, monkeypatch):
    monkeypatch.setattr(rowwise, "GPU_TILE", 1000)
    torch.manual_seed(0)
    x, weight, grad = torch.randn(2, 9, 64).to(dtype), torch.randn(64).to(dtype), torch.randn(2, 9, 64).to(dtype)
    norm = RMSNorm(64, 1e-5).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        table = rope_table(9, 16, 1e4, torch.device(device))

        def both(x, weight, table=table):
            normed = torch.func.functional_call(norm, {"weight": weight}, x)
            return rotate(normed.unflatten(-1, (4, 16)), *table).flatten(-2)

        out, grads = gradients(both, (x.to(device), weight.to(device)), grad.to(device))
        results.append([t.cpu() for t in (out, *grads)])
    for cpu, gpu in zip(*results):
        torch.testing.assert_close(cpu, gpu, atol=4 * TOLERANCE[dtype] * cpu.abs().max().item(), rtol=0)
