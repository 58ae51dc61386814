"""Storages that ops hand out, as a dispatch mode sees them that knows nothing of graphzero."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Bytes of distinct storages that ops hand out while it is active, and their peak."""

    def __init__(self, known):
        super().__init__()
        self.alive = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.alive:
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        key, nbytes = storage._cdata, storage.nbytes()
        self.alive[key] = nbytes
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.drop, key)

    def drop(self, key):
        self.live -= self.alive.pop(key)
