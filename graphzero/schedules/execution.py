"""An order in which all ranks can run their rows."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from operator import itemgetter

from graphzero.errors import ScheduleError
from graphzero.schedules.circles import describe_circle, format_place
from graphzero.schedules.queues import Stop
from graphzero.schedules.schedule import PipelineSchedule
from graphzero.schedules.values import Dependencies, Position, Value, format_value, locate_values, made_values


def execution_order(schedule: PipelineSchedule) -> list[Position]:
    """The cells, without idle ones, in an order that keeps those of all rows and has each behind what it needs.

    Raises ScheduleError, with the cells that wait for each other, where there is none.
    """
    needed_values = Dependencies(schedule).needed_values
    columns = [0] * schedule.ranks
    present: set[Value] = set()
    waiting: dict[Value, list[int]] = defaultdict(list)
    order: list[Position] = []
    rows = deque(range(schedule.ranks))
    while rows:
        row = rows.popleft()
        while columns[row] < len(schedule.rows[row]):
            cell = schedule.rows[row][columns[row]]
            if cell:
                absent = next((value for value in needed_values(cell) if value not in present), None)
                if absent:
                    waiting[absent].append(row)
                    break
                order.append((row, columns[row]))
                for value in made_values(cell):
                    present.add(value)
                    rows.extend(waiting.pop(value, ()))
            columns[row] += 1
    if waiting:
        absent_values = {(row, columns[row]): value for value, stopped in waiting.items() for row in stopped}
        raise _stop_error(schedule, absent_values)
    return order


def _stop_error(schedule: PipelineSchedule, absent: dict[Position, Value]) -> ScheduleError:
    """The error of rows that stand still.  absent: by the cell that each stands at, a value that does not come."""
    makers = locate_values(schedule)
    for (row, column), value in absent.items():
        if value not in makers:
            problem = f"'{schedule.rows[row][column]}' needs '{format_value(value)}', which no cell runs"
            return ScheduleError(f"row {row}, column {column}: {problem}", row, column)
    stops = {head[0]: Stop(head, makers[value]) for head, value in sorted(absent.items())}
    (row, column), text = describe_circle(stops, itemgetter(0), partial(format_place, schedule))
    return ScheduleError(f"row {row}, column {column}: '{schedule.rows[row][column]}' {text}", row, column)
