"""Data of a traced step."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphzero.ir.graph import StepGraph
from graphzero.plan import Plan
from graphzero.plan.timeline import COMPUTE, Event, Timeline
from graphzero.runtime.world.world import Sent


@dataclass(frozen=True)
class RankTrace:
    """One call on one rank. Times are seconds of the first rank's clock.

    rank: its number in the job.  begin, end: of the call; program: of the program within it, in which ranks of one
    process take turns.
    member: of ``pp``, where there are pipeline stages; ``events`` then have the actions of its stages too, by their
    labels, on the stream "actions".
    """

    rank: int
    begin: float
    end: float
    program: tuple[float, float]
    events: tuple[Event, ...]
    member: int | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the whole call."""
        return self.end - self.begin

    @property
    def around(self) -> float:
        """Seconds of the call that are not the program's."""
        return self.seconds - (self.program[1] - self.program[0])

    @property
    def own(self) -> float:
        """Seconds of the call without those in which other ranks of the process had their turn."""
        return self.around + sum(event.seconds for event in self.events if event.stream == COMPUTE)

    def shifted(self, ahead: float) -> RankTrace:
        """The same trace by a clock that is behind by ``ahead``."""
        events = tuple(one._replace(begin=one.begin - ahead, end=one.end - ahead) for one in self.events)
        begin, end = self.program
        times = self.begin - ahead, self.end - ahead, (begin - ahead, end - ahead)
        return RankTrace(self.rank, *times, events, self.member)


@dataclass(frozen=True)
class TraceData:
    """See ``Trace``."""

    name: str
    placement: str
    program: StepGraph = field(repr=False)
    plan: Plan = field(repr=False)
    ranks: tuple[RankTrace, ...] = field(repr=False)
    traced: float
    untraced: float
    clock_error: float
    sent: tuple[Sent, ...] = field(repr=False)
    peak: int | None = None
    no_peak: str = ""
    planned: Timeline | None = field(default=None, repr=False)
    device: str = ""
    fullest: int | None = None
    programs: tuple[StepGraph, ...] = field(default=(), repr=False)
    planned_actions: tuple[tuple[Event, ...], ...] = field(default=(), repr=False)

    @property
    def first(self) -> RankTrace:
        """Whose step it is that is next to the plan: of pipeline stages, a rank of the fullest ones."""
        return next(one for one in self.ranks if one.member == self.fullest)

    @property
    def is_virtual(self) -> bool:
        """Whether all ranks took turns in one process."""
        return len(self.ranks) > 1 and len({rank.begin for rank in self.ranks}) == 1

    @property
    def overhead(self) -> float:
        """Time that tracing adds to a step, as a fraction of it."""
        return self.traced / self.untraced - 1
