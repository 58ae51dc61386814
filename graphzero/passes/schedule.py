"""Schedule: collectives start early and are awaited late, states are written in place once nobody reads the old.

* A bucketed collective becomes ``launch`` and ``wait``; between them it owns a communication slot.
* Gathers of parameters are prefetched: the next bucket is launched as soon as the one before it has arrived.
* Reductions of gradients and gathers of updated parameters are awaited one launch of their kind later, at the
  latest when backward ends or a result is read; so two of a kind are under way at a time.
* ``assign`` writes a new state over the old right after the last reader of the old.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.layout import layout_of
from graphzero.ir.memory import storage_roots
from graphzero.passes.base import BuiltinPass


@dataclass(frozen=True)
class Schedule(BuiltinPass):
    """Orders the program; it changes no value."""

    def __call__(self, graph: StepGraph) -> StepGraph:
        waits = [_split(graph, node) for node in list(graph.nodes) if node.target in ops.BUCKETS]
        groups: dict[Any, list[fx.Node]] = defaultdict(list)
        for wait in waits:
            launch = _launch_of(wait)
            groups[launch.args[0], launch.args[-1], value.phase_of(wait), _is_early(launch)].append(wait)
        for (_, _, _, early), members in groups.items():
            if early:
                _prefetch(members)
            else:
                _await_late(graph, members)
        _copy_outputs(graph)
        _assign(graph)
        _give_slots(graph)
        return graph


def _split(graph: StepGraph, bucket: fx.Node) -> fx.Node:
    types, nds = value.type_of(bucket), value.sbp_of(bucket)
    name = bucket.target.__name__.removeprefix("bucket_")  # type: ignore[union-attr]
    with graph.graph.inserting_before(bucket):
        launch = graph.call(ops.launch, (f"bucket_{name}", -1, *bucket.args), types, sbp=nds, like=bucket)
        wait = graph.call(ops.wait, (launch,), types, sbp=nds, like=bucket)
    bucket.replace_all_uses_with(wait)
    graph.graph.erase_node(bucket)
    return wait


def _launch_of(wait: fx.Node) -> fx.Node:
    launch = wait.args[0]
    assert isinstance(launch, fx.Node)
    return launch


def _is_early(launch: fx.Node) -> bool:
    return all(node.op == "placeholder" for node in launch.all_input_nodes)


def _prefetch(waits: list[fx.Node]) -> None:
    """Launch each bucket of a phase right behind the arrival of the one before it."""
    for before, wait in zip(waits[:-1], waits[1:], strict=True):
        before.append(_launch_of(wait))


def _await_late(graph: StepGraph, waits: list[fx.Node]) -> None:
    position = {node: i for i, node in enumerate(graph.nodes)}
    phase_end = _phase_ends(graph)
    for i, wait in enumerate(waits):
        picks = list(wait.users)
        readers = [user for pick in picks for user in pick.users]
        limits = [min(readers, key=position.__getitem__)] if readers else []
        limits += [phase_end[value.phase_of(wait)]]
        limits += [_launch_of(waits[i + 2])] if i + 2 < len(waits) else []
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


def _copy_outputs(graph: StepGraph) -> None:
    """What build returns of a state that the step writes over is the state before the step."""
    roots = storage_roots(graph)
    written = {node for node in graph.placeholders() if node.name in graph.updates}

    def copied(node: fx.Node) -> fx.Node:
        root = roots[node][0] if value.is_tensor(node) else None
        if root is None or root[0] not in written:
            return node
        first = next(n for n in graph.nodes if n.op != "placeholder")
        with graph.graph.inserting_before(first) if node.op == "placeholder" else graph.graph.inserting_after(node):
            return graph.call(
                torch.ops.aten.clone.default, (node,), value.type_of(node), sbp=value.nd_of(node), like=node
            )

    graph.set_output(fx.map_arg(graph.outputs, copied), graph.aux, graph.updates)  # type: ignore[arg-type]


def _assign(graph: StepGraph) -> None:
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    roots = storage_roots(graph)
    placeholders = {node.name: node for node in graph.placeholders()}
    last_reader = {node: position[node] for node in placeholders.values()}
    for node in nodes[:-1]:
        for operand in node.all_input_nodes:
            for storage in roots[operand]:
                if storage is not None and storage[0] in last_reader:
                    last_reader[storage[0]] = max(last_reader[storage[0]], position[node])
    first = position[next(n for n in nodes if n.op != "placeholder")]
    updates = {}
    for name, new in graph.updates.items():
        old = placeholders[name]
        new = _detached(graph, old, new, roots)
        after = max(position.get(new, position[_origin(new)]), last_reader[old], first - 1)
        anchor = nodes[after] if new in position or after > position[_origin(new)] else new
        with graph.graph.inserting_after(anchor):
            updates[name] = graph.call(
                ops.assign, (old, new), value.type_of(old), sbp=value.nd_of(old), phase="update", like=new
            )
    graph.set_output(graph.outputs, graph.aux, updates)


def _origin(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0] if node.all_input_nodes else node


def _detached(graph: StepGraph, old: fx.Node, new: fx.Node, roots: Any) -> fx.Node:
    """A new value that lives in another state's storage is copied, so that the order of writes does not matter."""
    root = roots[new][0]
    if root is None or root[0].op != "placeholder" or root[0] is old:
        return new
    place = graph.graph.inserting_after(new)
    if new.op == "placeholder":
        place = graph.graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder"))
    with place:
        return graph.call(torch.ops.aten.clone.default, (new,), value.type_of(new), sbp=value.nd_of(new), like=new)


def _give_slots(graph: StepGraph) -> None:
    """Each collective takes the free slot that fits best, so that few bytes serve all.

    That is the smallest that is large enough, else the largest, which grows; a new one only where none is free.
    """
    sizes: list[int] = []
    free: set[int] = set()
    for node in graph.nodes:
        if node.target is ops.launch:
            found = layout_of(graph, node)
            need = found.slot_bytes if found is not None else 0
            enough = [slot for slot in free if sizes[slot] >= need]
            slot = (
                min(enough, key=lambda i: (sizes[i], i))
                if enough
                else max(free, key=lambda i: (sizes[i], i), default=-1)
            )
            if slot < 0:
                slot = len(sizes)
                sizes.append(0)
            free.discard(slot)
            sizes[slot] = max(sizes[slot], need)
            node.args = (node.args[0], slot, *node.args[2:])
        elif node.target is ops.wait:
            free.add(_launch_of(node).args[1])  # type: ignore[arg-type]
