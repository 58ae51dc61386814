"""check_rule proves a user's rule on real arguments, or names the signatures that are wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import graphzero as gz
from graphzero.errors import SbpError
from graphzero.sbp import registry
from graphzero.sbp.rule_checks import check_rule

aten = torch.ops.aten


@torch.library.custom_op("proven::shift", mutates_args=())
def shift(x: Tensor, by: Tensor, dim: int = 0) -> Tensor:
    return (x - x.mean(dim, keepdim=True)) + by


@torch.library.custom_op("proven::bare", mutates_args=())
def bare(x: Tensor) -> Tensor:
    return x.clone()


X, BY = torch.rand(6, 4, dtype=torch.float64), torch.rand(6, 4, dtype=torch.float64)


@pytest.fixture(autouse=True)
def right() -> Iterator[None]:
    known = dict(registry._entries)
    gz.sbp.rule(shift, "N...+N...->N...")
    yield
    registry._entries.clear()
    registry._entries.update(known)
    registry._cache.clear()


def texts(*samples: object, ranks: tuple[int, ...] = (2, 3, 4)) -> list[str]:
    return [str(signature) for signature in check_rule(shift, *samples, ranks=ranks)]  # type: ignore[arg-type]


def test_a_right_rule_gives_the_signatures_that_it_allows() -> None:
    assert texts((X, BY)) == ["B, B -> B", "S(1), S(1) -> S(1)", "P, P -> P"]


def test_every_wrong_signature_is_named_with_its_ranks() -> None:
    gz.sbp.rule(shift, "...+~...->...")
    with pytest.raises(AssertionError, match="the rule breaks the law") as caught:
        texts((X, BY), ranks=(2, 3))
    lines = str(caught.value).splitlines()
    assert any("on 2 ranks, S(0), S(0) -> S(0): output 0 is not the op's own" in line for line in lines)
    assert any("on 3 ranks" in line for line in lines)


def test_keyword_arguments_stand_in_a_dict_at_the_end() -> None:
    with pytest.raises(AssertionError, match=r"S\(1\), S\(1\) -> S\(1\)"):
        texts((X, BY, {"dim": 1}))


def test_a_rule_function_is_tried_on_every_sample() -> None:
    @gz.sbp.rule(shift)
    def by_dim(call: gz.sbp.Call) -> str:
        line = "Nb" if call["dim"] == 0 else "aN"
        return f"{line}+{line}->{line}"

    assert {"S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)"} < set(texts((X, BY), (X, BY, 1)))


def test_a_rule_that_allows_nothing_is_no_rule() -> None:
    gz.sbp.rule(shift, "~NM,~NM->NM")
    with pytest.raises(AssertionError, match="allows nothing but B, B -> B on these samples"):
        texts((X, BY))


def test_what_cannot_be_tried_says_so() -> None:
    with pytest.raises(SbpError, match="proven.bare.default has no rule: give it one"):
        check_rule(bare, (X,))
    with pytest.raises(SbpError, match=r"needs arguments to try the rule on: check_rule\(op, "):
        check_rule(shift)
    with pytest.raises(SbpError, match="does not fit the shape"):
        gz.sbp.rule(shift, "ab+ab->ab")
        check_rule(shift, (X[0], BY[0]))


def test_an_op_may_be_named_by_its_packet_but_not_one_with_overloads() -> None:
    assert check_rule(torch.ops.proven.shift, (X, BY))
    with pytest.raises(SbpError, match=r"aten.add has \d+ overloads, and a rule is for one of them: .*aten.add.Tensor"):
        gz.sbp.rule(aten.add, "...+...->...")
