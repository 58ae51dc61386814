"""Arguments on which the law is tried: at least one call for every op that has a rule.

Sizes are small, some do not divide by two or three, some are one.  Values are float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphzero.sbp.registry import op_name, registered

aten = torch.ops.aten
gz = torch.ops.graphzero


@dataclass(frozen=True)
class Sample:
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        def show(x: Any) -> str:
            if isinstance(x, Tensor):
                return "x".join(map(str, x.shape)) or "0d"
            return "[" + " ".join(map(show, x)) + "]" if isinstance(x, (list, tuple)) else str(x)

        shown = ", ".join(map(show, (*self.args, *self.kwargs.values())))
        return f"{op_name(self.op).removesuffix('.default')}({shown})"


_generator = torch.Generator()


def f(*shape: int) -> Tensor:
    """Numbers of either sign."""
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def u(*shape: int) -> Tensor:
    """Numbers between 0.1 and 0.9, all different."""
    return torch.rand(shape, generator=_generator, dtype=torch.float64) * 0.8 + 0.1


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator)


def b(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator) > 0.5


TABLE: list[tuple[Any, ...]] = []  # (op, args..., and keyword arguments as a dict at the end)


def add(op: Any, *args: Any, **kwargs: Any) -> None:
    TABLE.append((op, args, kwargs))


def _build() -> None:
    for part in (_pointwise, _reduce, _matmul, _view, _slicing, _index, _norm, _loss, _conv_pool, _creation,
                 _attention, _linalg):  # fmt: skip
        _generator.manual_seed(0)
        part()


SCALARS = {"rounding_mode": "floor", "p": 2, "decimals": 1, "is_result": False, "self_is_result": False, "n": 1}
INTEGERS = ("bitwise", "__", "gcd", "lcm")
COMPLEX = ("_conj", "real", "imag", "conj_physical", "_neg_view")


def _pointwise() -> None:
    """From the schema: one shape for all operands, then shapes that broadcast, where operands are apart."""
    from graphzero.sbp.rules import comparison, pointwise
    from graphzero.sbp.rules._write import overloads

    names = [*pointwise.LINEAR, pointwise.BACKWARDS, pointwise.GROWING_OPS, pointwise.NONLINEAR,
             comparison.COMPARISONS, "maximum", "minimum", "max.other", "min.other", "logical_or", "logical_and",
             "bitwise_or", "bitwise_and", "__or__", "__and__", "clone", "detach", "detach_copy", "alias", "alias_copy",
             "lift", "lift_fresh", "lift_fresh_copy", "positive"]  # fmt: skip
    for op in overloads(*names):
        _add_elementwise(op, [(4, 5), (4, 5), (4, 5)])
        tensors = sum("Tensor" in str(a.type) for a in op._schema.arguments)
        if tensors > 1 and "backward" not in op_name(op):
            _add_elementwise(op, [(4, 5), (1, 5), (5,)])
            _add_elementwise(op, [(5,), (4, 1), ()])
    for op in (aten.logical_or.default, aten.logical_and.default, aten.bitwise_or.Tensor, aten.bitwise_and.Tensor):
        add(op, b(4, 5), b(5))
    for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default):
        if op is not aten.maximum.default:
            add(op, f(4, 5), 2.0)
        add(op, i(9, 4, 5), i(9, 5) + 1)
    add(aten.add.Tensor, f(4, 5), f(4, 5), alpha=3)
    add(aten.add.Tensor, b(4, 5), b(4, 5))
    add(aten.mul.Tensor, b(4, 5), f(5))
    add(aten._prelu_kernel.default, f(4, 5), u(1, 5))
    add(aten._prelu_kernel.default, f(4, 5), u(1, 1))
    add(aten._prelu_kernel_backward.default, f(4, 5), f(4, 5), u(4, 5))
    add(aten.copy.default, f(4, 5), f(5))
    add(aten.fill.Scalar, f(4, 5), 2.0)
    add(aten.fill.Tensor, f(4, 5), f())
    for op in (aten.view_as_real.default, aten.view_as_real_copy.default):
        add(op, torch.complex(f(4, 3), f(4, 3)))
    for op in (aten.view_as_complex.default, aten.view_as_complex_copy.default):
        add(op, f(4, 3, 2))
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex128):
        add(aten._to_copy.default, f(4, 5), dtype=dtype)
        add(aten._to_copy.default, i(3, 4, 5), dtype=dtype)
    add(aten._to_copy.default, b(4, 5), dtype=torch.float64)
    for cond in (b(4, 5), b(5), b(4, 1)):
        add(aten.where.self, cond, f(4, 5), f(1, 5))
        for number in (0, 2.0):
            add(aten.where.ScalarOther, cond, f(4, 5), number)
            add(aten.where.ScalarSelf, cond, number, f(4, 5))
            add(aten.masked_fill.Scalar, f(4, 5), cond, number)
        add(aten.where.Scalar, cond, 1.0, 2.0)
        add(aten.masked_fill.Tensor, f(4, 5), cond, f())
    for dim in (0, -1):
        add(aten.glu.default, f(4, 6, 2), dim)
    add(aten.glu_backward.default, f(4, 3), f(4, 6), 1)
    add(aten.bucketize.Tensor, f(4, 5), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))


def _add_elementwise(op: Any, shapes: list[tuple[int, ...]]) -> None:
    keywords = {a.name: SCALARS[a.name] for a in op._schema.arguments if a.kwarg_only and a.name in SCALARS}
    add(op, *_elementwise(op, shapes), **keywords)


def _elementwise(op: Any, shapes: list[tuple[int, ...]]) -> list[Any]:
    name, args, rest = op_name(op).removeprefix("aten."), [], iter(shapes)
    for argument in op._schema.arguments:
        if argument.kwarg_only:
            continue
        if "Tensor" in str(argument.type):
            x = u(*next(rest))
            whole = name.startswith(INTEGERS) or (name.startswith("ldexp") and args)
            x = (x * 5).long() if whole else torch.complex(x, x) if name.startswith(COMPLEX) else x
            args.append(x * 4 + 1 if name.startswith(("acosh", "mvlgamma", "special_zeta")) else x)
        elif argument.name in SCALARS:
            args.append(SCALARS[argument.name])
        elif argument.has_default_value() and argument.default_value is not None:
            args.append(argument.default_value)
        elif "bool" in str(argument.type):
            args.append(False)
        else:
            args.append(3 if name.startswith(INTEGERS) or "int" in str(argument.type) else 0.4)
    if name.startswith("polygamma"):
        args = [1, args[1]]
    return args


def _reduce() -> None:
    dims: list[Any] = [[0], [1, -1], [-2]]
    for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.nansum.default,
               aten.var.dim, aten.std.dim, aten.var_mean.dim, aten.std_mean.dim, aten.logsumexp.default,
               aten.any.dims, aten.all.dims, aten.count_nonzero.dim_IntList,
               aten.var.correction, aten.std.correction, aten.var_mean.correction,
               aten.std_mean.correction):  # fmt: skip
        for dim in dims:
            add(op, b(4, 5, 3) if op in (aten.any.dims, aten.all.dims) else f(4, 5, 3), dim)
    for keep in (True, False):
        add(aten.sum.dim_IntList, f(4, 5, 3), [1], keep)
        add(aten.mean.dim, f(4, 5, 3), [-1], keep)
        add(aten.amax.default, f(4, 5, 3), [-1], keep)
    add(aten.sum.dim_IntList, f(4, 5), [], True)
    add(aten.sum.dim_IntList, f(4, 5), None)
    add(aten.sum.dim_IntList, f(4, 5), [0], dtype=torch.int64)
    add(aten.sum.dim_IntList, b(4, 5), [0])
    add(aten.sum.default, f())
    add(aten.amax.default, f(4, 5))
    for order in (0, 1, 2, 3.0, float("inf"), float("-inf")):
        add(aten.linalg_vector_norm.default, f(4, 5), order, [1])
        add(aten.linalg_vector_norm.default, f(4, 5), order)
    for op in (aten.sum.default, aten.mean.default, aten.max.default, aten.min.default, aten.prod.default,
               aten.var.default, aten.std.default, aten.var_mean.default, aten.std_mean.default, aten.median.default,
               aten.count_nonzero.default, aten.norm.Scalar, aten.argmax.default, aten.argmin.default):  # fmt: skip
        add(op, f(4, 5))
    for op in (aten.any.default, aten.all.default):
        add(op, b(4, 5))
        add(op, f(4, 5))
    for op in (aten.any.dim, aten.all.dim):
        add(op, b(4, 5), 1)
        add(op, b(4, 5), 0, True)
    for op in (aten.prod.dim_int, aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim,
               aten.median.dim, aten.mode.default, aten.cumsum.default, aten.cumprod.default, aten.cummax.default,
               aten.cummin.default, aten.logcumsumexp.default, aten.sort.default, aten.argsort.default):  # fmt: skip
        for dim in (0, -1):
            add(op, f(4, 5), dim)
    add(aten.sort.stable, f(4, 5), stable=True, dim=1)
    add(aten.topk.default, f(4, 5), 2)
    add(aten.topk.default, f(4, 5), 2, 0)
    add(aten.kthvalue.default, f(4, 5), 2)
    add(aten.norm.ScalarOpt_dim, f(4, 5), 2, [1])
    add(aten.norm.ScalarOpt_dim_dtype, f(4, 5), 2, [1], True, dtype=torch.float64)
    add(aten.norm.ScalarOpt_dtype, f(4, 5), 2, dtype=torch.float64)
    for dim in (0, 1, -1):
        for op in (aten._softmax.default, aten._log_softmax.default):
            add(op, f(4, 5, 3), dim, False)
        add(aten._safe_softmax.default, f(4, 5, 3), dim)
        for op in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
            add(op, f(4, 5, 3), f(4, 5, 3), dim, torch.float64)
    add(aten.histc.default, u(9), 4, 0, 1)
    add(aten.histc.default, u(9), 4)
    add(aten.searchsorted.Tensor, u(5).sort().values, f(4, 3))
    add(aten.searchsorted.Tensor, u(4, 5).sort().values, f(4, 3))
    add(aten.searchsorted.Tensor, u(4, 5), f(4, 3), sorter=u(4, 5).argsort())


def _matmul() -> None:
    add(aten.mm.default, f(4, 5), f(5, 3))
    add(aten.bmm.default, f(2, 4, 5), f(2, 5, 3))
    add(aten.mv.default, f(4, 5), f(5))
    add(aten.dot.default, f(5), f(5))
    add(aten.vdot.default, f(5), f(5))
    for shape in ((3,), (4, 3), (1, 3), (4, 1), (1,)):
        add(aten.addmm.default, f(*shape), f(4, 5), f(5, 3), beta=2, alpha=3)
        add(aten.baddbmm.default, f(*shape), f(2, 4, 5), f(2, 5, 3))
        add(aten.addbmm.default, f(*shape), f(2, 4, 5), f(2, 5, 3))
    add(aten.baddbmm.default, f(2, 4, 3), f(2, 4, 5), f(2, 5, 3))
    add(aten.addmv.default, f(4), f(4, 5), f(5))
    for p in (1.0, 2.0):
        for x, y in ((f(4, 3), f(5, 3)), (f(2, 4, 3), f(2, 5, 3))):
            add(aten._cdist_forward.default, x, y, p, None)
            distances = aten._cdist_forward.default(x, y, p, None)
            add(aten._cdist_backward.default, f(*distances.shape), x, y, p, distances)
    add(aten._trilinear.default, f(4, 3), f(5, 3, 2), f(4, 2), [1, 3], [0], [1, 2], [2, 3])
    add(aten._trilinear.default, f(4, 5), f(5, 3, 2), f(4, 2), [2, 3], [0], [1, 2], [0, 1])
    add(aten.addr.default, f(4, 5), f(4), f(5))


def _view() -> None:
    views = [((4, 6), [24]), ((24,), [4, 6]), ((4, 6, 2), [4, 12]), ((4, 12), [4, 6, 2]), ((6, 4), [4, 6]),
             ((5, 4), [5, 2, 2]), ((5, 1, 4), [5, 4, 1]),
             ((1, 6), [2, 3]), ((6,), [1, 6]), ((6, 6), [2, 3, 6]), ((6, 5), [-1, 5]),
             ((1,), [])]  # fmt: skip
    for op in (aten.view.default, aten.view_copy.default, aten._unsafe_view.default, aten.reshape.default):
        for before, after in views:
            add(op, f(*before), after)
    add(aten._reshape_alias.default, f(4, 6), [24], [1])
    for op in (aten.view.dtype, aten.view_copy.dtype):
        add(op, f(4, 6), torch.int64)
        add(op, f(4, 6), torch.float32)
    for op in (aten.squeeze.default, aten.squeeze_copy.default):
        add(op, f(4, 1, 5, 1))
    for op in (aten.squeeze.dim, aten.squeeze_copy.dim):
        add(op, f(4, 1, 5), 1)
        add(op, f(4, 1, 5), 2)
    for op in (aten.squeeze.dims, aten.squeeze_copy.dims):
        add(op, f(1, 4, 1, 5), [0, 2])
    for op, dim in itertools.product((aten.unsqueeze.default, aten.unsqueeze_copy.default), (0, 1, -1)):
        add(op, f(4, 5), dim)
    for op in (aten.expand.default, aten.expand_copy.default):
        for before, after in (((4, 1), [4, 5]), ((5,), [4, 5]), ((4, 1, 5), [-1, 3, -1]), ((), [4]), ((1,), [6])):
            add(op, f(*before), after)
    for op in (aten.t.default, aten.t_copy.default):
        add(op, f(4, 5))
        add(op, f(4))
    for op in (aten.transpose.int, aten.transpose_copy.int):
        add(op, f(4, 5, 2), 0, -1)
        add(op, f(4, 5, 2), 1, 2)
    for op in (aten.permute.default, aten.permute_copy.default):
        add(op, f(4, 5, 2), [2, 0, 1])
        add(op, f(4, 5, 2), [0, -1, 1])
    add(aten.repeat.default, f(4, 5), [1, 2])
    add(aten.repeat.default, f(4, 5), [3, 1, 1])
    add(aten.flip.default, f(4, 5), [0])
    add(aten.flip.default, f(4, 5), [])
    add(aten.roll.default, f(4, 5), [1], [1])
    add(aten.roll.default, f(4, 5), [3])
    for op in (aten.unfold.default, aten.unfold_copy.default):
        add(op, f(4, 5), 1, 3, 1)
    for op in (aten.diagonal.default, aten.diagonal_copy.default):
        add(op, f(4, 5, 3))
        add(op, f(4, 5, 3), 1, 0, 2)
    for op in (aten.tril.default, aten.triu.default):
        add(op, f(4, 5))
        add(op, f(4, 5, 3), 1)


def _slicing() -> None:
    for op in (aten.slice.Tensor, aten.slice_copy.Tensor):
        add(op, f(4, 5), 0, 1, 3)
        add(op, f(4, 5), 1, 0, 9223372036854775807)
        add(op, f(4, 5), -1, None, None, 2)
    add(aten.narrow_copy.default, f(4, 5), 1, 1, 2)
    add(aten.slice_backward.default, f(4, 2), [4, 5], 1, 1, 3, 1)
    for op in (aten.select.int, aten.select_copy.int):
        add(op, f(4, 5, 3), 1, 2)
        add(op, f(4, 5), -1, -1)
    add(aten.select_backward.default, f(4, 3), [4, 5, 3], 1, 2)
    add(aten.diagonal_backward.default, f(3, 4), [4, 5, 3], 0, 0, 1)
    add(aten.unfold_backward.default, f(4, 3, 3), [4, 5], 1, 3, 1)
    add(aten.slice_scatter.default, f(4, 5), f(4, 2), 1, 1, 3)
    add(aten.select_scatter.default, f(4, 5, 3), f(4, 3), 1, 2)
    add(aten.diagonal_scatter.default, f(4, 5, 3), f(3, 4), 0, 0, 1)
    for op in (aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor):
        add(op, f(4, 5), 2, 1)
    for op in (aten.split_with_sizes.default, aten.split_with_sizes_copy.default,
               aten.unsafe_split_with_sizes.default):  # fmt: skip
        add(op, f(4, 5), [2, 3], -1)
    for op in (aten.unbind.int, aten.unbind_copy.int):
        add(op, f(4, 5, 3), 1)
    add(aten.cat.default, [f(4, 5), f(4, 2), f(4, 1)], 1)
    add(aten.cat.default, [f(2, 5), f(4, 5)])
    add(aten.cat.default, [f(0), f(4, 5), f(4, 2)], -1)
    add(aten.cat.default, [f(4, 5), f(0), f(4, 2)], 1)
    add(aten.stack.default, [f(4, 5), f(4, 5)], 1)
    add(aten.stack.default, [f(4, 5), f(4, 5), f(4, 5)], -1)
    add(aten.constant_pad_nd.default, f(4, 5), [1, 2])
    add(aten.constant_pad_nd.default, f(4, 5), [0, 0, 1, -1], 0)
    add(aten.constant_pad_nd.default, f(4, 5), [1, 2], 1.0)


def _index() -> None:
    add(aten.embedding.default, f(7, 4), i(7, 4, 5))
    add(aten.embedding.default, f(7, 4), i(7))
    for by_count in (False, True):
        add(aten.embedding_dense_backward.default, f(4, 5, 2), i(7, 4, 5), 7, -1, by_count)
    add(aten.index_select.default, f(4, 5, 2), 1, i(5, 3))
    add(aten.index_select.default, f(4, 5), 0, i(4))
    add(aten.gather.default, f(4, 5), 1, i(5, 4, 3))
    add(aten.gather.default, f(4, 5), 0, i(4, 3, 5))
    add(aten.gather.default, f(4, 5), 1, i(5, 2, 3))
    add(aten.gather.default, f(), 0, i(1))
    add(aten.index_select.default, f(), 0, i(1, 1))
    add(aten.take.default, f(4, 5), i(20, 6, 2))
    twice = torch.stack([torch.randperm(5, generator=_generator)[:3] for _ in range(4)])
    add(aten.scatter.src, f(4, 5), 1, twice, f(4, 3))
    add(aten.scatter.src, f(4, 5), 1, twice[:2], f(4, 3))
    add(aten.scatter.value, f(4, 5), 1, twice, 0)
    add(aten.scatter.value, f(4, 5), 1, twice, 2.0)
    add(aten.scatter_add.default, f(4, 5), 1, i(5, 4, 6), f(4, 6))
    add(aten.scatter_add.default, f(4, 5), 1, i(5, 4, 4), f(4, 6))
    add(aten.scatter_add.default, f(4, 5), 0, i(4, 3, 5), f(3, 5))
    add(aten.scatter.reduce, f(4, 5), 1, twice, f(4, 3), reduce="multiply")
    add(aten.scatter_reduce.two, f(4, 5), 1, i(5, 4, 6), f(4, 6), "amax")
    add(aten.index_add.default, f(4, 5), 1, i(5, 6), f(4, 6), alpha=2)
    add(aten.index_add.default, f(4, 5), 0, i(4, 6), f(6, 5))
    add(aten.index_copy.default, f(4, 5), 1, torch.tensor([3, 0]), f(4, 2))
    add(aten.index_fill.int_Scalar, f(4, 5), 1, torch.tensor([3, 0]), 0)
    add(aten.index_fill.int_Scalar, f(4, 5), 1, torch.tensor([3, 0]), 1.0)
    add(aten.index_fill.int_Tensor, f(4, 5), 1, torch.tensor([3, 0]), f())
    for op in (aten.index.Tensor, aten._unsafe_index.Tensor):
        add(op, f(4, 5, 3), [i(4, 6)])
        add(op, f(4, 5, 3), [None, i(5, 4, 6)])
        add(op, f(4, 5, 3), [i(4, 6), None, i(3, 6)])
        add(op, f(4, 5, 3), [i(4, 4, 1), i(5, 6)])
        add(op, f(4, 5, 3), [None, i(5, 1), i(3, 4)])
    add(aten.index.Tensor, f(4, 5), [torch.tensor([True, False, True, True])])
    for op, adds in itertools.product((aten.index_put.default, aten._unsafe_index_put.default), (True, False)):
        rows = i(4, 6) if adds else torch.tensor([2, 0, 3])
        add(op, f(4, 5, 3), [rows], f(len(rows), 5, 3), adds)
        add(op, f(4, 5, 3), [rows], f(3), adds)
        add(op, f(3, 4, 5), [None, rows], f(3, len(rows), 1), adds)
    add(aten.index_put.default, f(4, 5), [b(4)], f(), False)


def _norm() -> None:
    for weight, bias in ((u(5), u(5)), (u(5), None), (None, None)):
        add(aten.native_layer_norm.default, f(4, 3, 5), [5], weight, bias, 1e-5)
        _, mean, rstd = aten.native_layer_norm.default(x := f(4, 3, 5), [5], weight, bias, 1e-5)
        mask = [True, weight is not None, bias is not None]
        add(aten.native_layer_norm_backward.default, f(4, 3, 5), x, [5], mean, rstd, weight, bias, mask)
    add(aten.native_layer_norm.default, f(4, 3, 5), [3, 5], u(3, 5), u(3, 5), 1e-5)
    add(aten._fused_rms_norm.default, f(4, 3, 5), [5], u(5), 1e-5)
    add(aten._fused_rms_norm.default, f(4, 3, 5), [3, 5], None, 1e-5)
    for weight in (u(6), None):
        x = f(4, 6, 3, 2)
        _, mean, rstd = aten.native_group_norm.default(x, weight, weight, 4, 6, 6, 2, 1e-5)
        add(aten.native_group_norm.default, x, weight, weight, 4, 6, 6, 2, 1e-5)
        mask = [True, weight is not None, weight is not None]
        add(aten.native_group_norm_backward.default, f(4, 6, 3, 2), x, mean, rstd, weight, 4, 6, 6, 2, mask)
    add(aten.native_group_norm.default, f(5, 6), u(6), u(6), 5, 6, 1, 3, 1e-5)
    for shape in ((4, 5), (4, 5, 3, 2)):
        x, c = f(*shape), shape[1]
        add(aten._native_batch_norm_legit_no_training.default, x, u(c), u(c), u(c), u(c), 0.1, 1e-5)
        add(aten._native_batch_norm_legit_no_training.default, x, None, None, u(c), u(c), 0.1, 1e-5)
        for train in (True, False):
            add(aten.native_batch_norm.default, x, u(c), u(c), u(c), u(c), train, 0.1, 1e-5)
            add(aten._native_batch_norm_legit_functional.default, x, u(c), u(c), u(c), u(c), train, 0.1, 1e-5)
            add(aten.native_batch_norm_backward.default, f(*shape), x, u(c), u(c), u(c), u(c) if train else u(0),
                u(c) if train else u(0), train, 1e-5, [True, True, True])  # fmt: skip
        add(aten.native_batch_norm_backward.default, f(*shape), x, u(c), u(c), u(c), u(c), u(c), False, 1e-5,
            [True, True, False])  # fmt: skip
        add(aten._native_batch_norm_legit.no_stats, x, u(c), u(c), True, 0.1, 1e-5)


def _loss() -> None:
    for reduction in (0, 1, 2):
        for weight in (None, u(5)):
            add(aten.nll_loss_forward.default, f(4, 5), i(5, 4), weight, reduction, -100)
            add(aten.nll_loss_forward.default, f(5), i(5), weight, reduction, -100)
            add(aten.nll_loss2d_forward.default, f(4, 5, 3, 2), i(5, 4, 3, 2), weight, reduction, -100)
            grad = f(4) if reduction == 0 else f()
            add(aten.nll_loss_backward.default, grad, f(4, 5), i(5, 4), weight, reduction, 2, u())
            grad = f(4, 3, 2) if reduction == 0 else f()
            add(aten.nll_loss2d_backward.default, grad, f(4, 5, 3, 2), i(5, 4, 3, 2), weight, reduction, 2, u())
        for op in (aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss):
            add(op.default, f(4, 5), f(4, 5), reduction)
        grad = f(4, 5) if reduction == 0 else f()
        add(aten.mse_loss_backward.default, grad, f(4, 5), f(4, 5), reduction)
        add(aten.smooth_l1_loss_backward.default, grad, f(4, 5), f(4, 5), reduction, 1.0)
        add(aten.huber_loss_backward.default, grad, f(4, 5), f(4, 5), reduction, 1.0)
        add(aten.soft_margin_loss_backward.default, grad, f(4, 5), f(4, 5), reduction)
        for weight in (None, u(5)):
            add(aten.multi_margin_loss.default, f(4, 5), i(5, 4), 1, 1.0, weight, reduction)
            for grad_ in [f(4) if reduction == 0 else f()]:
                add(aten.multi_margin_loss_backward.default, grad_, f(4, 5), i(5, 4), 1, 1.0, weight, reduction)
        scores, labels = f(4, 5), i(5, 4, 5)
        add(aten.multilabel_margin_loss_forward.default, scores, labels, reduction)
        _, is_target = aten.multilabel_margin_loss_forward.default(scores, labels, reduction)
        grad_ = f(4) if reduction == 0 else f()
        add(aten.multilabel_margin_loss_backward.default, grad_, scores, labels, reduction, is_target)
        for weight in (None, u(4, 5)):
            add(aten.binary_cross_entropy.default, u(4, 5), u(4, 5), weight, reduction)
            add(aten.binary_cross_entropy_backward.default, grad, u(4, 5), u(4, 5), weight, reduction)
            add(aten.binary_cross_entropy_with_logits.default, f(4, 5), u(4, 5), weight, u(5), reduction)


def _conv_pool() -> None:
    for bias, transposed, groups in itertools.product((True, False), (True, False), (1, 2)):
        tail = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
        weight = f(4 if transposed else 6, (6 if transposed else 4) // groups, 3, 3)
        x = f(4, 4, 5, 5)
        add(aten.convolution.default, x, weight, f(6) if bias else None, *tail)
        y = aten.convolution.default(x, weight, None, *tail)
        add(aten.convolution_backward.default, f(*y.shape), x, weight, [6] if bias else None, *tail, [True, True, bias])
    add(aten.convolution_backward.default, f(4, 6, 3), f(4, 4, 5), f(6, 4, 3), [6], [1], [0], [1], False, [0], 1,
        [False, True, True])  # fmt: skip
    add(aten.convolution.default, f(4, 4, 5), f(6, 4, 3), f(6), [1], [0], [1], False, [0], 1)
    for n in (2, 3):
        x, k, a = f(4, 3, *[4] * n), [2] * n, aten
        pool = getattr(a, f"max_pool{n}d_with_indices").default
        y, at = pool(x, k, k)
        add(pool, x, k, k)
        tail = (k, k, [0] * n, [1] * n, False, at)
        add(getattr(a, f"max_pool{n}d_with_indices_backward").default, f(*y.shape), x, *tail)
        add(getattr(a, f"avg_pool{n}d").default, x, k, k)
        add(getattr(a, f"avg_pool{n}d_backward").default, f(*y.shape), x, k, k, [0] * n, False, True, None)
        for name in (f"_adaptive_avg_pool{n}d", f"adaptive_avg_pool{n}d"):
            add(getattr(a, name).default, x, [2] * n)
        add(getattr(a, f"_adaptive_avg_pool{n}d_backward").default, f(*y.shape), x)
        _, at = getattr(a, f"adaptive_max_pool{n}d").default(x, [2] * n)
        add(getattr(a, f"adaptive_max_pool{n}d").default, x, [2] * n)
        add(getattr(a, f"adaptive_max_pool{n}d_backward").default, f(*y.shape), x, at)
    add(aten.max_pool2d_with_indices.default, f(3, 4, 4), [2, 2])
    for name in ("avg_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d"):
        add(getattr(aten, name).default, f(4, 3, 6), [2])
    add(aten.max_pool1d_with_indices.default, f(4, 3, 6), [2])
    for n, name in itertools.product((1, 2, 3), ("reflection", "replication")):
        x, pad = f(4, 3, *[4] * n), [1, 1] * n
        op = getattr(aten, f"{name}_pad{n}d").default
        add(op, x, pad)
        add(getattr(aten, f"{name}_pad{n}d_backward").default, f(*op(x, pad).shape), x, pad)
    for name in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d"):
        n, corners = int(name[-2]), [] if "nearest" in name else [False]
        add(getattr(aten, f"upsample_{name}").default, f(4, 3, *[4] * n), [6] * n, *corners)
        add(getattr(aten, f"upsample_{name}").vec, f(4, 3, *[4] * n), [6] * n, *corners, None)
        add(getattr(aten, f"upsample_{name}_backward").default, f(4, 3, *[6] * n), [6] * n, [4, 3, *[4] * n], *corners)
    for n, pool in ((2, aten.max_pool2d_with_indices), (3, aten.max_pool3d_with_indices)):
        y, at = pool.default(f(4, 3, *[4] * n), [2] * n)
        extra = () if n == 2 else ([2] * n, [0] * n)
        add(getattr(aten, f"max_unpool{n}d").default, y, at, [4] * n, *extra)
        x, grid = f(4, 3, *[4] * n), u(4, *[2] * n, n)
        add(getattr(aten, f"grid_sampler_{n}d").default, x, grid, 0, 0, False)
        tail = (f(4, 3, *[2] * n), x, grid, 0, 0, False)
        add(getattr(aten, f"grid_sampler_{n}d_backward").default, *tail, [True, True])
    add(aten.channel_shuffle.default, f(4, 6, 3, 2), 2)
    add(aten.native_channel_shuffle.default, f(4, 6, 3, 2), 2)
    add(aten.pixel_shuffle.default, f(4, 8, 3, 3), 2)
    add(aten.pixel_unshuffle.default, f(4, 2, 4, 4), 2)
    add(aten.im2col.default, f(4, 3, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1])
    add(aten.col2im.default, f(4, 12, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])


def _creation() -> None:
    add(aten.zeros.default, [4, 5], dtype=torch.float64)
    add(aten.ones.default, [4, 5])
    add(aten.full.default, [4, 5], 2.0)
    add(aten.empty.memory_format, [4, 5])
    add(aten.new_zeros.default, f(4, 3), [5, 2])
    add(aten.new_ones.default, f(4, 3), [5, 2])
    add(aten.new_full.default, f(4, 3), [5, 2], 2.0)
    add(aten.new_empty.default, f(4, 3), [5, 2])
    for op in (aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.zero.default):
        add(op, f(4, 5))
    add(aten.full_like.default, f(4, 5), 2.0)
    add(aten.arange.default, 5)
    add(aten.arange.start, 1, 5)
    add(aten.arange.start_step, 1, 5, 2)
    add(aten.linspace.default, 0, 1, 5)
    add(aten.logspace.default, 0, 1, 5)
    add(aten.eye.default, 4)
    add(aten.eye.m, 4, 5)
    add(aten.scalar_tensor.default, 2.0)
    add(aten.tril_indices.default, 4, 5)
    add(aten.triu_indices.default, 4, 5)


def _attention() -> None:
    masks = [None, f(4, 2, 3, 5), f(1, 2, 1, 5), f(3, 5)]
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    for mask, causal in [(m, False) for m in masks] + [(None, True)]:
        q, k, v = f(4, 2, 3, 8), f(4, 2, 5, 8), f(4, 2, 5, 8)
        add(gz.attention.default, q, k, v, mask, causal, 0.3)
        add(flash.default, q, k, v, 0.0, causal, attn_mask=mask, scale=0.3)
        out, lse = gz.attention.default(q, k, v, mask, causal, 0.3)
        grad = f(*out.shape)
        add(gz.attention_backward.default, grad, q, k, v, out, lse, mask, causal, 0.3)
        add(flash_backward.default, grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=0.3)
    add(gz.pin.default, f(4, 5), 0)
    step = torch.tensor(2.0, dtype=torch.float64)
    add(gz.adam.default, f(4, 5), f(4, 5), f(4, 5), f(4, 5).square(), step, 0.1, 0.9, 0.99, 1e-8, 0.1)


def _linalg() -> None:
    x = f(4, 3, 3)
    positive = x @ x.mT + torch.eye(3, dtype=x.dtype)
    for op in (aten.linalg_cholesky_ex, aten.linalg_inv_ex, aten._linalg_det, aten._linalg_slogdet, aten._linalg_eigh,
               aten._linalg_svd, aten.linalg_qr, aten.linalg_lu_factor_ex, aten.linalg_matrix_exp,
               aten.cholesky_inverse):  # fmt: skip
        add(op.default, positive)
    add(aten.cholesky_solve.default, f(4, 3, 2), positive)
    add(aten.linalg_solve_triangular.default, positive.triu(), f(4, 3, 2), upper=True)
    factors, pivots, _ = aten.linalg_lu_factor_ex.default(positive)
    add(aten.linalg_lu_solve.default, factors, pivots, f(4, 3, 2))
    add(aten.linalg_householder_product.default, f(4, 3, 2), u(4, 2))
    add(aten._fft_r2c.default, f(4, 5), [1], 0, True)
    add(aten._fft_c2c.default, torch.complex(f(4, 5), f(4, 5)), [0], 0, True)
    add(aten._fft_c2r.default, torch.complex(f(4, 5), f(4, 5)), [1], 0, 8)
    add(aten.diag_embed.default, f(4, 3))
    add(aten.diag_embed.default, f(4, 3), 1, 0, 1)


UNCHECKED_VALUES = ("aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default")
NO_CPU_KERNEL = ("aten._fused_rms_norm_backward.default",)
LOCALIZED_ELSEWHERE = ("graphzero.uniform_like.default",)


def samples() -> list[Sample]:
    if not TABLE:
        registered()
        _build()
    return [Sample(op, args, kwargs) for op, args, kwargs in TABLE]


def by_op() -> Iterator[tuple[Any, list[Sample]]]:
    ordered = sorted(samples(), key=lambda s: op_name(s.op))
    for op, group in itertools.groupby(ordered, key=lambda s: s.op):
        yield op, list(group)
