"""Calls of reductions, products of matrices and linear algebra, for the law; see ``samples``."""

from __future__ import annotations

from typing import Any

import torch
from sample_table import add, aten, b, f, u


def reduce() -> None:
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


def matmul() -> None:
    add(aten.mm.default, f(4, 5), f(5, 3))
    add(aten.bmm.default, f(2, 4, 5), f(2, 5, 3))
    add(aten.mv.default, f(4, 5), f(5))
    add(aten.dot.default, f(5), f(5))
    add(aten.vdot.default, f(5), f(5))
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    for left, right in ((f(8, 4), f(3, 4, 5)), (f(4, 8), f(8, 5)), (f(3, 4, 5), f(5, 8))):
        add(torch.ops.graphzero.grouped_mm.default, left, right, ends)
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
    add(aten._euclidean_dist.default, f(4, 3), f(5, 3))
    add(aten._euclidean_dist.default, f(2, 4, 3), f(2, 5, 3))
    add(aten._trilinear.default, f(4, 3), f(5, 3, 2), f(4, 2), [1, 3], [0], [1, 2], [2, 3])
    add(aten._trilinear.default, f(4, 5), f(5, 3, 2), f(4, 2), [2, 3], [0], [1, 2], [0, 1])
    add(aten.addr.default, f(4, 5), f(4), f(5))


def linalg() -> None:
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
