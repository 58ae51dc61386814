"""The table of names, views and copies is what the ops do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphzero.ir import ops
from graphzero.ir.aliases import AliasKind, alias_kind, is_copy, is_name, is_plain_view, is_view, is_whole_view

aten = torch.ops.aten
X = torch.arange(24.0).view(2, 3, 4)
CALLS: dict[AliasKind, list[tuple[Any, tuple[Any, ...]]]] = {
    AliasKind.NAME: [(aten.alias.default, ()), (aten.detach.default, ())],
    AliasKind.RESHAPE: [(aten.view.default, ([6, 4],)), (aten._unsafe_view.default, ([24],)),
                   (aten.reshape.default, ([4, 6],))],
    AliasKind.UNIT: [(aten.unsqueeze.default, (1,)), (aten.squeeze.default, ()), (aten.squeeze.dim, (0,)),
                (aten.squeeze.dims, ([0, 1],))],
    AliasKind.TURN: [(aten.transpose.int, (0, 2)), (aten.permute.default, ([2, 0, 1],))],
    AliasKind.PART: [(aten.expand.default, ([5, 2, 3, 4],)), (aten.slice.Tensor, (1, 1, 3)), (aten.select.int, (0, 1)),
                (aten.diagonal.default, ()), (aten.as_strided.default, ([2], [1]))],
    AliasKind.OTHER: [(aten.split.Tensor, (1,)), (aten.unbind.int, (0,)), (aten.unfold.default, (2, 2, 1)),
                 (aten.view.dtype, (torch.int32,)), (aten.unsafe_split.Tensor, (1,)),
                 (aten.unsafe_chunk.default, (2,))],
    AliasKind.COPY: [(aten.clone.default, ()), (aten._to_copy.default, ()), (aten.contiguous.default, ())],
}  # fmt: skip
NAMES = [str(op) for calls in CALLS.values() for op, _ in calls]
ALL = [(kind, op, args) for kind, calls in CALLS.items() for op, args in calls]


@pytest.mark.parametrize(
    ("kind", "op", "args"), ALL, ids=lambda x: str(x) if isinstance(x, torch._ops.OpOverload) else ""
)
def test_what_shares_storage_with_its_operand_is_a_view_and_a_copy_does_not(
    kind: AliasKind, op: Any, args: Any
) -> None:
    assert alias_kind(op) is kind
    x = X.transpose(0, 1) if op is aten.contiguous.default else X.clone()
    made = op(x, *args)
    for one in made if isinstance(made, (list, tuple)) else [made]:
        assert (one.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == is_view(op) != is_copy(op)


@pytest.mark.parametrize(
    ("kind", "op", "args"), ALL, ids=lambda x: str(x) if isinstance(x, torch._ops.OpOverload) else ""
)
def test_a_whole_view_shows_each_element_once_and_a_name_is_the_operand(kind: AliasKind, op: Any, args: Any) -> None:
    made = op(X, *args)
    if is_whole_view(op) or is_name(op):
        assert sorted(made.flatten().tolist()) == sorted(X.flatten().tolist())
    if is_name(op):
        assert isinstance(made, Tensor) and made.stride() == X.stride() and torch.equal(made, X)
    if kind is AliasKind.RESHAPE or kind is AliasKind.UNIT:
        assert torch.equal(made.flatten(), X.flatten())
    if is_plain_view(op):
        assert isinstance(made, Tensor) and made.dtype == X.dtype


def test_what_makes_values_of_its_own_stands_in_no_line() -> None:
    for op in (aten.add.Tensor, aten.mm.default, aten.relu.default, aten.cat.default, ops.all_gather, ops.launch, min):
        assert alias_kind(op) is None and not is_view(op)


def test_passes_own_ops_are_in_it() -> None:
    assert {one: alias_kind(one) for one in (ops.use, ops.relabel, ops.assign, ops.box, ops.slice_shard)} == {
        ops.use: AliasKind.MARK, ops.relabel: AliasKind.MARK, ops.assign: AliasKind.WRITTEN, ops.box: AliasKind.OTHER,
        ops.slice_shard: AliasKind.OTHER,
    }  # fmt: skip
