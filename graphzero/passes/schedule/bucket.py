"""Bucket: few large collectives instead of many small ones.

Two collectives may join if they are of one kind, axis, dtype and phase, and if either both only read placeholders (a
gather of parameters; the bucket is at its first member) or no result of the earlier is read before the later
starts (reductions of gradients, gathers of updated parameters; the bucket is at its last member).

A large value on a CPU travels by itself: out of its own storage into that of its result, where it lies in one piece, or
in few long ones, as when it is cut in sections (``Slots``).  Copying it into a bucket and out of one would cost more
than to start one transfer more.

On several placement axes a value may be moved along one after the other.  What carries results of one bucket on along
the next axis joins again, and with nothing else.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import ops, transfer, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.transfer import Transfer, delivered, transfer_of
from graphzero.ir.transfer_layout import LONG, lay_out, lies_in_long_runs
from graphzero.passes.base import BuiltinPass

JOINED = (ops.all_gather, ops.reduce_scatter, ops.all_reduce, ops.shift)
WAITING = (*JOINED, ops.accumulate)  # may come later than what they read
SMALLEST, LARGEST = 64 * 2**10, 4 * 2**20  # bytes of a bucket by default
ALONE = LONG  # bytes from which a value on a CPU travels by itself


@dataclass(frozen=True)
class Bucket(BuiltinPass):
    """Joins collectives into buckets; a value that is larger than a bucket gets its own.

    bucket_bytes: of whole values in a bucket, at most.  By default an eighth of the parameters' bytes, within 64 KiB
        and 4 MiB: slots then stay small compared with a small model.  The bits of a result do not depend on it.

    Requires: collectives that are not in buckets yet.
    Ensures: each gather, reduce-scatter and all-reduce is in a bucket, possibly alone; results keep their names.

    Example::

        bucket{bucket_bytes=1024}

         graph step(dp=2) local
           g = batch() : f32[8]  P
           h = batch() : f32[6]  P
         backward:
           a = neg(g) : f32[8]  P
        -  r = reduce_scatter(a, 0, 'dp') : f32[8]  S(0)
           b = neg(h) : f32[6]  P
        -  s = reduce_scatter(b, 0, 'dp') : f32[6]  S(0)
        +  bucket_reduce_scatter = bucket_reduce_scatter([a, b], [0, 0], 'dp') : (f32[8]  S(0), f32[6]  S(0))
        +  r = bucket_reduce_scatter[0] : f32[8]  S(0)
        +  s = bucket_reduce_scatter[1] : f32[6]  S(0)
           return r, s
    """

    bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None and self.bucket_bytes <= 0:
            raise ConfigError(f"Bucket(bucket_bytes={self.bucket_bytes}): a bucket holds a positive number of bytes")

    def __call__(self, graph: StepGraph) -> StepGraph:
        limit = self.bucket_bytes or default_limit(graph)
        for nodes in _levels(graph):
            _join_level(graph, nodes, limit)
        return graph


def _levels(graph: StepGraph) -> list[list[fx.Node]]:
    """The collectives that read no other collective's result, those that read one of these, and so on.

    What goes round from rank to rank is one level: it joins only what is next to it.
    """
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.target in JOINED:
            source = _added(value.operand(node))
            goes_on = node.target is ops.shift and source.target is ops.shift
            depth[node] = depth[source] if goes_on else depth.get(source, -1) + 1
    levels: dict[int, list[fx.Node]] = defaultdict(list)
    for node, level in depth.items():
        levels[level].append(node)
    return [levels[level] for level in sorted(levels)]


def _added(node: fx.Node) -> fx.Node:
    """The value that a micro-batch adds to an accumulator; any other value itself."""
    return value.operand(node, 1) if node.target is ops.accumulate else node


def _join_level(graph: StepGraph, nodes: list[fx.Node], limit: int) -> None:
    at = liveness(graph)
    position = at.position
    open_: dict[Any, _OpenBucket] = {}
    closed: list[list[fx.Node]] = []
    early: dict[fx.Node, bool] = {}
    for node in sorted(nodes, key=position.__getitem__):
        moves = transfer_of(node)
        assert moves is not None
        key = _key(graph, moves, at.section[node], early)
        bucket = open_.get(key)
        if _goes_alone(graph, moves):
            closed.append([node])
            continue
        if bucket is None or not bucket.takes(node, limit, early=key[-1]):
            bucket = open_[key] = _OpenBucket(position)
            closed.append(bucket.members)
        bucket.add(node)
    for members in closed:
        _join(graph, members, position, early[members[0]])


def default_limit(graph: StepGraph) -> int:
    """Bytes of a bucket, and of what is under way ahead of its use."""
    parameters = sum(value.tensor_type(node).nbytes for node in graph.placeholders("param"))
    return min(max(parameters // 8, SMALLEST), LARGEST)


def _goes_alone(graph: StepGraph, moves: Transfer) -> bool:
    """Return whether a large value is contiguous wherever it is sent or received, so that nothing needs to be
    copied."""
    type_ = value.tensor_type(moves.node)
    if graph.placement.device_type != "cpu" or type_.nbytes < ALONE:
        return False
    ranks = graph.placement.hierarchy[graph.placement.axis(moves.axis)]
    return all(type_.shape[dim] % ranks == 0 for dim in moves.dims) and lies_in_long_runs(graph, lay_out(graph, moves))


class _OpenBucket:
    """Transfers that are to be joined, and that others may join."""

    def __init__(self, position: dict[fx.Node, int]) -> None:
        self.members: list[fx.Node] = []
        self._position, self._nbytes, self._first_reader = position, 0, len(position)

    def takes(self, node: fx.Node, limit: int, early: bool) -> bool:
        """Return whether a transfer may join them."""
        at = self._position[node]
        if self._nbytes + value.tensor_type(node).nbytes > limit:
            return False
        if node.target is ops.shift:  # what goes round leaves when it is there, to travel during the next block
            return at == self._position[self.members[-1]] + 1 and value.operand(node) not in self.members
        return early or self._first_reader > at

    def add(self, node: fx.Node) -> None:
        self.members.append(node)
        self._nbytes += value.tensor_type(node).nbytes
        self._first_reader = min([self._first_reader, *(self._position[user] for user in _readers(node))])


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The readers that need the result at its node.

    A collective that carries it on along another axis can wait, and so can an op that adds it up over micro-batches.
    """
    for user in node.users:
        if user.target in WAITING:
            yield from _readers(user)
        else:
            yield user


def _key(graph: StepGraph, moves: Transfer, section: tuple[int, str], early: dict[fx.Node, bool]) -> tuple[Any, ...]:
    """Properties that transfers must share in order to be joined.  early: see ``is_early``."""
    node, (source,) = moves.node, moves.members
    what = moves.kind, moves.axis, moves.completes(graph), value.tensor_type(node).dtype
    carried_on = source.target is ops.shift if node.target is ops.shift else made_by(source)
    return (*what, section, carried_on, is_early(node, early))


def made_by(node: fx.Node) -> fx.Node | None:
    """The transfer (single, bucket or launch) that ``node`` is a result of, and that may join others, or None."""
    delivery = delivered(node)
    return delivery[0].node if delivery is not None and delivery[0].collective.joins else None


def is_early(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Return whether all that a transfer reads is there when the step begins, or is gathered from that.

    known: of the transfers that have been asked for, to which this one is added.
    """
    if node not in known:
        sources = ((operand, made_by(operand)) for operand in dict.fromkeys(node.all_input_nodes))
        known[node] = all(
            operand.op == "placeholder" if producer is None else is_early(producer, known)
            for operand, producer in sources
        )
    return known[node]


def _join(graph: StepGraph, members: list[fx.Node], position: dict[fx.Node, int], early: bool) -> None:
    anchor = members[0] if early else members[-1]
    carried = [] if early else sorted(_carried_on(members[:-1]), key=position.__getitem__)
    with graph.graph.inserting_before(anchor):
        bucket = transfer.bucket(graph, members, like=anchor)
    for i, member in enumerate(members):
        if member is not anchor:
            anchor.prepend(member)
        member.target, member.args = operator.getitem, (bucket, i)
        member.meta["phase"] = value.phase_of(anchor)
    if early:
        for member in members[:0:-1]:
            anchor.append(member)
    for node in reversed(carried):
        if position[node] < position[anchor]:
            anchor.append(node)


def _carried_on(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The collectives that carry results on along other axes, and what adds them up, one after the other."""
    for node in nodes:
        further = [user for user in node.users if user.target in WAITING]
        yield from further
        yield from _carried_on(further)
