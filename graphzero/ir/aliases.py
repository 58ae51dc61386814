"""Table of the ops that make no value of their own: names, views and copies of their first operand.

========= ================================================================ =====================================
kind      the result is the operand                                        and lies
========= ================================================================ =====================================
NAME      itself, under another name: nothing is called                    in its storage
MARK      itself, in another SBP, or for one phase: nothing is called      in its storage
RESHAPE   in other sizes, its elements in their order                      in its storage; of some strides a copy
UNIT      with dims of one element more or fewer                           in its storage
TURN      with its dims in another order                                   in its storage
PART      cut, or spread out, into other dims                              in its storage
WRITTEN   as another value has been written over it                        in its storage
OTHER     seen in some way that nothing more is known of                   in its storage
COPY      once more, or in another dtype                                   elsewhere
========= ================================================================ =====================================

What is in no line, and whose schema says of no result that it is a view, makes a value of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ops import AS_GLOBAL, AS_LOCAL, PIN
from graphzero.sbp.op_call import cache_by_op

aten = torch.ops.aten


class AliasKind(Enum):
    """Relation of an op's result to its operand, for ops that make no value of their own."""

    NAME = auto()
    MARK = auto()
    RESHAPE = auto()
    UNIT = auto()
    TURN = auto()
    PART = auto()
    WRITTEN = auto()
    OTHER = auto()
    COPY = auto()


# ATen marks these as making a new tensor, but they return views of their operand's storage.
UNMARKED = (
    aten._unsafe_view.default, aten.reshape.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
)  # fmt: skip
ANNOTATIONS = (ops.use, PIN)  # marks that give a value a second SBP; a box is placed before them

_OF: Mapping[AliasKind, tuple[Any, ...]] = {
    AliasKind.NAME: (aten.alias.default, aten.detach.default),
    AliasKind.MARK: (*ANNOTATIONS, ops.relabel, AS_LOCAL, AS_GLOBAL),
    AliasKind.RESHAPE: (aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    AliasKind.UNIT: (aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
    AliasKind.TURN: (aten.t.default, aten.transpose.int, aten.permute.default),
    AliasKind.PART: (
        aten.expand.default, aten.slice.Tensor, aten.select.int, aten.diagonal.default, aten.as_strided.default,
    ),
    AliasKind.WRITTEN: ops.WRITING,
    AliasKind.OTHER: (ops.box, ops.slice_shard, ops.take, *UNMARKED[2:]),
    AliasKind.COPY: (aten.clone.default, aten._to_copy.default, aten.contiguous.default),
}  # fmt: skip
_KIND: Mapping[Any, AliasKind] = {op: kind for kind, some in _OF.items() for op in some}
_WHOLE = (AliasKind.RESHAPE, AliasKind.UNIT, AliasKind.TURN)
_SHOWN = (*_WHOLE, AliasKind.PART)


@cache_by_op
def alias_kind(target: Any) -> AliasKind | None:
    """The line of the table for an op; None for one that makes values of its own."""
    kind = _KIND.get(target)
    return AliasKind.OTHER if kind is None and _is_marked(target) else kind


def _is_marked(target: Any) -> bool:
    """Return whether an op's schema says that a result shares storage with an operand, and writes nothing there."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)


def is_name(target: Any) -> bool:
    """Return whether the op's result is its operand itself, marked or not."""
    return alias_kind(target) in (AliasKind.NAME, AliasKind.MARK)


def is_view(target: Any) -> bool:
    """Return whether the op's results lie in the storage of its first operand."""
    return alias_kind(target) not in (None, AliasKind.COPY)


def is_read_only_view(target: Any) -> bool:
    """Return whether the op's results lie in the storage of its first operand, and it writes nothing there."""
    return is_view(target) and target not in ops.WRITING


def is_whole_view(target: Any) -> bool:
    """Return whether the op shows all values of its operand in other dims."""
    return alias_kind(target) in _WHOLE


def is_plain_view(target: Any) -> bool:
    """Return whether the op is a view of one operand, of its dtype, of which it is known where which element lies."""
    return alias_kind(target) in _SHOWN


def is_reshape(target: Any) -> bool:
    """Return whether the op shows all values of its operand in other sizes, which of some strides is a copy."""
    return alias_kind(target) is AliasKind.RESHAPE


def is_copy(target: Any) -> bool:
    """Return whether the op makes its operand's values once more, in whatever dtype."""
    return alias_kind(target) is AliasKind.COPY


def is_narrowing(node: fx.Node) -> bool:
    """Return whether a node casts its operand to a smaller dtype, and does nothing else."""
    if node.target is not aten._to_copy.default or node.kwargs.keys() != {"dtype"}:
        return False
    return value.tensor_type(node).dtype.itemsize < value.tensor_type(value.operand(node)).dtype.itemsize


def unnamed(node: fx.Node) -> fx.Node:
    """The value that a node is, or is another name of."""
    while is_name(node.target):
        node = value.operand(node)
    return node
