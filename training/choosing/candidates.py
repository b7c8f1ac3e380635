"""What `recompute: auto` chooses from: every mode that a layer can have, with its bytes and seconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from model.gpt import GPTConfig, flops_per_token
from model.modes import RECOMPUTABLE, Mode, parse
from model.tiling import Tiles
from training.choosing.assignment import Choice, Limits
from training.choosing.calibration import Times
from training.choosing.layer_costs import Tracer
from training.flops import recomputed_flops_per_token

# Recomputing takes at least this share of the time that its FLOPs have in forward, and each list member this part.
LEAST_SPEED, LEAST_EXTRA = 0.7, 0.002


def modes(config: GPTConfig, tiles: Tiles) -> list[Mode]:
    """Every mode that one layer can have, without groups and offload, that may differ from the others."""
    modules = [m for m in RECOMPUTABLE if not (tiles.mlp_tile_tokens and m in ("activation", "mlp"))]
    if config.attention != "unfused" or tiles.attention_head_groups:
        modules.remove("core_attn")  # a fused kernel keeps nothing inside
    lists = [c for n in range(len(modules) + 1) for c in itertools.combinations(modules, n)]
    lists = [c for c in lists if not {"mlp", "activation"} <= set(c)]  # mlp computes its activation again
    # Unfused attention is kept with its [T, T] probabilities, which saves nothing.
    kept: tuple[tuple[str, ...], ...] = ((), ("attention",)) if config.attention != "unfused" else ((),)
    return [Mode("selective", c) if c else Mode() for c in lists] + [Mode("full", keep=k) for k in kept]


def groups(num_layers: int) -> list[int]:
    """Sizes of groups that are worth a look: two, three, and the root of the layers, as full+sqrt has them."""
    root = math.ceil(math.sqrt(num_layers))
    return sorted({2, 3, root} & set(range(2, num_layers)))


def leanest(num_layers: int) -> list[Mode]:
    """Modes among which is the one that keeps least, whatever the shape."""
    full = [Mode("full"), *(Mode("full", group=n) for n in groups(num_layers))]
    return [*full, *(replace(mode, offload="async") for mode in full)]


class Candidates:
    """Choices under certain tiles; those that another one beats in everything are left out."""

    def __init__(self, tracer: Tracer, times: Times, host_bytes: int | None) -> None:
        self.tracer, self.times = tracer, times
        config = tracer.job.config
        self.num_layers = config.num_layers
        self.around = tracer.surroundings(self.num_layers)
        self.plain_bytes = tracer.span(Mode()).kept_bytes
        alone = [mode for mode in modes(config, tracer.job.tiles) if str(mode) in times.layers]
        chosen = [parse(c.name) for c in undominated([self.choice(mode) for mode in alone])]
        chosen += [
            replace(mode, group=n) for mode in chosen if mode.recompute == "full" for n in groups(self.num_layers)
        ]
        if host_bytes is None or host_bytes > 0:
            chosen += [replace(mode, offload="async") for mode in chosen]
        self.choices = undominated([self.choice(mode) for mode in chosen])

    def limits(self, device_bytes: int, host_bytes: int | None) -> Limits:
        """device_bytes: for the layers and the loss, beside `around.base_bytes`."""
        return Limits(self.num_layers, device_bytes, host_bytes, self.around.loss_bytes, self.around.gradient_bytes)

    def choice(self, mode: Mode) -> Choice:
        nbytes = self.tracer.span(mode)
        forward, backward = self._seconds(mode)
        copy = nbytes.host_bytes * self.times.copy_s_per_byte
        if not self.times.copies_overlap:
            forward, backward, copy = forward + copy, backward + copy, 0.0
        costs = (nbytes.kept_bytes, nbytes.transient_bytes, nbytes.host_bytes, forward, backward, copy)
        return Choice(str(mode), mode.group, *costs)

    def for_all(self, choice: Choice) -> list[Choice]:
        """The choice in all layers; the last group may be smaller."""
        whole, rest = divmod(self.num_layers, choice.span)
        parts = [choice] * whole
        return [*parts, self.choice(replace(parse(choice.name), group=rest))] if rest else parts

    def _seconds(self, mode: Mode) -> tuple[float, float]:
        """Forward and backward of a group: measured for one layer, and by FLOPs for what a larger group repeats."""
        one = replace(mode, group=1, offload=None)
        forward, backward = self.times.layers[str(one)]
        plain_forward, plain_backward = self.times.layers["none"]
        # What does more work is not faster: a measurement that says so is noise.
        least = LEAST_SPEED * self._again(one) + LEAST_EXTRA * len(one.modules)
        forward, backward = max(forward, plain_forward), max(backward, plain_backward + least * plain_forward)
        more = self._again(replace(mode, offload=None)) - mode.group * self._again(one)
        return forward * mode.group, backward * mode.group + more * plain_forward

    def _again(self, mode: Mode) -> float:
        """Forward FLOPs that backward of a group repeats, beside those of mode none, in units of a layer's forward."""
        job = self.tracer.job
        config = replace(job.config, num_layers=mode.group)
        head = 6 * config.vocab_size * config.hidden_size
        forward = (flops_per_token(config, job.seq_length) - head) / 3 / mode.group
        with_mode, plain = (
            recomputed_flops_per_token(config, [m] * mode.group, job.seq_length, job.tiles) for m in (mode, Mode())
        )
        return (with_mode - plain) / forward


def undominated(choices: Sequence[Choice]) -> list[Choice]:
    """Those than which no other of the same span is as good in everything; of equals the first."""

    def beaten(i: int) -> bool:
        same = ((j, other) for j, other in enumerate(choices) if j != i and other.span == choices[i].span)
        return any(_as_good(o, choices[i]) and (j < i or not _as_good(choices[i], o)) for j, o in same)

    return [choice for i, choice in enumerate(choices) if not beaten(i)]


def _as_good(a: Choice, b: Choice) -> bool:
    def costs(c: Choice) -> tuple[float, ...]:
        return c.kept_bytes, c.transient_bytes, c.host_bytes, c.forward_s, c.backward_s, c.copy_s

    return all(x <= y for x, y in zip(costs(a), costs(b)))
