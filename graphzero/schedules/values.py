"""Values of a schedule: what its actions make, what they need, and an order in which all ranks can run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import itemgetter

from graphzero.errors import ScheduleError
from graphzero.schedules.action import RECEIVES, SENDS, SHARDING, Action, ActionKind
from graphzero.schedules.queues import describe_circle, run_queues
from graphzero.schedules.schedule import PipelineSchedule

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
SEND_F, RECEIVE_F = ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD
SEND_B, RECEIVE_B = ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD

# Stage, kind of the action that makes it, micro-batch.  B makes the values of I and of W.
Value = tuple[int, ActionKind, int]
Position = tuple[int, int]  # row, column


def made_values(action: Action) -> tuple[Value, ...]:
    """The values that exist once ``action`` has run."""
    if action.parts:
        return tuple(value for part in action.parts for value in made_values(part))
    if action.micro_batch is None or action.kind in SHARDING:
        return ()
    kinds = (INPUT, WEIGHT) if action.kind is B else (action.kind,)
    return tuple((action.stage, kind, action.micro_batch) for kind in kinds)


class Dependencies:
    """The values that each action of one schedule waits for.

    Where the rows have sends and receives, what comes from another rank is waited for by way of them: its receive must
    have been posted, and it must have been sent.  To post a receive is to wait for nothing.
    """

    def __init__(self, schedule: PipelineSchedule) -> None:
        self.schedule = schedule
        self.is_lowered = is_lowered(schedule)

    def needed_values(self, action: Action) -> Iterator[Value]:
        """The values that must exist before ``action`` can run."""
        stage, kind, micro_batch = action.stage, action.kind, action.micro_batch
        for part in action.parts:
            yield from self.needed_values(part)
        if micro_batch is None:
            return
        if kind is F and stage > 0:
            if self.is_lowered and self.schedule.crosses_ranks(stage - 1):
                yield from ((stage, RECEIVE_F, micro_batch), (stage - 1, SEND_F, micro_batch))
            else:
                yield stage - 1, F, micro_batch
        elif kind in (B, INPUT):
            yield stage, F, micro_batch
            if self.is_lowered and self.schedule.crosses_ranks(stage):
                yield from ((stage, RECEIVE_B, micro_batch), (stage + 1, SEND_B, micro_batch))
            elif stage + 1 < self.schedule.stages:
                yield stage + 1, INPUT, micro_batch
        elif kind in (WEIGHT, SEND_B):
            yield stage, INPUT, micro_batch
        elif kind is SEND_F:
            yield stage, F, micro_batch


def is_lowered(schedule: PipelineSchedule) -> bool:
    """Whether the rows say when something is sent and received."""
    return any(cell.kind in SENDS or cell.kind in RECEIVES for _, _, cell in schedule.cells())


def format_value(value: Value) -> str:
    """The text of the action that makes ``value``, were it one of its own: "0I3" also of what "0B3" makes."""
    return str(Action(*value))


def format_place(schedule: PipelineSchedule, position: Position) -> str:
    """ "'0F3' (row 0, column 3)"."""
    row, column = position
    return f"'{schedule.rows[row][column]}' (row {row}, column {column})"


def cell_error(position: Position, cell: Action, problem: str) -> ScheduleError:
    """The error for a cell that cannot be where it is."""
    row, column = position
    return ScheduleError(f"row {row}, column {column}: '{cell}' {problem}", row, column)


def execution_order(schedule: PipelineSchedule) -> list[Position]:
    """The cells, without idle ones, in an order that keeps those of all rows and has each after what it needs.

    Raises ScheduleError, with the cells that wait for each other, where there is none.
    """
    cells = {(row, column): cell for row, column, cell in schedule.cells()}
    needed_values = Dependencies(schedule).needed_values
    makers = {value: position for position, cell in cells.items() for value in made_values(cell)}

    def needs(position: Position) -> Iterator[Position]:
        for value in needed_values(cells[position]):
            if value not in makers:
                raise cell_error(position, cells[position], f"needs '{format_value(value)}', which no cell runs")
            yield makers[value]

    rows = {row: [position for position in cells if position[0] == row] for row in range(schedule.ranks)}
    run = run_queues(rows, needs)
    if run.stops:
        position, problem = describe_circle(run.stops, itemgetter(0), partial(format_place, schedule))
        raise cell_error(position, cells[position], problem)
    return run.order
