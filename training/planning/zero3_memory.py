"""What DeepSpeed holds at ZeRO stage 3, event by event (engine_books.py).

Gathering follows partitioned_param_coordinator.py: a module's parameters are fetched when it is called, the next ones
are fetched ahead, and a parameter is let go when it is not used again soon. The first pass only records the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from training.metering.kinds import GRADIENTS, OPTIMIZER, PARAMETERS
from training.planning.engine_books import STEP_BYTES, Mark
from training.planning.zero_memory import NORM_BYTES, DeepSpeedMemory

# Defaults of deepspeed/runtime/zero/config.py.
PREFETCH, PERSISTENCE, MAX_LIVE, MAX_REUSE, SUB_GROUP = 50_000_000, 100_000, 10**9, 10**9, 10**9


class Zero3Memory(DeepSpeedMemory):
    """Weights, gradients and optimizer state in equal parts on every rank; weights gathered while they are used."""

    def start(self) -> None:
        z = self.zero
        self.bucket_elements = int(z["reduce_bucket_size"])
        self.accumulated_itemsize = 4 if self.accumulates_fp32 else self.itemsize
        self.part = {name: -(-n // self.world_size) for name, n in self.numel.items()}
        self.param_offload = (z.get("offload_param") or {}).get("device", "none") != "none"
        self.coordinator = Coordinator(self)
        self.bucket: list[str] = []
        self.bucket_fill = 0
        self.own: dict[str, int] = {}
        self.large: str | None = None

        shard = sum(self.part.values())
        state = shard * 12 + STEP_BYTES * len(self._sub_groups())
        if self.param_offload:
            self.hold_offloaded(PARAMETERS, shard * self.itemsize, registered=False)
        else:
            self.hold(PARAMETERS, shard * self.itemsize)
        self.hold(GRADIENTS, self.bucket_elements * self.itemsize)
        if self.offload:
            self.hold_offloaded(OPTIMIZER, state + shard * 4)  # and gradients in float32
            self.hold_offloaded(GRADIENTS, shard * self.accumulated_itemsize, registered=False)
        else:
            self.hold(OPTIMIZER, state)
            self.hold(GRADIENTS, shard * self.accumulated_itemsize)
        self.coordinator.gather_persistent()

    def _sub_groups(self) -> list[list[str]]:
        """What the optimizer updates at a time: parameter groups, cut when they are large."""
        limit, result = int(self.zero.get("sub_group_size", SUB_GROUP)), []
        for group in self.groups:
            current: list[str] = []
            size = 0
            for p in group:
                current.append(p.name)
                size += self.part[p.name]
                if size >= limit:
                    result.append(current)
                    current, size = [], 0
            if current:
                result.append(current)
        return result

    def at(self, mark: Mark) -> None:
        kind, about = mark
        name = str(about)
        if kind == "start":
            self.coordinator.begin()
        elif kind == "enter":
            self.coordinator.fetch(name)
        elif kind == "enter backward":
            self.coordinator.fetch(name)
        elif kind in ("leave", "leave backward"):
            self.coordinator.release(name)
        elif kind == "gradient":
            self._reduce_before(name)
        elif kind == "taken" and name == self.large:
            self.own[name] = self.numel[name] * self.itemsize
            self.hold(GRADIENTS, self.own[name])
            self.large = None

    def _reduce_before(self, name: str) -> None:
        n = self.numel[name]
        if self.bucket and self.bucket_fill + n > self.bucket_elements:
            self._reduce()
        if self.bucket_fill + n > self.bucket_elements:
            self.large = name
        self.bucket.append(name)
        self.bucket_fill += n

    def _reduce(self) -> None:
        if not self.bucket:
            return
        parts = sum(self.part[name] for name in self.bucket)
        alone = len(self.bucket) == 1 and self.numel[self.bucket[0]] % self.world_size == 0
        joined = 0 if alone else parts * self.world_size * self.itemsize
        cast = parts * 4 if self.accumulated_itemsize != self.communication_itemsize else 0
        sent = self.bucket_fill * self.communication_itemsize if self.communication_itemsize != self.itemsize else 0
        self.use(joined + cast + sent)
        if self.offload and self.last_pass:  # a norm each, of what the reduction has left
            self.use((cast or joined) + max(NORM_BYTES * self.part[name] for name in self.bucket))
        for name in self.bucket:
            self.hold(GRADIENTS, -self.own.pop(name, 0))
        self.bucket, self.bucket_fill = [], 0

    def end_pass(self) -> None:
        self._reduce()
        self.coordinator.release_leftovers()

    def update(self) -> None:
        self.coordinator.release_all()
        if not self.offload:
            for name in self.numel:
                self.use(NORM_BYTES * self.part[name])
            for group in self._sub_groups():
                size = sum(self.part[name] for name in group)
                joined = size * self.accumulated_itemsize if len(group) > 1 else 0
                self.hold(GRADIENTS, joined)
                if self.accumulated_itemsize != 4:
                    self.hold(GRADIENTS, size * 4)
                    self.hold(GRADIENTS, -joined)
                    joined = size * 4
                self.hold(GRADIENTS, -joined)
        self.coordinator.gather_persistent()


class Coordinator:
    """Which parameters are gathered, and what that takes."""

    def __init__(self, engine: Zero3Memory) -> None:
        z = engine.zero
        self.engine = engine
        # The rank's part is all there is; offloaded, a GPU needs a copy of it, a CPU does not.
        self.whole = engine.world_size == 1 and not (engine.param_offload and engine.cuda)
        threshold = int(z.get("stage3_param_persistence_threshold", z.get("param_persistence_threshold", PERSISTENCE)))
        self.persistent = {name for name, n in engine.numel.items() if n <= threshold}
        self.prefetch_elements = int(z.get("stage3_prefetch_bucket_size", z.get("prefetch_bucket_size", PREFETCH)))
        self.max_live = int(z.get("stage3_max_live_parameters", z.get("max_live_parameters", MAX_LIVE)))
        self.max_reuse = int(z.get("stage3_max_reuse_distance", z.get("max_reuse_distance", MAX_REUSE)))
        self.owned: dict[str, list[str]] = {}
        for p in engine.parameters:
            self.owned.setdefault(p.name.rpartition(".")[0], []).append(p.name)
        if engine.recipe.model.tied_embeddings:
            self.owned["head"] = ["embedding.weight"]
        self.place = {p.name: i for i, p in enumerate(engine.parameters)}
        self.held: dict[str, int] = {}  # bytes of each gathered parameter
        self.in_flight: dict[str, _Gather] = {}
        self.users: dict[str, set[str]] = {}
        self.active: dict[str, None] = {}  # modules that backward has entered and not left
        self.order: list[str] = []  # modules as they are fetched for, in the last pass
        self.complete = False
        self.recording = False

    # -- one pass --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        if self.recording:
            self.complete, self.recording = True, False
            self._index()
        elif not self.complete:
            self.recording = True
            self.order = []
        self.step, self.live_elements = 0, 0
        self.queue = (
            deque((name, step) for step, module in enumerate(self.order) for name in self._names(module))
            if self.complete
            else deque()
        )
        self.fetched_for: dict[str, int] = {}

    def _index(self) -> None:
        """For every place in the order: elements of modules before it, and where each parameter is used."""
        self.elements_before = [0]
        self.uses: dict[str, list[int]] = {}
        for step, module in enumerate(self.order):
            names = self._names(module)
            self.elements_before.append(self.elements_before[-1] + sum(self.engine.numel[n] for n in names))
            for name in names:
                self.uses.setdefault(name, []).append(step)

    def _names(self, module: str) -> list[str]:
        return self.owned.get(module, [])

    def fetch(self, module: str) -> None:
        names = self._names(module)
        if self.recording:
            self.order.append(module)
        self._gather([n for n in names if n not in self.held and n not in self.in_flight])
        for name in names:
            self.users.setdefault(name, set()).add(module)
            if name in self.in_flight:
                self.in_flight.pop(name).wait(self, name)
        if self.complete:
            self._skip(names)
            self._prefetch()
        self.step += 1

    def _skip(self, names: Iterable[str]) -> None:
        wanted = {n for n in names if self.fetched_for.get(n, -1) < self.step}
        found: set[str] = set()
        while self.queue and len(found) < len(wanted):
            name, step = self.queue.popleft()
            self.fetched_for[name] = step
            found.add(name)

    def _prefetch(self) -> None:
        limit = min(self.max_live - self.live_elements, self.prefetch_elements)
        chosen: list[str] = []
        size = 0
        while self.queue and size < limit:
            name, step = self.queue.popleft()
            self.fetched_for[name] = max(self.fetched_for.get(name, -1), step)
            if name not in self.held and name not in self.in_flight and name not in chosen:
                chosen.append(name)
                size += self.engine.numel[name]
        self._gather(chosen)

    def _gather(self, names: list[str]) -> None:
        if not names:
            return
        self.live_elements += sum(self.engine.numel[n] for n in names)
        gather = _Gather(names)
        if not self.whole:
            gather.start(self)
        for name in names:
            self.in_flight[name] = gather

    def release(self, module: str) -> None:
        names = self._names(module)
        going = set(names)
        if self.complete:
            going = {n for n in names if n not in self.persistent and not self._used_soon(n)}
        for name in names:
            self.users.get(name, set()).discard(module)
            if name in going:
                self._let_go(name)

    def _used_soon(self, name: str) -> bool:
        if self.fetched_for.get(name, -1) > self.step:
            return True
        before = self.elements_before
        following = next((s for s in self.uses.get(name, ()) if s >= self.step), None)
        return following is not None and before[following] - before[min(self.step, len(before) - 1)] < self.max_reuse

    def _let_go(self, name: str) -> None:
        if name in self.held and not self.users.get(name):
            self.engine.hold(PARAMETERS, -self.held.pop(name))
            self.live_elements -= self.engine.numel[name]

    def release_leftovers(self) -> None:
        """What backward entered and did not leave: a module whose input needs no gradient, like the embedding."""
        for name, users in self.users.items():
            users.clear()
            if name not in self.persistent:
                self._let_go(name)

    def release_all(self) -> None:
        for name in list(self.in_flight):
            self.in_flight.pop(name).wait(self, name)
        for users in self.users.values():
            users.clear()
        for name in list(self.held):
            self._let_go(name)

    def gather_persistent(self) -> None:
        for name in self.persistent:
            if name not in self.held:
                self.held[name] = 0 if self.whole else self._size(name)
                self.engine.hold(PARAMETERS, self.held[name])

    def _size(self, name: str) -> int:
        return self.engine.part[name] * self.engine.world_size * self.engine.itemsize


class _Gather:
    """One all-gather: of a single parameter into its own memory, or of several into one that is then copied out."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.waiting = names, len(names)
        self.joined = 0
        self.done = False

    def start(self, coordinator: Coordinator) -> None:
        sizes = [coordinator._size(name) for name in self.names]
        if len(self.names) > 1:
            self.joined = sum(sizes)
        coordinator.engine.hold(PARAMETERS, sum(sizes))

    def wait(self, coordinator: Coordinator, name: str) -> None:
        """`name` is needed: all of this gather become available; the joint memory goes with the last one to wait."""
        engine = coordinator.engine
        if not self.done:
            self.done = True
            for each in self.names:
                size = (
                    0
                    if coordinator.whole
                    else (engine.numel[each] * engine.itemsize if self.joined else coordinator._size(each))
                )
                coordinator.held[each] = size
                if self.joined:
                    engine.hold(PARAMETERS, size)
        self.waiting -= 1
        if not self.waiting and self.joined:
            engine.hold(PARAMETERS, -self.joined)
