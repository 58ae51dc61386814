"""The cost of one step, counted on the final program before anything runs: bytes of memory, bytes sent.

The program is walked as the eager executor does, and counted by the same tables (``ir.storage``, ``ir.layout``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import numpy as np
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.memory_space import is_offload, is_reload
from graphzero.ir.storage.arena import Arena
from graphzero.ir.storage.liveness import Bytes, Liveness, liveness
from graphzero.ir.transfer import Transfer
from graphzero.ir.transfer_layout import shape_on
from graphzero.ir.verifier.verify import examine
from graphzero.plan.plan import CATEGORIES, RESIDENT, Collective, HostTraffic, MemoryPlan, Plan
from graphzero.sbp.boxing import wire_bytes
from graphzero.sbp.link_costs import Links
from graphzero.sbp.types import B, replace_at

SHARED = ("parameters", "compute_parameters", "optimizer_states", "accumulators", "gradients")


def plan_of(graph: StepGraph, links: Links = ()) -> Plan:
    """The plan of a lowered program for the first rank, which holds the largest pieces.

    links: what communication costs on each placement axis, for seconds; () for none.
    """
    examine(graph)
    parameters = sum(
        value.tensor_type(node).numel for node in graph.placeholders("param") if not value.is_average(node)
    )
    at = liveness(graph)
    by_node = dict(zip(at.layouts, collectives_of(graph, links), strict=True))
    entries = [by_node[node] for i in at.turns if (node := at.nodes[i]) in by_node]
    return Plan(
        name=graph.name,
        placement=_place(graph),
        parameters=parameters,
        memory=memory_of(graph),
        collectives=[entry for entry, _ in entries],
        padding_bytes=sum(padding for _, padding in entries),
        comm_volume=sum(entry.elements for entry, _ in entries) / max(parameters, 1),
        links=links,
        host_traffic=host_traffic_of(at),
    )


def host_traffic_of(at: Liveness) -> HostTraffic:
    """Bytes that a step copies between host memory and the device."""
    nodes = [at.nodes[i] for i in at.turns]
    ups = (node for node in nodes if node.target is ops.to_device_launch or is_reload(node.target))
    downs = (node for node in nodes if node.target is ops.to_host_launch or is_offload(node.target))
    return HostTraffic(*(sum(at.nbytes_of(node) for node in copies) for copies in (ups, downs)))


def _place(graph: StepGraph) -> str:
    axes = (f"{name}={size}" for name, size in zip(graph.placement.names, graph.placement.hierarchy, strict=True))
    return ", ".join(axes)


# ---- traffic


Entry = tuple[Collective, float]  # with its padding in bytes


def collectives_of(graph: StepGraph, links: Links) -> Iterator[Entry]:
    """Each call, with its padding."""
    at = liveness(graph)
    for node, layout in at.layouts.items():
        moves, results = layout.moves, layout.moves.results
        kinds = [role.kind if (role := value.role_of(r)) is not None else "" for r in results]
        whats = {"param": "parameters", "gradient": "gradients"}
        what = whats.get(kinds[0], "other") if len(set(kinds)) == 1 else "other"
        exact = [wire_bytes(moves.kind, _exact_elements(graph, m, moves), layout.ranks) for m in moves.members]
        padding = layout.wire_bytes - sum(exact) * layout.itemsize
        counted = sum(e for e, kind in zip(exact, kinds, strict=True) if kind in whats)
        names = tuple(label_of(result) for result in results)
        link = links[graph.placement.axis(moves.axis)] if links else None
        seconds = link.seconds(moves.kind, layout.wire_bytes, layout.ranks) if link else None
        yield (
            Collective(moves.kind, moves.axis, layout.wire_bytes, value.phase_of(node), names, what, seconds, counted),
            max(padding, 0.0),
        )


def _exact_elements(graph: StepGraph, node: fx.Node, moves: Transfer) -> float:
    """Elements of the value, whole on this axis, as it is on the other axes."""
    index = graph.placement.axis(moves.axis)
    nd = replace_at(value.nd_of(node), index, B)
    return float(prod(shape_on(graph, value.tensor_type(node), nd)))


def label_of(node: fx.Node) -> str:
    """The path of a parameter, state or gradient; a value's own name otherwise."""
    role = value.role_of(node)
    return role.of if role is not None and role.of else node.name


# ---- memory


def memory_of(graph: StepGraph, arena: Arena | None = None) -> MemoryPlan:
    """The memory of ``plan_of``.  arena: where the executor is told to put large temporaries."""
    at = liveness(graph)
    over = memory_over_time(graph, arena)
    total = total_over_time(over)
    worst = int(total.argmax())
    at_peak = {name: int(nbytes[worst]) for name, nbytes in over.items()}
    resident = dict.fromkeys(RESIDENT, 0) | at.resident() | {"arena": arena.nbytes if arena is not None else 0}
    backward_end = at.phase_end.get("backward", -1)
    grads = (span for span in at.spans() if span.category in ("gradients", "accumulators"))
    gradients = sum(span.nbytes for span in grads if span.begin <= backward_end < span.end)
    state = resident["parameters"] + resident["compute_parameters"] + resident["optimizer_states"] + gradients
    where = f"'{at.nodes[worst].name}' in {value.phase_of(at.nodes[worst])}"
    on_host = at.on_host()
    stays = sum(span.nbytes for span in on_host if span.begin < 0)
    host = stays + int(at.over_time(on_host).max())
    return MemoryPlan(resident, at_peak, state, where, int(over["activations"].max()), host, stays)


def memory_over_time(graph: StepGraph, arena: Arena | None) -> dict[str, Bytes]:
    """Bytes by category while each node runs, in order; what they sum to is largest at the plan's peak.

    Of the arena, what of it holds nothing.
    """
    at = liveness(graph)
    spans, resident = at.spans(), at.resident()
    over = {name: at.over_time(x for x in spans if x.category == name) + resident.get(name, 0) for name in CATEGORIES}
    over["communication"] += at.transient
    if arena is not None:
        over["arena"] += arena.nbytes - at.over_time(x for x in spans if x.storage in arena.offsets)
    return over


def total_over_time(over: Mapping[str, Bytes]) -> Bytes:
    """Bytes of all categories."""
    total: Bytes = np.sum([*over.values()], axis=0)
    return total
