"""Which storages live, and in which layer of a model they were made."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import host


class Births(TorchDispatchMode):
    """Notes, for every storage that an operation makes, the layer that was running; views of older ones are not new.

    layer: the number of the layer that runs, -1 before the first and None after the last.
    """

    def __init__(self, model):
        super().__init__()
        self.layer = -1
        self.born = {}  # address -> (weak reference, layer, bytes, operation)
        for i, layer in enumerate(model.layers):
            layer.register_forward_pre_hook(lambda *_, i=i: setattr(self, "layer", i))
        model.norm.register_forward_pre_hook(lambda *_: setattr(self, "layer", None))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                known = self.born.get(storage._cdata)
                if known is None or known[0]() is None:
                    shared = any(
                        isinstance(a, torch.Tensor) and a.untyped_storage()._cdata == storage._cdata for a in args
                    )
                    if not shared:  # else it was made where nobody looked: a parameter
                        self.born[storage._cdata] = (weakref.ref(storage), self.layer, storage.nbytes(), str(func))
        return out

    def alive(self, layer) -> list[tuple[int, str]]:
        """(bytes, operation) of what was made in a layer and lives, not counting host memory."""
        living = [(reference(), *rest) for reference, *rest in self.born.values()]
        return [
            (n, op)
            for storage, where, n, op in living
            if where == layer and storage is not None and not host.is_host(storage)
        ]

    def alive_bytes(self, layer) -> int:
        return sum(nbytes for nbytes, _ in self.alive(layer))

    def all_alive_bytes(self) -> int:
        """Bytes of all that was made and lives, host memory included."""
        return sum(nbytes for reference, _, nbytes, _ in self.born.values() if reference() is not None)
