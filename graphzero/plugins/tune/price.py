"""Cost of a layout: its program, the bytes of its plan and the seconds of its timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphzero.plan import Plan
from graphzero.plan.device import Device
from graphzero.plan.pipelines.pipeline_timeline import pipeline_timeline
from graphzero.plan.timeline import Timeline, timeline
from graphzero.plugins.tune.captured_step import CapturedStep
from graphzero.plugins.tune.layout import Layout
from graphzero.sbp.types import Sbp


@dataclass(frozen=True)
class Price:
    """A layout and what one step of it costs a rank; ``splits``: path of a parameter -> its split over ``tp``."""

    layout: Layout
    splits: Mapping[str, Sbp] = field(repr=False)
    plan: Plan = field(repr=False)
    time: Timeline = field(repr=False)

    @property
    def seconds(self) -> float:
        return self.time.seconds

    @property
    def peak(self) -> int:
        return self.plan.memory.peak

    @property
    def traffic(self) -> dict[tuple[str, str, str], float]:
        """Bytes sent by (kind, what for, axis)."""
        bytes_by_kind: dict[tuple[str, str, str], float] = {}
        for c in self.plan.collectives:
            key = c.kind, c.what_for, c.axis
            bytes_by_kind[key] = bytes_by_kind.get(key, 0.0) + c.bytes
        return bytes_by_kind


def price(step: CapturedStep, layout: Layout, splits: Mapping[str, Sbp], device: Device) -> Price:
    """Compile the step in this layout, and read off what it costs.

    Raises ConfigError where the settings cannot be had.
    """
    program = step.program(layout.placement(device.type), splits, layout.settings(step.settings))
    if program.pipeline is not None:
        return Price(layout, splits, program.plan, pipeline_timeline(program.pipeline, device))
    return Price(layout, splits, program.plan, timeline(program.graph, device))
