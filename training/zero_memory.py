"""What DeepSpeed holds at ZeRO stages 0, 1 and 2, event by event (training/engine_memory.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.engine_memory import STEP_BYTES, EngineMemory, Mark, Parameter
from training.recipe import Recipe
from training.kinds import GRADIENTS, OPTIMIZER, PARAMETERS

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
        if self.last_pass:  # gradients are joined for the all-reduce, also when there is one rank
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


class _PartitionedMemory(DeepSpeedMemory):
    """Stages 1 and 2: weights flat on every rank, optimizer state and gradients split over them.

    Rank 0's bytes; other ranks differ by the parameters that lie across the cuts.
    """

    rank = 0

    def start(self) -> None:
        self.bucket_elements = int(self.zero["reduce_bucket_size"])
        self.buffers = 2 if self.zero.get("overlap_comm") else 1
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
        self.partition_held = 0  # gradients of the own partition, this pass
        self.accumulated = 0  # and of earlier passes
        self.own: dict[str, int] = {}  # gradients that stayed where autograd made them

        self.hold(PARAMETERS, sum(self.flat) * self.itemsize)
        state = sum(self.part) * 12
        if not self.offload:
            self.hold(OPTIMIZER, state + STEP_BYTES * len(self.groups))
            return
        largest = max(self.numel.values())
        self.hold_offloaded(OPTIMIZER, state + sum(self.part) * 4 + STEP_BYTES * len(self.groups))  # and gradients
        self.hold_offloaded(OPTIMIZER, sum(self.part) * self.itemsize + largest * self.itemsize, registered=False)
        self.hold(GRADIENTS, largest * self.itemsize)

    def update(self) -> None:
        if self.offload:
            return
        for name in self.owned:
            self.use(NORM_BYTES * self.numel[name])
        for i, part in enumerate(self.part):
            several = len([p for p in self.groups[i] if p.name in self.owned]) + (self._padding(i) > 0) > 1
            joined = part * self.itemsize if several or self.itemsize == 4 else 0
            self.hold(GRADIENTS, joined)
            if self.itemsize == 2:
                self.hold(GRADIENTS, part * 4)
                self.hold(GRADIENTS, -joined)
                joined = part * 4
            if i == len(self.part) - 1:
                self._drop_partition()
            self.hold(GRADIENTS, -joined)

    def _padding(self, group: int) -> int:
        used = sum(p.numel for p in self.groups[group])
        return max(0, self.flat[group] - used) if self.rank == self.world_size - 1 else 0

    def _drop_partition(self) -> None:
        self.hold(GRADIENTS, -(self.partition_held + self.accumulated) * self.itemsize)
        self.partition_held = self.accumulated = 0

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
        size = count = 0
        for n in slices:
            size, count = size + n, count + 1
            if size > self.bucket_elements:
                self._all_reduce(size, count)
                size = count = 0
        self._all_reduce(size, count)
        for name in self.bucket:
            if name in self.owned:
                self._to_partition(name)
            if name not in self.owned or name in self.own:
                self._clear(name)
        self.bucket, self.bucket_fill = [], 0

    def _all_reduce(self, size: int, count: int) -> None:
        joined = size * self.itemsize if count > 1 else 0
        cast = size * self.communication_itemsize if self.communication_itemsize != self.itemsize else 0
        self.use(joined + cast)

    def _slices(self) -> list[int]:
        """Sizes of the stretches of the bucket that go to one rank each."""
        slices: list[tuple[int, int]] = []
        for name in self.bucket:
            group, first = self.places[name]
            part, end = self.part[group], first + self.numel[name]
            while first < end:
                rank = min(first // part, self.world_size - 1)
                size = min(end, (rank + 1) * part) - first if rank < self.world_size - 1 else end - first
                if slices and slices[-1][0] == rank:
                    slices[-1] = rank, slices[-1][1] + size
                else:
                    slices.append((rank, size))
                first += size
        return [size for _, size in slices]

    def _to_partition(self, name: str) -> None:
        if self.offload:
            n = self.numel[name]
            if self.accumulation > 1 and name not in self.on_host:
                self.on_host.add(name)
                self.hold_offloaded(GRADIENTS, n * self.itemsize, registered=False)
            if self.last_pass:
                self.use(NORM_BYTES * n)
                if self.itemsize != 4:
                    self.use(4 * n)
        elif not self.partition_held:
            self.partition_held = self.owned_elements
            self.hold(GRADIENTS, self.owned_elements * self.itemsize)

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
            self.hold(GRADIENTS, -self.partition_held * self.itemsize)
        else:
            self.accumulated = self.partition_held
        self.partition_held = 0

    @property
    def on_host(self) -> set[str]:
        return self.__dict__.setdefault("_on_host", set())


class Zero1Memory(_PartitionedMemory):
    """Gradients add up whole on every rank; they are reduced and split after the last micro-batch."""

    def at(self, mark: Mark) -> None:
        kind, name = mark
        if kind == "gradient":
            self._ready()
        elif kind == "taken" and name not in self.own:
            self.own[name] = self.numel[name] * self.itemsize  # type: ignore[index]
            self.hold(GRADIENTS, self.own[name])  # type: ignore[index]

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
            if not self._into_bucket(name):  # type: ignore[arg-type]
                self.large = name
        elif kind == "taken" and name == getattr(self, "large", None):
            self.large = None
            self.own[name] = self.numel[name] * self.itemsize  # type: ignore[index]
            self.hold(GRADIENTS, self.own[name])  # type: ignore[index]

    def end_pass(self) -> None:
        self._epilogue()
