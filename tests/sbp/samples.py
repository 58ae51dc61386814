"""Arguments on which the law is tried: at least one call for every op that has a rule.

Sizes are small, some do not divide by two or three, some are one.  Values are float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import sample_layers as layers
import sample_pointwise as pointwise
import sample_rare as rare
import sample_reductions as reductions
import sample_shapes as shapes
from sample_table import TABLE, Sample, generator

from graphzero.sbp.op_call import op_name
from graphzero.sbp.registry import registered

UNCHECKED_VALUES = ("aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default",
                    "aten.empty_strided.default", "aten.new_empty_strided.default",
                    "aten.empty_permuted.default")  # fmt: skip
NO_CPU_KERNEL = ("aten._fused_rms_norm_backward.default",)
LOCALIZED_ELSEWHERE = (
    "graphzero.uniform_like.default", "graphzero.rank_key.default", "graphzero.stochastic_round.default",
    "graphzero.adam_rounded.default",
)  # fmt: skip
PARTS = (
    pointwise.pointwise, reductions.reduce, reductions.matmul, shapes.view, shapes.slicing, shapes.index, layers.norm,
    layers.loss, layers.conv_pool, shapes.creation, layers.attention, reductions.linalg, rare.matrices,
    rare.moved, rare.bags, rare.bags_of_one_length,
    rare.quantized, rare.made_of_sizes, rare.pooled, rare.whole,
)  # fmt: skip


def samples() -> list[Sample]:
    if not TABLE:
        registered()
        for part in PARTS:
            generator.manual_seed(0)
            part()
    return [Sample(op, args, kwargs) for op, args, kwargs in TABLE]


def by_op() -> Iterator[tuple[Any, list[Sample]]]:
    ordered = sorted(samples(), key=lambda s: op_name(s.op))
    for op, group in itertools.groupby(ordered, key=lambda s: s.op):
        yield op, list(group)
