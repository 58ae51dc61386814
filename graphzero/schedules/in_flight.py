"""The number of micro-batches that a stage keeps values for, cell by cell."""

from __future__ import annotations

from graphzero.schedules.action import ActionKind
from graphzero.schedules.schedule import PipelineSchedule


def count_in_flight(schedule: PipelineSchedule, rank: int) -> tuple[dict[int, int], ...]:
    """While each cell of a rank runs: by stage, the micro-batches whose forward values are kept.

    They are kept from F to the end of B, or of W.  Nothing is kept for evaluation, beyond the action itself.
    """
    in_flight = dict.fromkeys(schedule.stages_on(rank), 0)
    counts = []
    for cell in schedule.rows[rank]:
        actions = cell.computations if cell else ()
        for action in actions:
            in_flight[action.stage] += action.kind is ActionKind.FORWARD
        counts.append(dict(in_flight))
        for action in actions:
            is_end = action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT) or not schedule.has_backward
            in_flight[action.stage] -= is_end
    return tuple(counts)


def most_in_flight(schedule: PipelineSchedule) -> tuple[float, ...]:
    """Of each rank, the most micro-batches at a time; one that only some of a rank's stages keep counts in part."""
    return tuple(
        max((sum(counts.values()) / len(counts) for counts in count_in_flight(schedule, rank)), default=0.0)
        for rank in range(schedule.ranks)
    )
