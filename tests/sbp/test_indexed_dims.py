"""Ops that index split dims: each rank reads zeros outside of its piece, or writes its piece alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sample_table import f, i, u

from graphzero.sbp import B, Offset, P, S, Signature, registry, rule, signatures
from graphzero.sbp.rule_checks import check_rule, meta_of

aten = torch.ops.aten
SUM, NONE, MEAN = 2, 0, 1


def sign(*inputs: Any, makes: tuple[Any, ...]) -> Signature:
    return Signature(inputs, makes)


CALLS = [
    (aten.embedding, (f(7, 4), i(7, 3, 5)), sign(S(0), B, makes=(P,))),
    (aten.embedding, (f(7, 4), i(7, 3, 5), 2), sign(S(0), B, makes=(P,))),
    (aten.embedding_dense_backward, (f(3, 5, 4), i(7, 3, 5), 7, -1, False), sign(B, B, makes=(S(0),))),
    (aten.embedding_dense_backward, (f(3, 5, 4), i(7, 3, 5), 7, 2, False), sign(B, B, makes=(S(0),))),
    (aten.nll_loss_forward, (f(6, 7), i(7, 6), None, SUM, 3), sign(S(1), B, makes=(P, B))),
    (aten.nll_loss_forward, (f(6, 7), i(7, 6), u(7), SUM, -100), sign(S(1), B, S(0), makes=(P, P))),
    (aten.nll_loss_forward, (f(6, 7), i(7, 6), u(7), NONE, -100), sign(S(1), B, S(0), makes=(P, B))),
    (aten.nll_loss_forward, (f(6, 7), i(3, 6), None, SUM, 1), sign(S(1), B, makes=(P, B))),  # no target on a last rank
    (aten.nll_loss_forward, (f(7), i(7), None, SUM, -100), sign(S(0), B, makes=(P, B))),
    (aten.nll_loss2d_forward, (f(2, 7, 3, 2), i(7, 2, 3, 2), u(7), SUM, 3), sign(S(1), B, S(0), makes=(P, P))),
    (aten.nll_loss_backward, (u(), f(6, 7), i(7, 6), u(7), SUM, 3, u()), sign(B, S(1), B, S(0), B, makes=(S(1),))),
    (aten.nll_loss_backward, (u(6), f(6, 7), i(7, 6), None, NONE, 3, u()), sign(B, S(1), B, B, makes=(S(1),))),
    (aten.nll_loss2d_backward, (u(), f(2, 7, 3, 2), i(7, 2, 3, 2), None, SUM, 3, u()),
     sign(B, S(1), B, B, makes=(S(1),))),
    (aten.gather, (f(4, 7), 1, i(7, 4, 3)), sign(S(1), B, makes=(P,))),
    (aten.gather, (f(7, 4), -2, i(7, 3, 4)), sign(S(0), B, makes=(P,))),
    (aten.index_select, (f(4, 7), 1, i(7, 5)), sign(S(1), B, makes=(P,))),
    (aten.scatter_add, (f(4, 7), 1, i(7, 4, 6), f(4, 6)), sign(S(1), B, B, makes=(S(1),))),
    (aten.index_add, (f(7, 4), 0, i(7, 6), f(6, 4), {"alpha": 2}), sign(S(0), B, B, makes=(S(0),))),
    (aten.scatter.value, (f(4, 7), 1, i(7, 4, 3), 1.5), sign(S(1), B, makes=(S(1),))),
]  # fmt: skip


@pytest.mark.parametrize(("op", "sample", "allowed"), CALLS, ids=lambda x: str(x) if callable(x) else "")
def test_a_dim_that_an_index_points_to_may_be_split(op: Any, sample: tuple[Any, ...], allowed: Signature) -> None:
    assert allowed in check_rule(op if hasattr(op, "_schema") else op.default, sample, ranks=(2, 3, 5))


def allowed_by(op: Any, *args: Any) -> list[str]:
    made = op(*args)
    made = [made] if isinstance(made, torch.Tensor) else list(made)
    metas = [meta_of(x) if isinstance(x, torch.Tensor) else x for x in args]
    return [str(signature) for signature in signatures(op, metas, {}, [meta_of(x) for x in made], 2)]


def test_rows_that_are_divided_by_how_often_they_occur_are_not_split() -> None:
    assert "B, B -> S(0)" not in allowed_by(aten.embedding_dense_backward.default, f(3, 5, 4), i(7, 3, 5), 7, -1, True)


def test_a_mean_over_targets_is_not_taken_in_pieces() -> None:
    for reduction, found in ((SUM, True), (MEAN, False)):
        lines = allowed_by(aten.nll_loss_forward.default, f(6, 7), i(7, 6), None, reduction, -100)
        assert ("S(1), B -> P, B" in lines) == found


@pytest.mark.parametrize("index", [9, -1])
@pytest.mark.parametrize("start", [0, 4])
def test_an_index_outside_of_the_whole_dim_fails_on_every_rank_as_in_aten(start: int, index: int) -> None:
    table, at, where = f(4, 3), torch.tensor([1, 5, index]), {"start": start, "total": 8}
    ours = torch.ops.graphzero
    with pytest.raises(IndexError):
        ours.embedding_from(table, at, **where)
    with pytest.raises(IndexError, match="out of bounds"):
        ours.nll_loss_forward_from(f(3, 4), at, None, SUM, -100, **where)
    with pytest.raises((IndexError, RuntimeError), match="out of (bounds|range)"):
        ours.gather_from(f(3, 4), 1, at.view(3, 1), **where)


def test_what_is_not_a_number_stays_where_it_is() -> None:
    """A piece reads its first row for what it does not have; that row may hold anything."""
    table = f(8, 3)
    table[0], table[4] = float("nan"), float("inf")
    at = torch.tensor([1, 5, 7, 2])
    found = [torch.ops.graphzero.embedding_from(table[s : s + 4], at, start=s, total=8) for s in (0, 4)]
    assert torch.equal(found[0] + found[1], table[at])
    grad = f(4, 3)
    grad[1] = float("inf")
    made = torch.ops.graphzero.index_add_from(f(4, 3), 0, at, grad, start=0, total=8)
    assert made.isfinite().all()


@pytest.fixture
def forgotten() -> Iterator[None]:
    known = dict(registry._entries)
    yield
    registry._entries.clear()
    registry._entries.update(known)
    registry._cache.clear()


def test_an_op_of_ones_own_says_what_it_does_on_a_piece(forgotten: None) -> None:
    @torch.library.custom_op("indexed_dims_test::rows", mutates_args=())
    def rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return table[index]

    @torch.library.custom_op("indexed_dims_test::rows_from", mutates_args=())
    def rows_from(table: torch.Tensor, index: torch.Tensor, *, start: int, total: int) -> torch.Tensor:
        here = (index >= start) & (index < start + table.shape[0])
        found = table.new_zeros((*index.shape, *table.shape[1:]))
        found[here] = table[index[here] - start]
        return found

    rule(rows, "Ve,~...->...e", offset=Offset(rows_from, "ve,~...->...e", 0, 0))
    assert sign(S(0), B, makes=(P,)) in check_rule(rows, (f(7, 4), i(7, 3)))
    rule(rows, "Ve,~...->...e", offset=Offset(op_that_is_wrong, "ve,~...->...e", 0, 0))
    with pytest.raises(AssertionError, match=r"S\(0\), B -> P: output 0 is not the op's own"):
        check_rule(rows, (f(7, 4), i(7, 3)))


def op_that_is_wrong(table: torch.Tensor, index: torch.Tensor, *, start: int, total: int) -> torch.Tensor:
    return table[index.clamp(max=table.shape[0] - 1)]
