"""An op for a stack of values: what it computes of one, it computes of each along a dim that is first.

Like a batching rule of ``torch.vmap``, but of ops in a graph, whose numbers may be known only when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.aliases import AliasKind, alias_kind
from graphzero.ir.value import TensorType
from graphzero.sbp.op_call import Call, argument_names

aten = torch.ops.aten


@dataclass(frozen=True)
class Lifted:
    """An operand as a stack of it, with ``ones`` dims of one element put in after the first, so that it broadcasts."""

    node: fx.Node
    ones: int = 0


@dataclass(frozen=True)
class StackedOp:
    """The computation of the stack of an op's results. args, kwargs: operands that come as stacks are ``Lifted``."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class _Use:
    """One op in a graph. stacks: operands that come as stacks. count: the size of each stack."""

    node: fx.Node
    stacks: Collection[fx.Node]
    count: int

    @property
    def ndim(self) -> int:
        """Number of dims of the first operand."""
        return _ndim(value.own_operands(self.node)[0])

    def all_stacked(self, operands: Sequence[Any] | None = None) -> bool:
        checked = value.own_operands(self.node) if operands is None else operands
        return all(operand in self.stacks for operand in checked)

    def lifted(self, args: Any, ndim: int | None = None) -> Any:
        """Arguments with stacks where they are, of values brought to ``ndim`` dims; None: as they are."""

        def lift(x: fx.Node) -> Any:
            ones = ndim - _ndim(x) if ndim is not None and value.is_tensor(x) else 0
            return Lifted(x, max(ones, 0)) if x in self.stacks else x

        return fx.map_arg(args, lift)

    def stacked_call(self, target: Any, args: Any, ndim: int | None = None) -> StackedOp:
        return StackedOp(target, tuple(self.lifted(args, ndim)), self.lifted(dict(self.node.kwargs), ndim))

    def with_arguments(self, new: Mapping[str, Any]) -> StackedOp:
        """The same op with other arguments."""
        schema = self.node.target._schema.arguments  # type: ignore[union-attr]
        names = argument_names(self.node.target)
        given = dict(zip(names, self.node.args, strict=False)) | dict(self.node.kwargs) | dict(new)
        places = max(i for i, a in enumerate(schema) if a.name in given and not a.kwarg_only) + 1
        args = tuple(given.get(a.name, a.default_value) for a in schema[:places])
        rest = {a.name: given[a.name] for a in schema[places:] if a.name in given}
        return StackedOp(self.node.target, tuple(self.lifted(args)), self.lifted(rest))


Rule = Callable[[_Use], StackedOp | None]


def stacked_op(node: fx.Node, stacks: Collection[fx.Node], count: int) -> StackedOp | None:
    """The op at ``node`` for values of which those in ``stacks`` come ``count`` at a time.

    None where there is none, or none that is known: a rule for it is a line of ``_RULES``.
    """
    rule = _RULES.get(node.target) or (_elementwise if _is_elementwise(node) else None)
    return rule(_Use(node, stacks, count)) if rule is not None else None


def stacked_type(type_: Any, count: int) -> Any:
    """The type of a stack of such values."""
    if isinstance(type_, tuple):
        return tuple(None if one is None else stacked_type(one, count) for one in type_)
    return TensorType(type_.dtype, (count, *type_.shape))


def _ndim(node: fx.Node) -> int:
    return len(value.tensor_type(node).shape)


def _is_elementwise(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not value.is_tensor(node):
        return False
    if node.kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        return False
    return torch.Tag.pointwise in node.target.tags or alias_kind(node.target) in (AliasKind.COPY, AliasKind.NAME)


def _elementwise(use: _Use) -> StackedOp:
    return use.stacked_call(use.node.target, use.node.args, _ndim(use.node))


def _product(use: _Use) -> StackedOp | None:
    return use.stacked_call(aten.bmm.default, use.node.args) if use.all_stacked() else None


def _added_product(use: _Use) -> StackedOp | None:
    term, *factors = use.node.args
    if not use.all_stacked(factors):
        return None
    return use.stacked_call(aten.baddbmm.default, [*use.lifted([term], 2), *factors])


def _turned(use: _Use) -> StackedOp | None:
    return StackedOp(aten.transpose.int, (Lifted(value.operand(use.node)), 1, 2), {}) if use.ndim == 2 else None


def _permuted(use: _Use) -> StackedOp:
    x, dims = use.node.args
    return StackedOp(aten.permute.default, (Lifted(x), [0, *_further(dims, use.ndim)]), {})  # type: ignore[arg-type]


def _viewed(use: _Use) -> StackedOp:
    shape = value.tensor_type(use.node).shape
    return StackedOp(use.node.target, (Lifted(use.node.args[0]), [use.count, *shape]), {})  # type: ignore[arg-type]


def _expanded(use: _Use) -> StackedOp:
    shape = value.tensor_type(use.node).shape
    operand = Lifted(use.node.args[0], len(shape) - use.ndim)  # type: ignore[arg-type]
    return StackedOp(use.node.target, (operand, [use.count, *shape]), {})


def _as_it_is(use: _Use) -> StackedOp | None:
    """An op that takes leading dims for a stack of its own accord."""
    return use.stacked_call(use.node.target, use.node.args) if use.all_stacked() else None


def _dims(use: _Use, *names: str, of_result: bool = False) -> StackedOp | None:
    """An op that is told dims of its operands, or of its result: each is one further on.  None given: all of them."""
    if not use.all_stacked():
        return None
    ndim = use.ndim + (1 if of_result else 0)
    call = Call(use.node.target, use.node.args, use.node.kwargs, ())  # type: ignore[arg-type]
    return use.with_arguments({name: _further(call[name], ndim) for name in names})


def _further(dims: Any, ndim: int) -> Any:
    if isinstance(dims, int):
        return dims % max(ndim, 1) + 1
    return [dim % max(ndim, 1) + 1 for dim in dims or range(ndim)]


_AS_THEY_ARE = (
    aten.triu.default, aten.tril.default, aten.linalg_cholesky_ex.default, aten.linalg_inv_ex.default,
    aten._linalg_eigh.default, aten._linalg_svd.default, aten.linalg_qr.default, aten._linalg_det.default,
    aten._linalg_slogdet.default, aten.linalg_matrix_exp.default, aten.linalg_solve_triangular.default,
    aten._linalg_solve_ex.default, aten.cholesky_solve.default, aten.cholesky_inverse.default,
)  # fmt: skip
_RULES: Mapping[Any, Rule] = {
    aten.mm.default: _product,
    aten.addmm.default: _added_product,
    aten.t.default: _turned,
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _viewed),
    aten.expand.default: _expanded,
    **dict.fromkeys(_AS_THEY_ARE, _as_it_is),
    **dict.fromkeys(
        (
            aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.linalg_vector_norm.default,
            aten.select.int, aten.slice.Tensor, aten.squeeze.dim, aten.squeeze.dims, aten.cat.default,
            aten.cumsum.default, aten._softmax.default,
        ),
        lambda use: _dims(use, "dim"),
    ),
    aten.permute.default: _permuted,
    aten.flip.default: lambda use: _dims(use, "dims"),
    aten.transpose.int: lambda use: _dims(use, "dim0", "dim1"),
    aten.diagonal.default: lambda use: _dims(use, "dim1", "dim2"),
    **dict.fromkeys((aten.unsqueeze.default, aten.stack.default), lambda use: _dims(use, "dim", of_result=True)),
}  # fmt: skip
