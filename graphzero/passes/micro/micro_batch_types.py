"""SBP, sizes and type of a value without the axis ``mb``: of the whole batch, and of one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphzero.ir import value
from graphzero.ir.value import TensorType
from graphzero.sbp import rank_call
from graphzero.sbp.types import B, Nd, S, Sbp

# Parts of a program in micro-batches.  The last iteration of the body is written with the epilogue.
PROLOGUE, BODY, LAST, EPILOGUE = "prologue", "body", "last", "epilogue"


@dataclass(frozen=True)
class MicroBatchTypes:
    """Types of values in micro-batches.

    axis: the number of ``mb``.  count: of micro-batches.  repeats: how often the body runs, for all of them or for all
    but the last.
    """

    axis: int
    count: int
    repeats: int = 0

    def others(self, node: fx.Node, part: str = "") -> Nd:
        """The SBP on the other axes, of the whole batch or of a micro-batch."""
        return self.without(value.nd_of(node), part)

    def without(self, nd: Nd, part: str = "") -> Nd:
        """``nd`` without ``mb``.  A dim that another axis cuts in a section for each row has fewer in a micro-batch."""
        mine = nd[self.axis]
        others = (*nd[: self.axis], *nd[self.axis + 1 :])
        if part not in (BODY, LAST) or not mine.is_split:
            return others
        return tuple(S(s.dim, s.sections // self.count) if _is_finer(s, mine) else s for s in others)

    def plain(self, nd: Nd, dim: int) -> Nd:
        """``nd`` without splits of ``dim`` on axes inside of ``mb``, or in sections: those cut each micro-batch."""

        def inside(i: int, sbp: Sbp) -> bool:
            return sbp.is_split and sbp.dim == dim and (i >= self.axis or sbp.sections > 1)

        return tuple(B if inside(i, sbp) else sbp for i, sbp in enumerate(nd))

    def concatenation_sbp(self, source: Nd, wanted: Nd, dim: int) -> Nd:
        """The SBP in which pieces of ``dim`` are concatenated: split as the axes outside of ``mb`` have cut it."""

        pairs = [*zip(source, wanted, strict=True)][: self.axis]
        outside = (have if have.is_split and have.dim == dim and have.sections == 1 else want for have, want in pairs)
        return self.plain((*outside, *wanted[self.axis :]), dim)

    def micro_batch_type(self, type_: Any, nd: Any) -> Any:
        """The type of a value in one micro-batch."""
        if not isinstance(type_, TensorType) or nd is None or not nd[self.axis].is_split:
            return type_
        return TensorType(type_.dtype, tuple(self.micro_batch_shape(type_.shape, (nd[self.axis],))))

    def micro_batch_shape(self, shape: Sequence[int], nd: Nd) -> list[int]:
        (sbp,), sizes = nd, list(shape)
        if sbp.is_split:
            sizes[sbp.dim] //= self.count
        return sizes

    def args(
        self, node: fx.Node, args: Any, kwargs: Any, ins: Sequence[rank_call.Pair], outs: Sequence[rank_call.Pair]
    ) -> tuple[Any, Any] | None:
        """The op's arguments with sizes of one micro-batch; None for an op that finds rows by their number.

        ins, outs: shape, and SBP on ``mb`` alone, of each operand and result.
        """
        target: Any = node.target
        if rank_call.counts_places(target, node.args, node.kwargs, ins, outs):
            return None
        return rank_call.local_args(target, args, kwargs, ins, outs, self.micro_batch_shape)

    def meta(self, node: fx.Node, part: str = "") -> dict[str, Any]:
        """The metadata of a value without ``mb``; in a micro-batch with its sizes."""

        def nd(given: Any) -> Any:
            return None if given is None else self.without(given, part)

        meta = dict(node.meta)
        sbp, type_ = meta.get("sbp"), meta.get("type")
        if sbp is not None:
            meta["sbp"] = tuple(map(nd, sbp)) if isinstance(type_, tuple) else nd(sbp)
        if meta.get("pins"):
            meta["pins"] = (*meta["pins"][: self.axis], *meta["pins"][self.axis + 1 :])
        if part in (BODY, LAST) and sbp is not None:
            pairs = zip(type_, sbp, strict=True) if isinstance(type_, tuple) else [(type_, sbp)]
            types = tuple(self.micro_batch_type(t, s) for t, s in pairs)
            meta["type"] = types if isinstance(type_, tuple) else types[0]
        if part == BODY:
            meta["repeat"] = self.repeats
        return meta


def _is_finer(sbp: Sbp, mine: Sbp) -> bool:
    """Return whether a split cuts the pieces that another split of the dim makes, in more sections."""
    return sbp.is_split and sbp.dim == mine.dim and sbp.sections > mine.sections
