"""Sends and receives: what an action needs from other ranks and gives to them, written into rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from graphzero.errors import ScheduleError
from graphzero.schedules.action import RECEIVES, SENDS, Action
from graphzero.schedules.execution import execution_order
from graphzero.schedules.schedule import PipelineSchedule
from graphzero.schedules.values import (
    INPUT,
    RECEIVE_B,
    RECEIVE_F,
    SEND_B,
    SEND_F,
    B,
    Dependencies,
    F,
    Position,
    Value,
    is_lowered,
    made_values,
)

Edge = tuple[int, int]  # from stage, to stage: neighbours on different ranks, in one direction
Receives = Literal["early", "late"]


def edge_of(message: Action) -> Edge:
    """The edge over which a send or receive goes."""
    stage = message.stage
    ends = {SEND_F: (stage, stage + 1), RECEIVE_F: (stage - 1, stage),
            SEND_B: (stage, stage - 1), RECEIVE_B: (stage + 1, stage)}  # fmt: skip
    return ends[message.kind]


def list_receives(schedule: PipelineSchedule, cell: Action) -> list[Action]:
    """The receives whose messages the actions of ``cell`` need."""
    receives = []
    for action in cell.computations:
        if action.kind is F and action.stage and schedule.crosses_ranks(action.stage - 1):
            receives.append(Action(action.stage, RECEIVE_F, action.micro_batch))
        elif action.kind in (B, INPUT) and schedule.crosses_ranks(action.stage):
            receives.append(Action(action.stage, RECEIVE_B, action.micro_batch))
    return receives


def list_sends(schedule: PipelineSchedule, cell: Action) -> list[Action]:
    """The sends of what the actions of ``cell`` make for other ranks."""
    sends = []
    for action in cell.computations:
        if action.kind is F and schedule.crosses_ranks(action.stage):
            sends.append(Action(action.stage, SEND_F, action.micro_batch))
        elif action.kind in (B, INPUT) and action.stage and schedule.crosses_ranks(action.stage - 1):
            sends.append(Action(action.stage, SEND_B, action.micro_batch))
    return sends


def matching_message(message: Action) -> Action:
    """The receive, on another rank, of what is sent; the send of what is received."""
    source, target = edge_of(message)
    forward = source < target
    if message.kind in SENDS:
        return Action(target, RECEIVE_F if forward else RECEIVE_B, message.micro_batch)
    return Action(source, SEND_F if forward else SEND_B, message.micro_batch)


def lower_schedule(schedule: PipelineSchedule, receives: Receives = "early") -> PipelineSchedule:
    """``schedule`` with its sends and receives, and without idle cells.  A send stands behind what it sends.

    receives: "late" posts each just before the action that needs it: fewest buffers, most communicators.  "early" posts
    it when it is sent, were all actions of F, I and W equally long: the messages of all ranks are then in one order, so
    that one queue a rank is enough (``check_launch_order``).  The order must not depend on measured times, since all
    ranks have to find the same one.
    """
    if is_lowered(schedule):
        raise ScheduleError(f"the schedule {schedule.name!r} has sends and receives already")
    rows = _with_late_receives(schedule) if receives == "late" else _with_early_receives(schedule)
    return replace(schedule, rows=tuple(map(tuple, rows)))


def remove_messages(schedule: PipelineSchedule) -> PipelineSchedule:
    """``schedule`` without sends, receives and idle cells."""
    rows = (
        tuple(cell for cell in schedule.actions(rank) if cell.kind not in SENDS | RECEIVES)
        for rank in range(schedule.ranks)
    )
    return replace(schedule, rows=tuple(rows))


def count_posted_receives(schedule: PipelineSchedule, rank: int) -> int:
    """The most receives of a lowered row that are posted before the action that needs them begins: its buffers."""
    posted = most = 0
    for cell in schedule.actions(rank):
        posted += cell.kind in RECEIVES
        most = max(most, posted)
        posted -= len(list_receives(schedule, cell))
    return most


def _with_late_receives(schedule: PipelineSchedule) -> list[list[Action]]:
    rows: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for row, _, cell in schedule.cells():
        rows[row] += [*list_receives(schedule, cell), cell, *list_sends(schedule, cell)]
    return rows


def _with_early_receives(schedule: PipelineSchedule) -> list[list[Action]]:
    """At one time what ends is sent, and received by others, before anything begins."""
    entries: list[list[tuple[tuple[float, bool, Position], Action]]] = [[] for _ in range(schedule.ranks)]
    for position, (cell, start, end) in _unit_times(schedule).items():
        entries[position[0]].append(((start, True, position), cell))
        for send in list_sends(schedule, cell):
            for message in (send, matching_message(send)):
                entries[schedule.stage_ranks[message.stage]].append(((end, False, position), message))
    return [[action for _, action in sorted(row, key=lambda entry: entry[0])] for row in entries]


def _unit_times(schedule: PipelineSchedule) -> dict[Position, tuple[Action, float, float]]:
    """Of each cell its start and end, if F, I and W all take one unit, and both parts of OVERLAP begin at once."""
    needed_values = Dependencies(schedule).needed_values
    free_from = [0.0] * schedule.ranks
    present: dict[Value, float] = {}
    times = {}
    for row, column in execution_order(schedule):
        cell = schedule.rows[row][column]
        assert cell is not None
        values = made_values(cell)
        start = max([free_from[row], *(present[value] for value in needed_values(cell))])
        free_from[row] = start + len(values)
        present.update(dict.fromkeys(values, free_from[row]))
        times[row, column] = cell, start, free_from[row]
    return times
