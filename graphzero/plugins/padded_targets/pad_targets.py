"""PadTargets: a loss over a slice of a split sequence, over the whole sequence with padded targets.

``cross_entropy(logits[:, :-1], labels[:, 1:])`` leaves pieces of unequal sizes, so ranks would gather the logits.
Between slice and loss each op computes rows apart from each other: its rule allows a split of them.  So it may compute
the rows that the slice drops as well (``sliced_region``).  Their targets are ``ignore_index``, so the loss reads none
of them, and where the gradient of the slice was put into zeros it is zero there: both are the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from graphzero.ir.graph import StepGraph
from graphzero.passes.base import BuiltinPass
from graphzero.passes.place.forward_sweep import AxisPropagation, swept
from graphzero.plugins.padded_targets.sliced_region import SlicedRegion, region_of
from graphzero.sbp.link_costs import Links

SLICE = torch.ops.aten.slice.Tensor


@dataclass(frozen=True)
class PadTargets(BuiltinPass):
    """Computes a loss over a slice of a split dim over all of the dim, with targets that it ignores.

    Only where the slice drops less than one rank's piece, and where it is the same: everything that reads the slice
    is of a loss over classes that has an ``ignore_index``, of its gradient, or an op on rows apart from each other.

    links: what communication costs on each axis, () for bytes.

    Requires: pins on inputs, uses and gradients.
    Ensures: the same losses and gradients; no such slice is left, so that what it cuts may stay split.

    Example::

        pad_targets

         graph loss(cp=2) captured
           z = batch() : f32[2, 8, 5]  S(1)!
           y = batch() : i64[2, 8]  S(1)!
           g = batch() : f32[]  B!
           n = batch() : f32[]  B!
         forward:
        -  zs = slice(z, 1, 0, -1) : f32[2, 7, 5]
        -  zr = reshape(zs, [14, 5]) : f32[14, 5]
        +  zr = reshape(z, [16, 5]) : f32[16, 5]
           ys = slice(y, 1, 1, 8) : i64[2, 7]
           yr = reshape(ys, [14]) : i64[14]
        -  lp = _log_softmax(zr, 1, False) : f32[14, 5]
        -  l = nll_loss_forward(lp, yr, None, 2, -100) : (f32[], f32[])
        +  lp = _log_softmax(zr, 1, False) : f32[16, 5]
        +  reshape = reshape(yr, [2, 7, 1]) : i64[2, 7, 1]
        +  constant_pad_nd = constant_pad_nd(reshape, [0, 0, 0, 1], -100) : i64[2, 8, 1]
        +  reshape_1 = reshape(constant_pad_nd, [16]) : i64[16]
        +  l = nll_loss_forward(lp, reshape_1, None, 2, -100) : (f32[], f32[])
           s = l[0] : f32[]
         backward:
        -  dl = nll_loss_backward(g, lp, yr, None, 2, -100, n) : f32[14, 5]
        -  dr = _log_softmax_backward_data(dl, lp, 1, torch.float32) : f32[14, 5]
        -  ds = reshape(dr, [2, 7, 5]) : f32[2, 7, 5]
        -  dz = slice_backward(ds, [2, 8, 5], 1, 0, -1, 1) : f32[2, 8, 5]
        +  dl = nll_loss_backward(g, lp, reshape_1, None, 2, -100, n) : f32[16, 5]
        +  dr = _log_softmax_backward_data(dl, lp, 1, torch.float32) : f32[16, 5]
        +  ds = reshape(dr, [2, 8, 5]) : f32[2, 8, 5]
        +  arange = arange(8) : i64[8]
        +  ge = ge.Scalar(arange, 7) : bool[8]
        +  view = view(ge, [8, 1]) : bool[8, 1]
        +  dz = masked_fill.Scalar(ds, view, 0) : f32[2, 8, 5]
           return s, dz
    """

    links: Links = field(default=(), repr=False)

    def __call__(self, graph: StepGraph) -> StepGraph:
        numbers = {node: i for i, node in enumerate(graph.nodes)}
        slices = graph.graph.find_nodes(op="call_function", target=SLICE)
        slices = [node for node in slices if region_of(node, numbers) is not None]
        axes = swept(graph, self.links) if slices else ()
        for node in slices:
            numbers = {node: i for i, node in enumerate(graph.nodes)}  # of the program that the ones before have left
            region = region_of(node, numbers)
            if region is not None and _is_worth_it(region, axes):
                region.compute_whole(graph)
        return graph


def _is_worth_it(region: SlicedRegion, axes: Sequence[AxisPropagation]) -> bool:
    """Return whether ranks split the rows, and the slice drops less than one of their pieces."""
    sbps = {axis: axis.sbp(region.whole) for axis in axes}
    ranks = prod(axis.ranks for axis, sbp in sbps.items() if sbp.is_split and sbp.dim == region.dim)
    return ranks > 1 and (region.length - region.rows) * ranks < region.length
