"""What DeepSpeed holds at ZeRO stages 0, 1 and 2, event by event (engine_books.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.metering.kinds import GRADIENTS, OPTIMIZER, PARAMETERS
from training.planning.engine_books import STEP_BYTES, EngineMemory, Mark, Parameter
from training.recipe import Recipe

NORM_BYTES = 8  # DeepSpeed takes norms of gradients in float64, one tensor at a time
ALLREDUCE_ELEMENTS = 500_000_000  # deepspeed/runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE
ALIGNMENT = 2  # elements; stage_1_and_2.py, nccl_start_alignment_factor


def groups_of(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """The optimizer's parameter groups (training/optimizer.py): matrices, then vectors."""
    split = [[p for p in parameters if p.is_matrix], [p for p in parameters if not p.is_matrix]]
    return [group for group in split if group]


class DeepSpeedMemory(EngineMemory):
    def __init__(
        self, recipe: Recipe, parameters: Sequence[Parameter], world_size: int, cuda: bool, config: dict[str, Any]
    ) -> None:
        super().__init__(recipe, parameters, world_size, cuda)
        self.zero = config["zero_optimization"]
        self.offload = (self.zero.get("offload_optimizer") or {}).get("device", "none") != "none"
        self.groups = groups_of(parameters)
        sizes = {"fp16": 2, "bf16": 2, "bfp16": 2, "fp32": 4}
        self.accumulates_fp32 = (config.get("data_types") or {}).get("grad_accum_dtype") == "fp32"
        self.communication_itemsize = sizes.get(config.get("communication_data_type") or "", self.itemsize)


class Zero0Memory(DeepSpeedMemory):
    """bf16: FP16_UnfusedOptimizer around AdamW; fp32: AdamW itself. All gradients stay until the step is done."""

    def start(self) -> None:
        self.hold(PARAMETERS, self.total * self.itemsize)
        self.hold(OPTIMIZER, (self.total * 4 if self.itemsize == 2 else 0) + self.total * 8)
        self.hold(OPTIMIZER, STEP_BYTES * len(self.parameters))

    def at(self, mark: Mark) -> None:
        kind, name = mark
        if kind == "taken" and self.first_pass:
            self.hold(GRADIENTS, self.numel[name] * self.itemsize)  # type: ignore[index]

    def end_pass(self) -> None:
        if self.last_pass and self.world_size > 1:  # gradients are joined for the all-reduce
            self.use(self._largest_join() * self.itemsize)

    def _largest_join(self) -> int:
        largest = size = count = 0
        for p in self.parameters:
            size, count = size + p.numel, count + 1
            if size > ALLREDUCE_ELEMENTS:
                largest, size, count = max(largest, size if count > 1 else 0), 0, 0
        return max(largest, size if count > 1 else 0)

    def update(self) -> None:
        if self.itemsize == 2:
            for group in self.groups:
                for p in group:
                    self.use(p.numel * 4)  # its norm
                self.hold(GRADIENTS, 4 * sum(p.numel for p in group))
            self.hold(GRADIENTS, -4 * self.total)
        self.hold(GRADIENTS, -self.itemsize * self.total)


class BF16Memory(DeepSpeedMemory):
    """Stage 1 with bf16 and accumulation, BF16_Optimizer: a float32 gradient of every weight on every rank."""

    def start(self) -> None:
        unit = ALIGNMENT * self.world_size
        flat = [-(-sum(p.numel for p in group) // unit) * unit for group in self.groups]
        self.flat = flat
        self.hold(PARAMETERS, sum(flat) * 2)
        self.hold(GRADIENTS, sum(flat) * 4)
        self.hold(OPTIMIZER, sum(flat) // self.world_size * 12 + STEP_BYTES * len(self.groups))

    def at(self, mark: Mark) -> None:
        kind, name = mark
        if kind == "taken" and self.first_pass:
            self.hold(GRADIENTS, self.numel[name] * 2)  # type: ignore[index]

    def end_pass(self) -> None:
        self.use(4 * max(self.numel.values()))  # each is added in float32
        if self.last_pass:
            joined = sum(self.flat) if self.flat[0] <= ALLREDUCE_ELEMENTS and len(self.flat) > 1 else 0
            self.use(joined * 4 + max(joined, *self.flat) * self.communication_itemsize)

    def update(self) -> None:
        self.hold(GRADIENTS, -2 * self.total)


class _PartitionedMemory(DeepSpeedMemory):
    """Stages 1 and 2: weights flat on every rank, optimizer state and gradients split over them.

    Rank 0's bytes; other ranks differ by the parameters that lie across the cuts. `compact`: gradients of several
    micro-batches add up in a float32 partition of their own, not in the weights' dtype.
    """

    rank = 0

    def start(self) -> None:
        self.bucket_elements = int(self.zero["reduce_bucket_size"])
        self.buffers = 2 if self.zero.get("overlap_comm") else 1
        self.compact = self.itemsize == 2 and self.accumulates_fp32
        unit = ALIGNMENT * self.world_size
        self.flat = [-(-sum(p.numel for p in group) // unit) * unit for group in self.groups]
        self.part = [size // self.world_size for size in self.flat]
        self.owned: set[str] = set()
        self.places: dict[str, tuple[int, int]] = {}  # group, first element in it
        for i, group in enumerate(self.groups):
            position, first, end = 0, self.part[i] * self.rank, self.part[i] * (self.rank + 1)
            for p in group:
                self.places[p.name] = i, position
                if first <= position < end or position < first < position + p.numel:
                    self.owned.add(p.name)
                position += p.numel
        self.owned_elements = sum(self.numel[name] for name in self.owned)
        self.bucket: list[str] = []
        self.bucket_fill = 0
        self.ready = False
        self.large: str | None = None  # a gradient that is too large for the bucket, being made
        self.partition_held = 0  # bytes of gradients of the own partition, of this pass
        self.accumulated = 0  # and of earlier passes
        self.compact_held: set[int] = set()  # groups whose float32 partition there is
        self.own: dict[str, int] = {}  # bytes of gradients that stayed where autograd made them
        self.on_host: set[str] = set()

        self.hold(PARAMETERS, sum(self.flat) * self.itemsize)
        state = sum(self.part) * 12
        if not self.offload:
            self.hold(OPTIMIZER, state + STEP_BYTES * len(self.groups))
            return
        largest = max(self.numel.values())
        self.hold_offloaded(OPTIMIZER, state + sum(self.part) * 4 + STEP_BYTES * len(self.groups))  # and gradients
        self.hold_offloaded(OPTIMIZER, (sum(self.part) + largest) * self.itemsize, registered=False)
        self.hold(GRADIENTS, largest * self.itemsize)

    def update(self) -> None:
        if self.offload or self.compact:
            for name in () if self.offload else self.owned:
                self.use(NORM_BYTES * self.numel[name])
            for i in list(self.compact_held):
                self.hold(GRADIENTS, -4 * self.part[i])
            self.compact_held.clear()
            return
        for name in self.owned:
            self.use(NORM_BYTES * self.numel[name])
        for i, part in enumerate(self.part):
            several = len([p for p in self.groups[i] if p.name in self.owned]) + (self._padding(i) > 0) > 1
            joined = part * self.itemsize if several else 0
            self.hold(GRADIENTS, joined)
            if self.itemsize == 2:
                self.hold(GRADIENTS, part * 4)
                self.hold(GRADIENTS, -joined)
                joined = part * 4
            if i == len(self.part) - 1:
                self.hold(GRADIENTS, -self.partition_held - self.accumulated)
                self.partition_held = self.accumulated = 0
            self.hold(GRADIENTS, -joined)

    def _padding(self, group: int) -> int:
        used = sum(p.numel for p in self.groups[group])
        return max(0, self.flat[group] - used) if self.rank == self.world_size - 1 else 0

    # The reduce bucket, as reduce_independent_p_g_buckets_and_remove_grads fills it.

    def _ready(self) -> None:
        if not self.ready:
            self.hold(GRADIENTS, self.bucket_elements * self.itemsize * self.buffers)
            self.ready = True

    def _into_bucket(self, name: str) -> bool:
        """Whether the gradient went into the bucket's own memory."""
        n = self.numel[name]
        if self.bucket_fill + n > self.bucket_elements:
            self._flush()
        self.bucket.append(name)
        self.bucket_fill += n
        if n > self.bucket_elements and self.offload:
            self.use(n * self.itemsize)
        return n <= self.bucket_elements

    def _flush(self) -> None:
        slices = self._slices()
        if self.compact:
            self._make_compact()
        size = count = largest_own = 0
        for rank, n in [*slices, (-1, 0)]:
            largest_own = max(largest_own, n if rank == self.rank else 0)
            size, count = size + n, count + (n > 0)
            if size > self.bucket_elements or rank < 0:
                joined = size * self.itemsize if count > 1 else 0
                cast = size * self.communication_itemsize if self.communication_itemsize != self.itemsize else 0
                self.use(joined + cast + (4 * largest_own if self.compact else 0))
                size = count = largest_own = 0
        for name in self.bucket:
            if name in self.owned:
                self._to_partition(name)
            if name not in self.owned or not self.compact or self.offload:
                self._clear(name)
        self.bucket, self.bucket_fill = [], 0

    def _make_compact(self) -> None:
        for name in self.bucket:
            group = self.places[name][0]
            if name in self.owned and group not in self.compact_held:
                self.compact_held.add(group)
                self.hold(GRADIENTS, 4 * self.part[group])

    def _slices(self) -> list[tuple[int, int]]:
        """(rank, elements) of the stretches of the bucket that go to one rank each."""
        slices: list[tuple[int, int]] = []
        for name in self.bucket:
            group, first = self.places[name]
            part, end = self.part[group], first + self.numel[name]
            while first < end:
                rank = min(first // part, self.world_size - 1)
                size = min(end, (rank + 1) * part) - first if rank < self.world_size - 1 else end - first
                apart = self.compact and rank == self.rank  # each goes to a place of its own
                if slices and slices[-1][0] == rank and not apart:
                    slices[-1] = rank, slices[-1][1] + size
                else:
                    slices.append((rank, size))
                first += size
        return slices

    def _to_partition(self, name: str) -> None:
        if self.offload:
            n = self.numel[name]
            if self.accumulation > 1 and not self.compact and name not in self.on_host:
                self.on_host.add(name)
                self.hold_offloaded(GRADIENTS, n * self.itemsize, registered=False)
            if self.last_pass:
                self.use(NORM_BYTES * n)
                if self.itemsize != 4 and not self.compact:
                    self.use(4 * n)
        elif not self.partition_held and not self.compact:
            self.partition_held = self.owned_elements * self.itemsize
            self.hold(GRADIENTS, self.partition_held)

    def _clear(self, name: str) -> None:
        self.hold(GRADIENTS, -self.own.pop(name, 0))

    def _epilogue(self) -> None:
        self._flush()
        if self.ready:
            self.hold(GRADIENTS, -self.bucket_elements * self.itemsize * self.buffers)
            self.ready = False
        for name in list(self.own):
            self._clear(name)
        if self.accumulated:
            self.hold(GRADIENTS, -self.partition_held)
        else:
            self.accumulated = self.partition_held
        self.partition_held = 0

    def _keep_own(self, name: str) -> None:
        self.own[name] = self.numel[name] * self.itemsize
        self.hold(GRADIENTS, self.own[name])


class Zero1Memory(_PartitionedMemory):
    """Gradients add up whole on every rank; they are reduced and split after the last micro-batch."""

    def at(self, mark: Mark) -> None:
        kind, name = mark
        if kind == "gradient":
            self._ready()
        elif kind == "taken" and name not in self.own:
            self._keep_own(str(name))

    def end_pass(self) -> None:
        if not self.last_pass:
            return
        for group in self.groups:
            for p in group:
                if self._into_bucket(p.name):
                    self._clear(p.name)
        self._epilogue()


class Zero2Memory(_PartitionedMemory):
    """Gradients are reduced as they come, and only the rank's own partition stays."""

    def at(self, mark: Mark) -> None:
        kind, name = mark
        if kind == "gradient":
            self._ready()
            if not self._into_bucket(str(name)):
                self.large = str(name)
        elif kind == "taken" and name == self.large:
            self._keep_own(str(name))
            self.large = None

    def end_pass(self) -> None:
        self._epilogue()
