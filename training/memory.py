"""The meter: live device bytes, host bytes, the peak and who caused it; one for CPU, CUDA and fake tensors.

On CPU and for fake tensors every storage is followed from the operation that makes it until it dies, so the
numbers are exact to the byte and the same on every run. On CUDA the allocator's statistics are the truth;
storages are followed there as well when `operations=True`, to name the operation at the peak and to break the
peak down.

What following does not count: workspace that a kernel takes and returns within itself, what gloo copies in
threads of its own, and sparse tensors. And torch adds gradients that meet at a fork out of place while any
dispatch mode is on, in place otherwise: there a followed step really holds one gradient more than an unfollowed
one (no mode has its peak there).
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from model import host
from training.metering import kinds
from training.metering.cuda_memory import CudaMemory
from training.metering.kinds import KINDS, LEAVES, LOSS, OPTIMIZER, OTHER, TEMPORARY
from training.metering.places import Places, graph_task
from training.metering.storages import Origin, Storages, resizes_seen
from training.metering.timeline import Timeline

_NOTHING = dict.fromkeys(KINDS, 0)


class Meter:
    """Counts memory while `with Meter() as meter:` is open; the numbers stay readable afterwards.

    Every tensor that exists at entry counts too (all that Python's garbage collector knows, after a
    collection). `model` and `optimizer` (or `track` later) name modules and tell parameters, gradients and
    optimizer state apart; a model's `head` is its loss module. Phases are found by themselves, or said with
    `phase`, which is exact where work is done around backward and step. Meters nest, except that CUDA keeps
    one peak for all.

    device: "cpu", "cuda" or "fake"; None: "fake" under FakeTensorMode, else the model's, else cuda if there
        is one.
    budget_bytes: more live device bytes raise torch.OutOfMemoryError naming operation, module, wanted and
        free bytes; on CUDA the allocator is limited until the meter closes, and raises its own.
    host_budget_bytes: the same for the host pool (model/host.py), as model.host.HostOutOfMemoryError.
    timeline: the number of points to keep for `timeline`; 0 for none.
    operations: whether to follow every operation; None: everywhere but on CUDA.
    """

    def __init__(
        self,
        *,
        device: str | torch.device | None = None,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        budget_bytes: int | None = None,
        host_budget_bytes: int | None = None,
        timeline: int = 0,
        operations: bool | None = None,
    ) -> None:
        if timeline < 0 or timeline == 1:
            raise ValueError(f"timeline={timeline}: write the number of points to keep, at least 2, or 0 for none")
        self.budget_bytes = budget_bytes
        self.host_budget_bytes = host_budget_bytes
        self.after_forward_bytes = 0  # the most that was alive between a forward and its backward
        self.after_forward_breakdown_bytes = _NOTHING.copy()  # the same by kind
        self.current_phase = ""
        self.kind = ""  # of device: "cpu", "cuda" or "fake"; known at entry
        self._asked_device = device
        self._asked_operations = operations
        self._asked_timeline = timeline
        self._optimizers: list[weakref.ref] = []
        self._places = Places()
        self._storages: Storages | None = None
        self._cuda: CudaMemory | None = None
        self._points: Timeline | None = None
        self._peak_host = self._host = 0
        self._is_open = self._said = self._loss_found = False
        self._phase_births = 0
        self._failed: Origin | None = None
        if model is not None or optimizer is not None:
            self.track(model, optimizer)

    # -- opening and closing ---------------------------------------------------------------------------------

    def __enter__(self) -> Meter:
        if self._is_open:
            raise RuntimeError("this meter is open already: make another one to meter within it")
        device = self._find_device()
        self.kind = device if isinstance(device, str) else device.type
        self.current_phase = ""
        self._said = self._loss_found = False
        self._phase_births = 0
        self._cuda = CudaMemory(device) if isinstance(device, torch.device) and self.kind == "cuda" else None
        follow = self.kind != "cuda" if self._asked_operations is None else self._asked_operations
        self._storages = None
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            host.watchers.append(self._host_grows)
            stack.callback(host.watchers.remove, self._host_grows)
            for handle in (
                hooks.register_module_forward_pre_hook(self._before_module),
                hooks.register_module_forward_hook(self._after_module, always_call=True),
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ):
                stack.callback(handle.remove)
            if self._cuda is not None:
                stack.enter_context(self._cuda.limited(self.budget_bytes))
            if follow or self._cuda is None:
                budget = self.budget_bytes if self._cuda is None else None
                self._storages = Storages(self.kind, self._places, budget, self._kind_of_birth)
                self._storages.see_existing()
                self._storages.after_operation = self._mark_time if self._asked_timeline else None
                stack.enter_context(resizes_seen(self._storages))
                stack.enter_context(self._storages)
            self._assign_known(optimizers=True)
            self.reset_peak()
            self._stack = stack.pop_all()
        self._is_open = True
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _close(self) -> None:
        self._is_open = False
        self._host = host.live_bytes(self.kind == "fake")
        if self._storages is not None:
            self._storages.close()
        if self._cuda is not None:
            self._cuda.freeze()

    def _find_device(self) -> str | torch.device:
        if self._asked_device is not None:
            device = self._asked_device
            return device if device in ("cpu", "fake") else torch.device(device)
        if any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()):
            return "fake"
        for model in self._places.models:
            for parameter in getattr(model(), "parameters", tuple)():
                if parameter.device.type in ("cpu", "cuda"):
                    return parameter.device
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def track(self, model: torch.nn.Module | None = None, optimizer: Any = None) -> None:
        """Name the modules of a model, and know its storages and an optimizer's by kind from now on."""
        if model is not None:
            self._places.models.append(weakref.ref(model))
            if isinstance(head := getattr(model, "head", None), torch.nn.Module):
                self._places.losses.add(head)
        if optimizer is not None:
            self._optimizers.append(weakref.ref(optimizer))
        self._assign_known(optimizers=True)

    # -- numbers ---------------------------------------------------------------------------------------------

    @property
    def live_bytes(self) -> int:
        """Device bytes alive now; on CUDA what the allocator has given out."""
        return self._cuda.read("live") if self._cuda else self._storages.live_bytes if self._storages else 0

    @property
    def peak_bytes(self) -> int:
        """The most device bytes alive at once since entry or `reset_peak`."""
        return self._cuda.read("peak") if self._cuda else self._storages.peak_bytes if self._storages else 0

    @property
    def host_bytes(self) -> int:
        """Bytes of the host pool alive now."""
        return host.live_bytes(self.kind == "fake") if self._is_open else self._host

    @property
    def peak_host_bytes(self) -> int:
        """The most host pool bytes alive at once since entry or `reset_peak`."""
        return self._peak_host

    @property
    def peak_op(self) -> str:
        """Who caused the peak: "aten.mm in layers.3.mlp.fc1 (backward)"; "" when nothing grew since
        `reset_peak`.

        On CUDA without `operations` the phase only.
        """
        if self._storages is not None:
            return self._places.describe(self._storages.peak_origin) if self._storages.peak_origin else ""
        return f"({self._cuda.peak_phase})" if self._cuda and self._cuda.peak_phase else ""

    @property
    def failed_op(self) -> str:
        """Who ran out of memory since `reset_peak`, in the words of `peak_op`; "" when nobody did."""
        origin = self._storages.failed_origin if self._storages and self._storages.failed_origin else self._failed
        return self._places.describe(origin) if origin else ""

    @property
    def breakdown_bytes(self) -> dict[str, int]:
        """Bytes at the peak by kind, the sum being `peak_bytes`; complete when the peak's phase has ended.

        parameters, gradients, optimizer (state), activations (kept for backward), loss (made by the loss
        module), temporary, other (was there before, or made outside any phase). On CUDA with `operations`
        only, and before the allocator's rounding; else all 0.
        """
        return kinds.by_name(self._storages.peak_by_kind) if self._storages else _NOTHING.copy()

    @property
    def reserved_bytes(self) -> int:
        """Bytes the CUDA allocator holds, given out or not; elsewhere the live bytes."""
        return self._cuda.read("reserved") if self._cuda else self.live_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most `reserved_bytes` since entry or `reset_peak`."""
        return self._cuda.read("peak_reserved") if self._cuda else self.peak_bytes

    @property
    def retries(self) -> int:
        """How often the CUDA allocator had to give back cached memory and try again, since entry."""
        return self._cuda.read("retries") if self._cuda else 0

    @property
    def outside_bytes(self) -> int:
        """Device memory in use that the allocator does not hold: context, libraries, other processes."""
        return self._cuda.read("outside") if self._cuda else 0

    @property
    def timeline(self) -> list[tuple[int, str, str, int]]:
        """(sequence number, phase, module, live bytes) since `reset_peak`, thinned out to local maxima.

        A point for every operation that is followed and every module boundary.
        """
        names = self._places.names()
        points = self._points.kept if self._points else []
        return [(n, phase, names.get(id(ref and ref()), ""), live) for n, phase, ref, live in points]

    def reset_peak(self) -> None:
        """Start peaks, after-forward and timeline anew from what is alive now: a step starts."""
        self.after_forward_bytes, self.after_forward_breakdown_bytes = 0, _NOTHING.copy()
        self._peak_host, self._failed = self.host_bytes, None
        self._points = Timeline(self._asked_timeline) if self._asked_timeline else None
        if self._storages is not None:
            self._storages.reset_peak()
        if self._cuda is not None:
            self._cuda.reset_peak()

    # -- phases ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say which part of the step runs: "forward", "loss", "backward" or "optimizer"."""
        if name not in LEAVES:
            raise ValueError(f"unknown phase {name!r}: write one of {', '.join(LEAVES)}")
        before = self.current_phase, self._said
        self._said = True
        self._switch(name)
        try:
            yield
        except torch.OutOfMemoryError:
            self._note_failure()
            raise
        finally:
            self._switch(before[0])
            self._said = before[1]

    def _switch(self, name: str) -> None:
        old = self.current_phase
        if self._storages is not None:
            if old:
                self._storages.settle(self._phase_births, LEAVES[old])
            if old in ("forward", "backward"):  # the only ones that make parameters (ZeRO-3) and gradients
                self._assign_known()
            self._phase_births = self._storages.births
            self._storages.phase = name
        if self._cuda is not None:
            self._cuda.end_phase(old)
        forward = ("forward", "loss")
        if old in forward and name not in forward and torch.is_grad_enabled():
            live = self.live_bytes
            if live > self.after_forward_bytes:  # with accumulation: of the fullest micro-batch
                self.after_forward_bytes = live
                if self._storages is not None:
                    self.after_forward_breakdown_bytes = kinds.by_name(self._storages.by_kind)
        self.current_phase = name

    def _before_module(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # within a compiled region nobody sees modules come and go
            return
        places = self._places
        if not self._said and places.outside and graph_task() < 0:
            self._switch("forward")
        places.enter(module)
        if places.loss_called and self.current_phase == "forward":
            self._switch("loss")
            self._loss_found = True
        self._mark_time()

    def _after_module(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        if torch.compiler.is_compiling():
            return
        places = self._places
        if isinstance(sys.exc_info()[1], torch.OutOfMemoryError):
            self._note_failure()
        self._mark_time()
        places.leave(module)
        if self._loss_found and not places.loss_called:
            self._switch("forward")
            self._loss_found = False
        if not self._said and places.outside and self.current_phase == "forward":
            self._switch("")

    def _before_step(self, *ignored: Any) -> None:
        if not self._said:
            self._switch("optimizer")

    def _after_step(self, *ignored: Any) -> None:
        if not self._said:
            self._switch("")

    def _kind_of_birth(self) -> int:
        if not self._said and self._places.outside:
            in_backward = graph_task() >= 0
            if in_backward != (self.current_phase == "backward") and self.current_phase != "optimizer":
                self._switch("backward" if in_backward else "")
        if self.current_phase == "loss" or (self.current_phase == "backward" and self._places.in_loss):
            return LOSS
        return TEMPORARY if self.current_phase else OTHER

    def _assign_known(self, optimizers: bool = False) -> None:
        if (books := self._storages) is None:
            return
        for reference in self._places.models:
            if (model := reference()) is not None:
                for tensor, kind in kinds.of_model(model):
                    books.assign(tensor, kind)
        for tensor in (t for o in self._optimizers for t in kinds.of_optimizer(o())) if optimizers else ():
            books.assign(tensor, OPTIMIZER, only_other=True)

    def _host_grows(self, nbytes: int, fake: bool, storage: torch.UntypedStorage | None) -> None:
        if fake != (self.kind == "fake"):
            return
        live, budget = host.live_bytes(fake), self.host_budget_bytes
        if budget is not None and live + nbytes > budget:
            raise host.HostOutOfMemoryError(
                f"out of host memory: {self._places.describe(('host pool', *self._places.now()))} wants "
                f"{nbytes:,} bytes, {max(0, budget - live):,} bytes are free of a budget of {budget:,} bytes"
            )
        self._peak_host = max(self._peak_host, live + nbytes)
        if storage is not None and self._storages is not None:
            self._storages.take_off(storage)

    def _note_failure(self) -> None:
        if self._failed is None:  # the innermost module notes it first
            reference, why = self._places.now()
            self._failed = ("", reference, why or self.current_phase)

    def _mark_time(self) -> None:
        if self._points is not None:
            self._points.add(self.current_phase, self._places, self.live_bytes)
