"""A GPU that only keeps time: streams and events as vector clocks, over tensors on the CPU, to find races.

Every operation is taken for a kernel on the current stream that reads and writes blocks of device memory; a copy on
another stream does so there. Two accesses to one block, one of them a write, race unless an event orders them. The
allocator is the worst that CUDA's may be: a block whose tensor dies goes to the next tensor of its size at once.
"""

import contextlib
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import host, offload


class Race(AssertionError):  # noqa: N818 - what it is about
    """Two accesses to the same memory that no event puts in order."""


class Stream:
    def __init__(self, *_):
        self.clock = {self: 0}  # what has happened, of every stream, before the next thing here

    def record_event(self):
        return Event(self.clock)

    def wait_event(self, event):
        for stream, count in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Event:
    def __init__(self, clock):
        self.clock = dict(clock)

    def synchronize(self):
        pass


class Block:
    """Memory, with the latest accesses to it: (stream, count)."""

    def __init__(self):
        self.writes, self.reads = [], []

    def access(self, stream, write, what):
        earlier = self.writes + (self.reads if write else [])
        for other, count, before in earlier:
            if stream.clock.get(other, 0) < count:
                raise Race(f"{what} does not wait for {before} on another stream")
        stream.clock[stream] += 1
        stamp = (stream, stream.clock[stream], what)
        if write:
            self.writes, self.reads = [stamp], []
        else:
            self.reads.append(stamp)


class Device:
    """Stands in for a CUDA device."""

    type = "cuda"


class Cuda:
    """Stands in for torch.cuda."""

    def __init__(self):
        self.main = self.current = Stream()
        self.Stream, self.Event = Stream, Event
        self.registered = set()

    def current_stream(self, device=None):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def cudart(self):
        return self

    def check_error(self, error):
        assert not error

    def cudaHostRegister(self, pointer, nbytes, flags):  # noqa: N802
        self.registered.add(pointer)

    def cudaHostUnregister(self, pointer):  # noqa: N802
        self.registered.remove(pointer)


class Gpu(TorchDispatchMode):
    """While entered, operations are kernels and model/offload.py takes the CPU for a CUDA device."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.cuda, self.blocks, self.free = Cuda(), {}, {}
        device, fake = Device(), _Torch(self.cuda)
        original = offload.Moved.__init__

        def on_device(moved, transfers, tensor):
            original(moved, transfers, tensor)
            moved.device = device

        monkeypatch.setattr(offload, "torch", fake)
        monkeypatch.setattr(offload.Moved, "__init__", on_device)
        self.kernels = self.copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        seen = {tensor.untyped_storage()._cdata for tensor in tensors}
        for tensor in tensors:
            self.block_of(tensor)
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        made = [tensor for tensor in made if tensor.untyped_storage()._cdata not in seen]
        blocks = [self.block_of(tensor) for tensor in made]
        name = str(func)
        if func.is_view or "empty" in name or "detach" in name or "alias" in name:
            return out
        self.kernels += 1
        self.copies += self.cuda.current is not self.cuda.main
        written = [
            value
            for value, argument in zip(args, func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in tensors:
            self.block_of(tensor).access(self.cuda.current, False, name)
        for block in blocks + [self.block_of(t) for t in tree_leaves(written) if isinstance(t, torch.Tensor)]:
            block.access(self.cuda.current, True, name)
        return out

    def block_of(self, tensor) -> Block:
        storage = tensor.untyped_storage()
        known = self.blocks.get(storage._cdata)
        if known is not None and known[0]() is storage:
            return known[1]
        size = storage.nbytes()
        block = self.free[size].pop() if self.free.get(size) else Block()
        if not host.is_host(storage) and not host.allocating():
            assert self.cuda.current is self.cuda.main, "device memory that belongs to a stream for copies"
            weakref.finalize(storage, lambda: self.free.setdefault(size, []).append(block))
        self.blocks[storage._cdata] = (weakref.ref(storage), block)
        return block


class _Torch:
    """torch, with a device memory of its own."""

    def __init__(self, cuda):
        self.cuda = cuda

    def empty(self, *size, device=None, **kwargs):
        return torch.empty(*size, **kwargs)

    def __getattr__(self, name):
        return getattr(torch, name)
