"""Overlap: transfers start early and are awaited late, so that they move while the ranks compute.

* Gathers of parameters are prefetched: launched as soon as no more than ``nbytes`` of them are on their way or wait
  to be read, and the next one always when the one before it has arrived.
* Reductions of gradients and gathers of updated parameters are awaited late: when more than ``nbytes`` of their kind
  have been launched after them, at the latest when backward ends or a result is read; two of a kind may always be under
  way at a time.  What carries them on along a further placement axis is launched with the next bucket.

``overlap`` does so in forward and backward, ``overlap_update`` in the update, which may have been moved between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import Liveness, liveness
from graphzero.ir.transfer import NO_SLOT_YET, Transfer, delivered, transfer_of
from graphzero.passes.base import BuiltinPass
from graphzero.passes.schedule.bucket import default_limit, is_early


@dataclass(frozen=True)
class Overlap(BuiltinPass):
    """Starts transfers of forward and backward early and awaits them late; changes no value.

    bucket_bytes: of whole values under way at a time; by default what ``Bucket`` takes for a bucket.

    Requires: launches without slots.
    Ensures: launches and waits of forward and backward are as far apart as the bytes in flight allow; no op is added.

    Example::

        overlap

         graph step(dp=2) local
           x = batch() : f32[8, 4]  S(0)
           w = param() : f32[4, 4]  B
         backward:
           g = mm(w, w) : f32[4, 4]  B
           p = keep_first(g, 'dp') : f32[4, 4]  P
           l = launch('bucket_all_reduce', -1, [p], 'dp', 'sum') : (f32[4, 4]  B)
        +  a = mul(x, x) : f32[8, 4]  S(0)
           k = wait(l) : (f32[4, 4]  B)
           r = k[0] : f32[4, 4]  B
        -  a = mul(x, x) : f32[8, 4]  S(0)
           y = mm(a, r) : f32[8, 4]  S(0)
           return y
    """

    bucket_bytes: int | None = None
    in_update: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None and self.bucket_bytes < 0:
            raise ConfigError(
                f"{type(self).__name__}(bucket_bytes={self.bucket_bytes}): bytes under way must not be negative"
            )

    def __call__(self, graph: StepGraph) -> StepGraph:
        limit = default_limit(graph) if self.bucket_bytes is None else self.bucket_bytes
        groups: dict[Any, list[Transfer]] = defaultdict(list)
        at, known = liveness(graph), dict[fx.Node, bool]()
        for moves in at.transfers.values():
            if moves.slot == NO_SLOT_YET and (value.phase_of(moves.end) == "update") == self.in_update:
                kind = _kind(moves), at.section[moves.end], _depth(moves), is_early(moves.node, known)
                groups[kind].append(moves)
        for (_, _, depth, early), members in sorted(groups.items(), key=lambda item: item[0][2]):
            if depth and not early:
                _carry_on_late(graph, members)
        for (*_, early), members in sorted(groups.items(), key=lambda item: -item[0][2]):
            if early:
                _prefetch(graph, members, limit)
        for (*_, early), members in groups.items():
            if not early:
                _await_late(graph, members, limit)
        return graph


@dataclass(frozen=True)
class OverlapUpdate(Overlap):
    """Starts transfers of the update early and awaits them late; changes no value.

    bucket_bytes: of whole values under way at a time; by default what ``Bucket`` takes for a bucket.

    Requires: launches without slots.
    Ensures: launches and waits of the update are as far apart as the bytes in flight allow; no op is added.

    Example::

        overlap_update

         graph step(dp=2) local
           w = param() : f32[8]  B
           m = state(w) : f32[8]  S(0)
           v = param() : f32[8]  B
         update:
           s = slice_shard(w, 0, 'dp') : f32[8]  S(0)
           a = add(s, m) : f32[8]  S(0)
           l = launch('bucket_all_gather', -1, [a], [0], 'dp') : (f32[8]  B)
        +  v1 = mul(v, 0.9) : f32[8]  B
           b = wait(l) : (f32[8]  B)
           w1 = b[0] : f32[8]  B  ; param(w)
        -  v1 = mul(v, 0.9) : f32[8]  B
           return update(w=w1, v=v1)
    """

    in_update: ClassVar[bool] = True


def _kind(moves: Transfer) -> tuple[str, str, str]:
    return moves.kind, moves.axis, moves.reduction


def _continued(moves: Transfer) -> Transfer | None:
    """The transfer whose results this one carries on along another axis."""
    delivery = delivered(moves.members[0])
    if delivery is None or not delivery[0].is_launch or delivery[0].axis == moves.axis:
        return None
    return delivery[0]


def _depth(moves: Transfer) -> int:
    before = _continued(moves)
    return 0 if before is None else _depth(before) + 1


def _nbytes(moves: Transfer) -> int:
    return sum(type_.nbytes for type_ in value.type_of(moves.end))


def _prefetch(graph: StepGraph, transfers: list[Transfer], limit: int) -> None:
    """Launch each bucket of a phase, with all that it continues, ``limit`` bytes before it is awaited."""
    position = liveness(graph).position
    tail: dict[fx.Node, fx.Node] = {}  # after which the next launch goes that is to be after a node
    moved: set[fx.Node] = set()
    first, under_way = 0, _nbytes(transfers[0])
    for i, moves in enumerate(transfers[1:], 1):
        under_way += _nbytes(moves)
        while first < i and under_way > limit:
            under_way -= _nbytes(transfers[first])
            first += 1
        after = transfers[first - 1].end if first else transfers[0].node
        for node in _way_to(moves):
            if node not in moved and position[node] > position[after]:
                tail.get(after, after).append(node)
                tail[after] = node
                moved.add(node)


def _way_to(moves: Transfer) -> list[fx.Node]:
    """A launch, after the launches and waits of what it continues."""
    before = _continued(moves)
    return [moves.node] if before is None else [*_way_to(before), before.end, *before.end.users, moves.node]


def _carry_on_late(graph: StepGraph, transfers: list[Transfer]) -> None:
    """Carry results on along a further axis when the next bucket is launched: until then they are on their way."""
    at = liveness(graph)
    starts: dict[Any, list[fx.Node]] = defaultdict(list)  # of what is where that begins, in order
    for moves in at.transfers.values():
        if moves.is_launch:
            starts[_kind(moves), at.section[moves.node], _depth(moves)].append(moves.node)
    for moves in transfers:
        before = _continued(moves)
        assert before is not None
        way = _way_on(moves)
        alike = starts[_kind(before), at.section[before.node], _depth(before)]
        inside = set(way)
        limits = [user for node in way for user in node.users if user not in inside]
        limits += [_after_phase(at, moves), *alike[alike.index(before.node) + 1 :][:1]]
        stop = min(limits, key=at.position.__getitem__)
        if at.position[stop] > at.position[moves.node]:
            for node in way:
                stop.prepend(node)


def _way_on(moves: Transfer) -> list[fx.Node]:
    """A launch, its wait and results, and the same of all that carries these on."""
    picks = moves.end.users
    further = dict.fromkeys(user for pick in picks for user in pick.users if user.target is ops.launch)
    onward = [node for one in further if (next_transfer := transfer_of(one)) for node in _way_on(next_transfer)]
    return [moves.node, moves.end, *picks, *onward]


def _await_late(graph: StepGraph, transfers: list[Transfer], limit: int) -> None:
    at = liveness(graph)
    position = at.position
    transfers = sorted(transfers, key=lambda moves: position[moves.node])  # carrying on late may have moved some
    launched = [*accumulate(map(_nbytes, transfers))]  # bytes, each with those before it
    for i, moves in enumerate(transfers):
        picks = list(moves.end.users)
        added = [user for pick in picks for user in pick.users if user.target is ops.accumulate]
        readers = [user for node in (*picks, *added) for user in node.users if user not in added]
        limits = [min(readers, key=position.__getitem__)] if readers else []
        limits += [_after_phase(at, moves)]
        enough = max(i + 2, bisect_right(launched, launched[i] + limit))
        limits += [later.node for later in transfers[enough : enough + 1]]
        stop = min(limits, key=position.__getitem__)
        stop.prepend(moves.end)
        for node in (*sorted(picks, key=position.__getitem__), *added):
            stop.prepend(node)


def _after_phase(at: Liveness, moves: Transfer) -> fx.Node:
    """The first node after the last of a transfer's phase."""
    return at.nodes[at.section_end[at.section[moves.node]] + 1]
