"""The sentence for actions that wait for each other in a circle."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from graphzero.errors import ScheduleError
from graphzero.schedules.schedule import PipelineSchedule
from graphzero.schedules.values import Position

Queue = TypeVar("Queue", bound=Hashable)


@dataclass(frozen=True)
class Stop:
    """Where a queue of actions stands still.  head: the first that does not run; needed: what it waits for."""

    head: Position
    needed: Position


def format_place(schedule: PipelineSchedule, position: Position) -> str:
    """ "'0F3' (row 0, column 3)"."""
    row, column = position
    return f"'{schedule.rows[row][column]}' (row {row}, column {column})"


def circle_error(
    schedule: PipelineSchedule, stops: Mapping[Queue, Stop], queue_of: Callable[[Position], Queue]
) -> ScheduleError:
    """The error of queues that stand still: one circle of them, each head waiting for what is behind the next head.

    queue_of: the queue in which a cell stands.
    """
    queue, path = next(iter(stops)), []
    while queue not in path:
        path.append(queue)
        queue = queue_of(stops[queue].needed)
    circle = path[path.index(queue) :]
    links = []
    for stop in map(stops.__getitem__, circle):
        head = stops[queue_of(stop.needed)].head
        link = f"needs {format_place(schedule, stop.needed)}"
        if stop.needed == stop.head:
            link += ", which is this cell itself"
        elif head == stop.head:
            link += ", which stands behind it"
        elif head != stop.needed:
            link += f", which stands behind {format_place(schedule, head)}"
        links.append(link)
    row, column = stops[circle[0]].head
    return ScheduleError(
        f"row {row}, column {column}: '{schedule.rows[row][column]}' {', which '.join(links)}", row, column
    )
