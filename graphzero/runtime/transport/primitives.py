"""Parts of all transports: handles to wait for, and the one order in which pieces are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from graphzero import _compat
from graphzero.sbp.reductions import REDUCTIONS


class Handle(Protocol):
    """A collective under way; its buffers may be read after ``wait`` and not be touched before."""

    def wait(self) -> Any: ...


class JoinedHandle:
    """Several collectives under way, begun in this order."""

    def __init__(self, handles: Sequence[Handle]):
        self.handles = handles

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()


DONE: Handle = JoinedHandle(())  # a collective that was over when it returned


def place_of(x: Tensor) -> tuple[int, int, int]:
    """Return storage, offset and size: equal for tensors of one dtype and layout that share all their memory."""
    return _compat.storage_id(x), int(x.storage_offset()), x.numel()


def same_place(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors of one dtype begin at the same place of the same storage."""
    return place_of(x)[:2] == place_of(y)[:2]


def fold(pieces: Sequence[Tensor], out: Tensor, reduction: str) -> None:
    """Reduce ``pieces`` from the first to the last into ``out``, which may be one of them; others may be overwritten.

    Every element is ((p0 + p1) + p2) + ...: an order that depends on ranks alone, not on where in which buffer
    the element lies.  Stages and bucket sizes therefore agree bit for bit.
    """
    reduce = REDUCTIONS[reduction]
    if len(pieces) == 1:
        out.copy_(pieces[0])
        return
    partial = pieces[0]
    for piece in pieces[1:-1]:
        reduce(partial, piece, out=partial)
    reduce(partial, pieces[-1], out=out)
