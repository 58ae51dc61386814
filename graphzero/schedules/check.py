"""Proofs that a schedule is legal, each refusal one sentence with row, column and cell.  Both count from 0.

complete    every stage runs F and B, or F, I and W, of every micro-batch once, on the rank of the stage; if the rows
            have sends and receives, everything that crosses ranks is sent and received once
ordered     the rows run to their ends: every action is where what it needs can have come
ascending   a stage adds up its weight gradients in the order of micro-batches, so that sums keep their bits
sharding    a stage with UNSHARD runs between it and its RESHARD, and is reduced after what it reduces
"""

from __future__ import annotations

from collections.abc import Iterator

from graphzero.errors import ScheduleError
from graphzero.schedules.action import Action, ActionKind
from graphzero.schedules.schedule import PipelineSchedule
from graphzero.schedules.values import (
    INPUT,
    RECEIVE_B,
    RECEIVE_F,
    SEND_B,
    SEND_F,
    WEIGHT,
    B,
    F,
    Position,
    Value,
    cell_error,
    execution_order,
    format_place,
    format_value,
    is_lowered,
    made_values,
)


def check_schedule(schedule: PipelineSchedule) -> None:
    """Raise ScheduleError unless ``schedule`` is legal."""
    check_complete(schedule)
    check_ascending(schedule)
    execution_order(schedule)
    check_sharding(schedule)


def check_complete(schedule: PipelineSchedule) -> None:
    """Raise ScheduleError unless each rank has the actions of its stages, and each of them once."""
    first: dict[Value, Position] = {}
    for row, column, cell in schedule.cells():
        for action in cell.parts or (cell,):
            if problem := _misplacement(schedule, row, action):
                raise cell_error((row, column), cell, problem)
        for value in made_values(cell):
            if value in first:
                problem = f"runs {format_value(value)} after {format_place(schedule, first[value])}"
                raise cell_error((row, column), cell, problem)
            first[value] = row, column
    for row in range(schedule.ranks):
        if not schedule.stages_on(row):
            raise ScheduleError(f"row {row} runs no stage: expected a stage for each rank", row)
    for row, value in _expected_values(schedule):
        if value not in first:
            raise ScheduleError(f"row {row} has no cell '{format_value(value)}'{_alternative(value)}", row)


def check_ascending(schedule: PipelineSchedule) -> None:
    """Raise ScheduleError unless each stage runs forward, and computes its weight gradients, in ascending order of
    micro-batches: losses, counts and statistics are summed in that order too.
    """
    last: dict[tuple[int, bool], tuple[int, Position]] = {}
    for row, column, cell in schedule.cells():
        for action in cell.computations:
            if action.kind not in (F, B, WEIGHT):
                continue
            key = action.stage, action.kind is F
            before, position = last.get(key, (-1, (0, 0)))
            micro_batch = action.micro_batch or 0
            if micro_batch < before:
                what = "runs forward" if action.kind is F else "sums its weight gradients"
                reason = f"a stage {what} in ascending order of micro-batches"
                raise cell_error((row, column), cell, f"comes after {format_place(schedule, position)}, but {reason}")
            last[key] = micro_batch, (row, column)


def check_sharding(schedule: PipelineSchedule) -> None:
    """Raise ScheduleError unless UNSHARD, RESHARD and REDUCE_GRAD, where there are any, are around their actions."""
    gathered_stages = {action.stage for _, _, action in schedule.cells() if action.kind is ActionKind.UNSHARD}
    unsharded: set[int] = set()
    reduced: dict[int, set[int | None]] = {}
    for row, column, cell in schedule.cells():
        stage = cell.stage
        if cell.kind is ActionKind.UNSHARD:
            if stage in unsharded:
                raise cell_error((row, column), cell, "finds the parameters gathered: expected a RESHARD before it")
            unsharded.add(stage)
        elif cell.kind is ActionKind.RESHARD:
            if stage not in unsharded:
                raise cell_error((row, column), cell, "finds the parameters sharded: expected an UNSHARD before it")
            unsharded.remove(stage)
        elif cell.kind is ActionKind.REDUCE_GRAD:
            if cell.micro_batch in reduced.setdefault(stage, set()):
                raise cell_error((row, column), cell, "is in the row twice")
            reduced[stage].add(cell.micro_batch)
        for action in cell.computations:
            gathers = action.stage in gathered_stages and action.kind is not WEIGHT
            if gathers and action.stage not in unsharded:
                raise cell_error(
                    (row, column), cell, f"finds the parameters sharded: no {action.stage}UNSHARD is before it"
                )
            if action.kind in (B, WEIGHT) and reduced.get(action.stage, set()) & {None, action.micro_batch}:
                raise cell_error(
                    (row, column), cell, f"comes after {action.stage}REDUCE_GRAD, which reduces its gradients"
                )


def _misplacement(schedule: PipelineSchedule, row: int, action: Action) -> str:
    """Say why ``action`` cannot be in ``row``; "" if it can."""
    stage, kind = action.stage, action.kind
    if not 0 <= stage < schedule.stages:
        return f"is of stage {stage}, but there are {schedule.stages} stages, 0 to {schedule.stages - 1}"
    if schedule.stage_ranks[stage] != row:
        return f"is of stage {stage}, which is on rank {schedule.stage_ranks[stage]}"
    if action.micro_batch is not None and not 0 <= action.micro_batch < schedule.micro_batches:
        return f"is of micro-batch {action.micro_batch}, but there are {schedule.micro_batches}, from 0"
    if kind not in (F, SEND_F, RECEIVE_F, ActionKind.UNSHARD, ActionKind.RESHARD) and not schedule.has_backward:
        return "is an action of backward, which these rows do not have"
    if kind in (SEND_F, RECEIVE_B) and not schedule.crosses_ranks(stage):
        return f"has no other rank to talk to: stage {stage + 1} is on this rank or does not exist"
    if kind in (SEND_B, RECEIVE_F) and (not stage or not schedule.crosses_ranks(stage - 1)):
        return f"has no other rank to talk to: stage {stage - 1} is on this rank or does not exist"
    return ""


def _expected_values(schedule: PipelineSchedule) -> Iterator[tuple[int, Value]]:
    """(row, value) of everything that is made in a complete schedule."""
    has_messages = is_lowered(schedule)
    for stage, row in enumerate(schedule.stage_ranks):
        forward = [F]
        backward = [INPUT, WEIGHT]
        if has_messages and schedule.crosses_ranks(stage):
            forward, backward = [*forward, SEND_F], [*backward, RECEIVE_B]
        if has_messages and stage and schedule.crosses_ranks(stage - 1):
            forward, backward = [*forward, RECEIVE_F], [*backward, SEND_B]
        for micro_batch in range(schedule.micro_batches):
            for kind in forward + (backward if schedule.has_backward else []):
                yield row, (stage, kind, micro_batch)


def _alternative(value: Value) -> str:
    stage, kind, micro_batch = value
    return f", nor '{stage}B{micro_batch}'" if kind in (INPUT, WEIGHT) else ""
