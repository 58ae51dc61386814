"""Calls of views, slices, indexing and creation, for the law; see ``samples``."""

from __future__ import annotations

import itertools

import torch
from sample_table import add, aten, b, f, generator, i


def view() -> None:
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
        for shape in ((4, 5), (1, 5), (4, 1)):
            add(op, f(*shape), dim)
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


def slicing() -> None:
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


def index() -> None:
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
    twice = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(4)])
    add(aten.scatter.src, f(4, 5), 1, twice, f(4, 3))
    add(aten.scatter.src, f(4, 5), 1, twice[:2], f(4, 3))
    add(aten.scatter.value, f(4, 5), 1, twice, 0)
    add(aten.scatter.value, f(4, 5), 1, twice, 2.0)
    add(aten.scatter_add.default, f(4, 5), 1, i(5, 4, 6), f(4, 6))
    add(aten.scatter_add.default, f(4, 5), 1, i(5, 4, 4), f(4, 6))
    add(aten.scatter_add.default, f(4, 5), 0, i(4, 3, 5), f(3, 5))
    add(aten.scatter.reduce, f(4, 5), 1, twice, f(4, 3), reduce="multiply")
    add(aten.scatter_reduce.two, f(4, 5), 1, i(5, 4, 6), f(4, 6), "amax")
    add(aten.scatter.value_reduce, f(4, 5), 1, twice, 2.0, reduce="multiply")
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


def creation() -> None:
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
