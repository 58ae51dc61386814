"""JoinUpdates: parameters that may be stepped at one time are stepped by one call.

An update is joined with others between two transfers, so one call steps what a bucket of gradients has brought, or what
a bucket of new parameters takes away: those that wait for later gradients don't hold it up, and it doesn't hold up what
is to be sent.  It is where the first of them was, or where all that they need is there.

Only updates in place are joined: no memory is taken.  An update that is made later holds its gradient longer; where
the program would then need more memory at its worst moment than before, it stays where it is.

A call costs the processor the same whatever it steps, so steps of many small parameters gain most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphzero.ir import value
from graphzero.ir.calls import LISTS
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import inplace
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.storage.roots import Roots, Storage, written_by
from graphzero.ir.transfer import is_transfer
from graphzero.passes.base import BuiltinPass


@dataclass(frozen=True)
class JoinUpdates(BuiltinPass):
    """Updates several parameters in one call; changes no value and no storage.

    Requires: updates that write over their operands.
    Ensures: the same values in the same storages, in fewer calls; the peak does not rise.

    Example::

        join_updates

         graph step(dp=2) local
           w = param() : f32[4]  B
           v = param() : f32[6]  B
           wm = state(w, m) : f32[4]  B
           ws = state(w, s) : f32[4]  B
           vm = state(v, m) : f32[6]  B
           vs = state(v, s) : f32[6]  B
           n = state(w, n) : f64[]  B
           g = batch() : f32[4]  B
           h = batch() : f32[6]  B
         update:
        -  a = adam([w], [g], [wm], [ws], [], [n], 0.1, 0.9, 0.99, 1e-08, 0.0, out=[w, wm, ws]) : (f32[4]  B, f32[4]  B, f32[4]  B)
        +  a = adam([w, v], [g, h], [wm, vm], [ws, vs], [], [n, n], 0.1, 0.9, 0.99, 1e-08, 0.0, out=[w, v, wm, vm, ws, vs]) : (f32[4]  B, f32[6]  B, f32[4]  B, f32[6]  B, f32[4]  B, f32[6]  B)
           a0 = a[0] : f32[4]  B
        -  a1 = a[1] : f32[4]  B
        -  a2 = a[2] : f32[4]  B
        -  b = adam([v], [h], [vm], [vs], [], [n], 0.1, 0.9, 0.99, 1e-08, 0.0, out=[v, vm, vs]) : (f32[6]  B, f32[6]  B, f32[6]  B)
        -  b0 = b[0] : f32[6]  B
        -  b1 = b[1] : f32[6]  B
        -  b2 = b[2] : f32[6]  B
        +  b0 = a[1] : f32[6]  B
        +  a1 = a[2] : f32[4]  B
        +  b1 = a[3] : f32[6]  B
        +  a2 = a[4] : f32[4]  B
        +  b2 = a[5] : f32[6]  B
           return update(w=a0, wm=a1, ws=a2, v=b0, vm=b1, vs=b2)
    """  # noqa: E501

    def __call__(self, graph: StepGraph) -> StepGraph:
        stretches = list(_stretches(graph))
        load = _Load(graph) if stretches else None
        for nodes in stretches:
            assert load is not None
            while (group := _first_group(nodes, load)) is not None:
                nodes = _join(graph, nodes, group, load)
        return graph


def _stretches(graph: StepGraph) -> Iterator[list[fx.Node]]:
    """The update between transfers, and between parts of other phases, where there is something to join."""
    stretch: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "call_function" and value.phase_of(node) == "update" and not is_transfer(node):
            stretch.append(node)
        else:
            if sum(_key(update) is not None for update in stretch) > 1:
                yield stretch
            stretch = []


class _Load:
    """over: bytes while each node runs, of what the step makes.  last: those that it is the last to read.

    most: bytes at the worst moment.  roots: the storages of each node's results, which joining does not change.
    """

    def __init__(self, graph: StepGraph) -> None:
        at = liveness(graph)
        self.last: dict[fx.Node, int] = defaultdict(int)
        for span in at.spans():
            if span.begin >= 0:
                self.last[at.nodes[span.end]] += span.nbytes
        over = at.over_time(at.spans()) + at.transient
        self.over = dict(zip(at.nodes, over.tolist(), strict=True))
        self.most = max(self.over.values())
        self.roots = at.roots


@dataclass(frozen=True)
class _JoinedUpdates:
    """Updates to be joined, by their positions in a stretch.  after, before: between which the call may be."""

    members: tuple[int, ...]
    after: int
    before: int

    @property
    def place(self) -> int:
        """The call is after what is there."""
        return max(self.after, self.members[0])

    def joined(self, other: _JoinedUpdates) -> _JoinedUpdates:
        after, before = max(self.after, other.after), min(self.before, other.before)
        return _JoinedUpdates(self.members + other.members, after, before)

    def waiting(self, nodes: list[fx.Node], load: _Load) -> dict[fx.Node, int]:
        """Bytes that its members hold longer than by themselves, while each node runs."""
        lifetimes: dict[fx.Node, int] = {}
        longer, members = 0, set(self.members)
        for i in range(self.members[0], self.place + 1):
            if longer:
                lifetimes[nodes[i]] = longer
            if i in members:
                longer += load.last[nodes[i]]
        return lifetimes

    def fits(self, nodes: list[fx.Node], load: _Load) -> bool:
        """Return whether there is a place for the call, and room for what waits for it."""
        extra = self.waiting(nodes, load) if self.place < self.before else {}
        return self.place < self.before and all(load.over[x] + more <= load.most for x, more in extra.items() if more)


def _first_group(nodes: list[fx.Node], load: _Load) -> _JoinedUpdates | None:
    """The first updates of a stretch that may be joined."""
    order = _Order(nodes, load.roots)
    open_: dict[Any, _JoinedUpdates] = {}
    for i, node in enumerate(nodes):
        key = _key(node)
        if key is None:
            continue
        around, open_group = order.around(i), open_.get(key)
        after = max((j for j in around if j < i), default=-1)
        alone = _JoinedUpdates((i,), after, min((j for j in around if j > i), default=len(nodes)))
        if open_group is not None and around.isdisjoint(open_group.members):
            group = open_group.joined(alone)
            if group.fits(nodes, load):
                open_[key] = group
                continue
        if open_group is not None and len(open_group.members) > 1:
            return open_group
        open_[key] = alone
    return next((group for group in open_.values() if len(group.members) > 1), None)


def _key(node: fx.Node) -> Any:
    """The key that updates share if they may be joined; None for other nodes, and for ops that take memory."""
    lists = LISTS.get(node.target)
    outs = inplace.outs_of(node) if lists is not None else ()
    if not outs or None in outs:
        return None
    dtype = value.tensor_type(node.args[0][0]).dtype  # type: ignore[index,arg-type]
    kinds = tuple(bool(arg) for arg in node.args[:lists])
    modes = tuple(sorted((key, arg) for key, arg in value.own_kwargs(node).items()))
    return (node.target, node.args[lists:], modes, dtype, kinds)


class _Order:
    """Order constraints between the nodes of a stretch."""

    def __init__(self, nodes: list[fx.Node], roots: Roots) -> None:
        self.roots = roots
        self.readers: dict[Storage, list[int]] = defaultdict(list)
        self.writers: dict[Storage, list[int]] = defaultdict(list)
        self.made: dict[fx.Node, int] = {node: i for i, node in enumerate(nodes)}
        self.nodes = nodes
        for i, node in enumerate(nodes):
            for root in self._storages_read(node):
                self.readers[root].append(i)
            for root in written_by(node, roots):
                self.writers[root].append(i)

    def around(self, i: int) -> set[int]:
        """The nodes that may not change places with the update at ``i``; its results are moved with it."""
        node = self.nodes[i]
        neighbours = {self.made[operand] for operand in node.all_input_nodes if operand in self.made}
        for root in written_by(node, self.roots):
            neighbours.update(self.readers[root], self.writers[root])
        for root in self._storages_read(node):
            neighbours.update(self.writers[root])
        return neighbours - {i} - {self.made[user] for user in node.users if user in self.made}

    def _storages_read(self, node: fx.Node) -> set[Storage]:
        if _is_pick(node):
            return set()
        return {root for operand in node.all_input_nodes for root in self.roots.get(operand, ()) if root is not None}


def _is_pick(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and source.target in LISTS


def _join(graph: StepGraph, nodes: list[fx.Node], group: _JoinedUpdates, load: _Load) -> list[fx.Node]:
    """Make the first update the call of all; returns what the stretch consists of by then."""
    members = [nodes[i] for i in group.members]
    first, results, lists = members[0], _results(members), LISTS[members[0].target]
    args = [[x for member in members for x in member.args[at]] for at in range(lists)]  # type: ignore[union-attr]
    types = tuple(value.type_of(member)[i] for member, i in results)
    nds = tuple(value.sbp_of(member)[i] for member, i in results)
    rooms = [inplace.outs_of(member)[i] for member, i in results]
    picks = {user.args: user for member in members for user in member.users}
    for node, more in group.waiting(nodes, load).items():
        load.over[node] += more
    load.last[first] = sum(load.last[member] for member in members)
    first.args, first.kwargs = (*args, *first.args[lists:]), {**first.kwargs, value.OUT: rooms}
    first.meta.update(type=types, sbp=nds)
    moved = [first]
    if nodes[group.place] is not first:
        nodes[group.place].append(first)
    for i, result in enumerate(results):
        if (pick := picks.get(result)) is not None:
            pick.args = (first, i)
            moved[-1].append(pick)
            moved.append(pick)
    gone = {*members, *moved}
    above, below = nodes[: group.place + 1], nodes[group.place + 1 :]
    for member in members[1:]:
        graph.graph.erase_node(member)
    return [*(node for node in above if node not in gone), *moved, *(node for node in below if node not in gone)]


def _results(members: list[fx.Node]) -> list[tuple[fx.Node, int]]:
    """(member, number of its result), in the order of the call's results: all parameters, then all of each moment."""
    counts = [len(inplace.outs_of(member)) // len(member.args[0]) for member in members]  # type: ignore[arg-type]
    results = []
    for kind in range(counts[0]):
        for member in members:
            many = len(member.args[0])  # type: ignore[arg-type]
            results += [(member, kind * many + k) for k in range(many)]
    return results
