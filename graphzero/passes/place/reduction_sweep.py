"""Second sweep of propagation: where partial values are reduced.

The greedy sweep carries a partial sum through every linear op, and a partial maximum or minimum through those that
keep order.  Every split is frozen now; a value that is partial because an operand is may be whole instead, if that
operand is reduced before it.  Labelling values P or B so that the bytes of all reductions are least is a minimum cut:
one unit of flow is one byte on the wire.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import fx

from graphzero.ir import calls, value
from graphzero.ir.aliases import ANNOTATIONS
from graphzero.passes.place.forward_sweep import AxisPropagation
from graphzero.passes.place.minimum_cut import FOREVER, SINK, SOURCE, no_edges, sink_side
from graphzero.sbp.types import B, Sbp


def place_reductions(state: AxisPropagation) -> None:
    """Reduce partial values of ``state`` earlier where that saves bytes; changes ``found`` and ``chosen``."""
    partial = [node for node, sbps in state.found.items() if any(sbp is not None and sbp.is_partial for sbp in sbps)]
    carried = {node for node in partial if _may_be_whole(state, node)}
    for region in _regions(partial, carried, state):
        if any(node in carried for node in region):
            for node in _cut(state, region, carried):
                state.found[node] = tuple(B if sbp and sbp.is_partial else sbp for sbp in state.found[node])
                if node in state.chosen:
                    state.chosen[node] = calls.signatures_of(state.graph, node, state.axis)[0]


def _may_be_whole(state: AxisPropagation, node: fx.Node) -> bool:
    """Return whether a value is partial only because a partial operand passes through its op.

    Of an op of several results those that are partial become whole together, so each of them must be free to.
    """
    if node.target is operator.getitem:
        return _may_be_whole(state, value.operand(node))
    results = _partial_picks(state, node) if value.is_multi(node) else [node]
    if not all(_is_free(state, result) for result in results):
        return False
    if node.target in ANNOTATIONS:
        return True
    signature = state.chosen.get(node)
    return (
        signature is not None
        and any(s.is_partial for s in signature.inputs)
        and not any(s.is_split for s in signature.inputs)
    )


def _is_free(state: AxisPropagation, node: fx.Node) -> bool:
    """Return whether a value may be reduced here.

    A gradient over a data axis may not: it is reduced as the gradient, where the stage says, never in a smaller form
    before it.
    """
    return state.pinned(node) is None and not (state.is_data and value.has_role(node, "gradient"))


def _partial_picks(state: AxisPropagation, node: fx.Node) -> list[fx.Node]:
    """The partial ones of an op's several results."""
    return [user for user in node.users if user.target is operator.getitem and state.sbp(user).is_partial]


def _regions(partial: list[fx.Node], carried: set[fx.Node], state: AxisPropagation) -> Iterable[list[fx.Node]]:
    """Partial values in connected groups, joined through the ops that carry them."""
    members = set(partial)
    group: dict[fx.Node, fx.Node] = {node: node for node in partial}

    def find(node: fx.Node) -> fx.Node:
        while group[node] is not node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    for node in partial:
        if node in carried:
            for operand in _partial_operands(state, node):
                if operand in members:
                    group[find(operand)] = find(node)
    regions: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in partial:
        regions[find(node)].append(node)
    return regions.values()


def _partial_operands(state: AxisPropagation, node: fx.Node) -> list[fx.Node]:
    if node.target is operator.getitem:
        return [value.operand(node)]
    operands = value.tensor_operands(node)
    if node not in state.chosen:
        return operands
    return [o for o, s in zip(operands, state.chosen[node].inputs, strict=True) if s.is_partial]


def _cut(state: AxisPropagation, region: list[fx.Node], carried: set[fx.Node]) -> list[fx.Node]:
    """The values of a region that should be whole."""
    capacity = no_edges()  # from what stays partial to what is whole
    inside = set(region)
    for node in region:
        if node not in carried:
            capacity[SOURCE][node] = FOREVER
        elif any(operand not in inside for operand in _partial_operands(state, node)):
            capacity[node][SINK] += 1e-3  # a whole operand is made partial for it: no bytes, but work
        if value.is_multi(node):  # its partial results stay so together, or become whole
            for picked in _partial_picks(state, node):
                capacity[node][picked] = capacity[picked][node] = FOREVER
            continue
        reduced = ("reduced", node)
        for user in node.users:
            for want in state.wants(user, node):
                _add_reader(state, capacity, node, reduced, user if user in carried and user in inside else None, want)
    whole_side = sink_side(capacity)
    return [node for node in region if node in carried and node in whole_side]


def _add_reader(
    state: AxisPropagation, capacity: Any, node: fx.Node, reduced: Any, carrier: fx.Node | None, want: Sbp
) -> None:
    """Add one reader of ``node``: it reads the value whole, cut, or partial, if it carries it on as a partial sum."""
    rather = 1 - 1e-7 * value.has_role(node, "gradient")  # between equals it is the gradient that is reduced

    def wire(sbp: Sbp) -> float:
        return rather * state.price(node, sbp)

    if want.is_partial:
        if carrier is None:
            return  # a pin to P
        capacity[node][reduced] = wire(B)
        capacity[reduced][carrier] = FOREVER
    elif want.is_split:
        capacity[node][("cut", want, node)] = wire(want)  # once, for all who read it so
        capacity[("cut", want, node)][SINK] = FOREVER
    else:
        capacity[node][reduced] = wire(B)
        capacity[reduced][SINK] = FOREVER
