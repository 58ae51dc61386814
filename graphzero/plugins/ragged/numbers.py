"""Numbers that were sizes of padded inputs become those of what was given: the counts that means divide by."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.value import TensorType
from graphzero.passes.place.expand import DefinitionWriter
from graphzero.plugins.ragged.sizes import Formula, Place
from graphzero.plugins.ragged.work import PaddedOp
from graphzero.sbp import rank_call

aten = torch.ops.aten
_SCALARS = ("div", "mul", "sub", "lt", "le", "gt", "ge", "eq", "ne")
WITH_NUMBER = {getattr(aten, name).Scalar: getattr(aten, name).Tensor for name in _SCALARS}
WITH_TENSOR = (aten.div.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.add.Tensor)


def write_numbers(work: PaddedOp) -> None:
    """Let the op read every number that depends on sizes at the sizes of what was given.

    Raises CaptureError for a number that is not known as a count, or that the op does not take as a value.
    """
    for place, values in list(work.numbers.items()):
        if _name_of(work.node, place) in rank_call.size_arguments(work.node.target):  # type: ignore[arg-type]
            continue
        formula = work.sizes.formula(values)
        if formula is None or not _put(work, place, formula):
            names = [name for name in work.sizes.names_of(values) if name in work.ragged] or list(work.ragged)
            raise work.refusal(
                names[0],
                f"reads the number {values[0]!r}, which depends on sizes ({values[-1]!r} at others), and is not known "
                "as a count that it could take as a value",
            )


def _put(work: PaddedOp, place: Place, formula: Formula) -> bool:
    """Let the op read a number of what was given; whether it can."""
    node, type_ = work.node, value.type_of(work.node)
    if node.target is aten.full.default and place == 1:
        number = work.masks.number(formula, _exact(type_.dtype))
        number = DefinitionWriter(work.masks.graph, node).to(number, type_.dtype)
        node.target, node.args, node.kwargs = aten.expand.default, (number, list(type_.shape)), {}
        return True
    takes = node.target in WITH_NUMBER or node.target in WITH_TENSOR
    if not takes or place != 1 or len(work.operands) != 1:
        return False
    number = work.masks.number(formula, _dtype(value.tensor_type(work.operands[0]).dtype, type_.dtype, formula))
    node.target = WITH_NUMBER.get(node.target, node.target)
    node.args = (node.args[0], number, *node.args[2:])
    dtype = _dtype_made(node)
    if dtype is not type_.dtype:
        _cast(work, dtype, type_)
    return True


def _dtype(x: torch.dtype, result: torch.dtype, formula: Formula) -> torch.dtype:
    """Dtype of the number: as exact as a Python number is next to ``x``, for a result of dtype ``result``."""
    if x.is_floating_point:
        return _exact(x)
    is_whole = formula.power == 1 and isinstance(formula.factor, int) and isinstance(formula.plus, int)
    return x if is_whole and not result.is_floating_point and x is not torch.bool else _exact(result)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """A floating dtype that counts in steps of one for as long as may be."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _dtype_made(node: fx.Node) -> torch.dtype:
    def meta(x: fx.Node) -> Any:
        type_ = value.tensor_type(x)
        return torch.empty(type_.shape, dtype=type_.dtype, device="meta")

    target: Any = node.target
    dtype: torch.dtype = target(*fx.map_arg(node.args, meta), **node.kwargs).dtype
    return dtype


def _cast(work: PaddedOp, result: torch.dtype, type_: TensorType) -> None:
    """The op becomes the cast of what it makes."""
    node, graph = work.node, work.masks.graph
    with graph.graph.inserting_before(node):
        wide = graph.call(node.target, node.args, TensorType(result, type_.shape), like=node, kwargs=dict(node.kwargs))
    node.target, node.args, node.kwargs = aten._to_copy.default, (wide,), {"dtype": type_.dtype}


def _name_of(node: fx.Node, place: Place) -> str:
    if isinstance(place, str):
        return place
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return names[place] if place < len(names) else ""
