"""Whatever a text says, it is a graph or refused, and reading it does nothing else: ``bench/texts.py`` in short."""

from __future__ import annotations

import texts


def test_mutated_programs_are_refused_or_run_within_their_bounds() -> None:
    programs = texts.seeds((("mlp", "sgd"),))
    counts, bad, _, _ = texts.attack(texts.mutations(60, 1, programs))
    assert not bad, bad[0]
    assert counts["ran"], counts
    assert counts["refused: ParseError"], counts
    assert counts["refused: VerifyError"], counts


def test_names_of_torch_and_python_where_an_op_or_an_argument_stands_do_nothing() -> None:
    counts, bad = texts.attack_names(texts.Watch(), every=101)
    assert not bad, bad[0]
    assert counts["refused: ParseError"] > 100
