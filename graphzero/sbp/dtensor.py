"""SBP of what a user holds: DTensor's words for it, and annotations on plain tensors.

On real ranks a global tensor is a torch DTensor.  On a virtual placement it is a whole plain tensor, and how it
lies on the ranks is noted here, next to it, so that neither the tensor nor its copies change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.weak import WeakTensorKeyDictionary

from graphzero import _compat
from graphzero.errors import SbpError
from graphzero.sbp.placement import Placement
from graphzero.sbp.reductions import REDUCTIONS
from graphzero.sbp.types import B, Nd, S, partial

_annotated: Any = WeakTensorKeyDictionary()  # tensor -> (Placement, Nd)
_said: Any = WeakTensorKeyDictionary()  # tensor -> the Placement on which its user has put it
_count = 0


def annotate(x: Tensor, placement: Placement, nd: Nd, by_user: bool = False) -> None:
    """Note how the plain tensor ``x`` lies on ``placement``; forgotten with the tensor."""
    if by_user:
        _said[x] = placement
    known = _annotated.get(x)
    if known is None or known != (placement, nd):
        _annotated[x] = (placement, nd)
        global _count
        _count += 1


def annotation_count() -> int:
    """The number of annotations made so far; equal counts mean equal annotations."""
    return _count


def annotation(x: Tensor) -> tuple[Placement, Nd] | None:
    """The last annotation of a tensor, or None."""
    noted: tuple[Placement, Nd] | None = _annotated.get(x)
    return noted


def said_placement(x: Tensor) -> Placement | None:
    """The virtual placement on which the user has put a plain tensor, if he has."""
    placement: Placement | None = _said.get(x)
    return placement


def to_placements(nd: Nd) -> tuple[Any, ...]:
    """DTensor's placements: Replicate, Shard(i), Partial; its strided shard is a split in sections."""
    return tuple(
        Replicate() if s.is_broadcast else Partial(s.reduction) if s.is_partial
        else Shard(s.dim) if s.sections == 1 else _compat.StridedShard(s.dim, split_factor=s.sections)
        for s in nd
    )  # fmt: skip


def from_placements(placements: Sequence[Any], ndim: int) -> Nd:
    """SBP of DTensor placements.  Raises SbpError for those that have none."""
    nd = []
    for item in placements:
        if isinstance(item, Replicate):
            nd.append(B)
        elif type(item) is Shard:
            nd.append(S(item.dim % ndim))
        elif type(item) is _compat.StridedShard:
            nd.append(S(item.dim % ndim, int(item.split_factor)))
        elif type(item) is Partial and item.reduce_op in REDUCTIONS:
            nd.append(partial(item.reduce_op))
        else:
            raise SbpError(
                f"a DTensor placed {tuple(placements)} has no SBP: {item} is not one of Replicate, Shard, Partial("
                f"{', '.join(REDUCTIONS)}); redistribute it first"
            )
    return tuple(nd)


def nd_of_dtensor(x: DTensor) -> Nd:
    return from_placements(x.placements, x.dim())


def of(x: Any) -> Nd:
    """The SBP, one per placement axis, of a DTensor, a parameter that a Graph has placed, or a value of a graph.

    Raises SbpError where it is not known.
    """
    if isinstance(x, DTensor):
        return nd_of_dtensor(x)
    if isinstance(x, fx.Node):
        nd: Nd | None = x.meta.get("sbp")
        if nd is None:
            raise SbpError(f"the SBP of '{x.name}' is not known yet; run the pass propagate first")
        return nd
    known = annotation(x) if isinstance(x, Tensor) else None
    if known is None:
        raise SbpError(
            f"a {type(x).__name__} that no Graph has placed has no SBP; say it: gz.to_global(x, placement=..., sbp=...)"
        )
    return known[1]
