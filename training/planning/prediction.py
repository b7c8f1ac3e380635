"""What is predicted of one step, and who causes its peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from training.metering.kinds import ACTIVATIONS, GRADIENTS, KINDS, LOSS, OPTIMIZER, OTHER, PARAMETERS, TEMPORARY
from training.planning.engine_books import Walked
from training.planning.extend import Step

MEMORY_ERROR = {"cpu": 0.01, "cuda": 0.05}  # relative error band of a peak; on CUDA not yet measured


@dataclass
class Prediction:
    """One step of a recipe: bytes on the device and the host, who causes the peak, and how long it takes."""

    mode: str
    seq_length: int
    peak_device_bytes: int  # as the meter or CUDA's allocator counts it
    peak_host_bytes: int
    after_forward_device_bytes: int
    peak_op: str
    breakdown_bytes: dict[str, int]
    reserved_bytes: int  # what is compared with the budget: on CUDA the peak and the fragmentation allowance
    allowances_bytes: dict[str, int] = field(default_factory=dict)  # CUDA specifics by name, of which the peak has some
    step_time_s: float = 0.0
    tokens_per_s: float = 0.0
    mfu: float | None = None
    hfu: float | None = None
    recompute_overhead: float = 0.0  # FLOPs that recompute repeats, relative to the model's: hfu = mfu * (1 + this)
    stalled_s: float = 0.0
    memory_error: float = 0.0
    time_error: float = 0.0
    notes: list[str] = field(default_factory=list)  # what the mode cannot do here


def peak_of(whole: Step, walked: Walked) -> tuple[int, list[int], str]:
    """The peak, its bytes by kind, and who causes it."""
    best, kinds, owner = walked.end_top, walked.end_kinds[:], "(optimizer)"
    for one in walked.passes:
        own, engine = whole.peak + one.live, whole.start + one.top
        i, j = int(own.argmax()), int(engine.argmax())
        if engine[j] > max(best, own[i]):
            best = int(engine[j])
            kinds = list(whole.start_kinds[j] + one.kinds[j])
            kinds[TEMPORARY] += best - sum(kinds)
            what, about = whole.marks[j]
            owner = f"{'engine at ' if what != 'loss' else ''}{what} of {about}" if about else what
        elif own[i] > best:
            best, kinds = int(own[i]), list(whole.kinds[i] + one.kinds[i])
            operation, module, phase = whole.owners[i]
            words = (operation, f"in {module}" if module else "", f"({phase})" if phase else "")
            owner = " ".join(word for word in words if word)
    return int(best), [int(k) for k in kinds], owner


def by_name(kinds: Sequence[int]) -> dict[str, int]:
    """Bytes by the kinds that a plan's record has; tokens and targets count as temporary."""
    names = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOSS, TEMPORARY)
    result = {KINDS[kind]: int(kinds[kind]) for kind in names}
    result["temporary"] += int(kinds[OTHER])
    return result
