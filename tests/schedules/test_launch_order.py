"""Receive slots and communicators: the figures of torch's own rows, and sentences for what deadlocks."""

from __future__ import annotations

import pytest
from torch_rows import torch_rows

from graphzero.errors import ScheduleError
from graphzero.schedules import (
    GENERATORS,
    PipelineSchedule,
    check_launch_order,
    check_schedule,
    choose_communicators,
    count_posted_receives,
    finishes_with_slots,
    format_csv,
    generate_schedule,
    least_receive_slots,
    least_receive_slots_by_edge,
    lower_schedule,
    parse_csv,
    remove_messages,
)

RANKS = (2, 4, 8)  # with twice as many micro-batches
SLOTS = {
    "gpipe": (0, 0, 0),
    "1f1b": (1, 1, 1),
    "zb1p": (1, 1, 1),
    "interleaved": (1, 1, 1),
    "looped_bfs": (2, 2, 2),
    "interleaved_zero_bubble": (1, 2, 4),
    "zbv": (1, 1, 1),
    "DualPipeV": (1, 1, 1),
}
LATE_COMMUNICATORS = {  # that suffice if receives are posted next to their use
    "gpipe": ("one", "one", "one"),
    "1f1b": ("direction", "direction", "direction"),
    "zb1p": ("direction", "direction", "direction"),
    "interleaved": ("directed pair", "directed pair", "directed pair"),
    "looped_bfs": ("directed pair", "pair", "pair"),
    "interleaved_zero_bubble": ("edge", "directed pair", "directed pair"),
    "zbv": ("edge", "edge", "edge"),
    "DualPipeV": ("directed pair", "edge", "edge"),
}


def schedule_of(name: str, ranks: int) -> PipelineSchedule:
    if name in GENERATORS:
        return generate_schedule(name, ranks, 2 * ranks)
    rows = torch_rows(name, ranks, 2 * ranks)
    return remove_messages(PipelineSchedule.from_rows(rows))


@pytest.mark.parametrize("name", SLOTS)
def test_least_receive_slots(name: str) -> None:
    assert tuple(least_receive_slots(schedule_of(name, ranks)) for ranks in RANKS) == SLOTS[name]


def test_slots_of_single_edges_are_least() -> None:
    schedule = schedule_of("interleaved_zero_bubble", 4)
    slots = least_receive_slots_by_edge(schedule)
    assert finishes_with_slots(schedule, slots) and max(slots.values()) == 2
    for edge in slots:
        assert not slots[edge] or not finishes_with_slots(schedule, {**slots, edge: slots[edge] - 1})
    assert least_receive_slots_by_edge(schedule_of("1f1b", 2)) == {(0, 1): 0, (1, 0): 1}


@pytest.mark.parametrize("name", LATE_COMMUNICATORS)
def test_receives_posted_early_need_one_communicator_and_late_ones_more(name: str) -> None:
    for ranks, grouping in zip(RANKS, LATE_COMMUNICATORS[name], strict=True):
        schedule = schedule_of(name, ranks)
        early, late = lower_schedule(schedule, "early"), lower_schedule(schedule, "late")
        check_schedule(early)
        check_schedule(late)
        assert choose_communicators(early).grouping == "one"
        assert choose_communicators(late).grouping == grouping
        assert all(count_posted_receives(late, rank) <= 2 for rank in range(ranks))  # 2: of both parts of one cell


def test_pairs_of_ranks_are_not_enough_where_both_ends_send_first() -> None:
    late = lower_schedule(generate_schedule("1f1b", 2, 4), "late")
    with pytest.raises(ScheduleError, match="with a communicator for each pair of ranks$"):
        check_launch_order(late, "pair")
    check_launch_order(late, "directed pair")
    check_launch_order(lower_schedule(generate_schedule("gpipe", 2, 4), "late"), "pair")


def test_communicators_are_counted() -> None:
    choice = choose_communicators(lower_schedule(schedule_of("zbv", 4), "late"))
    assert (choice.grouping, choice.communicators, choice.most_on_rank) == ("edge", 12, 8)
    choice = choose_communicators(lower_schedule(schedule_of("interleaved", 4), "late"))
    assert (choice.grouping, choice.communicators, choice.most_on_rank) == ("directed pair", 8, 4)
    choice = choose_communicators(generate_schedule("gpipe", 1, 2))
    assert (choice.grouping, choice.communicators, choice.most_on_rank) == ("one", 0, 0)


def test_buffers_are_the_price_of_early_receives() -> None:
    lowered = lower_schedule(schedule_of("looped_bfs", 4), "early")
    assert [count_posted_receives(lowered, rank) for rank in range(4)] == [5, 1, 1, 5]


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_rows_with_sends_and_receives_of_torch(name: str) -> None:
    """Those with early receives finish with one communicator, those with late ones do not."""
    for ranks in RANKS:
        for deferred in (False, True):
            rows = torch_rows(name, ranks, 2 * ranks, with_comms=True, defer_pp_recv=deferred)
            schedule = PipelineSchedule.from_rows(rows)
            assert (choose_communicators(schedule).grouping == "one") is not deferred


def test_lowered_rows_are_text_as_torch_writes_it() -> None:
    late = format_csv(lower_schedule(generate_schedule("1f1b", 2, 2), "late"))
    assert late == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    early = format_csv(lower_schedule(generate_schedule("1f1b", 2, 2), "early"))
    assert early == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )


def test_a_deadlock_is_told_as_the_circle_that_it_is() -> None:
    lowered = lower_schedule(generate_schedule("1f1b", 2, 4), "late")
    with pytest.raises(ScheduleError) as caught:
        check_launch_order(lowered)
    assert str(caught.value) == (
        "row 0, column 3: '0SEND_F1' needs '1RECV_F1' (row 1, column 4), which stands behind '1SEND_B0' "
        "(row 1, column 3), which needs '0RECV_B0' (row 0, column 4), which stands behind '0SEND_F1' (row 0, "
        "column 3); sends and receives of a rank run in launch order, as on one NCCL communicator"
    )
    assert (caught.value.row, caught.value.column) == (0, 3)


def test_two_ends_of_one_edge_in_different_orders_are_refused() -> None:
    schedule = parse_csv("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1F1,1I1,1I0,1W0,1W1\n")
    check_schedule(schedule)
    with pytest.raises(ScheduleError, match="of one stage boundary and direction"):
        choose_communicators(lower_schedule(schedule, "late"))
    assert choose_communicators(lower_schedule(schedule, "early")).grouping == "one"


def test_rows_are_lowered_once() -> None:
    lowered = lower_schedule(generate_schedule("1f1b", 2, 2))
    with pytest.raises(ScheduleError, match="has sends and receives already"):
        lower_schedule(lowered)


def test_a_launch_order_needs_sends_and_receives() -> None:
    with pytest.raises(ScheduleError, match="has no sends and receives: lower it first"):
        check_launch_order(generate_schedule("1f1b", 2, 2))


def test_a_launch_order_is_that_of_complete_rows() -> None:
    with pytest.raises(ScheduleError, match="row 1 has no cell '1RECV_F0'"):
        check_launch_order(parse_csv("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n"))
