"""The sentence for actions that wait for each other in a circle."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from graphzero.schedules.queues import Item, Queue, Stop
from graphzero.schedules.schedule import PipelineSchedule
from graphzero.schedules.values import Position


def format_place(schedule: PipelineSchedule, position: Position) -> str:
    """ "'0F3' (row 0, column 3)"."""
    row, column = position
    return f"'{schedule.rows[row][column]}' (row {row}, column {column})"


def describe_circle(
    stops: Mapping[Queue, Stop[Item]], queue_of: Callable[[Item], Queue], format_item: Callable[[Item], str]
) -> tuple[Item, str]:
    """One circle of queues that stand still, each head waiting for what is behind the next head: the first head, and
    for what it waits, and that for what, back to it."""
    queue, path = next(iter(stops)), []
    while queue not in path:
        path.append(queue)
        queue = queue_of(stops[queue].needed)
    circle = path[path.index(queue) :]
    links = []
    for stop in map(stops.__getitem__, circle):
        head = stops[queue_of(stop.needed)].head
        link = f"needs {format_item(stop.needed)}"
        if stop.needed == stop.head:
            link += ", which is this cell itself"
        elif head == stop.head:
            link += ", which stands behind it"
        elif head != stop.needed:
            link += f", which stands behind {format_item(head)}"
        links.append(link)
    return stops[circle[0]].head, ", which ".join(links)
