"""A line of factors says which signatures an op has."""

from __future__ import annotations

import pytest
import torch

from graphzero.errors import SbpError
from graphzero.sbp.derive import Cut, derive
from graphzero.sbp.factors import NUMBER, parse
from graphzero.sbp.rules.view import view_line
from graphzero.sbp.signature import TensorMeta


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta(shape, dtype)


def lines(text: str, given: list, made: list, ranks: int | None = None) -> list[str]:
    return [str(s) for s in derive(parse(text), given, made, Cut(ranks))]


def test_a_product_splits_shared_letters_and_leaves_a_partial_of_a_summed_one() -> None:
    assert lines("mk,kn->mn", [meta(4, 6), meta(6, 8)], [meta(4, 8)]) == [
        "B, B -> B",
        "S(0), B -> S(0)",
        "S(1), S(0) -> P",
        "B, S(1) -> S(1)",
        "P, B -> P",
        "B, P -> P",
    ]


def test_an_added_term_without_the_summed_letter_must_be_partial() -> None:
    found = lines("n+mk,kn->mn", [meta(8), meta(4, 6), meta(6, 8)], [meta(4, 8)])
    assert "P, S(1), S(0) -> P" in found
    assert "B, S(1), S(0) -> P" not in found
    assert "P, P, B -> P" in found


def test_an_added_number_lets_no_partial_through() -> None:
    assert "P -> P" not in lines("...+...->...", [meta(4), NUMBER], [meta(4)])
    assert "P -> P" in lines("...,...->...", [meta(4), NUMBER], [meta(4)])


def test_a_summed_letter_is_not_split_beside_an_added_number() -> None:
    assert lines("k+->", [meta(4), NUMBER], [meta()]) == ["B -> B"]


def test_an_absent_optional_operand_leaves_no_place_and_no_term() -> None:
    assert lines("mk+m->m", [meta(4, 6), None], [meta(4)]) == ["B -> B", "S(0) -> S(0)", "S(1) -> P", "P -> P"]


def test_an_absent_output_leaves_no_place() -> None:
    assert lines("n->n,", [meta(4)], [meta(4), None]) == ["B -> B", "S(0) -> S(0)", "P -> P"]


def test_a_nonlinear_operand_is_never_partial() -> None:
    assert lines("~...->...", [meta(4, 6)], [meta(4, 6)]) == ["B -> B", "S(0) -> S(0)", "S(1) -> S(1)"]


def test_upper_case_and_unnamed_dims_are_not_split() -> None:
    assert lines("~aK_->aK_", [meta(4, 6, 2)], [meta(4, 6, 3)]) == ["B -> B", "S(0) -> S(0)"]


def test_the_rest_broadcasts_from_the_right() -> None:
    found = lines("...,...->...", [meta(4, 1), meta(6)], [meta(4, 6)])
    assert found[1:3] == ["S(0), B -> S(0)", "B, S(0) -> S(1)"]


def test_an_output_depends_on_the_operands_it_names() -> None:
    found = lines("nC,~n->n:0,:1", [meta(4, 3), meta(4)], [meta(4), meta()])
    assert "S(0), S(0) -> S(0), P" in found
    assert "P, B -> P, B" in found


def test_a_reduction_word_names_the_partial() -> None:
    assert lines("max: ak->a", [meta(4, 6)], [meta(4)]) == [
        "B -> B",
        "S(0) -> S(0)",
        "S(1) -> P(max)",
        "P(max) -> P(max)",
    ]


def test_a_maximum_is_not_taken_over_a_piece_that_may_be_empty() -> None:
    assert "S(0) -> P(max)" not in lines("max: k->", [meta(4)], [meta()], ranks=3)
    assert "S(0) -> P" in lines("k->", [meta(4)], [meta()], ranks=3)


def test_an_op_that_moves_values_passes_partials_of_every_kind() -> None:
    assert lines("sum max min: a->a", [meta(4)], [meta(4)])[2:] == ["P -> P", "P(max) -> P(max)", "P(min) -> P(min)"]


def test_an_operand_read_for_its_shape_gives_a_whole_output_whatever_it_holds() -> None:
    assert lines("?...->...", [meta(4)], [meta(4)])[2:] == ["P -> B", "P(max) -> B", "P(min) -> B"]


def test_a_letter_that_only_outputs_have_is_made_in_pieces() -> None:
    assert lines("->ab", [], [meta(4, 6)])[1:] == [" -> S(0)", " -> S(1)"]


def test_a_dim_is_split_with_the_dim_that_it_begins_with_where_both_divide() -> None:
    def view(ranks: int | None) -> list[str]:
        return lines("a_->(a_)", [meta(6, 4)], [meta(24)], ranks)

    assert "S(0) -> S(0)" in view(3)
    assert "S(0) -> S(0)" not in view(4)
    assert "S(0) -> S(0)" in view(None)


def test_a_merged_dim_is_split_in_sections_where_an_inner_dim_is_cut() -> None:
    assert lines("abc->(ab)c", [meta(6, 4, 3)], [meta(24, 3)], 2)[1:4] == [
        "S(0) -> S(0)", "S(1) -> S(0, 6)", "S(2) -> S(1)"
    ]  # fmt: skip
    assert "S(1) -> S(0, 6)" not in lines("abc->(ab)c", [meta(6, 4, 3)], [meta(24, 3)], 3)  # 4 over 3 is uneven
    assert lines("(_a)->a,a,a", [meta(12)], [meta(4)] * 3, 2)[1] == "S(0, 3) -> S(0), S(0), S(0)"


def test_a_dim_of_size_one_or_none_is_split_like_others() -> None:
    assert "S(0) -> S(0)" in lines("ab->ab", [meta(1, 4)], [meta(1, 4)], ranks=2)
    assert "S(0) -> P" in lines("ab->b", [meta(1, 4)], [meta(4)], ranks=2)
    assert "S(1) -> S(1)" in lines("ab->ab", [meta(4, 0)], [meta(4, 0)], ranks=2)
    assert lines("max: ab->b", [meta(1, 4)], [meta(4)], ranks=2) == ["B -> B", "S(1) -> S(0)", "P(max) -> P(max)"]
    assert lines("...,...->...", [meta(1, 4), meta(3, 4)], [meta(3, 4)], ranks=2)[1:3] == [
        "S(1), S(1) -> S(1)", "B, S(0) -> S(0)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ((1, 6), (1, 2, 3), "sum max min:a(bc)->abc"),
        ((6, 1), (2, 3, 1), "sum max min:(bc)a->bca"),
        ((1, 6), (2, 3), "sum max min:1(ab)->ab"),
        ((0, 6), (0, 3, 2), "sum max min:a(bc)->abc"),
        ((0,), (3, 0), "sum max min:(ab)->ab"),
        ((2, 0, 4), (0,), "sum max min:ab_->(ab)"),
    ],
)
def test_a_view_moves_dims_of_one_and_of_no_elements(
    before: tuple[int, ...], after: tuple[int, ...], line: str
) -> None:
    found = view_line(before, after)
    assert found is not None and found.replace(" ", "").replace("summaxmin", "sum max min") == line


def test_dims_are_split_in_the_sections_that_are_asked_for() -> None:
    def mm(sections: list[int], ranks: int | None = 2) -> list[str]:
        found = derive(
            parse("mk,kn->mn"), [meta(4, 6), meta(6, 12)], [meta(4, 12)], Cut(ranks, sections=frozenset(sections))
        )
        return [str(s) for s in found]

    assert "B, S(1, 3) -> S(1, 3)" in mm([3])
    assert "B, S(1, 3) -> S(1, 3)" not in mm([])
    assert "S(1, 3), S(0, 3) -> P" in mm([3])
    assert "B, S(1, 5) -> S(1, 5)" not in mm([5])  # 12 does not fall into five sections
    assert "B, S(1, 4) -> S(1, 4)" not in mm([4])  # nor can each of four be cut in two
    inner = derive(parse("(ab)->ab"), [meta(24)], [meta(4, 6)], Cut(3, sections=frozenset({8})))
    assert "S(0, 8) -> S(1, 2)" in [str(s) for s in inner]


def test_letters_of_merged_dims_get_their_sizes_from_the_other_side() -> None:
    with pytest.raises(SbpError, match=r"\(ab\) has size 20"):
        lines("ab->(ab)", [meta(4, 6)], [meta(20)])


def test_dims_of_one_size_may_be_cut_unevenly() -> None:
    assert "S(0) -> S(1)" in lines("ab->ba", [meta(5, 4)], [meta(4, 5)], ranks=2)


def test_truth_values_and_truncated_numbers_do_not_add() -> None:
    truth = meta(4, dtype=torch.bool)
    assert "P, P -> P" not in lines("...+...->...", [truth, truth], [truth])
    assert "P -> P" not in lines("...->...", [meta(4)], [meta(4, dtype=torch.int64)])
    assert "P -> P" in lines("...->...", [meta(4, dtype=torch.int64)], [meta(4)])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mk,kn", "one `->`"),
        ("a->b->c", "one `->`"),
        ("m!->m", "cannot read 'm!'"),
        ("aa->a", "occurs twice"),
        ("......->...", "occurs twice"),
        ("a->a:x", "operand numbers"),
        ("a->a:3", "depends on operand 3"),
        ("product: a->a", "is not a reduction"),
    ],
)
def test_a_line_that_cannot_be_read_is_an_error_that_says_why(text: str, says: str) -> None:
    with pytest.raises(SbpError, match=says):
        parse(text)


@pytest.mark.parametrize(
    ("text", "shapes", "out", "says"),
    [
        ("mk,kn->mn", [(4, 6), (5, 8)], (4, 8), "'k' has sizes"),
        ("...+...->...", [(4,), (5,)], (5,), "the rest has sizes"),
        ("mk,kn->mn", [(4, 6), (6,)], (4, 8), "does not fit the shape"),
        ("mk,kn->mn", [(4, 6)], (4, 8), "2 operands"),
        ("m1->m", [(4, 6)], (4,), "written 1 has size 6"),
        ("...e->e", [()], (4,), "does not fit"),
    ],
)
def test_shapes_that_contradict_the_line_are_an_error_that_shows_both(
    text: str, shapes: list[tuple[int, ...]], out: tuple[int, ...], says: str
) -> None:
    with pytest.raises(SbpError, match=says):
        derive(parse(text), [TensorMeta(s) for s in shapes], [TensorMeta(out)])
