"""Plans: the cost of one step in numbers and in words.  All figures are of the fullest rank.

``program_costs`` counts them on a final program.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from graphzero.ir.text.printer import show_as_printed
from graphzero.plan.pipelines.pipeline_seconds import PipelineSeconds
from graphzero.sbp.link_costs import Links

RESIDENT = ("parameters", "compute_parameters", "optimizer_states", "buffers", "accumulators", "communication", "arena")
CATEGORIES = (*RESIDENT, "gradients", "activations", "temporaries")


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
    def fullest_member(self) -> int:
        """The member of ``pp`` that the plan of the whole program is of."""
        return max(range(len(self.members)), key=lambda i: self.members[i].memory.peak)

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
        lines[0] += ", without copies to and from the host" * has_host
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
        memory = asdict(self.memory) | {"peak": self.memory.peak}
        del memory["peak_at"]
        return {
            "name": self.name,
            "placement": self.placement,
            "parameters": self.parameters,
            "memory": memory,
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
            lines.append(f"  {'in host memory':<20}{host}   at most, in addition to the device's")
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
