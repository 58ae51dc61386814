"""Rules are found, cached and applied to calls."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphzero.errors import SbpError
from graphzero.ir.calls import signatures_of
from graphzero.ir.text.parser import parse
from graphzero.sbp import registry
from graphzero.sbp.op_call import Call
from graphzero.sbp.rank_call import local_args
from graphzero.sbp.registry import NoRuleWarning, has_rule, rule, signatures
from graphzero.sbp.rule_checks import violations
from graphzero.sbp.shards import LocalSize
from graphzero.sbp.signature import Signature, TensorMeta
from graphzero.sbp.types import B, P, S

aten = torch.ops.aten
M = TensorMeta


def lines(op: Any, args: tuple[Any, ...], out: Any, ranks: int | None = None, **kwargs: Any) -> list[str]:
    return [str(s) for s in signatures(op, args, kwargs, out, ranks)]


@pytest.fixture
def restored() -> Iterator[None]:
    registry.has_rule(aten.mm.default)
    entries = dict(registry._entries)
    yield
    registry._entries.clear()
    registry._entries.update(entries)
    registry._cache.clear()


def double(x: torch.Tensor, times: float = 2.0) -> torch.Tensor:
    return x * times


def test_all_broadcast_comes_first_and_splits_in_the_order_of_dims() -> None:
    found = lines(aten.relu.default, (M((4, 6)),), M((4, 6)))
    assert found[:3] == ["B -> B", "S(0) -> S(0)", "S(1) -> S(1)"]


def test_the_same_call_gives_the_same_object() -> None:
    args = ([M((4, 6)), M((4, 2))], 1)
    assert signatures(aten.cat.default, args, {}, M((4, 8))) is signatures(aten.cat.default, args, {}, M((4, 8)))


def test_calls_that_differ_in_a_number_or_its_kind_are_told_apart() -> None:
    assert "P -> P" in lines(aten.constant_pad_nd.default, (M((4,)), [1, 1], 0), M((6,)))
    assert "P -> P" not in lines(aten.constant_pad_nd.default, (M((4,)), [1, 1], 1), M((6,)))
    assert "P -> P" in lines(aten._to_copy.default, (M((4,)),), M((4,)))
    assert "P -> P" not in lines(aten._to_copy.default, (M((4,)),), M((4,), torch.int64))


def test_a_run_time_number_may_multiply_but_not_be_added_to_a_partial() -> None:
    lr = object()
    assert "P -> P" in lines(aten.mul.Tensor, (M((4,)), lr), M((4,)))
    assert "P -> P" not in lines(aten.add.Tensor, (M((4,)), lr), M((4,)))
    assert "P -> P" not in lines(aten.add.Tensor, (M((4,)), 1.0), M((4,)))
    assert "P, P -> P" in lines(aten.add.Tensor, (M((4,)), M((4,))), M((4,)), alpha=lr)
    assert "P -> P" not in lines(aten.masked_fill.Scalar, (M((4,)), M((4,), torch.bool), lr), M((4,)))


def test_tensors_given_by_name_keep_the_order_in_which_they_are_given() -> None:
    found = signatures(aten.mm.default, (), {"mat2": M((6, 8)), "self": M((4, 6))}, M((4, 8)))
    assert Signature((B, S(0)), (S(0),)) in found
    assert Signature((S(1), B), (S(1),)) in found


def test_an_op_without_a_rule_gives_all_broadcast_and_warns_once_by_name(restored: None) -> None:
    op = aten.inverse.default
    registry._warned.discard(op)
    assert not has_rule(op)
    with pytest.warns(NoRuleWarning, match=r"aten\.inverse\.default has no SBP rule"):
        assert lines(op, (M((4, 4)),), M((4, 4))) == ["B -> B"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines(op, (M((5, 5)),), M((5, 5)))


def test_a_rule_may_be_a_line_a_function_or_a_list_of_signatures(restored: None) -> None:
    rule(double, "...->...")
    assert lines(double, (M((4,)),), M((4,))) == ["B -> B", "S(0) -> S(0)", "P -> P"]
    rule(double, lambda call: "...->..." if call["times"] != 0 else None)
    assert lines(double, (M((4,)), 0), M((4,))) == ["B -> B"]
    assert len(lines(double, (M((4,)),), M((4,)))) == 3

    @rule(double)
    def listed(call: Call) -> list[Signature]:
        return [Signature((P,), (P,))]

    assert lines(double, (M((4,)),), M((4,))) == ["B -> B", "P -> P"]


def test_a_users_rule_replaces_the_one_that_was_there(restored: None) -> None:
    rule(aten.relu.default, "~...->...")
    assert lines(aten.relu.default, (M((4,)),), M((4,))) == ["B -> B", "S(0) -> S(0)"]


def test_a_users_rule_is_the_rule_of_a_graph_that_has_asked_before(restored: None) -> None:
    graph = parse("graph g(dp=2)\n  x = batch() : f32[4]\nforward:\n  y = relu(x) : f32[4]\n  return y\n")
    assert Signature((P,), (P,)) not in signatures_of(graph, graph.node("y"), 0)
    rule(aten.relu.default, lambda call: [Signature((P,), (P,))])
    assert Signature((P,), (P,)) in signatures_of(graph, graph.node("y"), 0)


def test_a_rule_that_cannot_be_read_is_refused_when_it_is_given() -> None:
    with pytest.raises(SbpError, match="one `->`"):
        rule(double, "...")


def test_a_rule_that_contradicts_a_call_is_an_error_that_names_the_op(restored: None) -> None:
    rule(double, "mk,kn->mn")
    with pytest.raises(SbpError, match="rule of .*double: .*2 operands"):
        lines(double, (M((4,)),), M((4,)))


@pytest.mark.parametrize(
    ("line", "x"),
    [
        ("...->...", torch.rand(4, dtype=torch.float64)),  # exp is not linear
        ("~ak->a", torch.rand(4, 5, dtype=torch.float64)),  # and keeps its dims
    ],
)
def test_the_law_catches_a_wrong_rule(restored: None, line: str, x: torch.Tensor) -> None:
    op = aten.exp.default if x.dim() == 1 else aten.logsumexp.default
    args = (x,) if x.dim() == 1 else (x, [1])
    rule(op, line)
    assert violations(op, args, {}, ranks=2)


def test_the_law_catches_a_letter_that_is_not_shared(restored: None) -> None:
    rule(aten.cumsum.default, "ab->ab")
    assert violations(aten.cumsum.default, (torch.rand(4, 5, dtype=torch.float64), 1), {}, ranks=2)


def test_sizes_in_arguments_become_those_of_a_rank() -> None:
    def local(shape: Any, nd: Any) -> list[Any]:
        sizes = list(shape)
        for axis, sbp in zip(("dp", "tp"), nd, strict=False):
            if sbp.is_split:
                sizes[sbp.dim] = LocalSize(shape[sbp.dim], axis)
        return sizes

    args, _ = local_args(aten.view.default, (None, [-1, 4]), {}, [((8, 2, 2), (S(0),))], [((8, 4), (S(0),))], local)
    assert args[1] == [LocalSize(8, "dp"), 4]
    args, _ = local_args(aten.expand.default, (None, [8, -1]), {}, [((4,), (B, S(0)))], [((8, 4), (S(0), S(1)))], local)
    assert args[1] == [LocalSize(8, "dp"), LocalSize(4, "tp")]
    args, kwargs = local_args(aten.mm.default, (1, 2), {"x": 3}, [], [], local)
    assert (args, kwargs) == ((1, 2), {"x": 3})


def test_a_view_is_split_where_both_sides_are_cut_at_the_same_values() -> None:
    heads = lines(aten.view.default, (M((4, 6, 8)), [4, 6, 2, 4]), M((4, 6, 2, 4)), ranks=2)
    assert heads[:4] == ["B -> B", "S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)"]
    flat = lines(aten.view.default, (M((6, 16)), [96]), M((96,)))
    assert "S(0) -> S(0)" in flat
    assert "S(0) -> S(0)" not in lines(aten.view.default, (M((6, 16)), [96]), M((96,)), ranks=4)


def test_a_squeezed_dim_that_could_become_one_is_whole() -> None:
    assert lines(aten.squeeze.dim, (M((4, 1)), 1), M((4,)))[1] == "S(0) -> S(0)"
    assert "S(0) -> S(0)" not in lines(aten.squeeze.dim, (M((4, 1)), 0), M((4, 1)))


def test_random_numbers_follow_the_split_of_what_they_are_like() -> None:
    args = (M((4, 6)), M((), torch.int64), 0, [0, 0], [4, 6])
    found = lines(torch.ops.graphzero.uniform_like.default, args, M((4, 6)))
    assert found[:4] == ["B, B -> B", "S(0), B -> S(0)", "S(1), B -> S(1)", "P, B -> B"]


def test_rounding_at_random_follows_the_split_and_takes_no_partial_sums() -> None:
    args = (M((4, 6)), M((), torch.int64), 0, [0, 0], [4, 6])
    found = lines(torch.ops.graphzero.stochastic_round.default, args, M((4, 6), torch.bfloat16))
    assert found == ["B, B -> B", "S(0), B -> S(0)", "S(1), B -> S(1)"]


def test_dropout_masks_of_pieces_are_pieces_of_the_mask() -> None:
    uniform = torch.ops.graphzero.uniform_like.default
    like, key = torch.empty(4, 6), torch.tensor(7)
    whole = uniform(like, key, 3, [0, 0], [4, 6])
    assert torch.equal(uniform(like[:, 3:], key, 3, [0, 3], [4, 6]), whole[:, 3:])
