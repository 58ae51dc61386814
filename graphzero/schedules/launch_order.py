"""Which communicators a lowered schedule needs, where a communicator runs what is launched on it in turn.

So does NCCL: on one rank, sends and receives of one communicator are one queue, in launch order, and each waits at the
head of its queue until the matching one is at the head of the peer's.  Actions are one more queue a rank, and wait for
what they receive; launching itself does not wait.  Torch's ``pipeline_per_direction_p2p`` says of one communicator that
its order "can still form a dependency cycle and deadlock"; here that is computed, for each schedule.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from graphzero.errors import ScheduleError
from graphzero.schedules.action import RECEIVES, SENDS, Action
from graphzero.schedules.check import check_complete
from graphzero.schedules.circles import Stop, circle_error
from graphzero.schedules.messages import edge_of, matching_message
from graphzero.schedules.schedule import PipelineSchedule
from graphzero.schedules.values import Dependencies, Position, Value, is_lowered, locate_values, made_values

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
    replay = _Replay(schedule, grouping)
    replay.run_queues()
    stops = replay.list_stops()
    if not stops:
        return None
    error = circle_error(schedule, stops, replay.queue_of.__getitem__)
    return ScheduleError(f"{error}; {_DEADLOCKS[grouping]}", error.row, error.column)


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


class _Replay:
    """The queues of all ranks, run until nothing moves."""

    def __init__(self, schedule: PipelineSchedule, grouping: str) -> None:
        self.schedule = schedule
        self.needed_values = Dependencies(schedule).needed_values
        self.makers = locate_values(schedule)
        self.present: set[Value] = set()
        self.queues: dict[Queue, deque[Position]] = defaultdict(deque)
        self.queue_of: dict[Position, Queue] = {}
        self.peer_of: dict[Position, Position] = {}  # of a send its receive, of a receive its send
        group_of = GROUPINGS[grouping]
        for row, column, cell in schedule.cells():
            is_message = cell.kind in SENDS or cell.kind in RECEIVES
            queue = (row, (grouping, group_of(schedule, cell)) if is_message else ACTIONS)
            self.queues[queue].append((row, column))
            self.queue_of[row, column] = queue
            if is_message:
                (value,) = made_values(matching_message(cell))
                self.peer_of[row, column] = self.makers[value]

    def run_queues(self) -> None:
        """Run each head that can run, until none can."""
        of_rank = defaultdict(list)
        for queue in self.queues:
            of_rank[queue[0]].append(queue)
        work = deque(self.queues)
        while work:
            queue = work.popleft()
            while self.queues[queue] and self.find_needed(self.queues[queue][0]) is None:
                head = self.queues[queue][0]
                for position in (head, self.peer_of[head]) if head in self.peer_of else (head,):
                    self.present.update(made_values(self.action_at(position)))
                    behind = self.queues[self.queue_of[position]]
                    behind.popleft()
                    work.extend(of_rank[position[0]])
                    if behind and behind[0] in self.peer_of:
                        work.append(self.queue_of[self.peer_of[behind[0]]])

    def list_stops(self) -> dict[Queue, Stop]:
        """The queues that have not run to their ends."""
        stops = {}
        for queue, positions in self.queues.items():
            needed = self.find_needed(positions[0]) if positions else None
            if needed is not None:
                stops[queue] = Stop(positions[0], needed)
        return stops

    def find_needed(self, head: Position) -> Position | None:
        """The cell that ``head`` waits for; None if it can run.  A send runs with its receive, which waits for it."""
        action, peer = self.action_at(head), self.peer_of.get(head)
        if action.kind in RECEIVES:
            return peer
        for value in self.needed_values(action):
            if value not in self.present:
                return self.makers[value]
        return peer if peer is not None and self.queues[self.queue_of[peer]][0] != peer else None

    def action_at(self, position: Position) -> Action:
        action = self.schedule.rows[position[0]][position[1]]
        assert action is not None
        return action
