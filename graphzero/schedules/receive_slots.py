"""The number of receive buffers that each edge of a pipeline needs.

An edge is a stage boundary and a direction, not a pair of ranks: the stages of one rank would block each other.
The model: a rank runs its row; a send blocks it until a slot of the edge is free, or until the receiver stands at the
action that needs this very message; a message leaves its slot when that action begins.  Whether the rows run to their
ends does not depend on times, since what can go on can still do so later.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from graphzero.schedules.action import RECEIVES, SENDS, Action
from graphzero.schedules.execution import execution_order
from graphzero.schedules.messages import Edge, edge_of, lower_schedule, matching_message, remove_messages
from graphzero.schedules.schedule import PipelineSchedule

Messages = list[list[Action]]  # of each rank, in the order of its row


def least_receive_slots(schedule: PipelineSchedule) -> int:
    """The least number of slots with which the rows run to their ends, were it the same of all edges."""
    messages, edges = _list_messages(schedule)
    slots = 0
    while not _finishes(schedule, messages, dict.fromkeys(edges, slots)):
        slots += 1
    return slots


def least_receive_slots_by_edge(schedule: PipelineSchedule) -> dict[Edge, int]:
    """As few slots of each edge as the others allow, beginning with ``least_receive_slots`` of all."""
    messages, edges = _list_messages(schedule)
    slots = dict.fromkeys(edges, least_receive_slots(schedule))
    for edge in edges:
        while slots[edge] and _finishes(schedule, messages, {**slots, edge: slots[edge] - 1}):
            slots[edge] -= 1
    return slots


def finishes_with_slots(schedule: PipelineSchedule, slots: Mapping[Edge, int]) -> bool:
    """Whether the rows run to their ends with so many receive slots of each edge."""
    return _finishes(schedule, _list_messages(schedule)[0], slots)


def _list_messages(schedule: PipelineSchedule) -> tuple[Messages, list[Edge]]:
    execution_order(schedule)
    lowered = lower_schedule(remove_messages(schedule), receives="late")
    messages = [[cell for cell in row if cell and cell.kind in SENDS | RECEIVES] for row in lowered.rows]
    return messages, sorted({edge_of(message) for row in messages for message in row})


def _finishes(schedule: PipelineSchedule, messages: Messages, slots: Mapping[Edge, int]) -> bool:
    at = [0] * schedule.ranks
    arrived: dict[Edge, set[int | None]] = defaultdict(set)
    ranks = deque(range(schedule.ranks))
    while ranks:
        rank = ranks.popleft()
        while at[rank] < len(messages[rank]):
            message = messages[rank][at[rank]]
            edge, is_send = edge_of(message), message.kind in SENDS
            peer = schedule.stage_ranks[edge[1] if is_send else edge[0]]
            waiting = messages[peer][at[peer]] if at[peer] < len(messages[peer]) else None
            if is_send and len(arrived[edge]) < slots[edge]:
                arrived[edge].add(message.micro_batch)
            elif not is_send and message.micro_batch in arrived[edge]:
                arrived[edge].remove(message.micro_batch)
            elif waiting == matching_message(message):
                at[peer] += 1
            else:
                break
            at[rank] += 1
            ranks.append(peer)
    return all(at[rank] == len(messages[rank]) for rank in range(schedule.ranks))
