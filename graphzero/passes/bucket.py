"""Bucket: few large collectives instead of many small ones.

Two collectives may join if they are of one kind, axis, dtype and phase, and if either both only read placeholders (a
gather of parameters; the bucket stands at its first member) or no result of the earlier is read before the later
starts (reductions of gradients, gathers of updated parameters; the bucket stands at its last member).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.passes.base import BuiltinPass

BUCKETS = {
    ops.all_gather: ops.bucket_all_gather,
    ops.reduce_scatter: ops.bucket_reduce_scatter,
    ops.all_reduce: ops.bucket_all_reduce,
}

SMALLEST, LARGEST = 64 * 2**10, 4 * 2**20  # bytes of a bucket by default


@dataclass(frozen=True)
class Bucket(BuiltinPass):
    """Joins collectives up to ``nbytes`` bytes of whole values per bucket (one larger value is a bucket of its own).

    By default an eighth of the parameters' bytes, within 64 KiB and 4 MiB: slots then stay small beside a small
    model.  The bits of a result do not depend on it.
    """

    nbytes: int | None = None

    def __post_init__(self) -> None:
        if self.nbytes is not None and self.nbytes <= 0:
            raise ConfigError(f"Bucket(nbytes={self.nbytes}): a bucket holds a positive number of bytes")

    def __call__(self, graph: StepGraph) -> StepGraph:
        position = {node: i for i, node in enumerate(graph.nodes)}
        limit = self.nbytes or _default_limit(graph)
        open_: dict[Any, list[fx.Node]] = {}
        closed: list[list[fx.Node]] = []
        for node in graph.nodes:
            if node.target not in BUCKETS or node.op != "call_function":
                continue
            key = _key(node)
            members = open_.get(key)
            if members is not None and _fits(members, node, position, limit, early=key[-1]):
                members.append(node)
            else:
                open_[key] = [node]
                closed.append(open_[key])
        for members in closed:
            _join(graph, members, early=is_early(members[0]))
        return graph


def _default_limit(graph: StepGraph) -> int:
    parameters = sum(value.tensor_type(node).nbytes for node in graph.placeholders("param"))
    return min(max(parameters // 8, SMALLEST), LARGEST)


def _fits(members: list[fx.Node], node: fx.Node, position: dict[fx.Node, int], limit: int, early: bool) -> bool:
    if sum(value.tensor_type(m).nbytes for m in (*members, node)) > limit:
        return False
    first_reader = min((position[user] for m in members for user in m.users), default=len(position))
    return early or first_reader > position[node]


def _key(node: fx.Node) -> tuple[Any, ...]:
    rest: tuple[Any, ...] = node.args[1:]
    if node.target is not ops.all_reduce:
        source = node.all_input_nodes[0]
        rest = (node.args[2], *(sbp.reduction for sbp in value.nd_of(source)))  # what a reduce_scatter completes
    return (node.target, rest, value.tensor_type(node).dtype, value.phase_of(node), is_early(node))


def is_early(node: fx.Node) -> bool:
    """Whether all that a collective reads is there when the step begins."""
    return all(operand.op == "placeholder" for operand in node.all_input_nodes)


def _join(graph: StepGraph, members: list[fx.Node], early: bool) -> None:
    anchor = members[0] if early else members[-1]
    sources = [member.args[0] for member in members]
    dims = [member.args[1] for member in members]
    first = members[0]
    args = (sources, *first.args[1:]) if first.target is ops.all_reduce else (sources, dims, first.args[2])
    types = tuple(value.tensor_type(member) for member in members)
    with graph.graph.inserting_before(anchor):
        bucket = graph.call(
            BUCKETS[first.target],  # type: ignore[index]
            args,
            types,
            sbp=tuple(value.nd_of(member) for member in members),  # type: ignore[arg-type]
            like=anchor,
        )
    for i, member in enumerate(members):
        if member is not anchor:
            anchor.prepend(member)
        member.target, member.args = operator.getitem, (bucket, i)
        member.meta["phase"] = value.phase_of(anchor)
    if early:
        for member in members[:0:-1]:
            anchor.append(member)
