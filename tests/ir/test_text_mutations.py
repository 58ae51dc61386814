"""A text is a graph or is refused, and reading it does nothing else."""

from __future__ import annotations

import text_mutations


def test_mutated_programs_are_refused_or_run_within_their_bounds() -> None:
    programs = text_mutations.seeds((("mlp", "sgd"),))
    counts, bad, _, _ = text_mutations.attack(text_mutations.mutations(60, 1, programs))
    assert not bad, bad[0]
    assert counts["ran"], counts
    assert counts["refused: ParseError"], counts
    assert counts["refused: VerifyError"], counts


def test_names_of_torch_and_python_where_an_op_or_an_argument_stands_do_nothing() -> None:
    counts, bad = text_mutations.attack_names(text_mutations.Watch(), every=101)
    assert not bad, bad[0]
    assert counts["refused: ParseError"] > 100
