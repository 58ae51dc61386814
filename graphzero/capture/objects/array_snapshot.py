"""Snapshots of arrays of numbers that are no tensors: numpy's, ``array.array`` and ``bytearray``."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from graphzero.capture.objects.object_snapshot import ObjectSnapshot


class ArraySnapshot(ObjectSnapshot):
    """A copy of an array, compared byte by byte."""

    __slots__ = ()

    def read_content(self, holder: Any) -> list[Any]:
        return [holder.copy() if isinstance(holder, np.ndarray) else holder[:]]

    def children(self) -> list[Any]:
        return []

    def differs(self) -> bool:
        return _bytes_of(self.holder) != _bytes_of(self.content[0])

    def write_content(self, content: list[Any]) -> None:
        self.holder[... if isinstance(self.holder, np.ndarray) else slice(None)] = content[0]


def size_of_array(x: Any) -> int:
    """Bytes of an array that may be written to; 0 for any other object."""
    if isinstance(x, np.ndarray):
        return x.nbytes if x.flags.writeable else 0
    return memoryview(x).nbytes if isinstance(x, (array, bytearray)) else 0


def address_of_array(x: Any) -> int:
    """The address of an array's first byte."""
    return int(np.asarray(x).ctypes.data)


def _bytes_of(x: Any) -> bytes:
    return bytes(x) if isinstance(x, bytearray) else x.tobytes()
