"""Schedules by name: legal for all sizes, and the rows of torch.distributed.pipelining where it has them."""

from __future__ import annotations

import pytest
from torch_rows import texts, torch_rows

from graphzero.errors import ScheduleError
from graphzero.schedules import GENERATORS, ActionKind, check_schedule, generate_schedule

STAGES_PER_RANK = {"gpipe": (1,), "1f1b": (1,), "zb1p": (1,), "zbv": (2,)}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_schedule_is_legal_for_any_number_of_ranks_and_micro_batches(name: str) -> None:
    for ranks in (1, 2, 3, 4, 5, 8):
        for micro_batches in (1, 2, 3, 4, 5, 7, 8, 9, 17, 37):  # also fewer than stages, and no multiple of the ranks
            for stages_per_rank in STAGES_PER_RANK.get(name, (1, 2, 3)):
                schedule = generate_schedule(name, ranks, micro_batches, stages_per_rank)
                assert (schedule.ranks, schedule.stages) == (ranks, ranks * stages_per_rank)
                assert (schedule.micro_batches, schedule.name) == (micro_batches, name)
                check_schedule(schedule)
                check_schedule(schedule.forward_only())


@pytest.mark.parametrize(
    ("theirs", "ours", "stages_per_rank"),
    [
        ("GPipe", "gpipe", 1),
        ("Interleaved1F1B", "interleaved", 2),
        ("Interleaved1F1B", "interleaved", 3),
        ("InterleavedZeroBubble", "interleaved_zero_bubble", 2),
        ("InterleavedZeroBubble", "interleaved_zero_bubble", 3),
        ("ZBVZeroBubble", "zbv", 2),
    ],
)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 6), (4, 8), (4, 10), (4, 12), (8, 16)])
def test_rows_are_those_of_torch(theirs: str, ours: str, stages_per_rank: int, ranks: int, micro_batches: int) -> None:
    rows = torch_rows(theirs, ranks, micro_batches, stages_per_rank)
    expected = [texts(row) for row in rows]
    schedule = generate_schedule(ours, ranks, micro_batches, stages_per_rank)
    assert [[str(one) for one in row] for row in schedule.rows] == expected


def test_looped_bfs_is_that_of_torch_but_for_the_order_of_micro_batches_in_backward() -> None:
    rows = torch_rows("LoopedBFS", 4, 6, 2)
    reversed_micro_batches = {f"{stage}B{at}": f"{stage}B{5 - at}" for stage in range(8) for at in range(6)}
    expected = [[reversed_micro_batches.get(text, text) for text in texts(row)] for row in rows]
    schedule = generate_schedule("looped_bfs", 4, 6, 2)
    assert [[str(one) for one in row] for row in schedule.rows] == expected


def test_1f1b_alternates_after_its_warm_up() -> None:
    """Torch's own rows lack a forward action on the last rank, so that this is written out."""
    rows = generate_schedule("1f1b", 3, 4).rows
    assert [" ".join(map(str, row)) for row in rows] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_zb1p_delays_weight_gradients_by_the_rank() -> None:
    rows = generate_schedule("zb1p", 3, 4).rows
    assert [" ".join(map(str, row)) for row in rows] == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_one_stage_a_rank_makes_the_loop_the_plain_form() -> None:
    assert generate_schedule("looped_bfs", 4, 6, 1).rows == generate_schedule("gpipe", 4, 6).rows
    assert generate_schedule("interleaved_zero_bubble", 4, 6, 1).rows == generate_schedule("zb1p", 4, 6).rows


def test_stages_are_placed_in_a_loop_or_a_v() -> None:
    assert generate_schedule("interleaved", 3, 3).stage_ranks == (0, 1, 2, 0, 1, 2)
    assert generate_schedule("zbv", 3, 3).stage_ranks == (0, 1, 2, 2, 1, 0)
    assert generate_schedule("zbv", 3, 3).stages_on(1) == (1, 4)


def test_forward_rows_have_the_order_of_the_schedule_and_nothing_else() -> None:
    schedule = generate_schedule("interleaved", 2, 4).forward_only()
    assert {cell.kind for _, _, cell in schedule.cells()} == {ActionKind.FORWARD}
    assert " ".join(map(str, schedule.rows[0])) == "0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 2, 2), "no schedule is called '1f2b': expected one of gpipe, 1f1b, "),
        (("gpipe", 2, 0), "a schedule of 0 micro-batches: expected 1 or more"),
        (("gpipe", 2, 2, 2), "gpipe has 1 stage a rank, not 2: looped_bfs takes any number"),
        (("zbv", 2, 2, 1), "zbv has 2 stages a rank, not 1: interleaved_zero_bubble takes any number"),
    ],
)
def test_a_schedule_that_does_not_exist_is_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        generate_schedule(*arguments)
    assert message in str(caught.value)
