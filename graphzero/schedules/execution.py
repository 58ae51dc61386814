"""An order in which all ranks can run their rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import itemgetter

from graphzero.errors import ScheduleError
from graphzero.schedules.queues import describe_circle, run_queues
from graphzero.schedules.schedule import PipelineSchedule
from graphzero.schedules.values import Dependencies, Position, format_place, format_value, locate_values


def execution_order(schedule: PipelineSchedule) -> list[Position]:
    """The cells, without idle ones, in an order that keeps those of all rows and has each after what it needs.

    Raises ScheduleError, with the cells that wait for each other, where there is none.
    """
    cells = {(row, column): cell for row, column, cell in schedule.cells()}
    needed_values, makers = Dependencies(schedule).needed_values, locate_values(schedule)

    def error(position: Position, problem: str) -> ScheduleError:
        row, column = position
        return ScheduleError(f"row {row}, column {column}: '{cells[position]}' {problem}", row, column)

    def needs(position: Position) -> Iterator[Position]:
        for value in needed_values(cells[position]):
            if value not in makers:
                raise error(position, f"needs '{format_value(value)}', which no cell runs")
            yield makers[value]

    rows = {row: [position for position in cells if position[0] == row] for row in range(schedule.ranks)}
    run = run_queues(rows, needs)
    if run.stops:
        raise error(*describe_circle(run.stops, itemgetter(0), partial(format_place, schedule)))
    return run.order
