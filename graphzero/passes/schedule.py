"""Schedule: collectives start early and are awaited late, states are written in place once nobody reads the old.

* A bucketed collective becomes ``launch`` and ``wait``; between them it owns a communication slot.
* Gathers of parameters are prefetched: launched as soon as no more than ``nbytes`` of them are on their way or wait
  to be read, and the next one always when the one before it has arrived.
* Reductions of gradients and gathers of updated parameters are awaited late: when more than ``nbytes`` of their kind
  have been launched after them, at the latest when backward ends or a result is read; two of a kind may always be under
  way at a time.  What carries them on along a further placement axis is launched with the next bucket.
* Where the optimizer steps in backward, each op of the update stands where what it needs is there (``step_early``).
* ``assign`` writes a new state over the old right after the last reader of the old, and after every check: a step that
  one of them stops has changed nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.layout import layout_of, local_shape
from graphzero.ir.memory import Storage, last_check, storage_roots
from graphzero.passes.base import BuiltinPass
from graphzero.passes.bucket import default_limit, is_early, made_by
from graphzero.passes.step_early import step_early


@dataclass(frozen=True)
class Schedule(BuiltinPass):
    """Orders the program; it changes no value.

    nbytes: of whole values under way at a time; by default what ``Bucket`` takes for a bucket.
    in_backward: whether the optimizer steps a parameter while backward runs, as soon as its gradient is there.
    """

    nbytes: int | None = None
    in_backward: bool = False

    def __post_init__(self) -> None:
        if self.nbytes is not None and self.nbytes < 0:
            raise ConfigError(f"Schedule(nbytes={self.nbytes}): bytes under way are not negative")

    def __call__(self, graph: StepGraph) -> StepGraph:
        limit = default_limit(graph) if self.nbytes is None else self.nbytes
        waits = [_split(graph, node) for node in list(graph.nodes) if node.target in ops.BUCKETS]
        _start_and_await(graph, [wait for wait in waits if value.phase_of(wait) != "update"], limit)
        if self.in_backward:
            step_early(graph)
        _start_and_await(graph, [wait for wait in waits if value.phase_of(wait) == "update"], limit)
        _copy_old(graph)
        _assign(graph)
        _give_slots(graph)
        return graph


def _start_and_await(graph: StepGraph, waits: list[fx.Node], limit: int) -> None:
    groups: dict[Any, list[fx.Node]] = defaultdict(list)
    for wait in waits:
        launch = _launch_of(wait)
        groups[_kind(launch), value.phase_of(wait), _depth(launch), is_early(launch)].append(wait)
    for (_, _, depth, early), members in sorted(groups.items(), key=lambda item: item[0][2]):
        if depth and not early:
            _carry_on_late(graph, members)
    for (*_, early), members in sorted(groups.items(), key=lambda item: -item[0][2]):
        if early:
            _prefetch(graph, members, limit)
    for (*_, early), members in groups.items():
        if not early:
            _await_late(graph, members, limit)


def _split(graph: StepGraph, bucket: fx.Node) -> fx.Node:
    types, nds = value.type_of(bucket), value.sbp_of(bucket)
    name = bucket.target.__name__  # type: ignore[union-attr]
    with graph.graph.inserting_before(bucket):
        launch = graph.call(ops.launch, (name, -1, *bucket.args), types, sbp=nds, like=bucket)
        wait = graph.call(ops.wait, (launch,), types, sbp=nds, like=bucket)
    bucket.replace_all_uses_with(wait)
    graph.graph.erase_node(bucket)
    return wait


def _launch_of(wait: fx.Node) -> fx.Node:
    launch = wait.args[0]
    assert isinstance(launch, fx.Node)
    return launch


def _kind(launch: fx.Node) -> tuple[Any, ...]:
    """Collective, placement axis and reduction."""
    return (launch.args[0], *launch.args[3 if launch.args[0] == ops.bucket_all_reduce.__name__ else 4 :])


def _continued(launch: fx.Node) -> fx.Node | None:
    """The launch of the collective whose results this one carries on along another axis."""
    return made_by(launch.all_input_nodes[0])


def _depth(launch: fx.Node) -> int:
    before = _continued(launch)
    return 0 if before is None else _depth(before) + 1


def _nbytes(wait: fx.Node) -> int:
    return sum(type_.nbytes for type_ in value.type_of(wait))


def _wait_of(launch: fx.Node) -> fx.Node:
    return next(user for user in launch.users if user.target is ops.wait)


def _prefetch(graph: StepGraph, waits: list[fx.Node], limit: int) -> None:
    """Launch each bucket of a phase, with all that it continues, ``limit`` bytes before it is awaited."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    tail: dict[fx.Node, fx.Node] = {}  # behind which the next launch goes that is to stand behind a node
    moved: set[fx.Node] = set()
    first, under_way = 0, _nbytes(waits[0])
    for i, wait in enumerate(waits[1:], 1):
        under_way += _nbytes(wait)
        while first < i and under_way > limit:
            under_way -= _nbytes(waits[first])
            first += 1
        behind = waits[first - 1] if first else _launch_of(waits[0])
        for node in _way_to(_launch_of(wait)):
            if node not in moved and position[node] > position[behind]:
                tail.get(behind, behind).append(node)
                tail[behind] = node
                moved.add(node)


def _way_to(launch: fx.Node) -> list[fx.Node]:
    """A launch, behind the launches and waits of what it continues."""
    before = _continued(launch)
    return [launch] if before is None else [*_way_to(before), _wait_of(before), *_wait_of(before).users, launch]


def _carry_on_late(graph: StepGraph, waits: list[fx.Node]) -> None:
    """Carry results on along a further axis when the next bucket is launched: until then they are on their way."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    phase_end = _phase_ends(graph)
    starts: dict[Any, list[fx.Node]] = defaultdict(list)  # of what stands where that begins, in order
    for node in graph.nodes:
        if node.target is ops.launch:
            starts[_kind(node), value.phase_of(node), _depth(node)].append(node)
    for launch in map(_launch_of, waits):
        before = _continued(launch)
        assert before is not None
        way = _way_on(launch)
        alike = starts[_kind(before), value.phase_of(before), _depth(before)]
        inside = set(way)
        limits = [user for node in way for user in node.users if user not in inside]
        limits += [phase_end[value.phase_of(launch)], *alike[alike.index(before) + 1 :][:1]]
        stop = min(limits, key=position.__getitem__)
        if position[stop] > position[launch]:
            for node in way:
                stop.prepend(node)


def _way_on(launch: fx.Node) -> list[fx.Node]:
    """A launch, its wait and results, and the same of all that carries these on."""
    wait = _wait_of(launch)
    further = dict.fromkeys(user for pick in wait.users for user in pick.users if user.target is ops.launch)
    return [launch, wait, *wait.users, *(node for one in further for node in _way_on(one))]


def _await_late(graph: StepGraph, waits: list[fx.Node], limit: int) -> None:
    position = {node: i for i, node in enumerate(graph.nodes)}
    phase_end = _phase_ends(graph)
    waits = sorted(waits, key=lambda wait: position[_launch_of(wait)])  # carrying on late may have changed their order
    for i, wait in enumerate(waits):
        picks = list(wait.users)
        readers = [user for pick in picks for user in pick.users]
        limits = [min(readers, key=position.__getitem__)] if readers else []
        limits += [phase_end[value.phase_of(wait)]]
        launched = zip(waits[i + 1 :], accumulate(map(_nbytes, waits[i + 1 :])), strict=True)
        limits += [_launch_of(later) for later, nbytes in list(launched)[1:] if nbytes > limit][:1]
        stop = min(limits, key=position.__getitem__)
        stop.prepend(wait)
        for pick in sorted(picks, key=position.__getitem__):
            stop.prepend(pick)


def _phase_ends(graph: StepGraph) -> dict[str, fx.Node]:
    """Per phase, the first node behind its last."""
    ends: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            ends[value.phase_of(node)] = node.next
    return ends


def _copy_old(graph: StepGraph) -> None:
    """What lives in a storage that the step writes over, and is wanted beyond that, is copied.

    That is: what build returns of a state (it is the state before the step), and a new state that is another state's
    old value or a view of its own.  Then the order of writes does not matter.
    """
    roots = storage_roots(graph)
    placeholders = {node.name: node for node in graph.placeholders()}
    written = {placeholders[name] for name in graph.updates}
    copies: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node) -> fx.Node:
        root = roots[node][0] if value.is_tensor(node) else None
        if root is None or root[0] not in written:
            return node
        if node not in copies:
            copies[node] = _clone(graph, node)
        return copies[node]

    outputs, aux = fx.map_arg((graph.outputs, graph.aux), copied)  # type: ignore[arg-type]
    updates = {name: new if new is placeholders[name] else copied(new) for name, new in graph.updates.items()}
    graph.set_output(outputs, aux, updates)


def _clone(graph: StepGraph, node: fx.Node) -> fx.Node:
    given = node.op == "placeholder"
    first = next(n for n in graph.nodes if n.op != "placeholder")
    phase = value.phase_of(first) if first.op == "call_function" else "forward"
    with graph.graph.inserting_before(first) if given else graph.graph.inserting_after(node):
        return graph.call(
            torch.ops.aten.clone.default,
            (node,),
            value.type_of(node),
            sbp=value.nd_of(node),
            phase=phase if given else "",
            like=node,
        )


def _assign(graph: StepGraph) -> None:
    """Write each new state over the old, right after the last reader of the old and the last check."""
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    checked = position.get(last_check(graph), 0)  # type: ignore[arg-type]
    last_reader = _last_readers(nodes[:-1], storage_roots(graph))
    placeholders = {node.name: node for node in graph.placeholders()}
    updates = {}
    for name, new in graph.updates.items():
        old = placeholders[name]
        after = max(position[new], last_reader.get((old, 0), 0), checked, len(placeholders) - 1)
        with graph.graph.inserting_after(nodes[after]):
            updates[name] = graph.call(
                ops.assign, (old, new), value.type_of(old), sbp=value.nd_of(old), phase="update", like=new
            )
    graph.set_output(graph.outputs, graph.aux, updates)


def _last_readers(nodes: list[fx.Node], roots: dict[fx.Node, tuple[Storage | None, ...]]) -> dict[Storage | None, int]:
    """Position of the last node that reads each storage."""
    last: dict[Storage | None, int] = {}
    for i, node in enumerate(nodes):
        for operand in node.all_input_nodes:
            last.update(dict.fromkeys(roots[operand], i))
    return last


def _give_slots(graph: StepGraph) -> None:
    """Each collective takes the free slot that fits best, so that few bytes serve all.

    That is the smallest that is large enough, else the largest, which grows; a new one only where none is free.  A
    bucket of one needs none where its value lies in one piece anyway.
    """
    direct = _direct(graph)
    sizes: list[int] = []
    free: set[int] = set()
    for node in graph.nodes:
        if node in direct:
            node.args = (node.args[0], None, *node.args[2:])
        elif node.target is ops.launch:
            found = layout_of(graph, node)
            need = found.slot_bytes if found is not None else 0
            if not free:
                free.add(len(sizes))
                sizes.append(0)
            enough = [(sizes[slot], slot) for slot in free if sizes[slot] >= need]
            _, slot = min(enough) if enough else max((sizes[slot], slot) for slot in free)
            free.remove(slot)
            sizes[slot] = max(sizes[slot], need)
            node.args = (node.args[0], slot, *node.args[2:])
        elif node.target is ops.wait and _launch_of(node) not in direct:
            free.add(_launch_of(node).args[1])  # type: ignore[arg-type]


def _direct(graph: StepGraph) -> set[fx.Node]:
    """Launches of one value that can move between its own storage and its result's.

    A gather along dim 0 is the pieces one after the other, if the other axes cut alike; so is what a reduce-scatter
    sends if dim 0 divides.  A reduction works in its operand's storage, so that must be the op's own, and have no
    later reader.
    """
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    roots = storage_roots(graph)
    last = _last_readers(nodes, roots)
    found = set()
    for launch in graph.graph.find_nodes(op="call_function", target=ops.launch):
        layout = layout_of(graph, launch)
        assert layout is not None
        if len(layout.members) != 1 or (layout.kind != "all_reduce" and layout.dims != (0,)):
            continue
        (member,) = layout.members
        storage = roots[member][0]
        own = storage is not None and storage[0].op != "placeholder" and last[storage] == position[launch]
        least = prod(local_shape(graph, member, _smallest(graph, layout.axis)))
        even = least == layout.total * (1 if layout.kind == "all_gather" else layout.ranks)
        if (layout.kind == "all_gather" and even) or (own and (even or layout.kind == "all_reduce")):
            found.add(launch)
    return found


def _smallest(graph: StepGraph, axis: str) -> int:
    """The rank first along ``axis`` and last on the other axes: of those that are first, it has the smallest pieces."""
    last = [n - 1 for n in graph.placement.hierarchy]
    last[graph.placement.axis(axis)] = 0
    return int(graph.placement.ranks[tuple(last)])
