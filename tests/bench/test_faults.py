"""Every kind of fault ends as ``bench/stress/faults.py`` says it must."""

import pytest
from stress import single_rank_changes
from stress.faults import FAULTS, WAYS, run, run_changes


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", WAYS)
def test_faults_at_random_moments_end_in_a_named_error_and_no_wrong_number(way):
    table, made, bad = run(1, 1, [3], [way])
    assert made == len(FAULTS) and not bad, table


def test_a_change_that_ends_wrong_on_any_rank_is_counted_once_and_shown(monkeypatch, capsys):
    right, wrong = (
        {"seconds": 0.1, "wrong": ""},
        {"seconds": 2.0, "wrong": "before: a hook, by rank 1: nobody has noticed"},
    )
    monkeypatch.setattr(single_rank_changes, "run", lambda ranks, way, seed, folder: [[right, wrong], [right, wrong]])
    table, made, bad = run_changes(0, [2], ["memory"])
    assert (made, bad) == (2, 1) and "2.0" in table
    assert capsys.readouterr().err.count("nobody has noticed") == 1
