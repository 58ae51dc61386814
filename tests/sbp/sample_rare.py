"""Calls of ops that few models have, for the law; see ``samples``."""

from __future__ import annotations

import torch
from sample_table import add, aten, b, f, gz, i, packets, u


def matrices() -> None:
    x = f(4, 3, 3)
    positive = x @ x.mT + torch.eye(3, dtype=x.dtype)
    for op in packets("cholesky", "geqrf", "linalg_eig", "linalg_lu", "linalg_ldl_factor_ex"):  # 2.15 has no cholesky
        add(op.default, positive)
    factors, pivots, _ = aten.linalg_ldl_factor_ex.default(positive)
    add(aten.linalg_ldl_solve.default, factors, pivots, f(4, 3, 2))
    reflectors, scales = aten.geqrf.default(positive)
    add(aten.ormqr.default, reflectors, scales, f(4, 3, 2))
    add(aten.triangular_solve.default, f(4, 3, 2), positive)
    add(aten._linalg_eigvals.default, positive)
    add(aten._linalg_solve_ex.default, positive, f(4, 3, 2))
    add(aten._linalg_solve_ex.default, positive, f(4, 3))
    factors, pivots, _ = aten.linalg_lu_factor_ex.default(positive)
    for values, places in ((True, True), (True, False), (False, True)):
        add(aten.lu_unpack.default, factors, pivots, values, places)
    for tolerance in (None, u(), u(4)):
        add(aten.linalg_pinv.atol_rtol_tensor, f(4, 3, 2), rtol=tolerance)
    add(aten.nanmedian.default, f(4, 5))
    add(aten.nanmedian.dim, f(4, 5), 1)
    add(aten.aminmax.default, f(4, 5))
    add(aten.aminmax.default, f(4, 5), dim=1)
    add(aten.renorm.default, f(4, 5, 3), 2, 1, 0.5)
    add(aten.hash_tensor.default, f(4, 5), [1])
    add(aten.isin.Tensor_Tensor, i(9, 4, 5), i(9, 3))
    add(aten.isin.Tensor_Scalar, i(9, 4, 5), 3)
    add(aten.isin.Scalar_Tensor, 3, i(9, 3))
    add(gz.check.default, torch.ones((), dtype=torch.bool), "so it is")


def moved() -> None:
    for turns in (1, 2, -1):
        add(aten.rot90.default, f(4, 5, 3), turns, [0, 2])
    add(aten.block_diag.default, [f(4, 5), f(3), f(2, 2)])
    for op in (aten.as_strided, aten.as_strided_copy):
        add(op.default, f(4, 5), [2, 3], [5, 1], 1)
    add(aten.as_strided_scatter.default, f(4, 5), f(2, 3), [2, 3], [5, 1], 1)
    add(aten.put.default, f(4, 5), i(20, 6), f(6), True)
    add(aten.put.default, f(4, 5), torch.tensor([7, 0, 19]), f(3))
    for how in ("prod", "mean", "amax", "amin"):
        add(aten.index_reduce.default, f(4, 5), 1, i(5, 6), f(4, 6), how)
    add(aten.index_reduce.default, f(4, 5), 0, i(4, 6), f(6, 5), "amax", include_self=False)
    add(aten._efficientzerotensor.default, [4, 5], dtype=torch.float64)
    add(torch.ops.graphzero.move.default, f(4, 5), 1)


def bags() -> None:
    words, starts = i(7, 8), torch.tensor([0, 3, 4])
    for mode in (0, 1, 2):
        for scales in (None, u(8)) if mode == 0 else (None,):
            tail = (False, mode, False, scales)
            add(aten._embedding_bag.default, f(7, 4), words, starts, *tail)
            add(aten._embedding_bag_forward_only.default, f(7, 4), words, starts, *tail)
            _, bag, sizes, largest = aten._embedding_bag.default(f(7, 4), words, starts, *tail)
            add(aten._embedding_bag_backward.default, f(3, 4), words, starts, bag, sizes, largest, 7, *tail)
            add(aten._embedding_bag_dense_backward.default, f(3, 4), words, bag, sizes, largest, 7, False, mode, scales)
    _, bag, _, _ = aten._embedding_bag.default(f(7, 4), words, starts)
    add(aten._embedding_bag_per_sample_weights_backward.default, f(3, 4), f(7, 4), words, starts, bag, 0)


def bags_of_one_length() -> None:
    gz, words = torch.ops.graphzero, i(7, 6, 4)
    for mode in (0, 1, 2):
        for scales in (None, u(6, 4)) if mode == 0 else (None,):
            for padding in (-1, 3):
                add(gz.bag.default, f(7, 5), words, scales, mode, padding)
                _, largest = gz.bag.default(f(7, 5), words, scales, mode, padding)
                add(gz.bag_backward.default, f(6, 5), words, scales, largest, 7, mode, padding)
    for padding in (-1, 3):
        add(gz.bag_scales_backward.default, f(6, 5), f(7, 5), words, padding)


def quantized() -> None:
    zero = torch.tensor([0, 1, 2, 1, 0], dtype=torch.int32)
    add(aten.fake_quantize_per_tensor_affine_cachemask.default, f(4, 5), 0.1, 1, 0, 255)
    for scale, point in ((u(1), zero[:1]), (u(), zero[0])):
        on = torch.ones(1, dtype=torch.int64)
        by_tensors = aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default
        add(by_tensors, f(4, 5), scale + 0.1, point, on, 0, 255)
    add(
        aten.fake_quantize_per_channel_affine_cachemask.default, f(4, 5, 3).float(), u(5).float() + 0.1, zero, 1, 0, 255
    )


def made_of_sizes() -> None:
    for op in (aten.hann_window, aten.hamming_window, aten.blackman_window, aten.bartlett_window, aten.kaiser_window):
        add(op.default, 8)
        add(op.periodic, 8, False)
    add(aten.hamming_window.periodic_alpha, 8, True, 0.5)
    add(aten.hamming_window.periodic_alpha_beta, 8, True, 0.5, 0.5)
    add(aten.kaiser_window.beta, 8, True, 10.0)
    add(aten.fft_fftfreq.default, 8)
    add(aten.fft_rfftfreq.default, 8)
    add(aten.range.default, 0, 5)
    add(aten.range.step, 0, 6, 2)


def pooled() -> None:
    for n in (1, 2, 3):
        tail = ([6] * n,)
        add(getattr(aten, f"_upsample_nearest_exact{n}d").default, f(4, 3, *[4] * n), *tail)
        add(getattr(aten, f"_upsample_nearest_exact{n}d_backward").default, f(4, 3, *[6] * n), *tail, [4, 3, *[4] * n])
        add(getattr(aten, f"_upsample_nearest_exact{n}d").vec, f(4, 3, *[4] * n), *tail, None)
    smooth = [f"_upsample_{name}2d_aa" for name in ("bilinear", "bicubic", "lanczos")]  # 2.11 has no lanczos
    for op in packets(*smooth):
        add(op.default, f(4, 3, 4, 4), [6, 6], False)
        add(op.vec, f(4, 3, 4, 4), [6, 6], False, None)
    for op in packets(*(f"{name}_backward" for name in smooth)):
        add(op.default, f(4, 3, 6, 6), [6, 6], [4, 3, 4, 4], False)
    for n in (2, 3):
        x, kernel, size = f(4, 3, *[5] * n), [2] * n, [3] * n
        pool = getattr(aten, f"fractional_max_pool{n}d").default
        _, at = pool(x, kernel, size, picks := u(4, 3, n))
        add(pool, x, kernel, size, picks)
        backward = getattr(aten, f"fractional_max_pool{n}d_backward").default
        add(backward, f(4, 3, *size), x, kernel, size, at)
    for n in (1, 2, 3):
        if n > 1:
            add(getattr(aten, f"avg_pool{n}d").default, i(9, 4, 3, *[4] * n), [2] * n)
    x, weight = f(4, 5, 3), u(5)
    add(aten._batch_norm_with_update_functional.default, x, weight, weight, u(5), u(5), 0.1, 1e-5)
    none = torch.empty(0, dtype=torch.uint8)
    for update in (True, False):
        add(aten.batch_norm_backward.default, f(4, 5, 3), x, weight, u(5), u(5), u(5), u(5), update, 1e-5,
            [True, True, True], none)  # fmt: skip


def whole() -> None:
    mask = b(4, 5)
    add(aten.masked_scatter.default, f(4, 5), mask, f(4, 5))
    add(aten.masked_scatter_backward.default, f(4, 5), mask, [4, 5])
    add(aten._pdist_forward.default, f(4, 5))
    add(aten._pdist_backward.default, f(6), f(4, 5), 2.0, aten._pdist_forward.default(f(4, 5)))
    add(aten.empty_strided.default, [4, 5], [5, 1])
    add(aten.new_empty_strided.default, f(3), [4, 5], [5, 1])
    add(aten.empty_permuted.default, [4, 5], [1, 0])
    add(aten.nonzero_static.default, f(4, 5), size=3)
    add(aten.histogram.bin_ct, f(9), 3)
    add(aten.histogram.bins_tensor, f(9), u(4).sort().values)
    add(aten._histogramdd_bin_edges.default, f(9, 2), [3, 3])
    add(aten._histogramdd_from_bin_cts.default, f(9, 2), [3, 3])
    lengths = torch.tensor([1, 3, 2])
    add(aten.segment_reduce.default, x := f(6, 2), "sum", lengths=lengths)
    add(aten._segment_reduce_backward.default, f(3, 2), f(3, 2), x, "sum", lengths=lengths)
    add(aten.resize.default, f(4, 5), [5, 4])
    add(aten.resize_as.default, f(4, 5), f(5, 4))
    for start, end in ((u(), u()), (u(), 2), (1, u())):
        kinds = "_".join("Tensor" if isinstance(x, torch.Tensor) else "Scalar" for x in (start, end))
        for op in (aten.linspace, aten.logspace):
            add(getattr(op, kinds), start, end, 5)
