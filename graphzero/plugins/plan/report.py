"""Results of ``graphzero plan``: for the table, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from graphzero.plan.device import Device
from graphzero.plan.plan import PipelinePlan, Plan
from graphzero.plan.timeline import Timeline
from graphzero.plugins.plan.least_ranks import Least
from graphzero.plugins.plan.peak import AtPeak
from graphzero.sbp.placement import PIPELINE, Placement


class TransferGroup(NamedTuple):
    """Transfers of one kind and purpose along one axis.

    nbytes: sent by one rank.  psi: elements of parameters and gradients among them, in multiples of the parameters.
    seconds: one after the other.
    """

    axis: str
    kind: str
    what_for: str
    calls: int
    nbytes: float
    psi: float
    seconds: float


def traffic(plan: Plan, placement: Placement, device: Device) -> list[TransferGroup]:
    """The transfers of a step, in groups."""
    ranks = dict(zip(placement.names, placement.hierarchy, strict=True))
    totals: dict[tuple[str, str, str], list[float]] = {}
    for call in plan.collectives:
        seconds = device.link(placement, call.axis).seconds(call.kind, call.bytes, ranks[call.axis])
        group = totals.setdefault((call.axis, call.kind, call.what_for), [0.0, 0.0, 0.0, 0.0])
        for i, more in enumerate((1, call.bytes, call.elements / max(plan.parameters, 1), seconds)):
            group[i] += more
    transfer_groups = [TransferGroup(*key, int(calls), *rest) for key, (calls, *rest) in totals.items()]
    if plan.pipeline is not None:
        transfer_groups += _messages(plan.pipeline, placement, device)
    return sorted(transfer_groups, key=lambda group: (placement.axis(group.axis), group.what_for, group.kind))


def _messages(plan: PipelinePlan, placement: Placement, device: Device) -> Iterator[TransferGroup]:
    """The bytes that stages of the fullest rank send while micro-batches run: activations, and their gradients."""
    stages = plan.members[plan.fullest_member].stages
    edges = [edge for edge in plan.edges if edge.source in stages]
    if edges:
        count, nbytes = sum(edge.messages for edge in edges), float(sum(edge.messages * edge.bytes for edge in edges))
        link = device.link(placement, PIPELINE)
        yield TransferGroup(
            PIPELINE, "send", "activations", count, nbytes, 0.0, count * link.latency + nbytes / link.bandwidth
        )


@dataclass(frozen=True)
class StagePlan:
    """One stage of ZeRO: bytes and collectives, seconds, what weighs most at the peak, and the ranks that would fit.

    least: None where it was not asked for.  pieces: bytes of the peak that ranks share along the first data axis.
    """

    stage: int
    plan: Plan
    timeline: Timeline
    largest: list[AtPeak]
    least: Least | None = None
    pieces: int = 0

    @property
    def peak(self) -> int:
        return self.plan.memory.peak


@dataclass(frozen=True)
class PlanReport:
    """Results of the command. memory: bytes that a rank may use, from the command line or from the device."""

    factory: str
    placement: Placement
    device: Device
    memory: int
    stages: list[StagePlan]

    def to_json(self) -> dict[str, Any]:
        """The results as plain dicts, lists and numbers."""
        axes = dict(zip(self.placement.names, self.placement.hierarchy, strict=True))
        return {
            "factory": self.factory,
            "ranks": self.placement.size,
            "axes": axes,
            "memory": self.memory,
            "device": self.device.to_json(),
            "stages": [self._stage(one) for one in self.stages],
        }

    def _stage(self, one: StagePlan) -> dict[str, Any]:
        step, plan = one.timeline, one.plan
        return {
            "stage": one.stage,
            "made_stage": plan.stage,
            "parameters": plan.parameters,
            "resident": dict(plan.memory.resident),
            "at_peak": dict(plan.memory.at_peak),
            "peak": plan.memory.peak,
            "peak_at": plan.memory.peak_at,
            "largest_at_peak": [value._asdict() for value in one.largest],
            "model_state": plan.memory.model_state,
            "fits": one.peak <= self.memory,
            "least_ranks": None if one.least is None else {"ranks": one.least.ranks, "why": one.least.why},
            "traffic": [group._asdict() for group in traffic(plan, self.placement, self.device)],
            "comm_bytes": plan.comm_bytes,
            "comm_volume": plan.comm_volume,
            "padding_bytes": plan.padding_bytes,
            "in_host_memory": plan.memory.host,
            "host_traffic": plan.host_traffic._asdict(),
            **({} if plan.pipeline is None else {"pipeline": asdict(plan.pipeline)}),
            "seconds": {
                "compute": step.compute,
                "phases": step.by_phase(),
                "communication": step.communication,
                "exposed": step.exposed,
                "host_copies": step.host_copies,
                "host_copies_exposed": step.host_copies_exposed,
                "host": step.host,
                **({} if plan.pipeline is None else {"idle": step.idle}),
                "step": step.seconds,
            },
            "decisions": list(plan.decisions),
        }
