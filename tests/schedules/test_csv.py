"""CSV in the grammar of torch.distributed.pipelining: read in full or refused, and written back as it was."""

from __future__ import annotations

import random
import re

import pytest
from random_schedules import format_csv
from torch_rows import torch_rows

from graphzero.errors import ScheduleError
from graphzero.schedules import GENERATORS, check_schedule, generate_schedule, parse_action, parse_csv

LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.parametrize("name", GENERATORS)
def test_a_schedule_is_read_back_as_it_was_written(name: str) -> None:
    schedule = generate_schedule(name, 4, 6)
    assert parse_csv(format_csv(schedule), name=name) == schedule


COMMS = ({}, {"with_comms": True}, {"with_comms": True, "defer_pp_recv": True})


@pytest.mark.parametrize(("name", "comms"), [("GPipe", {}), *((name, comms) for name in LOOPED for comms in COMMS)])
def test_schedules_of_torch_are_read_and_legal_but_for_looped_bfs(name: str, comms: dict[str, bool]) -> None:
    rows = torch_rows(name, 4, 8, None, **comms)
    text = "".join(",".join(str(cell) if cell else "" for cell in row) + "\r\n" for row in rows)
    schedule = parse_csv(text)
    assert format_csv(schedule) == text.replace("\r\n", "\n")
    if name == "LoopedBFS":
        with pytest.raises(ScheduleError, match="ascending order of micro-batches"):
            check_schedule(schedule)
    else:
        check_schedule(schedule)


CELLS = ["0F3", "12B0", "1I2", "3W11", "0SEND_F1", "1RECV_F1", "2SEND_B0", "1RECV_B0", "0UNSHARD", "0RESHARD",
         "0REDUCE_GRAD", "0REDUCE_GRAD3", "(0F1;3B0)OVERLAP_F_B", "(3I0;0F1)OVERLAP_F_B"]  # fmt: skip


@pytest.mark.parametrize("text", CELLS)
def test_an_action_has_one_text(text: str) -> None:
    assert str(parse_action(text)) == text
    assert parse_action(f" {text} ") == parse_action(text)


@pytest.mark.parametrize(
    "text",
    [f"0F{'9' * 5000}", "0F3xyz", "0FOO", "0B1W2", "F3", "0F", "0", "0f3", "00F3", "0F03", "-1F0", "0F-1", "0F3.0",
     "0 F3", "0F3;", "'0F3'", "\u0660F0", "0\u212a3", "0SEND_F", "0SEND3", "0UNSHARDx", "(0F1;3B0)", "(0F1)OVERLAP_F_B",
     "()OVERLAP_F_B", "(0F1;3F0)OVERLAP_F_B", "(0F1;3B0;2B0)OVERLAP_F_B", "(0F1;3W0)OVERLAP_F_B",
     "(0F1;3B0)OVERLAP_F_B0", "0OVERLAP_F_B1", "((0F1;3B0)OVERLAP_F_B;1B0)OVERLAP_F_B", "(0F1;3B0)F0"],
)  # fmt: skip
def test_a_cell_that_is_not_an_action_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_csv(f"0F0,0B0\n1F0,,{text},1B0\n")
    error = caught.value
    assert str(error).startswith("row 1, column 2: ") and "expected" in str(error) and "\n" not in str(error)
    assert (error.row, error.column) == (1, 2)


def test_a_cell_with_any_change_is_another_action_or_refused() -> None:
    """Never read as less than it says, which is what an expression that is not anchored does."""
    generator = random.Random(0)
    letters = "0123456789FBIWSENDRCV_UHAGO();., xe-"
    read = refused = 0
    for _ in range(4000):
        cell = list(generator.choice(CELLS))
        for _ in range(generator.randint(1, 2)):
            at = generator.randrange(len(cell) + 1)
            cell[at : at + generator.randint(0, 1)] = generator.choice(["", generator.choice(letters)])
        text = "".join(cell)
        try:
            assert str(parse_action(text)) == re.sub(" *([(;)]) *", r"\1", text.strip(" "))
            read += 1
        except ScheduleError:
            refused += 1
    assert read > 200 and refused > 2000


def test_line_ends_and_a_byte_order_mark_do_not_matter() -> None:
    plain = parse_csv("0F0,0B0\n1F0,,1B0\n")
    assert parse_csv("\ufeff0F0,0B0\r\n1F0,,1B0\r\n") == parse_csv("0F0 , 0B0\n1F0,,1B0") == plain
    assert format_csv(plain) == "0F0,0B0\n1F0,,1B0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no row runs stage 0, of 1 stages"),
        (",,\n", "no row runs stage 0, of 1 stages"),
        ("0F0,0B0\n2F0,2B0\n", "no row runs stage 1, of 3 stages"),
        ("0F0,0B0\n999999999F0\n", "no row runs stage 1, of 1000000000 stages"),
    ],
)
def test_text_without_the_actions_of_a_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_csv(text)
    assert message in str(caught.value)
