"""The times at which actions run, given the costs of actions and transfers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphzero.schedules.action import Action, ActionKind
from graphzero.schedules.schedule import PipelineSchedule
from graphzero.schedules.values import (
    INPUT,
    RECEIVE_B,
    RECEIVE_F,
    WEIGHT,
    B,
    Dependencies,
    F,
    Position,
    Value,
    execution_order,
    made_values,
)


@dataclass(frozen=True)
class ScheduleCosts:
    """Seconds of actions and transfers, or any other unit of time.

    actions: by (stage, kind).  Of what is absent, F, I and W take 1, B what I and W take together, all others nothing.
    transfers: by (stage, stage) from which to which; 0 where absent, and between stages of one rank.  A transfer
    occupies neither rank, and several over one edge do not wait for each other.
    """

    actions: Mapping[tuple[int, ActionKind], float] = field(default_factory=dict)
    transfers: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def action_seconds(self, action: Action) -> float:
        """The seconds that a rank is busy with ``action``, which is not an OVERLAP."""
        stage, kind = action.stage, action.kind
        if kind is B and (stage, kind) not in self.actions:
            return self.action_seconds(Action(stage, INPUT)) + self.action_seconds(Action(stage, WEIGHT))
        return self.actions.get((stage, kind), 1.0 if kind in (F, INPUT, WEIGHT) else 0.0)


@dataclass(frozen=True)
class TimedAction:
    """An action, its column in the row of its rank, and when it runs.  The parts of OVERLAP are one each."""

    column: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class PipelineTimeline:
    """The actions of each rank with their times."""

    schedule: PipelineSchedule
    rows: tuple[tuple[TimedAction, ...], ...]

    @property
    def makespan(self) -> float:
        """The end of the last action of all ranks."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    def busy_seconds(self, rank: int) -> float:
        return sum(timed.end - timed.start for timed in self.rows[rank])

    @property
    def bubble(self) -> float:
        """The time in which ranks are idle, over that in which they are busy, of all ranks together."""
        busy = sum(map(self.busy_seconds, range(self.schedule.ranks)))
        return (self.makespan * self.schedule.ranks - busy) / busy if busy else 0.0


def simulate_schedule(schedule: PipelineSchedule, costs: ScheduleCosts | None = None) -> PipelineTimeline:
    """Run each rank's actions in the order of its row, each as early as what it needs is there.

    The parts of OVERLAP run in turn, as they do in torch's runtime unless it is given a function for both.
    Raises ScheduleError where the rows do not run to their ends.
    """
    costs = costs or ScheduleCosts()
    needed_values = Dependencies(schedule).needed_values
    free_from = [0.0] * schedule.ranks
    present: dict[Value, float] = {}
    rows: list[list[TimedAction]] = [[] for _ in range(schedule.ranks)]
    for row, column in execution_order(schedule):
        action = schedule.rows[row][column]
        assert action is not None
        for part in action.parts or (action,):
            arrivals = (
                present[value] + _transfer_seconds(schedule, costs, part.stage, value) for value in needed_values(part)
            )
            start = max([free_from[row], *arrivals])
            free_from[row] = end = start + costs.action_seconds(part)
            present.update(dict.fromkeys(made_values(part), end))
            rows[row].append(TimedAction(column, part, start, end))
    return PipelineTimeline(schedule, tuple(map(tuple, rows)))


def time_order(schedule: PipelineSchedule) -> list[Position]:
    """``execution_order`` by the times at which actions begin, all of equal costs."""
    rows = simulate_schedule(schedule).rows
    starts = {(row, timed.column): timed.start for row, actions in enumerate(rows) for timed in reversed(actions)}
    return sorted(execution_order(schedule), key=starts.__getitem__)


def _transfer_seconds(schedule: PipelineSchedule, costs: ScheduleCosts, stage: int, value: Value) -> float:
    """The seconds that ``value`` takes to ``stage``, from when it is there and its receive is posted."""
    source = {RECEIVE_F: stage - 1, RECEIVE_B: stage + 1}.get(value[1], value[0])
    is_local = schedule.stage_ranks[source] == schedule.stage_ranks[stage]
    return 0.0 if is_local else costs.transfers.get((source, stage), 0.0)
