"""OffloadActivations: values that forward leaves for backward wait in host memory instead of the device's.

The copy of a value begins after its last read in forward, and its memory is free when the copy is complete; the copy
back begins some time before its first read in backward.  ``plan`` chooses the values.

When the copies are does not depend on which other values go: all that could go form a line, in the order in which
forward is done with them, and a value is awaited when so many bytes after it in that line are done with too; in the
order in which backward reads them it comes back so many bytes ahead.  So each value frees the same memory whatever
else goes, and none ever costs any.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import ops, value
from graphzero.ir.aliases import is_read_only_view
from graphzero.ir.graph import StepGraph, copy_op
from graphzero.ir.storage.liveness import Liveness, StorageSpan, liveness
from graphzero.ir.storage.roots import Storage, written_by
from graphzero.ir.streams.instructions import begun_by
from graphzero.passes.base import BuiltinPass, is_pattern
from graphzero.passes.schedule.bucket import default_limit


@dataclass(frozen=True)
class OffloadActivations(BuiltinPass):
    """Keeps values of forward in host memory until backward reads them; the same bits.

    offload_activations: names of values, or patterns as of a shell; all that can go by default.
    bucket_bytes: that forward is done with, or backward reads, while a value is on its way, at least; by default what
        ``Bucket`` takes for a bucket.
    Raises ConfigError for a name of no value.

    A named value stays where copies cannot serve: where the update or the caller reads it, or anything is written over
    it, and where backward reads it before it could have gone.

    Requires: collectives have their slots.
    Ensures: backward reads copies that come back, and views of these.

    Example::

        offload_activations{offload_activations=(a) bucket_bytes=1}

         graph step(dp=1) local
           x = batch() : f32[8, 4]  B
         forward:
           a = exp(x) : f32[8, 4]  B
           b = sin(a) : f32[8, 4]  B
        +  host_room = host_room(a) : f32[8, 4]  B
        +  to_host_launch = to_host_launch(host_room, a) : f32[8, 4]  B
           c = sin(b) : f32[8, 4]  B
        +  to_host_wait = to_host_wait(to_host_launch, a) : f32[8, 4]  B
           d = sin(c) : f32[8, 4]  B
         backward:
           gd = cos(c) : f32[8, 4]  B
        +  to_device_launch = to_device_launch(to_host_wait) : f32[8, 4]  B
           gc = mul(gd, b) : f32[8, 4]  B
        -  at = t(a) : f32[4, 8]  B
        +  to_device_wait = to_device_wait(to_device_launch, to_host_wait) : f32[8, 4]  B
        +  at = t(to_device_wait) : f32[4, 8]  B
           gb = mm(at, gc) : f32[4, 4]  B
           return d, gb
    """

    offload_activations: tuple[str, ...] = ("*",)
    bucket_bytes: int | None = None

    def __call__(self, graph: StepGraph) -> StepGraph:
        round_trips = round_trips_of(graph, self.bucket_bytes)
        _write_copies(graph, self._named(graph, round_trips))
        return graph

    def _named(self, graph: StepGraph, round_trips: Sequence[RoundTrip]) -> list[RoundTrip]:
        names = {node.name for node in graph.nodes}
        for name in self.offload_activations:
            if not is_pattern(name) and name not in names:
                raise ConfigError(
                    f"offload_activations={name!r}: there is no such value in {graph.name}; what could wait on the "
                    f"host is {', '.join(trip.name for trip in round_trips) or 'nothing':.400}"
                )
        return [
            trip for trip in round_trips if any(fnmatchcase(trip.name, pattern) for pattern in self.offload_activations)
        ]


@dataclass(frozen=True)
class _Stay:
    """A value that is on the device between forward and backward.

    x: the value, which fills its storage.  views: of it, that backward needs, each after what it is a view of.
    late: ops of backward that read it or a view, in order.
    nbytes: on the fullest rank.
    last_early, first_late: positions of its last reader before backward, and of the first one there.
    """

    x: fx.Node
    views: tuple[fx.Node, ...]
    late: tuple[fx.Node, ...]
    nbytes: int
    last_early: int
    first_late: int


@dataclass(frozen=True)
class RoundTrip(_Stay):
    """A value of forward that may wait on the host, and where its copies would be.

    out_launch, out_wait, back_launch: positions of the ops before which the copies begin and the first is awaited,
        as the second is before ``first_late``; between the two in the middle its memory is free.
    """

    out_launch: int
    out_wait: int
    back_launch: int

    @property
    def name(self) -> str:
        """The value's."""
        return self.x.name


def round_trips_of(graph: StepGraph, bucket_bytes: int | None = None) -> list[RoundTrip]:
    """The values that could wait on the host, in the order in which forward is done with them."""
    at, window = liveness(graph), bucket_bytes or default_limit(graph)
    written = {storage for node in at.nodes for storage in written_by(node, at.roots)}
    values: dict[Storage, list[fx.Node]] = defaultdict(list)
    for node, storages in at.roots.items():
        if storages and storages[0] is not None and set(storages) == {storages[0]}:
            values[storages[0]].append(node)
    stays: dict[int, list[_Stay]] = defaultdict(list)
    for span in at.spans():
        if span.storage not in written and _may_go(at, span):
            stay = _stay_of(at, span, values[span.storage])
            if stay is not None:
                stays[at.section[stay.x][0]].append(stay)
    trips = [trip for part in stays.values() for trip in _round_trips(at, part, window)]
    return sorted(trips, key=lambda trip: (trip.out_launch, at.position[trip.x]))


def _may_go(at: Liveness, span: StorageSpan) -> bool:
    """Return whether forward makes a storage, for backward of the same part of the program and for nothing else."""
    maker, readers = span.storage[0], [at.nodes[i] for i in at.readers[span.storage]]
    is_forward = maker.op == "call_function" and value.phase_of(maker) == "forward"
    if span.category != "activations" or not is_forward or not span.nbytes:
        return False
    part = at.section[maker][0]
    return all(one.op != "output" and value.phase_of(one) != "update" and at.section[one][0] == part for one in readers)


def _stay_of(at: Liveness, span: StorageSpan, values: Sequence[fx.Node]) -> _Stay | None:
    """The value that fills a storage, and its readers; None where copies of it cannot serve backward.

    values: all that live there.
    """
    position, readers = at.position, at.readers[span.storage]
    first_late = min((i for i in readers if value.phase_of(at.nodes[i]) == "backward"), default=-1)
    early = [node for node in values if position[node] < first_late]
    filling = [i for i, node in enumerate(early) if _fills(at, span, node)]
    if not filling:
        return None
    x, shown, before = early[filling[-1]], early[filling[-1] + 1 :], early[: filling[-1]]
    late = {user for node in (x, *shown) for user in node.users if position[user] >= first_late}
    views = _leading_to(late, shown)
    is_over = all(position[begun_by(at.nodes[i])] >= first_late for i in readers if i >= first_late)
    is_after = all(position[user] < first_late for node in before for user in node.users)
    if not late or not is_over or not is_after or not all(map(_can_be_made_again, views)):
        return None
    last_early = max((i for i in readers if i < first_late), default=position[x])
    in_order = sorted(late, key=position.__getitem__)
    return _Stay(x, tuple(views), tuple(in_order), span.nbytes, last_early, first_late)


def _fills(at: Liveness, span: StorageSpan, node: fx.Node) -> bool:
    """Return whether a value is all that a storage holds from then on: what is made there, or reduced in place."""
    if not value.is_tensor(node) or node.target is ops.launch or not value.tensor_type(node).shape:
        return False
    is_shown = _can_be_made_again(node) and set(at.roots[node.all_input_nodes[0]]) == {span.storage}
    return not is_shown and at.nbytes_of(node) == span.nbytes


def _leading_to(readers: set[fx.Node], views: Sequence[fx.Node]) -> list[fx.Node]:
    """The views, one of the other, that readers need."""
    needed = set(readers)
    for view in reversed(views):
        needed |= {view} if needed & view.users.keys() else set()
    return [view for view in views if view in needed]


def _can_be_made_again(view: fx.Node) -> bool:
    """Return whether a value is a view of one operand, one of several, or another name."""
    is_shown = view.target is operator.getitem or is_read_only_view(view.target)
    return is_shown and len(view.all_input_nodes) == 1


# ---- where copies are


def _round_trips(at: Liveness, stays: list[_Stay], window: int) -> Iterator[RoundTrip]:
    """The round trips in one part of the program that leave the device free in between."""
    out = _places(stays, lambda stay: stay.last_early, window)
    back = _places(stays, lambda stay: -stay.first_late, window)
    for stay in stays:
        out_launch, out_wait = _after(at, stay.last_early), _after(at, out.get(stay, len(at.nodes)))
        trip = RoundTrip(**vars(stay), out_launch=out_launch, out_wait=out_wait,
                         back_launch=-back.get(stay, -stay.first_late))  # fmt: skip
        if trip.out_launch < trip.out_wait < trip.back_launch:
            yield trip


def _places(stays: Sequence[_Stay], key: Callable[[_Stay], int], window: int) -> dict[_Stay, int]:
    """Of a line of values in the order of ``key``: the key with which enough has come after each."""
    places, waiting = dict[_Stay, int](), list[tuple[_Stay, int]]()
    for stay in sorted(stays, key=key):
        enough = {one for one, seen in waiting if seen + stay.nbytes >= window and key(one) < key(stay)}
        places |= dict.fromkeys(enough, key(stay))
        waiting = [(one, seen + stay.nbytes) for one, seen in waiting if one not in enough]
        waiting.append((stay, 0))
    return places


def _after(at: Liveness, position: int) -> int:
    """The position of the first op after one and what only names its results."""
    position += 1
    while position < len(at.nodes) and at.nodes[position].target is operator.getitem:
        position += 1
    return position


# ---- writing them


def _write_copies(graph: StepGraph, trips: Sequence[RoundTrip]) -> None:
    """Copy values to the host and back, and let backward read what comes.

    Where several are in one place what begins is first, so that a link is not idle while another is awaited.
    """
    nodes = liveness(graph).nodes
    launches = []
    for trip in trips:
        room = _write(graph, ops.host_room, (trip.x,), trip.x, nodes[trip.out_launch])
        launches.append(_write(graph, ops.to_host_launch, (room, trip.x), trip.x, nodes[trip.out_launch]))
    waits = [
        _write(graph, ops.to_host_wait, (launch, trip.x), trip.x, nodes[trip.out_wait])
        for trip, launch in zip(trips, launches, strict=True)
    ]
    begun = [
        _write(graph, ops.to_device_launch, (wait,), trip.x, nodes[trip.back_launch])
        for trip, wait in zip(trips, waits, strict=True)
    ]
    for trip, wait, launch in zip(trips, waits, begun, strict=True):
        first_reader = nodes[trip.first_late]
        back = {trip.x: _write(graph, ops.to_device_wait, (launch, wait), trip.x, first_reader)}

        def read(x: fx.Node, back: dict[fx.Node, fx.Node] = back) -> fx.Node:
            return back.get(x, x)

        with graph.graph.inserting_before(first_reader):
            for view in trip.views:
                back[view] = copy_op(graph, view, read, f"{view.name}_back", phase="backward")
        for reader in trip.late:
            reader.args, reader.kwargs = fx.map_arg((reader.args, reader.kwargs), read)


def _write(graph: StepGraph, op: Any, args: tuple[fx.Node, ...], x: fx.Node, stop: fx.Node) -> fx.Node:
    """An op of the form of ``x`` before ``stop``, in its phase; of the update, backward goes on after it."""
    phase = "forward" if value.phase_of(stop) == "forward" else "backward"
    with graph.graph.inserting_before(stop):
        return graph.call(op, args, value.type_of(x), sbp=value.sbp_of(x), phase=phase, like=x)
