"""What is not a legal schedule is refused in a sentence that names row, column and cell."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from random_schedules import format_csv, is_legal, random_rows, schedule_of

from graphzero.errors import ConfigError, ScheduleError
from graphzero.schedules import (
    Action,
    ActionKind,
    PipelineSchedule,
    check_schedule,
    generate_schedule,
    parse_csv,
    simulate_schedule,
)


def error_of(schedule: PipelineSchedule) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("seed", range(200))
def test_a_random_legal_schedule_passes_every_check(seed: int) -> None:
    rows, stages, micro_batches = random_rows(random.Random(seed))
    assert is_legal(rows)
    schedule = schedule_of(rows, stages, micro_batches)
    check_schedule(schedule)
    check_schedule(schedule.forward_only())
    assert parse_csv(format_csv(schedule)) == schedule
    assert simulate_schedule(schedule).makespan >= max(map(len, rows))


@pytest.mark.parametrize("seed", range(200))
def test_a_random_schedule_with_one_change_is_refused_unless_it_is_legal(seed: int) -> None:
    generator = random.Random(seed)
    rows, stages, micro_batches = random_rows(generator)
    schedule = schedule_of(rows, stages, micro_batches)
    row = generator.randrange(len(rows))
    first, second = sorted(generator.sample(range(len(rows[row])), 2))
    cell = rows[row][first]
    change = generator.choice(["removed", "doubled", "swapped"])
    if change == "removed":
        del rows[row][first]
    elif change == "doubled":
        rows[row].insert(second, cell)
    else:
        rows[row][first], rows[row][second] = rows[row][second], rows[row][first]
    schedule = replace(schedule, rows=tuple(map(tuple, rows)))
    if change == "swapped" and is_legal(rows):
        check_schedule(schedule)
        return
    error = error_of(schedule)
    if change == "removed":
        absent = str(cell).replace("B", "I")
        assert str(error).startswith(f"row {row} has no cell '{absent}'")
        return
    assert error.row is not None and error.column is not None
    assert str(error).startswith(f"row {error.row}, column {error.column}: '{rows[error.row][error.column]}' ")
    if change == "doubled":
        assert (error.row, error.column) == (row, second)
        assert f"after '{cell}' (row {row}, column {first})" in str(error)


ILLEGAL = {
    "an action is absent": (
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n",
        "row 1 has no cell '1I1', nor '1B1'",
    ),
    "half of a backward action is absent": (
        "0F0,0I0\n1F0,1B0\n",
        "row 0 has no cell '0W0', nor '0B0'",
    ),
    "an action is there twice": (
        "0F0,0B0\n1F0,1B0,1B0\n",
        "row 1, column 2: '1B0' runs 1I0 after '1B0' (row 1, column 1)",
    ),
    "a backward action is split and whole": (
        "0F0,0I0,0B0,0W0\n1F0,1B0\n",
        "row 0, column 2: '0B0' runs 0I0 after '0I0' (row 0, column 1)",
    ),
    "an action is on another rank": (
        "0F0,0F1,0B0,1B1\n1F0,1F1,1B0,0B1\n",
        "row 0, column 3: '1B1' is of stage 1, which is on rank 1",
    ),
    "a rank has no stage": (
        "0F0,0B0\n,\n",
        "row 1 runs no stage: expected a stage for each rank",
    ),
    "backward stands before forward": (
        "0F0,0B0\n1B0,1F0\n",
        "row 1, column 0: '1B0' needs '1F0' (row 1, column 1), which comes after it",
    ),
    "weight gradients stand before gradients of the input": (
        "0F0,0W0,0I0\n",
        "row 0, column 1: '0W0' needs '0I0' (row 0, column 2), which comes after it",
    ),
    "two ranks wait for each other": (
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
        "row 0, column 1: '0B0' needs '1B0' (row 1, column 2), which comes after '1F1' (row 1, column 1), "
        "which needs '0F1' (row 0, column 2), which comes after '0B0' (row 0, column 1)",
    ),
    "the parts of one cell wait for each other": (
        "0F0,0B0\n(1F0;1B0)OVERLAP_F_B\n",
        "row 1, column 0: '(1F0;1B0)OVERLAP_F_B' needs '(1F0;1B0)OVERLAP_F_B' (row 1, column 0), "
        "which is this cell itself",
    ),
    "micro-batches descend": (
        "0F0,0F1,0B1,,0B0\n",
        "row 0, column 4: '0B0' comes after '0B1' (row 0, column 2), "
        "but a stage sums its weight gradients in ascending order of micro-batches",
    ),
    "a send is absent": (
        "0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
        "row 0 has no cell '0SEND_F0'",
    ),
    "a gradient is not sent": (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0\n",
        "row 1 has no cell '1SEND_B0'",
    ),
    "a send of a gradient stands before what it sends": (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_B0,1B0\n",
        "row 1, column 2: '1SEND_B0' needs '1B0' (row 1, column 3), which comes after it",
    ),
    "a send has no other rank": (
        "0F0,1F0,0SEND_F0,1B0,0B0\n",
        "row 0, column 2: '0SEND_F0' has no other rank to talk to: stage 1 is on this rank or does not exist",
    ),
    "an action stands before its receive": (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n",
        "row 1, column 0: '1F0' needs '1RECV_F0' (row 1, column 1), which comes after it",
    ),
    "a send stands before what it sends": (
        "0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
        "row 0, column 0: '0SEND_F0' needs '0F0' (row 0, column 1), which comes after it",
    ),
    "parameters are not gathered": (
        "0UNSHARD,0F0,0RESHARD,0B0\n",
        "row 0, column 3: '0B0' finds the parameters sharded: no 0UNSHARD is before it",
    ),
    "parameters are gathered twice": (
        "0UNSHARD,0F0,0UNSHARD,0B0\n",
        "row 0, column 2: '0UNSHARD' finds the parameters gathered: expected a RESHARD before it",
    ),
    "parameters are given up twice": (
        "0UNSHARD,0F0,0B0,0RESHARD,0RESHARD\n",
        "row 0, column 4: '0RESHARD' finds the parameters sharded: expected an UNSHARD before it",
    ),
    "gradients are reduced too early": (
        "0F0,0F1,0B0,0REDUCE_GRAD,0B1\n",
        "row 0, column 4: '0B1' comes after 0REDUCE_GRAD, which reduces its gradients",
    ),
    "gradients are reduced twice": (
        "0F0,0B0,0REDUCE_GRAD0,0REDUCE_GRAD0\n",
        "row 0, column 3: '0REDUCE_GRAD0' is in the row twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ILLEGAL)
def test_the_sentence_says_why(case: str) -> None:
    text, message = ILLEGAL[case]
    assert str(error_of(parse_csv(text))) == message


def test_sharding_and_reductions_around_their_actions_are_legal() -> None:
    check_schedule(
        parse_csv("0UNSHARD,0F0,0F1,0RESHARD,0UNSHARD,0I0,0I1,0RESHARD,0W0,0REDUCE_GRAD0,0W1,0REDUCE_GRAD1\n")
    )


@pytest.mark.parametrize(
    ("text", "micro_batches", "stages", "message"),
    [
        ("0F0,0B0\n", 2, None, "row 0 has no cell '0F1'"),
        ("0F0,0B0,0F1,0B1\n", 1, None, "row 0, column 2: '0F1' is of micro-batch 1, but there are 1, from 0"),
        ("0F0,1F0,1B0,0B0\n", 1, 1, "row 0, column 1: '1F0' is of stage 1, but there are 1 stages, 0 to 0"),
    ],
)
def test_what_the_rows_are_for_is_compared(text: str, micro_batches: int, stages: int | None, message: str) -> None:
    assert str(error_of(parse_csv(text, micro_batches, stages))) == message


def test_more_stages_than_the_rows_have_are_refused() -> None:
    with pytest.raises(ScheduleError, match="no row runs stage 1, of 2 stages"):
        parse_csv("0F0,0B0\n", stages=2)


def test_evaluation_has_no_backward_action() -> None:
    schedule = generate_schedule("1f1b", 2, 2)
    error = error_of(replace(schedule, has_backward=False))
    assert str(error) == "row 0, column 2: '0B0' is an action of backward, which these rows do not have"


def test_the_error_is_one_of_a_setting() -> None:
    error = error_of(parse_csv("0F0,0B0\n1B0,1F0\n"))
    assert isinstance(error, ConfigError) and (error.row, error.column) == (1, 0)


def test_rows_are_of_actions_that_have_a_text() -> None:
    backward = Action(0, ActionKind.BACKWARD, 0)
    check_schedule(PipelineSchedule.from_rows([["0F0", None, backward]]))
    for cell in (Action(0, ActionKind.FORWARD), Action(0, ActionKind.FORWARD, -1), 3):
        with pytest.raises(ScheduleError, match="row 0, column 1: .* is not an action"):
            PipelineSchedule.from_rows([["", cell, backward]])
