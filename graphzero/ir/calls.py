"""Ops of a graph as the SBP rules see them: what each allows, per placement axis."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from torch import fx

from graphzero._compat import arguments
from graphzero.errors import SbpError
from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.printer import print_line
from graphzero.ir.value import TensorType
from graphzero.ops import ADAM, AS_GLOBAL, AS_LOCAL, FREE, PIN, SAME
from graphzero.sbp import rank_call, registry
from graphzero.sbp.registry import CallSignatures
from graphzero.sbp.shards import nests
from graphzero.sbp.signature import Signature, TensorMeta
from graphzero.sbp.types import B, Nd, P, Sbp, parse_sbp


def is_op(node: fx.Node) -> bool:
    """Return whether the rules of the registry speak of this node: a tensor op, not one that passes put in."""
    return (
        node.op == "call_function"
        and node.target is not operator.getitem
        and node.target is not PIN
        and node.target not in ops.OF_PASSES
        and not value.is_scalar(node)
    )


# Ops that step several tensors, each by itself: how many of their arguments are lists, one item for each.
LISTS: Mapping[Any, int] = {ADAM: 6}


def parts_of(node: fx.Node) -> Sequence[int | None]:
    """Numbers of what the op at ``node`` does apart, each under its own SBP; [None] where it is one thing."""
    count = len(node.args[0]) if node.target in LISTS else 1  # type: ignore[arg-type]
    return range(count) if count > 1 else (None,)


def _args(node: fx.Node, part: int | None) -> tuple[Any, ...]:
    if part is None:
        return node.args
    lists = LISTS[node.target]
    return (*([group[part]] if group else [] for group in node.args[:lists]), *node.args[lists:])  # type: ignore[index]


def operands_of(node: fx.Node, part: int | None = None) -> list[fx.Node]:
    """The tensor operands of the op at ``node``, or of one of its parts, in the order a signature lists them."""
    if part is None:
        return value.own_operands(node)
    return [operand for operand in value.flat_nodes(_args(node, part)) if value.is_tensor(operand)]


def signatures_of(
    graph: StepGraph, node: fx.Node, axis: int, stand: Iterable[Sbp | None] = (), pieces: int | None = None,
    part: int | None = None,
) -> tuple[Signature, ...]:  # fmt: skip
    """Signatures of the op at ``node`` on placement axis number ``axis``, all-B first.

    stand: SBPs that operands or results have or shall have, for splits in as many sections as those.
    pieces: into how many pieces a dim is cut by all axes together, for what may not be empty; by default by this one.
    part: of ``parts_of``.
    """
    if node.target in (AS_LOCAL, AS_GLOBAL):
        return _end_of_region(node, axis, tuple(stand))
    sections = {sbp.sections for sbp in stand if sbp is not None} - {1}
    facts = [registry.rules_stamp(), node.target, *arguments(node), value.type_of(node)]
    facts += map(value.type_of, operands_of(node, part))
    known_facts, signatures = graph.rules.get((node, part), ((), None))
    if signatures is None or len(facts) != len(known_facts) or not all(map(operator.is_, facts, known_facts)):
        signatures = _signatures_of_call(node, part)
        graph.rules[node, part] = facts, signatures
    return _on_axis(node, signatures, graph.placement.hierarchy[axis], sections, pieces)


def result_sbp(graph: StepGraph, node: fx.Node, axis: int, sbp: Sbp) -> Sbp | None:
    """The SBP on ``axis`` of what an op makes of its first operand in ``sbp``; None where it allows none."""
    return next((s.outputs[0] for s in signatures_of(graph, node, axis, [sbp]) if s.inputs[0] is sbp), None)


def allowed_on(node: fx.Node, ranks: int | None, sections: Collection[int] = ()) -> tuple[Signature, ...]:
    """Signatures of the op at ``node`` on an axis of so many ranks, all-B first; the rest as of ``signatures_of``.

    ranks: None for any number of them.  Not of an end of per-rank code, which depends on the axis.
    """
    return _on_axis(node, _signatures_of_call(node), ranks, sections)


def _signatures_of_call(node: fx.Node, part: int | None = None) -> CallSignatures:
    op, args, kwargs = rank_call.of_whole(node.target, _args(node, part), value.own_kwargs(node))  # type: ignore[arg-type]
    metas = [meta_of(arg) for arg in args], {name: meta_of(arg) for name, arg in kwargs.items()}
    return registry.signatures_of_call(op, *metas, result_metas(node, part))


def _on_axis(
    node: fx.Node, signatures: CallSignatures, ranks: int | None, sections: Collection[int], pieces: int | None = None
) -> tuple[Signature, ...]:
    try:
        return signatures.on_axis(ranks, sections, pieces)
    except SbpError as error:
        source = value.source_of(node)
        raise SbpError(f"{error}\n  > {print_line(node)}" + (f"    {source}" if source else "")) from None


def _end_of_region(node: fx.Node, axis: int, stand: tuple[Sbp | None, ...]) -> tuple[Signature, ...]:
    """Signatures of an end of per-rank code, inside of which all values are B; along a free axis it changes nothing."""
    said = str(node.args[1][axis])  # type: ignore[index]
    if said == FREE:
        sizes = zip(value.tensor_type(value.operand(node)).shape, value.tensor_type(node).shape, strict=True)
        equal_dims = {dim for dim, (before, after) in enumerate(sizes) if before == after}
        able = (sbp for sbp in (B, P, *stand) if sbp is not None and (not sbp.is_split or sbp.dim in equal_dims))
        return tuple(Signature((sbp,), (sbp,)) for sbp in dict.fromkeys(able))
    sbp = B if said == SAME else parse_sbp(said)
    return (Signature((sbp,), (B,)) if node.target is AS_LOCAL else Signature((B,), (sbp,)),)


def misfit(graph: StepGraph, node: fx.Node, chosen: Mapping[int, Signature], part: int | None = None) -> str:
    """Say why signatures that the op at ``node`` allows on axes, by number, cannot be combined; "" if they can."""
    shared = _shared(chosen.values())
    if not shared:
        return ""
    on_axes = {axis: (*signature.inputs, *signature.outputs) for axis, signature in chosen.items()}
    hierarchy = graph.placement.hierarchy
    metas = [meta for meta in result_metas(node, part) if meta is not None]
    shapes = [*(value.tensor_type(o).shape for o in operands_of(node, part)), *(meta.shape for meta in metas)]
    nds = [tuple(on_axes[i][k] if i in on_axes else B for i in range(len(hierarchy))) for k in range(len(shapes))]
    if not nests_evenly(hierarchy, zip(shapes, nds, strict=True)):
        return "would cut a dim over several axes at other values in one operand or result than in another"
    if _counts_uneven_places(node, chosen.values(), shared, shapes):
        return "would leave a rank places of a dim that are not equally far apart, which the op counts"
    pieces = max(prod(hierarchy[i] for i, s in enumerate(nds[k]) if s.is_split and s.dim == dim) for k, dim in shared)
    for axis, signature in chosen.items():
        if signature.splits & shared and signature not in signatures_of(graph, node, axis, on_axes[axis], pieces, part):
            return "would leave some rank nothing of a dim that several axes cut, which the op cannot take"
    return ""


def _counts_uneven_places(
    node: fx.Node, chosen: Iterable[Signature], shared: set[tuple[int, int]], shapes: Sequence[tuple[int, ...]]
) -> bool:
    """Return whether the op counts places of a dim that several axes cut, one of them in sections."""
    entry = registry.entry_of(registry.base_of(node.target))  # type: ignore[arg-type]
    if entry is None or entry.offset is None:
        return False
    offset = rank_call.needed_offset(*rank_call.of_whole(node.target, node.args, value.own_kwargs(node)))  # type: ignore[arg-type]
    if offset is None:
        return False
    at = offset.tensor % len(shapes)
    dim = offset.dim_in(node.target, node.args, node.kwargs, len(shapes[at]))  # type: ignore[arg-type]
    return (at, dim) in shared and any((*s.inputs, *s.outputs)[at].sections > 1 for s in chosen)


def _shared(on_axes: Iterable[Signature]) -> set[tuple[int, int]]:
    """(tensor, dim) of what more than one axis splits."""
    seen: frozenset[tuple[int, int]] = frozenset()
    shared: set[tuple[int, int]] = set()
    for signature in on_axes:
        shared |= seen & signature.splits
        seen |= signature.splits
    return shared


def nests_evenly(hierarchy: tuple[int, ...], pairs: Iterable[tuple[tuple[int, ...], Nd]]) -> bool:
    """Return whether dims that several axes split are cut at the same values in all operands and results of an op.

    A rule sees one axis.  Where an op shows the values of a dim in a dim of another size, as a view does, the cuts of
    nested splits agree if both sizes divide by all ranks.
    """
    sizes: dict[tuple[int, ...], set[int]] = {}  # axes that cut one part of a dim together -> sizes of such parts
    for shape, nd in pairs:
        if not nests(shape, nd, hierarchy):
            return False
        for part in {sbp for sbp in nd if sbp.is_split}:
            axes = tuple(i for i, sbp in enumerate(nd) if sbp is part)
            sizes.setdefault(axes, set()).add(shape[part.dim] // part.sections)
    return all(
        len(lengths) == 1 or len(axes) == 1 or not any(size % prod(hierarchy[i] for i in axes) for size in lengths)
        for axes, lengths in sizes.items()
    )


def meta_of(arg: Any) -> Any:
    """``arg`` with a TensorMeta for each tensor; scalar nodes stay, the registry takes them for run-time numbers."""
    if isinstance(arg, fx.Node):
        type_ = value.type_of(arg)
        return type_.meta if isinstance(type_, TensorType) else arg
    if isinstance(arg, (list, tuple)):
        return [meta_of(item) for item in arg]
    return arg


def result_metas(node: fx.Node, part: int | None = None) -> tuple[TensorMeta | None, ...]:
    type_ = value.type_of(node)
    types = type_ if isinstance(type_, tuple) else (type_,)
    if part is not None:
        types = types[part :: len(parts_of(node))]
    return tuple(t.meta if isinstance(t, TensorType) else None for t in types)


def input_sbps(node: fx.Node, axis: int, part: int | None = None) -> tuple[Sbp, ...]:
    """The SBP in which each tensor operand is on ``axis``."""
    return tuple(value.nd_of(operand)[axis] for operand in operands_of(node, part))


def output_sbps(node: fx.Node, axis: int, part: int | None = None) -> tuple[Sbp, ...]:
    """The SBP of each result that the node makes on ``axis``."""
    nd = value.sbp_of(node)
    if part is not None:
        return tuple(axis_sbps[axis] for axis_sbps in nd[part :: len(parts_of(node))] if axis_sbps is not None)
    if value.is_multi(node):
        return tuple(axis_sbps[axis] for axis_sbps in nd if axis_sbps is not None)
    return (nd[axis],)


def result_pairs(node: fx.Node) -> list[tuple[tuple[int, ...], Nd]]:
    """(global shape, SBP) of each tensor result."""
    return [(t.shape, s) for t, s in value.results_of(node) if isinstance(t, TensorType)]


def operand_pairs(node: fx.Node) -> list[tuple[tuple[int, ...], Nd]]:
    return [(value.tensor_type(operand).shape, value.nd_of(operand)) for operand in value.own_operands(node)]
