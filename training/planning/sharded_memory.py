"""What torch's fully_shard (FSDP2) holds, event by event: training/engine_torch.py on more than one rank."""

from __future__ import annotations

from training.metering.kinds import GRADIENTS, OPTIMIZER, PARAMETERS
from training.planning.engine_books import STEP_BYTES, EngineMemory, Mark


class FSDPMemory(EngineMemory):
    """Every layer is gathered while it runs, and in backward the next one as well; the rest from start to end."""

    def start(self) -> None:
        self.groups: dict[object, list[str]] = {}  # by layer; None: embedding, last norm, head
        for p in self.parameters:
            words = p.name.split(".")
            self.groups.setdefault(int(words[1]) if words[0] == "layers" else None, []).append(p.name)
        self.part = {name: -(-n // self.world_size) for name, n in self.numel.items()}
        self.gathered: dict[object, int] = {}
        self.unreduced: dict[str, int] = {}
        self.layer: object = None  # whose backward runs
        self.sent = 0  # bytes of gradients being reduced
        shard = sum(self.part.values())
        self.hold(PARAMETERS, shard * self.itemsize)
        self.hold(OPTIMIZER, shard * (12 if self.itemsize == 2 else 8) + STEP_BYTES * len(self.parameters))

    def at(self, mark: Mark) -> None:
        kind, about = mark
        if kind == "start":
            self._gather(None)
        elif kind == "forward":
            self._let_go(but=about)
            self._gather(about)
        elif kind == "after":
            self._let_go(but=None)
        elif kind == "loss":  # the first layer of backward is gathered ahead
            self._gather(max((g for g in self.groups if g is not None), default=None))  # type: ignore[type-var]
        elif kind in ("backward", "below"):
            self._reduce(self.layer)
            self._let_go(but=about)
            self.layer = about
            if kind == "backward":
                self._gather(about)
                if isinstance(about, int) and about > 0:
                    self._gather(about - 1)
        elif kind == "taken":
            name = str(about)
            self.unreduced[name] = self.numel[name] * self.itemsize
            self.hold(GRADIENTS, self.unreduced[name])

    def _size(self, group: object) -> int:
        return sum(self.part[name] * self.world_size for name in self.groups[group]) * self.itemsize

    def _gather(self, group: object) -> None:
        if group in self.gathered:
            return
        self.gathered[group] = self._size(group)
        self.hold(PARAMETERS, self.gathered[group])
        self.use(self.gathered[group])  # received as one, then copied out

    def _let_go(self, but: object) -> None:
        for group in [g for g in self.gathered if g is not None and g != but]:
            self.hold(PARAMETERS, -self.gathered.pop(group))

    def _reduce(self, group: object) -> None:
        names = [name for name in self.groups.get(group, ()) if name in self.unreduced]
        if not names:
            return
        parts = sum(self.part[name] for name in names)
        self._drop_sent()
        self.sent = parts * self.world_size * self.itemsize  # kept until the next layer's gradients are sent
        self.hold(GRADIENTS, self.sent)
        self.use(parts * self.itemsize)
        self.hold(GRADIENTS, -sum(self.unreduced.pop(name) for name in names))
        if self.first_pass:
            self.hold(GRADIENTS, parts * 4)
        if self.itemsize == 2:
            self.use(parts * self.itemsize)

    def _drop_sent(self) -> None:
        self.hold(GRADIENTS, -self.sent)
        self.sent = 0

    def end_pass(self) -> None:
        self._reduce(self.layer)
        self._reduce(None)
        self._drop_sent()
        for group in list(self.gathered):
            self.hold(PARAMETERS, -self.gathered.pop(group))
        self.layer = None

    def update(self) -> None:
        self.hold(GRADIENTS, -4 * sum(self.part.values()))
