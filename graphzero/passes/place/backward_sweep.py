"""Third sweep of propagation, from the last value to the first: values that are made cut.

A value that all its readers cut in one way is made cut, if that costs nothing: a whole one by ops on pieces of whole
operands, a partial one by reducing and scattering, or gathering, its operands instead of itself where that is fewer
bytes: an operand is needed in pieces by another reader anyway, or is small, as what a table's gradient is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphzero.ir import calls, value
from graphzero.passes.place.forward_sweep import AxisPropagation
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import B, Sbp


def cut_for_readers(state: AxisPropagation) -> None:
    """Make cut what is only read so; changes ``found`` and ``chosen``."""
    for node in reversed(list(state.graph.nodes)):
        if node not in state.chosen or len(state.found[node]) != 1 or (want := _wanted(state, node)) is None:
            continue
        way = _in_pieces(state, node, want)
        if way is not None and (way.cost < state.price(node, want) or state.sbp(node) is B):
            for changed, signature in way.changes:
                state.found[changed], state.chosen[changed] = signature.outputs, signature


@dataclass(frozen=True)
class _Way:
    """A value made in pieces: the bytes on the wire, and the signatures of the ops that make it so."""

    cost: float
    changes: tuple[tuple[fx.Node, Signature], ...]


def _wanted(state: AxisPropagation, node: fx.Node) -> Sbp | None:
    """The split in which every reader needs a value that is whole or partial, if there is one."""
    have = state.sbp(node)
    if have.is_split or state.pinned(node) is not None or (state.is_data and _is_wide_gradient(node)):
        return None
    wants = {want for user in node.users for want in state.wants(user, node)}
    want = next(iter(wants)) if len(wants) == 1 else B
    return want if want.is_split else None


def _is_wide_gradient(node: fx.Node) -> bool:
    """Return whether a value is a gradient that was cast from 16 bit so that it is added up in more, at every stage."""
    if not value.has_role(node, "gradient") or node.target is not torch.ops.aten._to_copy.default:
        return False
    source: Any = node.args[0]
    return value.tensor_type(source).dtype.itemsize < value.tensor_type(node).dtype.itemsize


def _in_pieces(state: AxisPropagation, node: fx.Node, want: Sbp) -> _Way | None:
    """The cheapest way to make ``node`` as ``want`` from operands that are only cut, or reduced and scattered."""
    best: _Way | None = None
    operands = value.tensor_operands(node)
    for signature in calls.signatures_of(state.graph, node, state.axis, (want,)):
        if signature.outputs != (want,) or state.misfit(node, signature):
            continue
        ways = [_operand(state, node, o, w) for o, w in zip(operands, signature.inputs, strict=True)]
        feasible = [way for way in ways if way is not None]
        if len(feasible) < len(ways):
            continue
        way = _Way(sum(w.cost for w in feasible), (*(c for w in feasible for c in w.changes), (node, signature)))
        if best is None or way.cost < best.cost:
            best = way
    return best


def _operand(state: AxisPropagation, reader: fx.Node, node: fx.Node, want: Sbp) -> _Way | None:
    """The cost for ``reader`` to get ``node`` as ``want``; None if it takes more than one cut, reduction or gather.

    Along a data axis nothing is gathered for that: each rank stays with its share of the batch.
    """
    have = state.sbp(node)
    if have is want or (have is B and want.is_split):
        return _Way(0.0, ())
    if have.is_split and want is B and not state.is_data:
        return _Way(state.price(node, B), ())
    if not have.is_partial or not want.is_split:
        return None
    others = [user for user in node.users if user is not reader]
    if any(want in state.wants(user, node) for user in others):
        return _Way(0.0, ())  # it is boxed so for another reader
    here = _Way(state.price(node, want), ())
    if others or node not in state.chosen or len(state.found[node]) != 1 or state.pinned(node) is not None:
        return here
    further = _in_pieces(state, node, want)
    return further if further is not None and further.cost < here.cost else here
