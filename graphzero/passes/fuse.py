"""Fuse: several ops become one that computes the same, in less memory or time.

* ``fuse_adam``: the chain of elementwise ops that steps a parameter becomes one kernel.
* ``fuse_cross_entropy``: backward of nll_loss and of log_softmax become one op, which may write over what it reads.
* ``fuse_pieces``: gradients of pieces, each put among zeros and all summed up, are put side by side instead.

Sizes in arguments are this rank's by now: an op that is still ATen's sees the dims that it works on whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphzero.ir.graph import StepGraph
from graphzero.passes.base import BuiltinPass
from graphzero.passes.fuse_adam import fuse_adam
from graphzero.passes.fuse_cross_entropy import fuse_cross_entropy
from graphzero.passes.fuse_pieces import fuse_pieces


@dataclass(frozen=True)
class Fuse(BuiltinPass):
    """Changes no value, but for the rounding of Adam's update and the sign of zeros."""

    def __call__(self, graph: StepGraph) -> StepGraph:
        fuse_cross_entropy(graph)
        fuse_pieces(graph)
        fuse_adam(graph)
        return graph
