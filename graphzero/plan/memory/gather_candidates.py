"""Candidates for gathers: parameters that may stay gathered between forward and backward, of a program that keeps none.

If one stays, its storage in forward lives on until backward's last reader, and backward's own is not made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import Liveness, StorageSpan, liveness
from graphzero.ir.storage.roots import Storage
from graphzero.plan.memory.memory_candidate import MemoryCandidate
from graphzero.plan.plan import Plan

BANDWIDTH = 2.0**31  # bytes a second, where links are not known: a power of two, so that sums of bytes stay exact

Pairs = Mapping[str, Sequence[tuple[str, str]]]  # path -> (what forward makes, what backward makes again), by name


def gather_candidates(graph: StepGraph, plan: Plan, pairs: Pairs) -> list[MemoryCandidate]:
    """The parameters that a final program gathers in both phases, in the order of their spans."""
    at, seconds = liveness(graph), _seconds(graph, plan)
    nodes = {node.name: node for node in at.nodes}
    spans = {span.storage: span for span in at.spans()}
    candidates = []
    for path, names in pairs.items():
        present = [(nodes[a], nodes[b]) for a, b in names if a in nodes and b in nodes]
        changes = _changes(present, at, spans)
        longer = [change for change in changes if change[2] > 0]
        begin = min((start for start, _, _ in longer), default=0)
        end = min([stop for _, stop, _ in longer] + [start for start, _, less in changes if less < 0], default=0)
        freed = sum(nbytes for _, _, nbytes in longer)
        candidates.append(MemoryCandidate(path, freed, seconds[path], begin, max(end, begin), changes=tuple(changes)))
    return sorted(candidates, key=lambda one: (-one.end, one.begin, one.name))


def param_bytes(graph: StepGraph) -> dict[str, int]:
    """Bytes of each parameter, by its path."""
    params = ((value.role_of(node), node) for node in graph.placeholders("param"))
    return {role.of: value.tensor_type(node).nbytes for role, node in params if role is not None}


def _seconds(graph: StepGraph, plan: Plan) -> defaultdict[str, float]:
    """The seconds of gathering each parameter in backward: its share, by bytes, of the collectives that move it."""
    sizes, seconds = param_bytes(graph), defaultdict[str, float](float)
    for c in plan.collectives:
        if c.phase == "backward" and c.what_for == "parameters":
            whole = max(sum(sizes.get(name, 0) for name in c.names), 1)
            for name in c.names:
                seconds[name] += (c.bytes / BANDWIDTH if c.seconds is None else c.seconds) * sizes.get(name, 0) / whole
    return seconds


def _changes(
    pairs: Sequence[tuple[fx.Node, fx.Node]], at: Liveness, spans: Mapping[Storage, StorageSpan]
) -> list[tuple[int, int, int]]:
    """The changes that keeping makes: the storages of backward are not made, those of forward serve their readers.

    A storage of forward lives on only for readers that are not themselves made again."""
    made_again = {again for _, again in pairs}
    dropped: dict[Storage, StorageSpan] = {}
    last_reader: dict[Storage, int] = {}
    for first, again in pairs:
        for first_storage, again_storage in zip(at.roots[first], at.roots[again], strict=True):
            if first_storage is None or again_storage is None or first_storage == again_storage:
                continue
            dropped[again_storage] = spans[again_storage]
            readers = [at.position[user] for user in again.users if user not in made_again]
            last_reader[first_storage] = max(last_reader.get(first_storage, -1), *readers, -1)
    changes = [(span.begin, span.end + 1, -span.nbytes) for span in dropped.values()]
    for storage, last in last_reader.items():
        span = spans[storage]
        if last > span.end:
            changes.append((span.end + 1, last + 1, span.nbytes))
    return changes
