"""Small programs in the manner of bug reports train as in plain PyTorch: a sample of ``bench/stress/user_code.py``.

The command tries every program in every configuration.
"""

from __future__ import annotations

import os

import pytest
from stress import user_code
from stress.user_code_cells import OPTIONS, Cell, list_cells
from stress.user_programs import PROGRAMS

EARLY = list(PROGRAMS)[::8]  # programs of the first stage


def faults(programs: list[str], count: int, seed: int) -> list[str]:
    cells = [cell for name in programs for cell in user_code.draw_cells(f"^{name}$", count, seed)]
    return [f"{one.cell}: {one.text}" for one in user_code.try_cells(cells) if one.outcome == "fault"]


def test_a_sample_of_programs_computes_what_plain_pytorch_does_or_is_refused():
    assert faults(EARLY, 1, 0) == []


@pytest.mark.slow
def test_every_other_program_computes_what_plain_pytorch_does_or_is_refused():
    assert faults([name for name in PROGRAMS if name not in EARLY], 1, 1) == []


def test_the_configurations_of_a_program_hold_every_pair_of_options():
    cells = list(list_cells("batch_norm", 0))
    pairs = {(a, x, b, y) for a in OPTIONS for x in OPTIONS[a] for b in OPTIONS for y in OPTIONS[b] if a < b}
    met = {(a, getattr(c, a), b, getattr(c, b)) for c in cells for a in OPTIONS for b in OPTIONS if a < b}
    assert pairs <= met
    assert len(cells) < 40


def test_a_process_that_dies_is_a_fault_of_the_program_that_ran_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(user_code, "judge_cells", dying)
    names, layouts = ("batch_norm", "nt_xent", "diffusion"), ("2", "gloo 2")
    cells = [Cell(name, layout, 3, 1, "float64", False, False) for layout in layouts for name in names]
    found = list(user_code.try_cells(cells))
    assert [one.cell for one in found] == cells
    assert [one.outcome for one in found] == ["equal", "fault", "equal"] * 2


def dying(rank, ranks, folder, wanted):
    """The process of a rank, of which the last one ends at once where a cell of ``nt_xent`` comes."""

    def judge_cell(cell, rank):
        if cell.program == "nt_xent" and rank == ranks - 1:
            os._exit(7)
        return "equal", ""

    user_code.judge_cell = judge_cell
    user_code.judge_cells(rank, ranks, folder, wanted)
