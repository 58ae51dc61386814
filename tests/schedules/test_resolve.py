"""A schedule is given by its name, by rows or by a file, for a placement and a number of micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_schedules import format_csv

from graphzero.errors import ScheduleError
from graphzero.schedules import GENERATORS, PipelineSchedule, generate_schedule, resolve_schedule


def refusal(*arguments: object) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        resolve_schedule(*arguments)
    return caught.value


@pytest.mark.parametrize("name", GENERATORS)
def test_name_rows_schedule_and_file_are_the_same(name: str, tmp_path: Path) -> None:
    schedule = generate_schedule(name, 2, 5)
    sizes = (2, 5, schedule.stages)
    path = tmp_path / "schedule.csv"
    path.write_text(format_csv(schedule), encoding="utf-8-sig")
    texts = [list(map(str, row)) for row in schedule.rows]
    assert resolve_schedule(name, *sizes) == resolve_schedule(schedule, *sizes) == schedule
    assert resolve_schedule(texts, *sizes).rows == resolve_schedule(str(path), *sizes).rows == schedule.rows
    assert resolve_schedule(str(path), *sizes).stage_ranks == schedule.stage_ranks


def test_stages_have_a_place_on_each_rank() -> None:
    assert resolve_schedule("interleaved", 2, 4, 6).stages_on(1) == (1, 3, 5)
    assert str(refusal("interleaved", 4, 8, 6)) == (
        "interleaved has as many stages on each rank, but 6 stages are not a multiple of 4"
    )
    assert "gpipe has 1 stage a rank, not 2" in str(refusal("gpipe", 2, 2, 4))
    assert "no schedule is called '1f2b'" in str(refusal("1f2b", 2, 2, 3))


def test_rows_for_other_sizes_are_refused() -> None:
    rows = [["0F0", "0B0"], ["1F0", "1B0"]]
    assert str(refusal(rows, 4, 1, 2)) == "the schedule 'rows' is for 2 pp ranks, but there are 4"
    assert str(refusal(rows, 2, 2, 2)) == "row 0 has no cell '0F1'"
    assert str(refusal(rows, 2, 1, 3)) == "no row runs stage 2, of 3 stages: expected its actions in one row"
    assert str(refusal(rows, 2, 1, 1)) == "row 1, column 0: '1F0' is of stage 1, but there are 1 stages, 0 to 0"
    schedule = PipelineSchedule.from_rows(rows)
    assert str(refusal(schedule, 2, 2, 2)) == "the schedule 'rows' is for 1 micro-batches, but there are 2"
    assert str(refusal(schedule, 2, 1, 4)) == "the schedule 'rows' is for 2 stages, but there are 4"


def test_a_file_is_named_in_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("0F0,0B0x\n")
    error = refusal(str(path), 1, 1, 1)
    assert str(error).startswith(f"{path}: row 0, column 1: '0B0x' is not an action: expected a stage")
    assert (error.row, error.column) == (0, 1)
    path.write_bytes(b"\xff\xfe")
    assert str(refusal(str(path), 1, 1, 1)).startswith(f"the schedule {path} cannot be read: ")
    assert "No such file" in str(refusal(str(tmp_path / "none.csv"), 1, 1, 1))
