"""A region by itself: any arguments, any nesting, errors instead of wrong gradients, and nothing left behind."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from model.region import Kept, Region, current_region
from model.replay import Activity, is_recomputing


def region(function, *args, stochastic=True, **kwargs):
    return Region(function, args, kwargs, stochastic).run()


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def x_and_weight():
    torch.manual_seed(0)
    return torch.randn(4, 6, requires_grad=True), nn.Parameter(torch.randn(6, 6))


def compare(function, *rest, **kwargs):
    """Output and gradients of `function(x, weight, ...)`, plain and as a region, are the same bits."""
    results = []
    for call in (plain, region):
        x, weight = x_and_weight()
        torch.manual_seed(1)
        out = call(function, x * 1, weight, *rest, **kwargs)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, weight.grad))
    for ours, theirs in zip(*reversed(results)):
        assert ours is theirs is None or torch.equal(ours, theirs)


# Arguments


def test_keyword_tensors_none_ints_bools_and_nested_lists_are_arguments_like_any_other():
    def function(x, weight, power, nothing, flag, *, scale, table, pair):
        assert nothing is None
        assert flag is True
        assert type(power) is int
        x = (x @ weight).exp() * scale + table
        return (x * pair[0]["a"]).pow(power).tanh() * pair[1]

    scale, table = torch.rand(6), torch.rand(4, 6)
    compare(function, 3, None, True, scale=scale, table=table, pair=({"a": torch.rand(4, 6)}, 2.0))


def test_gradients_reach_keyword_tensors_and_tensors_in_lists():
    tensors = [torch.rand(3, requires_grad=True) for _ in range(3)]
    region(lambda a, *, b, c: (a * b).exp() * c[0], tensors[0], b=tensors[1], c=[tensors[2]]).sum().backward()
    a, b, c = (t.detach().requires_grad_() for t in tensors)
    ((a * b).exp() * c).sum().backward()
    for ours, theirs in zip(tensors, (a, b, c)):
        assert torch.equal(ours.grad, theirs.grad)


def test_several_outputs_and_an_output_that_is_an_argument():
    results = []
    for call in (plain, region):
        x, weight = x_and_weight()
        given, product, squares = call(lambda x, w: (x, x @ w, {"squares": (x @ w).square()}), x, weight)
        (given.sum() + product.tanh().sum() + squares["squares"].sum()).backward()
        results.append((x.grad, weight.grad))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results))


def test_no_argument_that_needs_a_gradient_still_gives_the_weights_theirs():
    weight = nn.Parameter(torch.ones(3))
    region(lambda x: (x * weight).exp(), torch.rand(3)).sum().backward()
    assert weight.grad.all()


def test_views_of_one_tensor_are_arguments():
    def function(q, k, v):
        return (q.exp() @ k.t()).tanh() @ v

    results = []
    for call in (plain, region):
        x, weight = x_and_weight()
        call(function, *(x @ weight).split(2, dim=1)).sum().backward()
        results.append((x.grad, weight.grad))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results))


# Replay


def test_random_numbers_are_replayed_and_the_generator_is_left_alone():
    compare(lambda x, w: F.dropout(F.dropout(x @ w).exp()))
    x, weight = x_and_weight()
    out = region(lambda x, w: F.dropout(x @ w).exp(), x, weight)
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_two_runs_before_one_backward_each_have_their_own_random_numbers():
    results = []
    for call in (plain, region):
        x, weight = x_and_weight()
        torch.manual_seed(2)
        first, second = (call(lambda x, w: F.dropout(x @ w).exp(), x, weight) for _ in range(2))
        (first.sum() + 2 * second.sum()).backward()
        results.append((x.grad, weight.grad))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results))


@pytest.mark.parametrize("around_forward", [True, False])
def test_autocast_is_replayed_as_it_was_in_forward(around_forward):
    dtypes = []

    def function(x, weight):
        product = x @ weight
        dtypes.append(product.dtype)
        return product.exp()

    x, weight = x_and_weight()
    with torch.autocast("cpu", torch.bfloat16, enabled=around_forward):
        out = region(function, x, weight).sum()
    with torch.autocast("cpu", torch.bfloat16, enabled=not around_forward):
        out.backward()
    assert len(dtypes) == 2
    assert len(set(dtypes)) == 1


def test_a_weight_shared_by_two_regions_trains_under_autocast():
    """Autocast caches the cast of a weight that both regions use."""
    results = []
    for call in (plain, region):
        x, weight = x_and_weight()
        with torch.autocast("cpu", torch.bfloat16):
            first = call(lambda x, w: (x @ w).tanh(), x, weight)
            second = call(lambda x, w: (x @ w).sigmoid(), first, weight)
        second.sum().backward()
        results.append((x.grad, weight.grad))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results))


def test_side_effects_can_tell_the_second_run_from_the_first():
    runs, activity = [], Activity()

    def function(x):
        runs.append(is_recomputing())
        return x.exp().tanh()

    x = torch.rand(3, requires_grad=True)
    out = Region(function, (x,), {}, False, counted=activity).run()
    assert (runs, activity.recomputed) == ([False], 0)
    out.sum().backward()
    assert (runs, activity.recomputed) == ([False, True], 1)
    assert not is_recomputing()


def test_the_second_run_happens_once_and_ends_where_nothing_is_wanted_any_more():
    steps = []

    def function(x, weight):
        steps.append("exp")
        x = x.exp()
        steps.append("sin")
        x = x.sin()
        steps.append("product")
        x = x @ weight
        steps.append("after")
        return x + 1

    x, weight = x_and_weight()
    region(function, x, weight).sum().backward()
    assert steps == ["exp", "sin", "product", "after", "exp", "sin", "product"]


# Nesting


def nested(outer, inner):
    def block(x, weight):
        return F.dropout((x @ weight).tanh(), 0.2).exp()

    def function(x, weight):
        return inner(block, inner(block, x, weight) * 0.1, weight).sin()

    return lambda x, weight: outer(function, x, weight)


def checkpointed(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


def on_cpu(function, *args):
    with save_on_cpu():
        return function(*args)


@pytest.mark.parametrize("inner", [region, checkpointed, on_cpu])
@pytest.mark.parametrize("outer", [region, checkpointed, on_cpu])
@pytest.mark.parametrize("outermost", [plain, region, checkpointed])
def test_regions_nest_in_each_other_in_recompute_and_in_offload_of_others(outermost, outer, inner):
    results = []
    for call in (nested(plain, plain), lambda x, w: outermost(nested(outer, inner), x, w)):
        x, weight = x_and_weight()
        torch.manual_seed(3)
        call(x * 1, weight).sum().backward()
        results.append((x.grad, weight.grad))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results))


def test_what_a_region_needs_itself_is_saved_through_the_hooks_around_it():
    saved = []

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    x, weight = x_and_weight()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        region(lambda x, w: (x @ w[:, :2]).exp().tanh().sin(), x * 1, weight)
    # x and weight, once as arguments and once for the product; nothing of what follows.
    assert {(4, 6), (6, 6)} <= set(saved) <= {(4, 6), (6, 6), (6, 2)}


# Kept outputs


class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return F.dropout(x.exp(), 0.3).sin()


def keeping(core, *args):
    region = current_region()
    return core(*args) if region is None else region.keep(core, args, {})


@pytest.mark.parametrize("frozen", [False, True])
def test_a_kept_output_is_not_computed_again_and_random_numbers_after_it_are_the_same(frozen):
    """frozen: nothing before the kept module needs a gradient, so its output does not either."""
    results, core = [], Core()

    def function(x, weight):
        x = keeping(core, x.tanh() if frozen else (x @ weight).tanh())
        return F.dropout(x @ weight, 0.5).exp()

    for call in (plain, region):
        x, weight = x_and_weight()
        x.requires_grad_(not frozen)
        torch.manual_seed(4)
        call(function, x, weight).sum().backward()
        results.append([t for t in (x.grad, weight.grad) if t is not None])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results))
    assert core.calls == 2


def test_a_kept_module_may_be_called_several_times_and_keeps_each_output():
    results, core = [], Core()

    def function(x, weight):
        for _ in range(3):
            x = keeping(core, x @ weight)
        return x.exp()

    for call in (plain, region):
        x, weight = x_and_weight()
        torch.manual_seed(5)
        call(function, x * 0.1, weight).sum().backward()
        results.append((x.grad, weight.grad))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results))
    assert core.calls == 6


# Errors instead of wrong gradients


def test_an_argument_changed_in_place_before_backward_is_an_error():
    x, weight = x_and_weight()
    hidden = x * 1
    out = region(lambda x, w: (x @ w).exp(), hidden, weight)
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        out.sum().backward()


def test_a_kept_output_changed_in_place_before_backward_is_an_error():
    x, weight = x_and_weight()
    held = []

    def core(x):
        held.append(x.exp())
        return held[0]

    out = region(lambda x, w: keeping(core, x @ w).tanh() @ w, x, weight)
    with torch.no_grad():
        held[0].add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        out.sum().backward()


def test_what_autograd_saved_changed_in_place_inside_a_region_is_the_error_it_is_outside():
    def function(x, weight):
        product = (x @ weight).exp()  # exp saves its output
        product.add_(1)
        return product.sin()

    for call in (plain, region):
        x, weight = x_and_weight()
        with pytest.raises(RuntimeError, match="modified"):
            call(function, x, weight).sum().backward()


def test_changing_what_backward_does_not_need_is_no_error():
    def function(x, weight):
        product = x @ weight
        product.add_(1).mul_(2)
        return product.exp()

    compare(function)


def test_a_parameter_changed_before_backward_is_the_error_it_is_outside():
    for call in (plain, region):
        x, weight = x_and_weight()
        out = call(lambda x, w: F.linear(x, w).exp(), x, weight)
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            out.sum().backward()


@pytest.mark.parametrize(
    "second",
    [
        lambda x: x.exp(),  # saves less
        lambda x: x[:2].exp().sin().sum(),  # another shape
        lambda x: x.double().exp().sin(),  # another dtype
        lambda x: x.sin().cos().detach().exp(),  # nothing at all that needs a gradient
    ],
)
def test_code_that_does_something_else_the_second_time_is_an_error(second):
    runs = []

    def function(x):
        runs.append(1)
        return x.exp().sin() if len(runs) == 1 else second(x)

    x = torch.rand(4, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match="must do the same"):
        region(function, x * 1).sum().backward()


def test_an_error_in_the_second_run_reaches_the_caller_and_a_later_one_may_succeed():
    runs = []

    def function(x):
        runs.append(1)
        if len(runs) == 2:
            raise torch.OutOfMemoryError("no room")
        return x.exp().sin()

    x = torch.rand(3, requires_grad=True)
    out = region(function, x).sum()
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        out.backward(retain_graph=True)
    assert not is_recomputing()
    assert current_region() is None
    out.backward()
    assert torch.equal(x.grad, x.detach().exp().cos() * x.detach().exp())


# Nothing left behind


def test_what_is_recomputed_lives_as_long_as_the_node_that_saved_it():
    """Recomputed tensors go one by one as backward passes them, not all at its end."""
    alive: list[weakref.ref] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(out := x * 2)
            alive.append(weakref.ref(out.untyped_storage()))
            return out

        @staticmethod
        def backward(ctx, grad):
            assert len(ctx.saved_tensors) == 1
            counts.append(sum(reference() is not None for reference in alive))
            return grad * 2

    def function(x):
        for _ in range(5):
            x = Watch.apply(x)
        return x

    counts: list[int] = []
    region(function, torch.ones(3, requires_grad=True)).sum().backward()
    assert counts == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("with_backward", [True, False])
def test_a_region_dies_with_its_graph_without_the_garbage_collector(with_backward):
    gc.collect()
    gc.disable()
    try:
        x, weight = x_and_weight()
        core = Core()
        call = Region(lambda x, w: keeping(core, x @ w) @ w, (x, weight), {}, True)
        reference, out = weakref.ref(call), call.run()
        del call
        if with_backward:
            out.sum().backward()
        del out
        assert reference() is None
    finally:
        gc.enable()


def test_a_kept_tensor_does_not_hold_the_graph_that_made_it():
    out = torch.rand(3, requires_grad=True).exp()
    assert Kept(out).get().grad_fn is None
