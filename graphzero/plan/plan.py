"""The cost of one step, computed from the final program before anything runs: bytes of memory, bytes sent.

The plan walks the program as the eager executor does and counts by the same tables (``ir.storage``, ``ir.layout``).
All figures are of the fullest rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.memory_space import is_offload, is_reload
from graphzero.ir.storage.arena import Arena
from graphzero.ir.storage.liveness import Bytes, Liveness, StorageSpan, liveness
from graphzero.ir.text.notebook_text import show_as_printed
from graphzero.ir.transfer import Transfer
from graphzero.ir.transfer_layout import shape_on
from graphzero.ir.verifier.verify import examine
from graphzero.plan.pipelines.pipeline_seconds import PipelineSeconds
from graphzero.sbp.boxing import wire_bytes
from graphzero.sbp.link_costs import Links
from graphzero.sbp.types import B, replace_at

RESIDENT = ("parameters", "compute_parameters", "optimizer_states", "buffers", "accumulators", "communication", "arena")
CATEGORIES = (*RESIDENT, "gradients", "activations", "temporaries")
SHARED = ("parameters", "compute_parameters", "optimizer_states", "accumulators", "gradients")


class Collective(NamedTuple):
    """One collective call of a step.

    kind: all_gather, reduce_scatter, all_reduce, all_to_all or shift; axis: the placement axis; bytes: on the wire,
    sent by one rank, padding included; phase: forward, backward or update; names: the values in it, parameters by their
    path; what_for: "parameters", "gradients" or "other" (loss, norms, counts, batch statistics, activations);
    seconds: what it takes by itself, by ``config.set_links``; None without.  elements: of parameters and gradients
    that one rank sends, without padding.
    """

    kind: str
    axis: str
    bytes: float
    phase: str
    names: tuple[str, ...]
    what_for: str
    seconds: float | None = None
    elements: float = 0.0


class HostTraffic(NamedTuple):
    """Bytes that a step of one rank copies between host memory and the device, in each direction."""

    to_device: int = 0
    to_host: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by category: between calls (``resident``) and at the worst moment of a call (``at_peak``).

    arena: the buffer of large temporaries, which is kept between calls.  At the peak it counts only the unused part of
    the buffer; values in it count in their own category.  Programs of one Graph share the buffer of the largest.
    model_state: resident parameters, their copies and optimizer states, plus the gradient bytes alive when backward
    ends: the number of the ZeRO papers.  Inputs belong to the caller and are not counted.
    activations: the most bytes at any moment of values that forward leaves, or that backward recomputes or brings back.
    host: the most bytes in host memory at any moment: optimizer states by ``config.enable_offload``, and values that
    ops have put there (``gz.passes.host_memory``).  They are not part of ``peak``.  host_resident: the part of it that
    stays between calls.
    """

    resident: dict[str, int]
    at_peak: dict[str, int]
    model_state: int
    peak_at: str = ""
    activations: int = 0
    host: int = 0
    host_resident: int = 0

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())

    def __getitem__(self, category: str) -> int:
        return self.resident[category]


@dataclass(frozen=True)
class PipelineMember:
    """Memory of the ranks of one member of ``pp``.

    stages: that they compute.  in_flight: the most bytes that parts of the program have handed over and a later part
    is to read, between two of their actions.
    """

    stages: tuple[int, ...]
    memory: MemoryPlan
    in_flight: int


@dataclass(frozen=True)
class PipelineEdge:
    """The messages that one rank of a stage sends to one of another: bytes of each, and their number in a step."""

    source: int
    target: int
    bytes: int
    messages: int


@dataclass(frozen=True)
class PipelinePlan:
    """Members, edges and schedule of a pipeline.

    bubble: idle time over busy time where forward takes 1 and backward 2 on every stage.  chart: who runs what when
    then.  seconds: the same by the seconds that parts are planned to take.
    """

    schedule: str
    members: tuple[PipelineMember, ...]
    edges: tuple[PipelineEdge, ...]
    bubble: float
    chart: str
    seconds: PipelineSeconds | None = None

    @property
    def lines(self) -> list[str]:
        """The plan in words; seconds are those of a micro-batch."""
        columns, seconds = ["stages", "parameters", "states", "in flight", "at peak"], self.seconds
        lines = [f"pipeline {self.schedule}, bubble {self.bubble:.3f} of busy time (forward 1, backward 2)"]
        transfers: dict[tuple[int, int], float] = {}
        if seconds is not None:
            lines[0] += f", {seconds.bubble:.3f} by planned seconds on {seconds.device}"
            columns += ["forward", "backward"]
            transfers = {(source, target): each for source, target, each in seconds.transfers}
        has_host = any(member.memory.host for member in self.members)
        columns += ["on host"] * has_host
        lines.append("".join(f"{name:>14}" for name in columns))
        for member in self.members:
            resident = member.memory.resident
            nbytes = (resident["parameters"], resident["optimizer_states"], member.in_flight, member.memory.peak)
            texts = [",".join(map(str, member.stages)), *map(mega, nbytes)]
            if seconds is not None:
                each = (seconds.stages[stage] for stage in member.stages)
                texts += [format_seconds(sum(direction)) for direction in zip(*each, strict=True)]
            texts += [mega(member.memory.host)] * has_host
            lines.append("".join(f"{text:>14}" for text in texts))
        for edge in self.edges:
            lines.append(f"stage {edge.source} -> {edge.target}: {edge.messages} messages of {mega(edge.bytes)}")
            if (edge.source, edge.target) in transfers:
                lines[-1] += f", {format_seconds(transfers[edge.source, edge.target])} each"
        return [*lines, *(self.chart if seconds is None else seconds.chart).splitlines()]


@dataclass(frozen=True)
class Plan:
    """The cost of one call of a program for one rank.

    memory: see ``MemoryPlan``.  collectives: all of them, in program order.  padding_bytes: bytes on the wire that only
    fill up uneven pieces (part of ``comm_bytes``).  comm_volume: elements of parameters and gradients that one rank
    sends, without padding, in units of the number of parameters.  links: the cost of each axis, by
    ``config.set_links``.  stage: of ZeRO.  kept: parameters that are gathered once a step, and not again for backward.
    recomputed: values of forward that backward recomputes.  decisions: choices of a memory budget and of other
    settings, in words.  pipeline: of pipeline stages; everything else is then of the fullest rank.  host_traffic: bytes
    over the link to the host.
    """

    name: str
    placement: str
    parameters: int
    memory: MemoryPlan
    collectives: list[Collective]
    padding_bytes: float
    comm_volume: float
    links: Links = ()
    stage: int = 0
    kept: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()
    pipeline: PipelinePlan | None = None
    host_traffic: HostTraffic = HostTraffic()

    @property
    def comm_bytes(self) -> float:
        """Bytes on the wire that one rank sends in a step, padding included."""
        return sum(collective.bytes for collective in self.collectives)

    @property
    def comm_seconds(self) -> float | None:
        """Seconds of all collectives one after the other, without overlap; None without ``config.set_links``."""
        return sum(c.seconds or 0.0 for c in self.collectives) if self.links else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, lists and numbers."""
        return {
            "name": self.name,
            "placement": self.placement,
            "parameters": self.parameters,
            "memory": {
                "resident": dict(self.memory.resident),
                "at_peak": dict(self.memory.at_peak),
                "peak": self.memory.peak,
                "model_state": self.memory.model_state,
                "activations": self.memory.activations,
                "host": self.memory.host,
                "host_resident": self.memory.host_resident,
            },
            "collectives": [
                collective._asdict() | {"names": list(collective.names)} for collective in self.collectives
            ],
            "host_traffic": self.host_traffic._asdict(),
            "comm_bytes": self.comm_bytes,
            "comm_seconds": self.comm_seconds,
            "comm_volume": self.comm_volume,
            "padding_bytes": self.padding_bytes,
            "stage": self.stage,
            "kept": list(self.kept),
            "recomputed": list(self.recomputed),
            "decisions": list(self.decisions),
            "pipeline": asdict(self.pipeline) if self.pipeline is not None else None,
        }

    _repr_pretty_ = show_as_printed

    def __str__(self) -> str:
        lines = [f"plan of {self.name} on {self.placement}, per rank ({self.parameters:,} parameters)", ""]
        lines.append(f"  {'bytes':<20}{'between calls':>16}{'at peak':>16}")
        for category in CATEGORIES:
            resident, peak = self.memory.resident.get(category, 0), self.memory.at_peak[category]
            if resident or peak:
                lines.append(f"  {category:<20}{mega(resident):>16}{mega(peak):>16}")
        total = sum(self.memory.resident.values())
        lines.append(f"  {'total':<20}{mega(total):>16}{mega(self.memory.peak):>16}   at {self.memory.peak_at}")
        lines.append(f"  {'model state':<20}{mega(self.memory.model_state):>16}")
        if self.memory.host:
            stays = mega(self.memory.host_resident) if self.memory.host_resident else ""
            host = f"{stays:>16}{mega(self.memory.host):>16}"
            lines.append(f"  {'in host memory':<20}{host}   at most, beside the device's")
        lines += ["", *self._traffic_lines()]
        lines.append(f"  parameters and gradients: {self.comm_volume:.3f} Psi; padding {mega(self.padding_bytes)}")
        if any(self.host_traffic):
            up, down = map(mega, self.host_traffic)
            lines.append(f"  over the link to the host: {up} to the device, {down} to the host")
        lines += [f"  {line}" for line in self.decisions]
        lines += ["", *(f"  {line}" for line in self.pipeline.lines)] if self.pipeline is not None else []
        return "\n".join(lines)

    def _traffic_lines(self) -> list[str]:
        """Calls and bytes by phase, kind and purpose, with seconds where links are known."""
        groups: dict[str, list[Collective]] = {}
        for c in self.collectives:
            groups.setdefault(f"{c.phase} {c.kind} {c.what_for}", []).append(c)
        head = f"  {'collectives':<34}{'calls':>6}{'sent':>14}" + (f"{'alone':>14}" if self.links else "")
        lines = [head]
        for name, calls in [*groups.items(), ("total", self.collectives)]:
            line = f"  {name:<34}{len(calls):>6}{mega(sum(c.bytes for c in calls)):>14}"
            lines.append(line + (f"{format_seconds(sum(c.seconds or 0.0 for c in calls)):>14}" if self.links else ""))
        return lines


def mega(nbytes: float) -> str:
    """Bytes in the unit that suits them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.1f} us"


def plan_of(graph: StepGraph, links: Links = ()) -> Plan:
    """The plan of a lowered program for the first rank, which holds the largest pieces.

    links: what communication costs on each placement axis, for seconds; () for none.
    """
    examine(graph)
    parameters = sum(value.tensor_type(node).numel for node in graph.placeholders("param") if not is_average(node))
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


def is_average(param: fx.Node) -> bool:
    """Whether only the update reads and changes a parameter: an average of others, which is not one of the model's."""
    return bool(param.users) and all(value.phase_of(user) == "update" for user in param.users)


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
    """Elements of the value, whole on this axis, as it stands on the other axes."""
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
    total = np.sum([*over.values()], axis=0)
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


class AtPeak(NamedTuple):
    """A value that is there at the worst moment of a call: its bytes on a rank, and the user's line that made it."""

    name: str
    category: str
    nbytes: int
    source: str


def largest_at_peak(graph: StepGraph, most: int, arena: Arena | None = None) -> list[AtPeak]:
    """The values that a call makes and that weigh most when it peaks, largest first."""
    spans = [span for span in _at_peak(graph, arena) if span.begin >= 0]
    spans.sort(key=lambda span: (-span.nbytes, span.begin))
    return [
        AtPeak(label_of(span.storage[0]), span.category, span.nbytes, value.source_of(span.storage[0]))
        for span in spans[:most]
    ]


def pieces_at_peak(graph: StepGraph, axis: str, arena: Arena | None = None) -> int:
    """Bytes, when a call peaks, of what ranks share along an axis whatever the batch: model states and gradients."""
    axis_index, nbytes = graph.placement.axis(axis), 0
    for span in _at_peak(graph, arena):
        node = span.storage[0]
        if span.category in SHARED and not value.is_multi(node) and value.nd_of(node)[axis_index].is_split:
            nbytes += span.nbytes
    return nbytes


def _at_peak(graph: StepGraph, arena: Arena | None) -> list[StorageSpan]:
    """The storages that exist when a call peaks."""
    worst = int(np.sum([*memory_over_time(graph, arena).values()], axis=0).argmax())
    return [span for span in liveness(graph).spans() if span.begin <= worst <= span.end]


def memory_over_time(graph: StepGraph, arena: Arena | None = None) -> dict[str, Bytes]:
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
