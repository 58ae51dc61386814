"""Results of ``graphzero plan``: for the table, and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from graphzero.cli.least_ranks import Least
from graphzero.plan.device import Device
from graphzero.plan.plan import AtPeak, Plan
from graphzero.plan.timeline import Timeline
from graphzero.sbp.placement import Placement


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
    return sorted(transfer_groups, key=lambda group: (placement.axis(group.axis), group.what_for, group.kind))


@dataclass(frozen=True)
class StagePlan:
    """One stage: bytes and collectives, seconds, the largest part of the peak, and the number of ranks that would fit.

    least: None where nobody asked.  pieces: bytes of the peak that ranks share along the first data axis.
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
            "seconds": {
                "compute": step.compute,
                "phases": step.by_phase(),
                "communication": step.communication,
                "exposed": step.exposed,
                "host": step.host,
                "step": step.seconds,
            },
            "decisions": list(plan.decisions),
        }
