"""A text is a graph or is refused, and reading it does nothing else: a part of ``bench/stress/text_fuzz.py``."""

from __future__ import annotations

from stress import text_fuzz


def test_mutated_programs_are_refused_or_run_within_their_bounds() -> None:
    programs = text_fuzz.seeds((("mlp", "sgd"),))
    counts, bad, _, _ = text_fuzz.attack(text_fuzz.mutations(60, 1, programs))
    assert not bad, bad[0]
    assert counts["ran"], counts
    assert counts["refused: ParseError"], counts
    assert counts["refused: VerifyError"], counts


def test_names_of_torch_and_python_where_an_op_or_an_argument_stands_do_nothing() -> None:
    counts, bad = text_fuzz.attack_names(text_fuzz.Watch(), every=101)
    assert not bad, bad[0]
    assert counts["refused: ParseError"] > 100
