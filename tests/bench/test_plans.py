"""The paper's table, and what a plan of its model says."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import plans


def test_the_closed_form_gives_every_cell_of_the_table() -> None:
    assert plans.table_cells() == (54, 54)


@pytest.mark.slow
def test_each_stage_is_planned_at_or_under_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    rows = plans.rows_of_paper(1)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert all(float(row[1]) <= float(row[2]) for row in rows)
    assert "on 64 ranks" in capsys.readouterr().out
