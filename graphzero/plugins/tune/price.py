"""Cost of a layout: its program, the bytes of its plan and the seconds of its timeline; and lower bounds of these.

A layout that cannot be fast enough is not compiled.  A bound has to hold for each layout of a grid, or the best one may
be left out.  So it counts of transfers only what every layout sends (bytes by bandwidth: how many messages they take
depends on buckets), and of compute only what every layout does (not the copies into and out of transfers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from graphzero.plan import Plan
from graphzero.plan.device import Device
from graphzero.plan.seconds import COPY
from graphzero.plan.timeline import COMPUTE, Event, Timeline, timeline
from graphzero.plugins.plan.pipeline_timeline import pipeline_timeline
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


@dataclass(frozen=True)
class Bound:
    """Lower bound of the layouts of a grid. plain: stage 0, one micro-batch, nothing saved; device: the one it was
    priced on."""

    plain: Price
    device: Device

    def seconds(self, layout: Layout) -> float:
        """The longest of what has to be done one after the other: compute, with transfers along the tensor axis that
        nothing hides; what comes before the first gradient, then the reductions of gradients; all transfers of an axis.
        """
        forward, update = self._work("forward"), self._work("update") / layout.shard_ranks
        backward = self._work("backward")
        waits = sum(event.seconds for event in self._moves(layout.tensor_axis) if event.phase == "forward")
        parts = layout.micro_batches
        first = (forward + waits) / parts  # of the first micro-batch
        if layout.stage < 2:  # gradients are reduced when the last one is added
            first += (forward + waits + backward) * (parts - 1) / parts
        return max(forward + backward + update + waits, first + self._reductions(layout), self._traffic(layout))

    def guess(self, layout: Layout) -> float:
        """Estimate without obstacles, messages included; it only decides which layout is priced first."""
        rounds = 1.0 if layout.stage < 3 else (1 + (1 if layout.keep_gathered else 2 * layout.micro_batches)) / 2
        sent = self._longest(layout, lambda axis: sum(event.seconds for event in self._moves(axis)), rounds)
        return max(self.seconds(layout), sent)

    def states(self, layout: Layout) -> float:
        """Bytes of parameters and optimizer states."""
        resident, ranks = self.plain.plan.memory.resident, layout.shard_ranks
        parameters = resident["parameters"] + resident["compute_parameters"]
        return parameters / (ranks if layout.stage == 3 else 1) + resident["optimizer_states"] / ranks

    def _work(self, phase: str) -> float:
        """Seconds of the ops of a phase."""
        events = self.plain.time.events
        return sum(x.seconds for x in events if x.stream == COMPUTE and x.phase == phase and x.kind != COPY)

    def _reductions(self, layout: Layout) -> float:
        """Seconds of the reductions of gradients over the data axis that takes longest: half of them where each rank
        keeps a part.
        """
        calls = [c for c in self.plain.plan.collectives if c.what_for == "gradients"]
        return self._longest(layout, lambda axis: self._wire(axis, sum(c.bytes for c in calls if c.axis == axis)), 0.5)

    def _traffic(self, layout: Layout) -> float:
        """Seconds of all transfers over the data axis that takes longest: gradients reduced, parameters gathered once.

        Stage 3 gathers again what backward reads, and recomputation computes again what it is worth: how much is not
        known before.
        """
        return self._longest(layout, lambda axis: self._wire(axis, sum(x.nbytes for x in self._moves(axis))), 1.0)

    def _wire(self, axis: str, nbytes: float) -> float:
        """Seconds of so many bytes, without messages."""
        return (
            nbytes / self.device.link(self.plain.layout.placement(self.device.type), axis).bandwidth if nbytes else 0.0
        )

    def _longest(self, layout: Layout, spent: Callable[[str], float], share: float) -> float:
        """spent: seconds of an axis at stage 0.  share: of these, over an axis along which ZeRO splits.

        What an axis carries may be split over the axes that ZeRO splits over already.
        """
        longest = 0.0
        for name, ranks in layout.axes:
            if name != layout.tensor_axis:
                sharded = name in layout.shard_axes
                before = layout.shard_ranks / (ranks if sharded else 1)
                longest = max(longest, spent(name) * (share if sharded else 1.0) / before)
        return longest

    def _moves(self, axis: str) -> Iterator[Event]:
        return (event for event in self.plain.time.events if axis and event.stream == f"communication {axis}")
