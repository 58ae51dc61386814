"""Calls of norms, losses, convolutions, pooling and attention, for the law; see ``samples``."""

from __future__ import annotations

import itertools

import torch
from sample_table import add, aten, f, gz, i, u


def norm() -> None:
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


def loss() -> None:
    for reduction in (0, 1, 2):
        for weight in (None, u(5)):
            add(aten.nll_loss_forward.default, f(4, 5), i(5, 4), weight, reduction, -100)
            add(aten.nll_loss_forward.default, f(5), i(5), weight, reduction, -100)
            add(aten.nll_loss2d_forward.default, f(4, 5, 3, 2), i(5, 4, 3, 2), weight, reduction, -100)
            grad = f(4) if reduction == 0 else f()
            add(aten.nll_loss_backward.default, grad, f(4, 5), i(5, 4), weight, reduction, 2, u())
            grad = f(4, 3, 2) if reduction == 0 else f()
            add(aten.nll_loss2d_backward.default, grad, f(4, 5, 3, 2), i(5, 4, 3, 2), weight, reduction, 2, u())
            own, images = gz.cross_entropy_backward.default, f(4, 5, 3, 2).log_softmax(1)
            add(own, grad, images, i(5, 4, 3, 2), weight, reduction, 2, u())
            grad = f(4) if reduction == 0 else f()
            add(own, grad, f(4, 5).log_softmax(1), i(5, 4), weight, reduction, 2, u())
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


def conv_pool() -> None:
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
    add(aten.conv_tbc.default, f(5, 4, 6), f(3, 6, 8), f(8))
    add(aten.affine_grid_generator.default, f(4, 2, 3), [4, 3, 5, 2], True)
    add(aten.affine_grid_generator.default, f(4, 3, 4), [4, 3, 5, 2, 3], False)
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


def attention() -> None:
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
        draws = torch.arange(24).view(4, 2, 3)
        add(gz.attention.default, q, k, v, mask, causal, 0.3, draws, 0.4)
        out, lse = gz.attention.default(q, k, v, mask, causal, 0.3, draws, 0.4)
        add(gz.attention_backward.default, grad, q, k, v, out, lse, mask, causal, 0.3, draws, 0.4)
        add(flash_backward.default, grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=0.3)
        for hop in (0, 1):
            q, k, v, rows = f(2, 2, 4, 8), f(2, 2, 4, 8), f(2, 2, 4, 8), f(1, 2, 4, 4) if mask is not None else None
            draws = torch.arange(16).view(2, 2, 4) if hop else None
            out, lse = f(2, 2, 4, 8), f(2, 2, 4)
            add(gz.attention_block.default, q, k, v, rows, causal, 0.3, draws, 0.4 * hop, 2, 1, hop, out, lse)
            add(
                gz.attention_block_backward.default,
                out,
                q,
                k,
                v,
                out,
                lse,
                rows,
                causal,
                0.3,
                draws,
                0.4 * hop,
                2,
                1,
                hop,
            )
    add(gz.pin.default, f(4, 5), 0)
    step = torch.tensor(2.0, dtype=torch.float64)
    for largest in ([], [f(4, 5).square()]):
        tensors = [f(4, 5)], [f(4, 5)], [f(4, 5)], [f(4, 5).square()], largest, [step]
        add(gz.adam.default, *tensors, 0.1, 0.9, 0.99, 1e-8, 0.1, decoupled=not largest)
