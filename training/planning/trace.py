"""One training step of the real model code on tensors without content: what it holds, when, and what work it does.

A trace is cut into intervals at the places where something outside the model may change memory (a gradient is
complete, a module's parameters are needed) and where a layer begins. Everything is relative to the start of the
step: parameters, optimizer and whatever an engine adds are not in it (engine_books.py).

The tensors are on the meta device: sizes and strides of the CPU's kernels at any length, five times as fast as fake
tensors. Where a CUDA kernel keeps or takes other bytes, training/planning/cuda_layout.py says so.
"""

from __future__ import annotations

import contextlib
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules import module as hooks

from model import host, recompute, tiling
from model.gpt import GPT, GPTConfig
from model.modes import Mode
from model.replay import is_recomputing
from training.metering.kinds import ACTIVATIONS, GRADIENTS, LOSS, OTHER, TEMPORARY
from training.metering.places import Places, graph_task
from training.metering.storages import Storages
from training.planning import cuda_layout, fakes
from training.planning.work import Work, work_of

Mark = tuple[str, Any]  # what begins an interval: a kind, and the layer, module or parameter it is about
IN_PLACE = {torch.ops.aten.addmm_.default, torch.ops.aten.add_.Tensor, torch.ops.aten.copy_.default}
LAYER_MARKS = ("start", "forward", "after", "backward", "recompute", "below")


@dataclass(frozen=True)
class Job:
    """What is traced."""

    config: GPTConfig
    modes: tuple[Mode, ...]  # one for each layer
    dtype: torch.dtype
    micro_batch_size: int
    seq_length: int
    tiles: tiling.Tiles = field(default_factory=tiling.Tiles)
    cuda: bool = False  # with the layouts and workspaces of CUDA kernels
    gathers: bool = False  # mark where modules need their parameters, for ZeRO-3 and FSDP


@dataclass
class Interval:
    """A stretch of the step between two marks. Bytes are relative to the start of the step."""

    mark: Mark
    start_bytes: int
    start_host_bytes: int
    start_kinds_bytes: list[int]  # by storages.KINDS
    peak_bytes: int = 0
    peak_host_bytes: int = 0
    kinds_bytes: list[int] = field(default_factory=list)  # at the peak
    owner: tuple[str, str, str] = ("", "", "")  # operation, module and phase of the peak
    work: dict[tuple[str, str], Work] = field(default_factory=dict)  # by phase and kernel class


@dataclass
class Trace:
    """The intervals of a step in order, and what is alive between forward and backward."""

    job: Job
    intervals: list[Interval]
    after_forward: int  # index of the first interval of backward: its start is what forward left behind
    end: Interval  # only its start
    notes: list[str] = field(default_factory=list)  # the mode's own warnings


def trace(job: Job) -> Trace:
    """Traces forward, loss and backward of one micro-batch. Raises ValueError where the model code does."""
    with fakes.surroundings(job), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.device("meta"):
            model = GPT(job.config)
        tiling.apply(model, **vars(job.tiles))
        recompute.apply(model, job.modes)
        shape = (job.micro_batch_size, job.seq_length)
        tokens, targets = (torch.zeros(shape, dtype=torch.long, device="meta") for _ in range(2))
        recorder = _Recorder(model, job)
        with recorder.watching(tokens, targets):
            recorder.phase("forward")
            denominator: Any = float(tokens.numel())
            loss = model(tokens, targets, denominator)
            recorder.phase("")
            recorder.phase("backward")
            recorder.after_forward = len(recorder.intervals)
            recorder.mark("loss", None)
            loss.backward()
            del loss
            recorder.phase("")
        notes = list(dict.fromkeys(str(w.message) for w in caught if w.category is UserWarning))
    return recorder.trace(notes)


class _Books(Storages):
    """The meter's books, which also tell the recorder of every operation and every change of kind."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__("fake", recorder.places, None, recorder.kind_of_birth)
        self.recorder = recorder
        self.cuda = recorder.job.cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_layer_norm.default and not self.cuda:
            # The CPU's kernel keeps a row's statistics in the dtype of x, the meta device's and CUDA's in float32.
            normed, *statistics = func(*args, **(kwargs or {}))
            out = normed, *(torch.empty_like(each, dtype=normed.dtype) for each in statistics)
            self._see_all(out, func)
        elif func in IN_PLACE and args[0].untyped_storage()._cdata in self._records:
            out = args[0]  # without content there is nothing to do, and shapes do not change: 30 us saved, or 400
        elif not self.cuda:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        else:
            with cuda_layout.adding_in_place(self, func, args):
                out = super().__torch_dispatch__(func, types, args, kwargs)
            if extra := cuda_layout.workspace_bytes(func, args):
                self.spike(extra, func)
        work = work_of(func, args, out)
        if work is not None:
            self.recorder.count(*work)
        return out

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta

    def spike(self, nbytes: int, origin: Any) -> None:
        """Memory that a kernel takes and gives back, at the end of its operation."""
        self.live_bytes += nbytes
        self.by_kind[TEMPORARY] += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_by_kind = self.live_bytes, self.by_kind[:]
            self._peak_birth, self.peak_origin = self.births, self._origin(origin)
        self.live_bytes -= nbytes
        self.by_kind[TEMPORARY] -= nbytes

    def _resize(self, record: Any, nbytes: int, origin: Any) -> None:
        super()._resize(record, cuda_layout.rounded(nbytes) if self.cuda else nbytes, origin)

    def _move(self, record: Any, kind: int) -> None:
        self.recorder.moved(record.birth, record.kind, kind, record.nbytes)
        super()._move(record, kind)


class _Recorder:
    """Cuts a step into intervals and keeps each one's peak."""

    LEAVES = {"forward": ACTIVATIONS, "loss": LOSS, "backward": GRADIENTS}

    def __init__(self, model: GPT, job: Job) -> None:
        self.model, self.job = model, job
        self.places = Places()
        self.current_phase, self._phase_births = "", 0
        self.after_forward = 0
        self.intervals: list[Interval] = []
        # Storages made before each interval's start and before its peak, to find where a storage was alive.
        self._start_births: list[int] = []
        self._peak_births: list[int] = []
        self._moves: list[tuple[int, ...]] = []
        self._weight = 1.0
        self.books = _Books(self)
        self._head = model.head
        self._layers = {layer: i for i, layer in enumerate(model.layers)}
        self._owners = {
            module: name
            for name, module in model.named_modules()
            if any(True for _ in module.parameters(recurse=False))
        }

    # -- watching --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self, *inputs: torch.Tensor) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            self.places.losses.add(self._head)
            for parameter_name, parameter in self.model.named_parameters():
                parameter.register_post_accumulate_grad_hook(self._on_gradient(parameter_name))
            self.model.embedding.register_forward_hook(self._on_embedding)
            stack.callback(hooks.register_module_forward_pre_hook(self._before).remove)
            stack.callback(hooks.register_module_forward_hook(self._after, always_call=True).remove)
            if self.job.gathers:
                fakes.mark_gathers(self.model, self._owners, self.mark)
            host.watchers.append(self._host_grows)
            stack.callback(host.watchers.remove, self._host_grows)
            self._host_start = host.live_bytes(True)
            self._host_peak = 0
            stack.callback(self.books.close)
            stack.enter_context(fakes.few_tiles(self.job, self._weigh))
            stack.enter_context(self.books)
            for tensor in (*self.model.parameters(), *inputs):
                self.books.see(tensor, "")
                self.books.assign(tensor, OTHER)
            self._start = self.books.live_bytes
            self.mark("start", None)
            yield
            self.mark("end", None)

    def _weigh(self, weight: float) -> None:
        self._weight = weight

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        places = self.places
        places.enter(module)
        if places.loss_called and self.current_phase == "forward":
            self.phase("loss")
        if (layer := self._layers.get(module)) is not None:
            if graph_task() < 0:
                self.mark("forward", layer)
            elif is_recomputing():
                self.mark("recompute", layer)
        elif module is self.model.norm:
            self.mark("after", None)

    def _after(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        self.places.leave(module)
        if self.current_phase == "loss" and not self.places.loss_called:
            self.phase("forward")
        layer = self._layers.get(module)
        if layer is not None and graph_task() < 0:
            out.register_hook(self._marker("backward", layer))

    def _on_embedding(self, module: torch.nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(self._marker("below", None))

    def _marker(self, kind: str, about: Any) -> Callable[[Any], None]:
        return lambda _: self.mark(kind, about)

    def _on_gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            self.mark("gradient", name)
            parameter.grad = None  # from here on it is the engine's
            self.mark("taken", name)

        return take

    # -- intervals -------------------------------------------------------------------------------------------

    def mark(self, kind: str, about: Any) -> None:
        """A new interval begins here."""
        books, host_bytes = self.books, host.live_bytes(True) - self._host_start
        self._end_interval()
        self._host_peak = host_bytes
        self.intervals.append(Interval((kind, about), books.live_bytes - self._start, host_bytes, books.by_kind[:]))
        self._start_births.append(books.births)
        books.reset_peak()

    def _end_interval(self) -> None:
        if not self.intervals:
            return
        books, interval = self.books, self.intervals[-1]
        interval.peak_bytes = books.peak_bytes - self._start
        interval.peak_host_bytes = self._host_peak
        interval.kinds_bytes = books.peak_by_kind[:]
        if books.peak_origin is not None:
            interval.owner = _words(self.places, books.peak_origin, self._names)
        self._peak_births.append(books._peak_birth)

    @property
    def _names(self) -> dict[int, str]:
        if not hasattr(self, "_all_names"):
            self._all_names = {id(m): n for n, m in (*self.model.named_modules(), *self.model.named_parameters())}
        return self._all_names

    def _host_grows(self, nbytes: int, fake: bool, storage: torch.UntypedStorage | None) -> None:
        if fake:
            self._host_peak = max(self._host_peak, host.live_bytes(True) + nbytes - self._host_start)
            if storage is not None:
                self.books.take_off(storage)

    def count(self, kernel: str, flops: float, nbytes: float) -> None:
        if self.intervals:
            phase = "recompute" if is_recomputing() else "backward" if self.current_phase == "backward" else "forward"
            work = self.intervals[-1].work
            work[phase, kernel] = work.get((phase, kernel), Work()) + Work(flops, nbytes, 1) * self._weight

    # -- kinds -----------------------------------------------------------------------------------------------

    def phase(self, name: str) -> None:
        if self.current_phase:
            self.books.settle(self._phase_births, self.LEAVES[self.current_phase])
        self._phase_births = self.books.births
        self.books.phase = self.current_phase = name

    def kind_of_birth(self) -> int:
        in_loss = self.current_phase == "loss" or (self.current_phase == "backward" and self.places.in_loss)
        return LOSS if in_loss else TEMPORARY

    def moved(self, birth: int, old: int, new: int, nbytes: int) -> None:
        """A storage that is alive turns out to be of another kind: it was so at the peaks since its birth."""
        starts, peaks = bisect_left(self._start_births, birth), bisect_left(self._peak_births, birth)
        self._moves.append((starts, peaks, len(self._peak_births), len(self.intervals), old, new, nbytes))

    def trace(self, notes: list[str]) -> Trace:
        for starts, peaks, ended, started, old, new, nbytes in self._moves:
            for kinds in (
                *(interval.start_kinds_bytes for interval in self.intervals[starts:started]),
                *(interval.kinds_bytes for interval in self.intervals[peaks:ended]),
            ):
                kinds[old] -= nbytes
                kinds[new] += nbytes
        last = self.intervals.pop()
        for interval in (*self.intervals, last):
            interval.start_kinds_bytes[OTHER] -= self._start
        for interval in self.intervals:
            interval.kinds_bytes[OTHER] -= self._start
        return Trace(self.job, self.intervals, self.after_forward, last, notes)


def _words(places: Places, origin: Any, names: dict[int, str]) -> tuple[str, str, str]:
    operation, reference, phase = origin
    thing = reference() if reference is not None else None
    name = names.get(id(thing), "" if thing is None else type(thing).__name__)
    return str(getattr(operation, "overloadpacket", operation) or ""), name, phase
