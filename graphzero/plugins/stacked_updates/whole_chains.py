"""Chains of an update that need values whole: found from how the first sweep moves values, not by an optimizer's name.

A chain is what an optimizer does with one matrix between the piece that a rank holds and the piece that it is to have:
ops of the update that read whole what is split, all that lies between them, and what comes before and after as far as
that makes fewer bytes of what goes in and comes out.  How far that is says a minimum cut: a value costs its bytes where
the chain begins after it, or where something outside reads what the chain makes.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from graphzero.ir import value
from graphzero.ir.aliases import ANNOTATIONS
from graphzero.ir.graph import StepGraph
from graphzero.passes.place.forward_sweep import AxisPropagation
from graphzero.passes.place.minimum_cut import FOREVER, SINK, SOURCE, no_edges, sink_side
from graphzero.plugins.stacked_updates.stacked_op import stacked_op


@dataclass(frozen=True)
class Chain:
    """nodes: its ops, in order.  entries: tensors that it reads, one for each chain of its kind.

    results: what others read of what it makes.  key: equal for chains that do the same, but to other values.
    """

    nodes: tuple[fx.Node, ...]
    entries: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    key: Any


def whole_chains(graph: StepGraph, axes: Sequence[AxisPropagation]) -> list[Chain]:
    """The chains of a graph's update, in order, that a stack of values can go through."""
    seeds = [node for node in graph.nodes if _is_movable(node) and any(_moves_pieces(axis, node) for axis in axes)]
    if not seeds:
        return []
    finder = _Finder(graph, axes)
    chains = [chain for group in finder.groups(seeds) if (chain := finder.chain(group)) is not None]
    return sorted(chains, key=lambda chain: finder.position[chain.nodes[0]])


def is_split(axes: Iterable[AxisPropagation], node: fx.Node) -> bool:
    """Return whether ranks hold pieces of a value."""
    return any(axis.ranks > 1 and sbp is not None and sbp.is_split for axis in axes for sbp in axis.found[node])


def _is_movable(node: fx.Node) -> bool:
    """Return whether a node is an op of the update on tensors that may be put elsewhere."""
    is_op = node.op == "call_function" and value.phase_of(node) == "update" and node.target not in ANNOTATIONS
    return is_op and not value.is_scalar(node)


def _moves_pieces(axis: AxisPropagation, node: fx.Node) -> bool:
    """Return whether pieces of an operand would be sent to other ranks for this op."""
    if axis.ranks == 1 or node not in axis.chosen:
        return False
    wants = zip(value.tensor_operands(node), axis.chosen[node].inputs, strict=True)
    return any(axis.sbp(operand).is_split and axis.sbp(operand) is not want for operand, want in wants)


@dataclass(frozen=True)
class _ChainGroup:
    """Ops that belong to one chain, with what they follow from, up to what the update is given, and what follows."""

    seeds: set[fx.Node]
    above: set[fx.Node]
    below: set[fx.Node]


class _Finder:
    def __init__(self, graph: StepGraph, axes: Sequence[AxisPropagation]):
        self.graph, self.axes = graph, axes
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.often: set[fx.Node] = set()  # what several chains follow from, and what follows from several
        self.split: list[AxisPropagation] = []  # the axes that split what any chain reads

    # ---- which ops belong to one chain

    def groups(self, seeds: list[fx.Node]) -> list[_ChainGroup]:
        """Ops that move pieces, together where one follows from another or both from one split value."""
        leader: dict[fx.Node, fx.Node] = {}

        def find(node: fx.Node) -> fx.Node:
            while leader.setdefault(node, node) is not node:
                leader[node] = node = leader[leader[node]]
            return node

        known = set(seeds)
        for seed in seeds:
            for node in _walk([seed], _tensors_above):
                if node in known or is_split(self.axes, node):
                    leader[find(node)] = find(seed)
        by_root: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for seed in seeds:
            by_root[find(seed)].append(seed)
        groups = [_ChainGroup(set(some), _walk(some, _above), _walk(some, _below)) for some in by_root.values()]
        read = [node for group in groups for node in group.above if not value.is_scalar(node)]
        self.split = [axis for axis in self.axes if any(is_split([axis], node) for node in read)]
        self.often = _twice(group.above for group in groups) | _twice(group.below for group in groups)
        return groups

    # ---- how far it reaches

    def chain(self, group: _ChainGroup) -> Chain | None:
        """The chain around some ops, or None where a stack cannot go through it."""
        between = {node for node in group.above & group.below if _is_movable(node)}
        free = [node for node in group.above ^ group.below if _is_movable(node) and node not in self.often]
        nodes = between | self._belonging_ops(group, between, free)
        ordered = sorted(nodes, key=self.position.__getitem__)
        entries = self._entries(ordered)
        results = tuple(node for node in ordered if any(user not in nodes for user in node.users))
        if not self._is_closed(ordered, entries) or not _stacked(ordered, entries).issuperset(results):
            return None
        return Chain(tuple(ordered), entries, results, self._key(ordered, entries))

    def _belonging_ops(self, group: _ChainGroup, between: set[fx.Node], free: list[fx.Node]) -> set[fx.Node]:
        """The free ops that belong to the chain: of equal cuts, the one with most ops.

        With an op comes what lies between it and the seeds.
        """
        capacity = no_edges()
        side: dict[fx.Node, Any] = {node: node for node in free} | dict.fromkeys(between, SINK)
        for node in dict.fromkeys((*side, *(operand for one in side for operand in one.all_input_nodes))):
            for user in () if value.is_scalar(node) else node.users:
                here, there = side.get(node, SOURCE), side.get(user, SOURCE)
                self._cost(capacity, node, user, here, there)
                if node in group.above and user in group.above:
                    capacity[there][here] = FOREVER
                if node in group.below and user in group.below:
                    capacity[here][there] = FOREVER
        for node in free:
            if not _stacked([node], node.all_input_nodes):
                capacity[SOURCE][node] = FOREVER
        return sink_side(capacity) & set(free)

    def _cost(self, capacity: Any, node: fx.Node, user: fx.Node, here: Any, there: Any) -> None:
        """Cost of a cut between a value on one side and a reader on the other.

        In pieces it is exchanged, a share for each rank; what is read whole goes to all ranks.
        """
        if here == there:
            return
        nbytes = FOREVER if value.is_multi(node) else float(value.tensor_type(node).nbytes)
        copies = 1 if value.is_multi(node) else self._copies(node, user)
        enters, leaves = ("enters", node), ("leaves", node, copies)
        capacity[here][enters] = nbytes if value.is_multi(node) or is_split(self.axes, node) else 0.0
        capacity[enters][there] = FOREVER
        capacity[there][leaves] = FOREVER
        capacity[leaves][here] = nbytes * copies

    def _copies(self, node: fx.Node, user: fx.Node) -> int:
        """To how many ranks a result goes that a reader has."""
        wholes = (axis for axis in self.split if any(not want.is_split for want in axis.wants(user, node)))
        return prod(axis.ranks for axis in wholes)

    def _entries(self, ordered: list[fx.Node]) -> tuple[fx.Node, ...]:
        """The tensors that it reads, but for those that all chains share."""
        inside = set(ordered)
        read = dict.fromkeys(x for node in ordered for x in value.own_operands(node) if x not in inside)
        return tuple(x for x in read if x not in self.often or is_split(self.axes, x))

    def _is_closed(self, ordered: list[fx.Node], entries: Iterable[fx.Node]) -> bool:
        """Return whether nothing that it reads follows from what it makes."""
        first = self.position[ordered[0]]
        return _walk([x for x in entries if self.position[x] > first], _above).isdisjoint(ordered)

    def _key(self, ordered: list[fx.Node], entries: tuple[fx.Node, ...]) -> Any:
        number = {node: i for i, node in enumerate((*entries, *ordered))}
        args = [(node.args, dict(node.kwargs)) for node in ordered]
        text = repr(fx.map_arg(args, lambda x: f"%{number[x]}" if x in number else x))  # a node's repr is its name
        types = tuple((value.type_of(node), node.target) for node in ordered)
        read = tuple((value.type_of(node), tuple(axis.found[node] for axis in self.axes)) for node in entries)
        return types, read, text


def _walk(begin: Iterable[fx.Node], further: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Values from ``begin`` on, one step ``further`` after the other; from ops of the update only."""
    reached, left = set(begin), list(begin)
    while left:
        for node in further(left.pop()):
            if node not in reached:
                reached.add(node)
                left.append(node)
    return reached


def _above(node: fx.Node) -> Iterable[fx.Node]:
    return node.all_input_nodes if _is_movable(node) else ()


def _tensors_above(node: fx.Node) -> Iterator[fx.Node]:
    """Operands that are tensors, without single numbers, which may depend on all matrices."""
    return (x for x in _above(node) if value.is_multi(x) or (value.is_tensor(x) and value.tensor_type(x).shape))


def _below(node: fx.Node) -> Iterator[fx.Node]:
    return (user for user in node.users if _is_movable(user))


def _twice(sets: Iterable[set[fx.Node]]) -> set[fx.Node]:
    """Elements that are in more than one of the sets."""
    once, repeated = set[fx.Node](), set[fx.Node]()
    for some in sets:
        repeated |= once & some
        once |= some
    return repeated


def _stacked(nodes: Iterable[fx.Node], entries: Collection[fx.Node]) -> set[fx.Node]:
    """Results that are stacks where entries are; empty if an op has no form for that."""
    stacks = set(entries)
    for node in nodes:
        if not stacks.isdisjoint(node.all_input_nodes):
            if node.target is not operator.getitem and stacked_op(node, stacks, 1) is None:
                return set()
            stacks.add(node)
    return stacks
