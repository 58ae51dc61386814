"""A timeline as text, one line for each rank."""

from __future__ import annotations

from graphzero.schedules.schedule import most_in_flight
from graphzero.schedules.timeline import PipelineTimeline, TimedAction

IDLE = "."


def draw_timeline(timeline: PipelineTimeline, width: int = 120) -> str:
    """A chart of ``width`` columns at most: what each rank runs over time, how long it is busy, what it keeps.

    ::

        rank 0 |F0 F1 ......B0    F2 B1    F3 B2    ...B3    | 80 % busy, 2 in flight
        rank 1 |...F0 B0    F1 B1    F2 B2    F3 B3    ......| 80 % busy, 1 in flight

    Where a rank has several stages, their numbers are in front.  If this is too wide, each action is its letter over
    its time, small if the micro-batch is odd: ``FfFfBBbb``.
    """
    schedule, makespan = timeline.schedule, timeline.makespan
    in_flight = most_in_flight(schedule)
    heads = [f"rank {rank} |" for rank in range(schedule.ranks)]
    tails = [
        f"| {100 * timeline.busy_seconds(rank) / makespan if makespan else 0:.0f} % busy, {in_flight[rank]:g} in flight"
        for rank in range(schedule.ranks)
    ]
    head_width = max(map(len, heads))
    room = max(width - head_width - max(map(len, tails)), 10)
    with_stage = schedule.stages > schedule.ranks
    lengths = [
        (timed.end - timed.start, len(_label(timed, with_stage)) + 1)
        for row in timeline.rows
        for timed in row
        if timed.end > timed.start
    ]
    scale = max((columns / seconds for seconds, columns in lengths), default=0.0)
    has_labels = scale * makespan <= room
    if not has_labels:
        scale = room / makespan
        for_shortest = max(1 / seconds for seconds, _ in lengths)
        scale = min(scale, for_shortest * max(1, int(scale / for_shortest)))
    lines = []
    for row, head, tail in zip(timeline.rows, heads, tails, strict=True):
        columns = [IDLE] * round(makespan * scale)
        for timed in row:
            first, end = round(timed.start * scale), round(timed.end * scale)
            text = _label(timed, with_stage) if has_labels else _letter(timed) * (end - first)
            columns[first:end] = text[: end - first].ljust(end - first)
        lines.append(head.rjust(head_width) + "".join(columns) + tail)
    return "\n".join(lines)


def _label(timed: TimedAction, with_stage: bool) -> str:
    text = str(timed.action)
    return text if with_stage else text.removeprefix(str(timed.action.stage))


def _letter(timed: TimedAction) -> str:
    letter = timed.action.kind.value[0]
    return letter.lower() if (timed.action.micro_batch or 0) % 2 else letter
