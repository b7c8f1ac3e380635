"""Others that choose what to recompute for a budget, on our model: torch's SAC ILP, checkpoint_sequential, ckptplan.

None of them plans by the peak of a step, so each gets a range of targets, and the largest is taken whose measured peak
is within the budget: the best that its user could find by trying.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective_contexts

from model.gpt import GPT, GPTConfig
from training.memory import Meter
from training.planning import fakes
from training.planning.trace import Job
from training.planning.work import work_of
from training.recipe import Recipe

TARGETS = 16  # of a range
RunLayers = Callable[[GPT], Callable[[torch.Tensor, Any], torch.Tensor]]


class NotHereError(Exception):
    """A rival that is not installed, or does not work here; says why."""


@dataclass(frozen=True)
class Target:
    """What a rival makes of one target, and what to say of it."""

    run_layers: RunLayers
    note: str


def all_of(recipe: Recipe, model: GPT, length: int) -> dict[str, Callable[[], list[Target]]]:
    """Targets by rival, the one that keeps most first. Calling one raises NotHereError where it cannot be had."""
    return {
        "torch checkpoint_sequential": lambda: _sequential(model),
        "torch SAC ILP": lambda: _sac_ilp(model.config, length),
        "ckptplan": lambda: _ckptplan(model, length),
    }


def largest(targets: Sequence[Target], peak: Callable[[RunLayers], int], budget_bytes: int) -> Target:
    """The first target whose step stays within the budget."""
    for target in targets:
        if peak(target.run_layers) <= budget_bytes:
            return target
    raise NotHereError("none of its choices stays within the budget")


# torch.utils.checkpoint.checkpoint_sequential


def _sequential(model: GPT) -> list[Target]:
    def segments(count: int) -> Target:
        def made(model: GPT) -> Any:
            def run(x: torch.Tensor, rope: Any) -> torch.Tensor:
                layers: list[Any] = [lambda x, layer=layer: layer(x, rope) for layer in model.layers]
                return checkpoint_sequential(layers, count, x, use_reentrant=False)

            return run

        return Target(made, f"{count} segments")

    # It never recomputes the last segment: the fewer there are, the less is recomputed.
    return [segments(count) for count in range(2, len(model.layers) + 1)]


# torch.distributed._tools.sac_ilp


def _sac_ilp(config: GPTConfig, length: int) -> list[Target]:
    """Its estimators want a GPU; on a CPU they are given prices per FLOP and byte, by which they then choose."""
    try:
        import pulp  # noqa: F401
        import pwlf  # noqa: F401
        from torch.distributed._tools import ilp_utils, sac_ilp
        from torch.distributed._tools.mem_tracker import MemTracker
        from torch.distributed._tools.runtime_estimator import RuntimeEstimator
        from torch.distributed._tools.sac_estimator import SACEstimator
    except ImportError as error:
        raise NotHereError(f"not installed: {error}") from None
    for name in ("sac_ilp", "ilp_utils"):
        logging.getLogger(f"torch.distributed._tools.{name}").setLevel(logging.CRITICAL)

    def priced(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        out = func(*args, **(kwargs or {}))
        work = work_of(func, args, out)
        return out, 0.0 if work is None else (work[1] / 5e10 + work[2] / 8e9) * 1e3  # ms

    job = Job(config, (), torch.bfloat16, 1, length)
    with fakes.surroundings(job), torch._subclasses.FakeTensorMode():
        model, tokens = GPT(config), torch.zeros(1, length, dtype=torch.long)

        def step() -> None:
            model(tokens, tokens, 1.0).backward()
            model.zero_grad()

        step()
        memory = MemTracker()
        memory.track_external(model)
        with memory:
            step()
        runtime = RuntimeEstimator()("operator-level-cost-model")
        runtime._estimate = priced
        with contextlib.redirect_stdout(io.StringIO()), runtime:
            step()
        estimator = SACEstimator()("operator-level-cost-model")
        estimator._estimate_runtime = priced
        with estimator:
            model(tokens, tokens, 1.0)
        graph = ilp_utils.parse_module_info(
            ilp_utils.aggregate_stats(model, memory, runtime, estimator, torch.device("cpu"))
        )
    units = [f"GPT.layers.{i}" for i in range(config.num_layers)]
    whole_gib = graph.nodes[0]["act_total"] * 2 / 2**30
    targets = []
    for i in range(4 * TARGETS):
        budget_gib = whole_gib * (1 - i / (4 * TARGETS))
        decisions, _, peak = sac_ilp.sac_milp(graph, budget_gib, ac_units=units)
        if peak < 0:
            break
        policies: list[list[int] | None] = [None] * config.num_layers
        for i_layer, unit in enumerate(units):
            if discarded := decisions.get(unit):
                stats = estimator.sac_mod_stats[unit]
                policies[i_layer] = sac_ilp.get_optimal_checkpointing_policy_per_module(stats, 1 - discarded)
        targets.append(Target(_by_operation(policies), f"its budget {budget_gib * 1024:.0f} MiB"))
    return targets


def _by_operation(policies: Sequence[list[int] | None]) -> RunLayers:
    """Layers recomputed but for the operations that a policy saves, by their number."""

    def contexts(policy: list[int]) -> Any:
        seen = {False: 0, True: 0}

        def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            number = seen[context.is_recompute]
            seen[context.is_recompute] += 1
            save = number < len(policy) and policy[number]
            return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

        return selective_contexts(decide)

    def made(model: GPT) -> Any:
        def run(x: torch.Tensor, rope: Any) -> torch.Tensor:
            for layer, policy in zip(model.layers, policies):
                if policy is None:
                    x = layer(x, rope)
                else:
                    x = checkpoint(layer, x, rope, use_reentrant=False, context_fn=partial(contexts, policy))
            return x

        return run

    return made


# ckptplan


def _ckptplan(model: GPT, length: int) -> list[Target]:
    """It cannot measure bytes on a CPU; it is given the meter's."""
    try:
        import ckptplan
    except ImportError:
        raise NotHereError("not installed: pip install ckptplan") from None

    class Alone(torch.nn.Module):
        """A layer as a block of one argument."""

        def __init__(self, layer: torch.nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x, rope)

    from model.rowwise import rope_table

    config = model.config
    rope = rope_table(length, config.head_dim, config.rope_theta, torch.device("cpu"))
    x = torch.randn(1, length, config.hidden_size, dtype=torch.bfloat16)
    with Meter(model=model) as meter:
        before = meter.live_bytes
        kept = model.layers[0](x.requires_grad_(), rope)
        nbytes = meter.live_bytes - before - kept.nbytes
        del kept
    stack = torch.nn.ModuleList(Alone(layer) for layer in model.layers)
    blocks = ckptplan.declare_blocks(stack, [(f"layer{i}", layer) for i, layer in enumerate(stack)])
    profiles = ckptplan.profile_blocks(blocks, (x.detach(),), device="cpu", dtype=torch.bfloat16)
    profiles = tuple(
        replace(
            profile,
            timing_only=False,
            activation_bytes_estimate=nbytes,
            activation_bytes_method="isolated_forward_delta",
        )
        for profile in profiles
    )
    targets = []
    for keep in range(len(profiles), -1, -1):
        plan = ckptplan.plan_checkpoints(
            profiles,
            blocks,
            target_kind="activation_budget_bytes",
            target_value=keep * nbytes,
            planner="dynamic_programming",
        )
        chosen = [decision.checkpointed for decision in plan.decisions]
        targets.append(Target(_checkpointed(chosen), f"{sum(chosen)} of {len(chosen)} layers"))
    return targets


def _checkpointed(chosen: Sequence[bool]) -> RunLayers:
    def made(model: GPT) -> Any:
        def run(x: torch.Tensor, rope: Any) -> torch.Tensor:
            for layer, again in zip(model.layers, chosen):
                x = checkpoint(layer, x, rope, use_reentrant=False) if again else layer(x, rope)
            return x

        return run

    return made
