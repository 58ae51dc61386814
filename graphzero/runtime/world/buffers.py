"""Memory of each local rank that programs use one after the other: no program keeps a value there."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Buffers:
    """A storage for each local rank, allocated when it is first needed."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.storages: list[torch.UntypedStorage] = []

    def grow(self, nbytes: int) -> None:
        """Allocate at least so many bytes.  Values are lost; tensors in the buffer stay, and point to the new memory.

        Raises RuntimeError where there is not so much memory; there is then as much as before.
        """
        if nbytes and not self.storages:
            self.storages = [torch.empty(0, dtype=torch.uint8).untyped_storage() for _ in range(self._count)]
        for storage in self.storages:
            before = storage.nbytes()
            if before < nbytes:
                storage.resize_(0)  # not both at a time, nor a copy
                try:
                    storage.resize_(nbytes)
                except RuntimeError:
                    storage.resize_(before)  # without it, what programs before have there would point nowhere
                    raise

    def whole(self, local: int) -> list[Tensor]:
        """All bytes of a local rank's buffer, or None."""
        return [self.view(local, 0, (s.nbytes(),), torch.uint8) for s in self.storages[local : local + 1]]

    def view(self, local: int, offset: int, shape: Shape, dtype: torch.dtype) -> Tensor:
        """A dense tensor at ``offset`` bytes."""
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        view = torch.empty(0, dtype=dtype)
        return view.set_(self.storages[local], offset // dtype.itemsize, shape, strides)
