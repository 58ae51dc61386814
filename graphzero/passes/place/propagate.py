"""Propagate: an SBP for every value.

Pins decide, and cost only breaks ties.  There are three sweeps for each placement axis:

1. forward, greedily: each op takes the signature whose operands need least boxing (``forward_sweep``).
2. the reductions: where a partial sum becomes whole is a minimum cut over the ops it passes through
   (``reduction_sweep``).
3. backward: a value that all its readers cut is made cut, so that no rank computes what it throws away
   (``backward_sweep``).
"""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass, field

from torch import fx

from graphzero.ir import value
from graphzero.ir.aliases import ANNOTATIONS
from graphzero.ir.graph import StepGraph
from graphzero.passes.base import BuiltinPass
from graphzero.passes.place.backward_sweep import cut_for_readers
from graphzero.passes.place.forward_sweep import AxisPropagation, swept
from graphzero.passes.place.reduction_sweep import place_reductions
from graphzero.sbp.link_costs import Links
from graphzero.sbp.op_call import op_name
from graphzero.sbp.registry import GatheredBatchWarning
from graphzero.sbp.types import B

_warned: set[object] = set()


@dataclass(frozen=True)
class Propagate(BuiltinPass):
    """Gives every value an SBP on every placement axis; pins are kept.

    links: what communication costs on each axis, () for bytes.

    Requires: pins on inputs, uses and gradients; other values are free.
    Ensures: every value has an SBP on every axis, one that its op can make; pins are kept.

    Example::

        propagate

        -graph sums(dp=2) captured
        +graph sums(dp=2) propagated
           x = batch() : f32[8, 4]  S(0)!
           w = param() : f32[4, 2]  B!
         forward:
           u = use(w) : f32[4, 2]  B!
        -  y = mm(x, u) : f32[8, 2]
        -  s = sum.dim_IntList(y, [0]) : f32[2]
        -  r = relu(s) : f32[2]
        +  y = mm(x, u) : f32[8, 2]  S(0)
        +  s = sum.dim_IntList(y, [0]) : f32[2]  P
        +  r = relu(s) : f32[2]  B
           return y, r
    """

    links: Links = field(default=(), repr=False)

    def __call__(self, graph: StepGraph) -> StepGraph:
        return propagation(graph, self.links)[0]


def propagation(graph: StepGraph, links: Links, notes: bool = False) -> tuple[StepGraph, list[AxisPropagation]]:
    """The graph with an SBP for every value, and how each axis came to it.  notes: see ``swept``."""
    axes = swept(graph, links, notes)
    for axis in axes:
        place_reductions(axis)
        cut_for_readers(axis)
        axis.write_sbps()
        _warn_of_gathered_batch(axis)
    graph.level = "propagated"
    return graph, axes


def _warn_of_gathered_batch(state: AxisPropagation) -> None:
    """Warn, once for each op, where a gradient of more than one element is whole on a data axis because of a gather."""
    if not state.is_data or state.ranks == 1:
        return
    for node in filter(value.is_tensor, state.graph.nodes):
        role = value.role_of(node)
        if role is None or role.kind != "gradient" or node.target in ANNOTATIONS:
            continue
        if state.sbp(node) is B and value.tensor_type(node).numel > 1:
            gather = _gather_before(state, node)
            if gather is not None and gather[0].target not in _warned:
                _warned.add(gather[0].target)
                _warn(state, role.of, *gather)


def _gather_before(state: AxisPropagation, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The op nearest before ``node`` that gathers an operand, and that operand; only whole values are looked after."""
    seen, queue = {node}, deque([node])
    while queue:
        at = queue.popleft()
        if at in state.chosen:
            stands = zip(value.tensor_operands(at), state.chosen[at].inputs, strict=True)
            gathered = next((x for x, wants in stands if wants is B and state.sbp(x).is_split), None)
            if gathered is not None:
                return at, gathered
        new = [x for x in at.all_input_nodes if x not in seen and x.op == "call_function" and _is_whole(state, x)]
        seen.update(new)
        queue.extend(new)
    return None


def _is_whole(state: AxisPropagation, node: fx.Node) -> bool:
    return node in state.found and all(sbp is None or sbp is B for sbp in state.found[node])


def _warn(state: AxisPropagation, parameter: str, op: fx.Node, operand: fx.Node) -> None:
    source, axis = value.source_of(op), state.graph.placement.names[state.axis]
    shape, where = list(value.tensor_type(operand).shape), f" ({source})" if source else ""
    name = op_name(op.target)  # type: ignore[arg-type]
    warnings.warn(
        f"every rank of {axis} computes the whole gradient of {parameter}: {name}{where} gathers {operand.name}: it "
        f"does not run on pieces of {shape} split {state.sbp(operand)}. Correct, but slower: write it with ops that "
        "work on each sample separately, or set the SBP of the input, config.set_input(...)",
        GatheredBatchWarning,
        stacklevel=2,
    )
