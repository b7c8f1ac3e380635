"""The exact choice behind `recompute: auto`: which layers are kept, recomputed and moved, at the least time that fits.

Layers are alike, so a plan is a number of layers for each choice and an order. The order that needs the least memory
is known: backward runs from the last layer to the first, so layer i has the kept bytes of all layers before it beside
its own transient peak. Minimising the largest such sum over all orders is the sequencing problem of Abdel-Wahab and
Kameda (Operations Research 26, 1978) and has a fixed rule, `_in_order`. What is left is how many layers each choice
gets: a mixed integer program with one integer and one binary variable a choice, however many layers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp


@dataclass(frozen=True)
class Choice:
    """What `span` consecutive layers cost under one mode. Bytes are of the device unless they say host."""

    name: str
    span: int  # layers that the choice covers at once: a group that is recomputed together
    kept_bytes: int  # from their forward to their backward
    transient_bytes: int  # on top of that while they run, the larger of forward and backward
    host_bytes: int  # from their forward to their backward
    forward_s: float
    backward_s: float
    copy_s: float  # on the host link, once in forward and once in backward; other layers' work can hide it


@dataclass(frozen=True)
class Limits:
    """What the layers of a step have to share."""

    num_layers: int
    device_bytes: int  # beside everything that is there whatever is chosen
    host_bytes: int | None  # None: no limit
    loss_bytes: int  # transient peak of the loss, when all layers' kept bytes are there
    gradient_bytes: int  # that a layer's backward leaves behind


@dataclass(frozen=True)
class Assignment:
    """A choice for each span of layers, first layer first, and what the model says of it."""

    choices: tuple[Choice, ...]
    peak_bytes: int
    host_bytes: int
    step_s: float  # forward and backward of the layers; each waits for the host link if that is slower


class DoesNotFit(ValueError):  # noqa: N818 - an answer, and the caller's to tell
    """No assignment stays within the limits."""


def evaluate(choices: Sequence[Choice], limits: Limits) -> Assignment:
    """What the model says of choices in this order, whether or not they fit."""
    live = limits.gradient_bytes * limits.num_layers  # of all layers; each takes its own off before it runs
    peak = 0
    for choice in choices:
        live -= limits.gradient_bytes * choice.span
        live += choice.kept_bytes
        peak = max(peak, live + choice.transient_bytes)
    kept = sum(choice.kept_bytes for choice in choices)
    copies = sum(choice.copy_s for choice in choices)
    step_s = sum(max(sum(times), copies) for times in zip(*((c.forward_s, c.backward_s) for c in choices)))
    host = sum(choice.host_bytes for choice in choices)
    return Assignment(tuple(choices), max(peak, kept + limits.loss_bytes), host, step_s)


def fits(assignment: Assignment, limits: Limits) -> bool:
    within_host = limits.host_bytes is None or assignment.host_bytes <= limits.host_bytes
    return assignment.peak_bytes <= limits.device_bytes and within_host


def assign(choices: Sequence[Choice], limits: Limits) -> Assignment:
    """The assignment of least `step_s` that fits; among equals one of small peak. Raises DoesNotFit."""
    choices = _in_order(choices, limits)
    m = len(choices)
    kept, transient, host, span, forward, backward, copy = (
        np.array([getattr(choice, name) for choice in choices], dtype=float)
        for name in ("kept_bytes", "transient_bytes", "host_bytes", "span", "forward_s", "backward_s", "copy_s")
    )
    # Variables: spans of each choice (n), whether it is used (y), time of forward and of backward (t). Bytes in units
    # of the budget and times of the slowest choice, so that the solver's tolerances mean something.
    unit, second = float(max(1, limits.device_bytes)), float(max(1e-12, (forward + backward + copy).max()))
    most = np.floor(limits.num_layers / span)
    net = (kept - limits.gradient_bytes * span) / unit
    rows: list[np.ndarray] = []
    upper: list[float] = []

    def at_most(n: np.ndarray, y: np.ndarray, t: tuple[float, float], bound: float) -> None:
        rows.append(np.concatenate([n, y, t]))
        upper.append(bound)

    zero = np.zeros(m)
    for i in range(m):
        at_most(np.eye(m)[i], -most[i] * np.eye(m)[i], (0, 0), 0)  # a choice that has spans is used
        # Within a run of one choice the last span has the most beside it, or the first if each adds less than nothing.
        before = np.where(np.arange(m) < i, net, 0.0)
        own = np.eye(m)[i] * max(net[i], 0.0)
        first = min(net[i], 0.0)
        base = (limits.gradient_bytes * limits.num_layers + transient[i]) / unit + first
        slack = base + float(np.maximum(net * most, 0).sum())  # enough to let go of the row when the choice is unused
        at_most(before + own, slack * np.eye(m)[i], (0, 0), 1 - base + slack)
    at_most(kept / unit, zero, (0, 0), 1 - limits.loss_bytes / unit)
    if limits.host_bytes is not None and host.any():
        at_most(host / host.max(), zero, (0, 0), limits.host_bytes / host.max())
    for phase, times in enumerate((forward, backward)):
        t = (-1.0, 0.0) if phase == 0 else (0.0, -1.0)
        at_most(times / second, zero, t, 0)
        at_most(copy / second, zero, t, 0)
    everywhere = LinearConstraint(np.concatenate([span, zero, (0, 0)]), limits.num_layers, limits.num_layers)
    # The second term only decides between plans of equal time.
    cost = np.concatenate([1e-7 * kept / max(1.0, kept.max()) / limits.num_layers, zero, (1, 1)])
    result = milp(
        cost,
        constraints=[LinearConstraint(np.array(rows), -np.inf, np.array(upper)), everywhere],
        integrality=np.concatenate([np.ones(2 * m), (0, 0)]),
        bounds=Bounds(np.zeros(2 * m + 2), np.concatenate([most, np.ones(m), (np.inf, np.inf)])),
        options={"mip_rel_gap": 1e-9},
    )
    if result.x is None:
        raise DoesNotFit(f"no assignment of {limits.num_layers} layers fits in {limits.device_bytes} bytes")
    counts = np.round(result.x[:m]).astype(int)
    best = evaluate([choice for choice, count in zip(choices, counts) for _ in range(count)], limits)
    if not fits(best, limits):  # by less than the solver's tolerance of a millionth
        tighter = int(limits.device_bytes * (1 - 2e-6)) - 1
        return assign(
            choices, Limits(limits.num_layers, tighter, limits.host_bytes, limits.loss_bytes, limits.gradient_bytes)
        )
    return best


def _in_order(choices: Sequence[Choice], limits: Limits) -> list[Choice]:
    """The order of layers that needs the least memory: first what frees more gradient than it keeps, by rising peak;
    then what keeps more, by falling transient, so that the large transients have the fewest layers before them."""

    def key(choice: Choice) -> tuple[int, int]:
        gradient = limits.gradient_bytes * choice.span
        net = choice.kept_bytes - gradient
        peak = choice.kept_bytes + choice.transient_bytes - gradient
        return (0, peak) if net <= 0 else (1, -(peak - net))

    return sorted(choices, key=key)
