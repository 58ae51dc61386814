"""Gradients travel in 16 bit and are added up in 32: a reduce-scatter becomes an all-to-all and a sum on each rank.

A reduce-scatter of 16-bit numbers halves what is sent, but on n ranks in a ring it rounds the sum n - 1 times.  Here
each rank's addend is rounded once.  Pieces of the addends go to the ranks that own them, and these add them up in the
gradient's own dtype, by one kernel: the same bits in every world, however large the message.  VeOmni (pull request
1167) and LoongForge (pull request 223) reduce so.

Contract: runs after ``zero``, on gradients that are split along the one axis that has several ranks.  The addends of n
ranks become one value of n times the size, split along a dim of its own, of which a rank holds what it sends.  Boxing
makes the all-to-all between that split and one along the gradient's dim.  This changes values: an addend by at most
half a unit in its last place of ``dtype``.  It holds the addends, and what was received, beside the gradient, and sends
each gradient by itself.  Left alone: gradients that are whole, split over several axes, or as narrow already, and steps
in micro-batches, whose sums would be held n times.

      gw         = mm(xt, y)                                 : f32[16, 4]  ; gradient(w)
    + gw_own     = as_local(gw, ['P'], [16, 4])              : f32[16, 4]
    + gw_narrow  = _to_copy(gw_own, dtype=torch.bfloat16)    : bf16[16, 4]
    + gw_row     = unsqueeze(gw_narrow, 0)                   : bf16[1, 16, 4]
    + gw_all     = as_global(gw_row, ['S(0)'], [2, 16, 4])   : bf16[2, 16, 4]
    + gw_all_pin = pin(gw_all, -1)                           : bf16[2, 16, 4]  S(1)!  ; gradient(w)
    + gw_wide    = _to_copy(gw_all_pin, dtype=torch.float32) : f32[2, 16, 4]
    + gw_sum     = sum.dim_IntList(gw_wide, [0])             : f32[16, 4]
    - gw_pin     = pin(gw, -1)                               : f32[16, 4]      S(0)!  ; gradient(w)
    + gw_pin     = pin(gw_sum, -1)                           : f32[16, 4]      S(0)!  ; gradient(w)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

import graphzero as gz
from graphzero.ir import value
from graphzero.ops import AS_GLOBAL, AS_LOCAL, FREE

aten = torch.ops.aten
S = gz.sbp.S


@dataclass(frozen=True)
class NarrowSums:
    """Sends addends of gradients in ``dtype`` and adds them up in the gradients' own."""

    dtype: torch.dtype = torch.bfloat16

    def __call__(self, graph: gz.StepGraph) -> gz.StepGraph:
        for pin in graph.gradients().values() if "mb" not in graph.placement.names else ():
            axis = self.axis_of(graph, pin)
            if axis is not None:
                pin.update_arg(0, self.summed(graph, pin, axis))
        return graph

    def axis_of(self, graph: gz.StepGraph, pin: fx.Node) -> int | None:
        """The axis that splits a gradient; None where it is left alone."""
        splits = [i for i, sbp in enumerate(value.nd_of(pin)) if sbp.is_split]
        narrows = self.dtype.itemsize < value.tensor_type(pin).dtype.itemsize
        ranks = graph.placement.hierarchy
        fits = len(splits) == 1 and all(n == 1 for i, n in enumerate(ranks) if i not in splits)
        return splits[0] if fits and narrows and value.nd_of(pin)[splits[0]].sections == 1 else None

    def summed(self, graph: gz.StepGraph, pin: fx.Node, axis: int) -> fx.Node:
        """The sum of all ranks' addends."""
        gradient, wide, ranks = pin.args[0], value.tensor_type(pin), graph.placement.hierarchy[axis]

        def add(name, op, x, args, shape, of=wide.dtype, **kwargs):
            type_ = value.TensorType(of, tuple(shape))
            return graph.call(op, (x, *args), type_, kwargs=kwargs, like=pin, name=f"{gradient.name}_{name}")

        def on_axis(word):
            return [word if i == axis else FREE for i in range(len(graph.placement.names))]

        with graph.graph.inserting_before(pin):
            shape, every, few = wide.shape, (ranks, *wide.shape), self.dtype
            own = add("own", AS_LOCAL, gradient, (on_axis("P"), list(shape)), shape)
            narrow = add("narrow", aten._to_copy.default, own, (), shape, few, dtype=few)
            row = add("row", aten.unsqueeze.default, narrow, (0,), (1, *shape), few)
            addends = add("all", AS_GLOBAL, row, (on_axis("S(0)"), list(every)), every, few)
            sent = graph.pin(addends, graph.placement.names[axis], S(value.nd_of(pin)[axis].dim + 1))
            graph.set_role(sent, value.role_of(pin))
        with graph.graph.inserting_before(pin):
            back = add("wide", aten._to_copy.default, sent, (), every, dtype=wide.dtype)
            return add("sum", aten.sum.dim_IntList, back, ([0],), shape)
