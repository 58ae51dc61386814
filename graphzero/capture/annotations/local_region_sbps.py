"""SBPs of the tensors of a ``local_region``, and the shapes that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphzero.errors import SbpError
from graphzero.ops import SAME
from graphzero.sbp.placement import Placement
from graphzero.sbp.shards import nests
from graphzero.sbp.types import B, Nd, Sbp

# How a value is given: one annotation for each axis, or for the axes that are named.
Given = Sbp | tuple[Sbp, ...] | Mapping[str, Sbp]


def nds_of(given: Given | list[Given], count: int, placement: Placement, what: str, of: str) -> list[Nd]:
    """An SBP for each of ``count`` tensors. ``what``: in_sbp or out_sbp; ``of``: what the tensors are."""
    each = given if isinstance(given, list) else [given] * count
    if len(each) != count:
        raise SbpError(
            f"local_region: {what} is a list of {len(each)} for {count} {of}: {_shown(each)}. A list holds one SBP for "
            "each tensor, in their order; a single SBP applies to all"
        )
    return [_nd(one, placement, what) for one in each]


def _nd(given: Given, placement: Placement, what: str) -> Nd:
    names = placement.names
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in names]
        if unknown:
            raise SbpError(
                f"local_region: {what} names the axis {unknown[0]!r}; the placement's are {', '.join(names)}"
            )
        return tuple(given.get(name, B) for name in names)
    nd = (given,) if isinstance(given, Sbp) else tuple(given)
    if len(nd) != len(names):
        raise SbpError(
            f"local_region: {what} is {_shown(nd)}, and the placement has {len(names)} axes ({', '.join(names)}). Give "
            f"one SBP for each axis as a tuple, or those that are not B by name: {{{names[0]!r}: gz.sbp.S(0)}}"
        )
    return nd


def _shown(given: Sequence[Any]) -> str:
    return f"({', '.join(map(str, given))})"


def local_shape(x: Tensor, nd: Nd, placement: Placement, what: str) -> list[int]:
    """Shape of a rank's part of ``x``. Raises SbpError where ranks would hold unequal parts."""
    shape = list(x.shape)
    cuts = _cuts(shape, nd, placement, what)
    if not nests(shape, nd, placement.hierarchy):
        raise SbpError(
            f"local_region: {what} of shape {shape} has no even sections to be {_shown(nd)} on {placement.hierarchy} "
            "ranks: give it in sections that its size divides by, times the ranks"
        )
    for dim, ranks in cuts.items():
        if shape[dim] % ranks:
            raise SbpError(
                f"local_region: {what} of shape {list(x.shape)} cannot be {_shown(nd)}: dim {dim} is {shape[dim]} = "
                f"{shape[dim] // ranks} x {ranks} + {shape[dim] % ranks}. The function of a region is traced once, "
                "so all pieces must be equal: pad the value, or take it as B and cut in the function"
            )
        shape[dim] //= ranks
    return shape


def global_shape(y: Tensor, nd: Nd, placement: Placement, what: str) -> list[int]:
    """Global shape of the ranks' values ``y``."""
    if y.dtype == torch.bool and any(sbp.is_partial for sbp in nd):
        raise SbpError(f"local_region: {what} is bool, which cannot be {_shown(nd)}: return numbers, y.to(torch.int64)")
    shape = list(y.shape)
    for dim, ranks in _cuts(shape, nd, placement, what).items():
        shape[dim] *= ranks
    return shape


def _cuts(shape: Sequence[int], nd: Nd, placement: Placement, what: str) -> dict[int, int]:
    """Split dim -> number of pieces."""
    cuts: dict[int, int] = {}
    for sbp, ranks in zip(nd, placement.hierarchy, strict=True):
        if sbp.is_split:
            if sbp.dim >= len(shape):
                raise SbpError(
                    f"local_region: {what} of shape {list(shape)} has no dim {sbp.dim}; choose another split, or B"
                )
            cuts[sbp.dim] = cuts.get(sbp.dim, 1) * ranks
    return cuts


def checked_results(out: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The flat results of a region's function.  Raises SbpError for what is not a tensor or None."""
    flat, spec = pytree.tree_flatten(out)
    for x in flat:
        if x is not None and not isinstance(x, Tensor):
            raise SbpError(
                f"local_region: the function returns {type(x).__name__} {x!r:.60}; it returns tensors, in dicts, lists "
                "and tuples if need be. A number that is the same on every rank can be computed outside"
            )
    return flat, spec


class RegionSignature:
    """The SBPs of one call's tensors, and what they say of the axes.

    apart: the axes along which ranks may do other work: those on which not all is B.  Along the others they do the
    same, draw the same numbers, and make equal gradients.
    """

    def __init__(self, in_sbp: Any, count: int, out_sbp: Any, placement: Placement) -> None:
        """count: of the tensors among the arguments."""
        self.ins = nds_of(in_sbp, count, placement, "in_sbp", "tensor arguments")
        self.outs, self.placement = out_sbp, placement

    @cached_property
    def apart(self) -> list[int]:
        each = self.outs if isinstance(self.outs, list) else [self.outs]
        nds = self.ins + self.outs_of(len(each))
        return [i for i in range(len(self.placement.names)) if any(nd[i] is not B for nd in nds)]

    def outs_of(self, count: int) -> list[Nd]:
        return nds_of(self.outs, count, self.placement, "out_sbp", "tensors that the function returns")

    def words(self, nd: Nd) -> list[str]:
        """SBPs as they are written in the ops of the graph."""
        return [str(sbp) if i in self.apart else SAME for i, sbp in enumerate(nd)]
