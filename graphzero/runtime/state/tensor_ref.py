"""A weak reference to a tensor that lets its module be converted.

``Module.to`` swaps what a DTensor parameter holds, which torch refuses while Python holds a weak reference to it.  Here
the storage is referred to: a parameter that was converted for real has another one, and counts as another tensor.
"""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphzero import _compat


class TensorRef:
    """A weak reference to one tensor's memory, on this rank."""

    __slots__ = ("_storage",)

    def __init__(self, x: Tensor) -> None:
        self._storage = StorageWeakRef(_compat.local_tensor(x).untyped_storage())

    def __copy__(self) -> TensorRef:
        return self

    def __deepcopy__(self, memo: object) -> TensorRef:
        """Itself, as of any weak reference.  torch's own would give up twice what it counts once."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"cannot pickle a {type(self).__name__}: it names memory of this process")

    @property
    def is_alive(self) -> bool:
        return not self._storage.expired()

    def is_of(self, x: Tensor) -> bool:
        """Return whether ``x`` is what was referred to, in the memory that it had."""
        return self.is_alive and self._storage.cdata == _compat.storage_id(_compat.local_tensor(x))
