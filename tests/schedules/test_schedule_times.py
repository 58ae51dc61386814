"""Times, bubbles and micro-batches in flight: closed forms, and sums that are done by hand."""

from __future__ import annotations

import pytest

from graphzero.errors import ScheduleError
from graphzero.schedules import (
    GENERATORS,
    ActionKind,
    PipelineSchedule,
    ScheduleCosts,
    count_in_flight,
    draw_timeline,
    generate_schedule,
    most_in_flight,
    parse_csv,
    simulate_schedule,
)

SIZES = [(2, 4), (4, 8), (4, 12), (8, 16)]
BUBBLES = {  # times ranks - 1, over micro-batches; F, I and W take 1 each
    "gpipe": 1,
    "1f1b": 1,
    "zb1p": 1 / 3,
    "interleaved": 1 / 2,
    "looped_bfs": 1 / 2,
    "interleaved_zero_bubble": 1 / 6,
    "zbv": 1 / 6,
}
IN_FLIGHT = {  # of ranks, micro-batches, rank
    "gpipe": lambda ranks, micro_batches, rank: micro_batches,
    "looped_bfs": lambda ranks, micro_batches, rank: micro_batches,
    "1f1b": lambda ranks, micro_batches, rank: ranks - rank,
    "interleaved": lambda ranks, micro_batches, rank: (ranks + 2 * (ranks - rank - 1) + 1) / 2,
    "zb1p": lambda ranks, micro_batches, rank: ranks,
    "interleaved_zero_bubble": lambda ranks, micro_batches, rank: ranks,
    "zbv": lambda ranks, micro_batches, rank: ranks,
}


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize("name", GENERATORS)
def test_bubble_and_memory_have_their_closed_forms(name: str, ranks: int, micro_batches: int) -> None:
    schedule = generate_schedule(name, ranks, micro_batches)
    timeline = simulate_schedule(schedule)
    assert timeline.bubble == pytest.approx(BUBBLES[name] * (ranks - 1) / micro_batches)
    expected = [IN_FLIGHT[name](ranks, micro_batches, rank) for rank in range(ranks)]
    assert list(most_in_flight(schedule)) == expected


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3, 4])
def test_stages_on_a_rank_divide_the_bubble_of_the_loop(stages_per_rank: int) -> None:
    for name, bubble in (("interleaved", 3 / 8), ("looped_bfs", 3 / 8), ("interleaved_zero_bubble", 1 / 8)):
        timeline = simulate_schedule(generate_schedule(name, 4, 8, stages_per_rank))
        assert timeline.bubble == pytest.approx(bubble / stages_per_rank), name


@pytest.mark.parametrize(
    ("name", "bubble"),
    [("gpipe", 3), ("1f1b", 3), ("zb1p", 2), ("interleaved", 3), ("looped_bfs", 3), ("interleaved_zero_bubble", 11 / 6),
     ("zbv", 2)],
)  # fmt: skip
def test_one_micro_batch_goes_through_all_stages_in_turn(name: str, bubble: float) -> None:
    """Fewer micro-batches than stages are legal, and have the bubble that they must have."""
    schedule = generate_schedule(name, 4, 1)
    assert simulate_schedule(schedule).bubble == pytest.approx(bubble)


def test_ranks_wait_for_transfers_and_for_slow_stages() -> None:
    schedule = generate_schedule("1f1b", 2, 2)
    costs = ScheduleCosts(
        {(1, ActionKind.FORWARD): 2.0, (1, ActionKind.BACKWARD_INPUT): 3.0}, {(0, 1): 0.5, (1, 0): 1.5}
    )
    timeline = simulate_schedule(schedule, costs)
    times = [[(str(one.action), one.start, one.end) for one in row] for row in timeline.rows]
    assert times == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 9, 11), ("0B1", 15, 17)],
        [("1F0", 1.5, 3.5), ("1B0", 3.5, 7.5), ("1F1", 7.5, 9.5), ("1B1", 9.5, 13.5)],
    ]
    assert (timeline.makespan, timeline.busy_seconds(0), timeline.busy_seconds(1)) == (17, 6, 12)
    assert timeline.bubble == pytest.approx((2 * 17 - 18) / 18)


def test_nothing_travels_between_stages_of_one_rank() -> None:
    costs = ScheduleCosts(transfers={(0, 1): 1.0, (1, 0): 1.0, (1, 2): 50.0, (2, 1): 50.0, (2, 3): 1.0, (3, 2): 1.0})
    assert simulate_schedule(generate_schedule("zbv", 2, 1), costs).makespan == 4 + 2 + 5 + 2 + 1


def test_a_receive_that_is_posted_late_begins_its_transfer_late() -> None:
    lowered = parse_csv("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    late = parse_csv("0F0,0SEND_F0,0UNSHARD,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    costs = ScheduleCosts({(0, ActionKind.UNSHARD): 9.0}, {(1, 0): 2.0})
    assert simulate_schedule(lowered, costs).makespan == 1 + 1 + 2 + 2 + 2
    assert simulate_schedule(late, costs).makespan == 1 + 9 + 2 + 2


def test_parts_of_one_cell_run_in_turn() -> None:
    timeline = simulate_schedule(parse_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n"))
    assert [(one.column, str(one.action), one.start, one.end) for one in timeline.rows[0]] == [
        (0, "0F0", 0, 1),
        (1, "0F1", 1, 2),
        (1, "0B0", 4, 6),
        (2, "0B1", 7, 9),
    ]


def test_rows_that_cannot_run_have_no_times() -> None:
    with pytest.raises(ScheduleError, match="'1B0' needs '1F0'"):
        simulate_schedule(parse_csv("0F0,0B0\n1B0,1F0\n"))


def test_micro_batches_in_flight_are_counted_cell_by_cell_and_stage_by_stage() -> None:
    schedule = PipelineSchedule.from_rows([["0F0", "1F0", "0F1", "", "1I0", "1W0", "0B0", "1F1", "1B1", "0B1"]])
    assert count_in_flight(schedule, 0) == (
        {0: 1, 1: 0}, {0: 1, 1: 1}, {0: 2, 1: 1}, {0: 2, 1: 1}, {0: 2, 1: 1}, {0: 2, 1: 1}, {0: 2, 1: 0}, {0: 1, 1: 1},
        {0: 1, 1: 1}, {0: 1, 1: 0},
    )  # fmt: skip
    assert most_in_flight(schedule) == (1.5,)
    assert most_in_flight(schedule.forward_only()) == (0.5,)


def test_a_chart_has_a_line_for_each_rank() -> None:
    timeline = simulate_schedule(generate_schedule("1f1b", 2, 4))
    assert draw_timeline(timeline).splitlines() == [
        "rank 0 |F0 F1 ......B0    F2 B1    F3 B2    ...B3    | 80 % busy, 2 in flight",
        "rank 1 |...F0 B0    F1 B1    F2 B2    F3 B3    ......| 80 % busy, 1 in flight",
    ]
    assert draw_timeline(timeline, 60).splitlines() == [
        "rank 0 |Ff..BBFbbfBB.bb| 80 % busy, 2 in flight",
        "rank 1 |.FBBfbbFBBfbb..| 80 % busy, 1 in flight",
    ]


def test_a_chart_names_stages_where_a_rank_has_several() -> None:
    assert draw_timeline(simulate_schedule(generate_schedule("zbv", 2, 2))).splitlines() == [
        "rank 0 |0F0 0F1 ....3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 ....0I1 0W1 | 86 % busy, 1.5 in flight",
        "rank 1 |....1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1 ....| 86 % busy, 2 in flight",
    ]


@pytest.mark.parametrize("width", [60, 100, 200])
def test_a_chart_keeps_to_its_width(width: int) -> None:
    for name in GENERATORS:
        for ranks, micro_batches in ((1, 1), (12, 40)):
            lines = draw_timeline(simulate_schedule(generate_schedule(name, ranks, micro_batches)), width).splitlines()
            assert len(lines) == ranks
            assert len({len(line[: line.rindex("|")]) for line in lines}) == 1
            assert max(map(len, lines)) <= width


def test_rows_that_lack_an_action_have_no_times() -> None:
    with pytest.raises(ScheduleError) as caught:
        simulate_schedule(parse_csv("0F0,0B0\n1F0,1F1,1B0,1B1\n"))
    assert str(caught.value) == "row 1, column 1: '1F1' needs '0F1', which no cell runs"
