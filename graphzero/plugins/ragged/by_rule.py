"""Padding by the rules of splits: dims of operands that belong together, and dims of results that are padded.

A dim that is padded is taken for one that is split: what was given is one piece, and padding another.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from graphzero.ir import calls, value
from graphzero.ir.ragged import Along
from graphzero.plugins.ragged.table import bounds
from graphzero.plugins.ragged.work import PaddedOp
from graphzero.sbp import registry
from graphzero.sbp.signature import Signature

aten = torch.ops.aten
SUMS = (aten.sum.dim_IntList, aten.sum.default, aten.nansum.default, aten.count_nonzero.default,
        aten.count_nonzero.dim_IntList)  # fmt: skip
LARGEST = (aten.amax.default, aten.max.default)
SMALLEST = (aten.amin.default, aten.min.default)
TRUTHS = {
    aten.any.default: 0, aten.any.dim: 0, aten.any.dims: 0, aten.all.default: 1, aten.all.dim: 1, aten.all.dims: 1,
}  # fmt: skip


def _signatures(work: PaddedOp, sections: set[int]) -> Sequence[Signature]:
    node = work.node
    kwargs = value.own_kwargs(node)
    return registry.signatures(
        node.target,  # type: ignore[arg-type]
        [calls.meta_of(arg) for arg in node.args],
        {name: calls.meta_of(arg) for name, arg in kwargs.items()},
        calls.result_metas(node),
        sections=sections - {1},
    )


def speak_for_one(work: PaddedOp, flat: Collection[fx.Node]) -> None:
    """Speak for one padded dim, and the dims of other operands that belong to it.

    flat: values of one number everywhere, whose ragged dims may be any.
    """
    i, along = min(work.left, key=lambda x: (x[0], x[1].dim, -x[1].sections, x[1].name))
    for signature in _fitting(work, i, along):
        mates = _mates(work, signature, along, flat)
        if mates is None or not _has_results(work, signature, along):
            continue
        zeros = _zeros(work, signature, [j for j, _ in mates])
        if zeros is None:
            continue
        for j, mate in mates:
            work.take(j, mate)
            work.cut.add((j, mate.dim, mate.name))
            if j in zeros:
                work.fill(j, mate, zeros[j])
        for result, sbp in _results(work.node, signature):
            if sbp.is_split:
                work.mark_result(result, Along(along.name, sbp.dim, sbp.sections, along.more))
        return
    raise work.refusal(along.name, "reads the whole dim at once, and does not know what is padding")


def _fitting(work: PaddedOp, i: int, along: Along) -> list[Signature]:
    """Signatures that cut the dim and take no partial operand; first those whose results are cut."""
    matching = [s for s in _signatures(work, {along.sections}) if s.inputs[i] is along.sbp
             and not any(sbp.is_partial for sbp in s.inputs)]  # fmt: skip
    return sorted(matching, key=lambda s: sum(not sbp.is_split for sbp in s.outputs))


def _mates(
    work: PaddedOp, signature: Signature, along: Along, flat: Collection[fx.Node]
) -> list[tuple[int, Along]] | None:
    """Dims that a signature cuts, by operand; None if it would cut an unpadded one."""
    wanted = [(j, Along(along.name, sbp.dim, sbp.sections, along.more))
              for j, sbp in enumerate(signature.inputs) if sbp.is_split]  # fmt: skip
    return wanted if all(one in work.left or _may_be(work, flat, *one) for one in wanted) else None


def _may_be(work: PaddedOp, flat: Collection[fx.Node], j: int, along: Along) -> bool:
    """Return whether an operand is one number everywhere, in a dim that may be padded so."""
    x = work.operands[j]
    return x in flat and work.sizes.fits(x, 0, along)


def _has_results(work: PaddedOp, signature: Signature, along: Along) -> bool:
    return all(
        work.sizes.fits(work.node, result, Along(along.name, sbp.dim, sbp.sections, along.more))
        for result, sbp in _results(work.node, signature)
        if sbp.is_split
    )


def _zeros(work: PaddedOp, signature: Signature, cut: Sequence[int]) -> dict[int, float] | None:
    """Values of operands in padded places that add nothing to results that are sums; None if there are none."""
    node, fill_values = work.node, dict[int, float]()
    for result, sbp in _results(node, signature):
        if not sbp.is_partial:
            continue
        numbers = _neutral(work, sbp.reduction, result, cut)
        if numbers is None:
            return None
        fill_values |= numbers
    return fill_values


def _neutral(work: PaddedOp, reduction: str, result: int, cut: Sequence[int]) -> dict[int, float] | None:
    target, x = work.node.target, value.tensor_type(work.operands[cut[0]])
    if target in TRUTHS:
        return {cut[0]: TRUTHS[target]}
    if target in LARGEST or target in SMALLEST:
        low, high = bounds(x.dtype)
        return {cut[0]: low if target in LARGEST else high}
    if reduction != "sum":
        return None
    if target in SUMS:
        return {cut[0]: 0}
    linear = _linear(work, result, cut)
    if not linear:
        return None
    real = {i for i in cut if value.tensor_type(work.operands[i]).dtype.is_floating_point}
    return dict.fromkeys(linear | real, 0)


def _linear(work: PaddedOp, result: int, cut: Sequence[int]) -> set[int]:
    """Cut operands over which a result is a sum: it is zero where they are zero."""
    for signature in _signatures(work, {1}):
        partial = {i for i, sbp in enumerate(signature.inputs) if sbp.is_partial and sbp.reduction == "sum"}
        others = all(sbp.is_broadcast for i, sbp in enumerate(signature.inputs) if i not in partial)
        result_sbp = dict(_results(work.node, signature))[result]
        if partial and partial.issubset(cut) and others and result_sbp.is_partial and result_sbp.reduction == "sum":
            return partial
    return set()


def create(work: PaddedOp) -> None:
    """Dims that the op makes by itself, one as the other: an ``expand``, a ``full``."""
    for result, shape in enumerate(value.shapes(work.node)):
        for dim in range(len(shape)):
            have = {along.name for along in work.result_dims[result] if along.dim == dim}
            for name in work.sizes.dims(work.node, result, dim):
                straight = work.sizes.straight(work.node, result, dim, name) if name in work.ragged else None
                if name not in have and straight is not None and _creates(work, result, straight):
                    work.mark_result(result, straight)


def _creates(work: PaddedOp, result: int, along: Along) -> bool:
    return any(
        all(sbp.is_broadcast for sbp in s.inputs) and dict(_results(work.node, s)).get(result) is along.sbp
        for s in _signatures(work, {1})
    )


def _results(node: fx.Node, signature: Signature) -> list[tuple[int, Any]]:
    """(number of a result, its SBP) of those that the op makes."""
    results = [i for i, meta in enumerate(calls.result_metas(node)) if meta is not None]
    return list(zip(results, signature.outputs, strict=True))
