"""Which module is at work, in forward, in backward and in what backward recomputes."""

from __future__ import annotations

import bisect
import weakref
from typing import Any

import torch

MAX_MARKS = 100_000  # module boundaries remembered; a step has a few thousand
MAX_NUMBER = 1 << 62

# -1 outside backward; nested backward passes have numbers of their own.
graph_task = torch._C._current_graph_task_id
current_node = torch._C._current_autograd_node
sequence_number = torch._C._autograd._get_sequence_nr


class Places:
    """Follows modules by forward hooks, and autograd nodes back to the module that made them.

    A node carries the sequence number that was current when forward made it. Noting that number at every
    module boundary is enough to find a node's module in backward, with no hook on any tensor.
    """

    def __init__(self) -> None:
        self.models: list[weakref.ref[torch.nn.Module]] = []  # whose names count
        self.losses: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # called from no module
        self._stack: list[tuple[weakref.ref, int, bool]] = []  # module, graph task it was called in, in the loss
        self._numbers: list[int] = []
        self._marks: list[tuple[weakref.ref | None, bool]] = []  # from that number on: module, in the loss

    @property
    def outside(self) -> bool:
        """Whether no module is being called."""
        return not self._stack

    @property
    def loss_called(self) -> bool:
        """Whether a loss module is being called."""
        return bool(self._stack) and self._stack[-1][2]

    @property
    def in_loss(self) -> bool:
        """Whether the work at hand belongs to a loss module: its forward, or its part of backward."""
        if self._stack and self._stack[-1][1] == graph_task():
            return self._stack[-1][2]
        mark = self._mark_of(current_node())
        return mark is not None and mark[1]

    def enter(self, module: torch.nn.Module) -> None:
        if not self._stack:
            self._roots.add(module)
        loss = module in self.losses or bool(self._stack and self._stack[-1][2])
        self._stack.append((weakref.ref(module), graph_task(), loss))
        self._mark()

    def leave(self, module: torch.nn.Module) -> None:
        for depth in range(len(self._stack) - 1, -1, -1):
            if self._stack[depth][0]() is module:
                del self._stack[depth:]
                break
        self._mark()

    def now(self) -> tuple[weakref.ref | None, str]:
        """The module (or the parameter, while its gradient is taken in) at work, and why: "", "backward" or
        "recompute"."""
        task = graph_task()
        if self._stack and self._stack[-1][1] == task:
            return self._stack[-1][0], "" if task < 0 else "recompute"
        if task < 0:
            return None, ""
        node = current_node()
        parameter = getattr(node, "variable", None)  # only gradient accumulation nodes have one
        if parameter is not None:
            return weakref.ref(parameter), "backward"
        mark = self._mark_of(node)
        return mark and mark[0], "backward"

    def describe(self, origin: tuple[Any, weakref.ref | None, str]) -> str:
        """An operation, its module and phase in words: "aten.mm in layers.3.mlp.fc1 (backward)"."""
        operation, reference, phase = origin
        name = self.names().get(id(reference()), "") if reference is not None else ""
        if not name and reference is not None and reference() is not None:
            name = type(reference()).__name__  # part of no model that is known
        operation = str(getattr(operation, "overloadpacket", operation) or "")
        words = (operation, f"in {name}" if name else "", f"({phase})" if phase else "")
        return " ".join(word for word in words if word)

    def names(self) -> dict[int, str]:
        """The names of all modules and parameters by id; a model's go before those of what wraps it."""
        names: dict[int, str] = {}
        for root in (*(model() for model in self.models), *self._roots):
            if root is not None:
                for name, thing in (*root.named_modules(), *root.named_parameters()):
                    names.setdefault(id(thing), name or type(thing).__name__)
        return names

    def _mark(self) -> None:
        number = sequence_number()
        if self._numbers and number < self._numbers[-1]:  # another thread's count: the old marks are no use
            self._numbers.clear()
            self._marks.clear()
        elif len(self._numbers) >= MAX_MARKS:
            del self._numbers[: MAX_MARKS // 2], self._marks[: MAX_MARKS // 2]
        self._numbers.append(number)
        self._marks.append((self._stack[-1][0], self._stack[-1][2]) if self._stack else (None, False))

    def _mark_of(self, node: torch.autograd.graph.Node | None) -> tuple[weakref.ref | None, bool] | None:
        if node is None:
            return None
        number = node._sequence_nr()
        if number > MAX_NUMBER:  # gradient accumulation belongs to no place in forward
            return None
        place = bisect.bisect_right(self._numbers, number) - 1
        return self._marks[place] if place >= 0 else None
