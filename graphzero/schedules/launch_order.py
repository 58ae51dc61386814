"""The communicators that a lowered schedule needs, where a communicator runs its launches in turn.

So does NCCL: on one rank, sends and receives of one communicator are one queue, in launch order, and each waits at the
head of its queue until the matching one is at the head of the peer's.  Actions are one more queue a rank, and wait for
what they receive; launching itself does not wait.  Torch's ``pipeline_per_direction_p2p`` says of one communicator that
its order "can still form a dependency cycle and deadlock"; here that is computed, for each schedule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from graphzero.errors import ScheduleError
from graphzero.schedules.action import RECEIVES, SENDS, Action
from graphzero.schedules.check import check_complete
from graphzero.schedules.circles import circle_error
from graphzero.schedules.messages import edge_of, matching_message
from graphzero.schedules.queues import run_queues
from graphzero.schedules.schedule import PipelineSchedule
from graphzero.schedules.values import Dependencies, Position, is_lowered, locate_values, made_values

Queue = tuple[int, Hashable]  # of a rank; its actions, or its messages of one communicator
ACTIONS = "actions"

GROUPINGS: dict[str, Callable[[PipelineSchedule, Action], Hashable]] = {
    "one": lambda schedule, message: (),
    "direction": lambda schedule, message: edge_of(message)[0] < edge_of(message)[1],
    "pair": lambda schedule, message: frozenset(_ranks_of(schedule, message)),
    "directed pair": lambda schedule, message: _ranks_of(schedule, message),
    "edge": lambda schedule, message: edge_of(message),
}
"""Which messages share a communicator, from fewest communicators to most.

A pair is one of ranks: what torch creates for unbatched sends and receives of an NCCL group that is initialized lazily.
"""


@dataclass(frozen=True)
class CommunicatorChoice:
    """The grouping of GROUPINGS with which a schedule finishes.

    communicators: how many there are.  most_on_rank: how many a rank is a member of at most.
    """

    grouping: str
    communicators: int
    most_on_rank: int


def choose_communicators(schedule: PipelineSchedule) -> CommunicatorChoice:
    """The first of GROUPINGS with which a lowered schedule finishes.  Raises ScheduleError if there is none."""
    for grouping in GROUPINGS:
        error = _find_deadlock(schedule, grouping)
        if error is None:
            return _count_communicators(schedule, grouping)
    assert error is not None
    raise error


def check_launch_order(schedule: PipelineSchedule, grouping: str = "one") -> None:
    """Raise ScheduleError unless a lowered schedule finishes with the communicators of ``grouping``."""
    error = _find_deadlock(schedule, grouping)
    if error is not None:
        raise error


def _find_deadlock(schedule: PipelineSchedule, grouping: str) -> ScheduleError | None:
    if not is_lowered(schedule) and any(map(schedule.crosses_ranks, range(schedule.stages))):
        raise ScheduleError(f"the schedule {schedule.name!r} has no sends and receives: lower it first")
    check_complete(schedule)
    queues, peer_of = _queue_cells(schedule, grouping)
    queue_of = {position: queue for queue, positions in queues.items() for position in positions}
    needed_values, makers = Dependencies(schedule).needed_values, locate_values(schedule)

    def needs(position: Position) -> Iterator[Position]:
        return map(makers.__getitem__, needed_values(_action_at(schedule, position)))

    stops = run_queues(queues, needs, {item: (peer,) for item, peer in peer_of.items()})
    if not stops:
        return None
    error = circle_error(schedule, stops, queue_of.__getitem__)
    return ScheduleError(f"{error}; {_DEADLOCKS[grouping]}", error.row, error.column)


def _queue_cells(
    schedule: PipelineSchedule, grouping: str
) -> tuple[dict[Queue, list[Position]], dict[Position, Position]]:
    """The cells of each queue; of a send its receive, of a receive its send."""
    makers, group_of = locate_values(schedule), GROUPINGS[grouping]
    queues: dict[Queue, list[Position]] = defaultdict(list)
    peer_of: dict[Position, Position] = {}
    for row, column, cell in schedule.cells():
        is_message = cell.kind in SENDS or cell.kind in RECEIVES
        queues[row, (grouping, group_of(schedule, cell)) if is_message else ACTIONS].append((row, column))
        if is_message:
            (value,) = made_values(matching_message(cell))
            peer_of[row, column] = makers[value]
    return queues, peer_of


def _action_at(schedule: PipelineSchedule, position: Position) -> Action:
    action = schedule.rows[position[0]][position[1]]
    assert action is not None
    return action


def _ranks_of(schedule: PipelineSchedule, message: Action) -> tuple[int, ...]:
    return tuple(schedule.stage_ranks[stage] for stage in edge_of(message))


def _count_communicators(schedule: PipelineSchedule, grouping: str) -> CommunicatorChoice:
    members = {
        (row, GROUPINGS[grouping](schedule, cell))
        for row, _, cell in schedule.cells()
        if cell.kind in SENDS or cell.kind in RECEIVES
    }
    on_ranks = Counter(row for row, _ in members)
    return CommunicatorChoice(grouping, len({group for _, group in members}), max(on_ranks.values(), default=0))


_DEADLOCKS = {
    "one": "sends and receives of a rank run in launch order, as on one NCCL communicator",
    "direction": "sends and receives of a rank run in launch order, with a communicator for each direction",
    "pair": "sends and receives run in launch order, with a communicator for each pair of ranks",
    "directed pair": "sends and receives run in launch order, with a communicator for each pair of ranks and direction",
    "edge": "sends and receives of one stage boundary and direction run in launch order",
}
