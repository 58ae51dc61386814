"""A cell's text is the same again, and shows what changed."""

from __future__ import annotations

import programs
import pytest


@pytest.mark.parametrize("setting", ["plain", "budget"])
def test_a_cell_is_the_same_again(setting):
    cell = programs.ProgramCell("mlp", "dp", 3, setting)
    text = programs.describe_cell(cell)
    assert text.startswith("graph TrainGraph(dp=2)") and "plan of TrainGraph" in text
    assert programs.diff_texts(text, programs.describe_cell(cell)) == ""
    assert len(text.splitlines()[-1].split("0x")) == 2


def test_a_loss_that_differs_in_its_last_bit_is_shown():
    before, after = (f"graph\n{x.hex()}\n" for x in (1.0, 1.0 + 2**-52))
    assert "+0x1.0000000000001p+0" in programs.diff_texts(before, after)
    assert len(programs.diff_texts("a\n" * 100, "b\n" * 100).splitlines()) == programs.SHOWN + 1
