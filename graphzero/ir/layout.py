"""How collectives lay values out in flat buffers, and how large the communication slots are.

The runtime packs by these tables and the plan counts by them, so that both agree to the byte.  A piece is
what one rank contributes or receives of one value; pieces of one bucket follow each other and are padded
to the fullest rank's size::

    all_gather      the slot is  [n, total]: every rank's pieces; a rank packs its own line
    reduce_scatter  the slot is  [n, total] to send, then [total] received
    all_reduce      the slot is  [total]: whole values, reduced in place
    all_to_all      the slot is  [n, total] to send, then [n, total] received
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.sbp.boxing import wire_bytes
from graphzero.sbp.local import piece_shape
from graphzero.sbp.types import Nd


@dataclass(frozen=True)
class Layout:
    """One collective over one flat buffer.

    kind: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all"; axis: placement axis; ranks: its length.
    members: the values, as nodes; dims: their split dims (one pair (src, dst) for all_to_all).
    sizes: elements of one padded piece, per member; offsets: where it starts; total: elements of one line.
    """

    kind: str
    axis: str
    ranks: int
    members: tuple[fx.Node, ...]
    dims: tuple[Any, ...]
    sizes: tuple[int, ...]
    reduction: str = "sum"

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @cached_property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def itemsize(self) -> int:
        return value.tensor_type(self.members[0]).dtype.itemsize

    @property
    def slot_elements(self) -> int:
        lines = {
            "all_gather": self.ranks,
            "reduce_scatter": self.ranks + 1,
            "all_reduce": 1,
            "all_to_all": 2 * self.ranks,
        }
        return lines[self.kind] * self.total

    @property
    def slot_bytes(self) -> int:
        return self.slot_elements * self.itemsize

    @property
    def arrived_elements(self) -> int:
        """Of what arrives by a gather or a reduce-scatter without a slot, padding included."""
        return self.total * (self.ranks if self.kind == "all_gather" else 1)

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends, padding included."""
        lines = {"all_gather": self.ranks, "reduce_scatter": self.ranks, "all_reduce": 1, "all_to_all": self.ranks**2}
        return wire_bytes(self.kind, lines[self.kind] * self.total * self.itemsize, self.ranks)


def layout_of(graph: StepGraph, node: fx.Node) -> Layout | None:
    """The layout of a collective (single, bucketed or launched), or None for any other node."""
    name, args = getattr(node.target, "__name__", ""), node.args
    if node.op != "call_function":
        return None
    if node.target is ops.launch:
        name, args = str(args[0]), args[2:]
    if name.startswith("bucket_"):
        return _bucket(graph, name.removeprefix("bucket_"), args)
    if node.target in (ops.all_gather, ops.reduce_scatter):
        return _bucket(graph, name, ([args[0]], [args[1]], args[2]))
    if node.target is ops.all_reduce:
        return _bucket(graph, name, ([args[0]], args[1], args[2] if len(args) > 2 else "sum"))
    if node.target is ops.all_to_all:
        return _all_to_all(graph, args)
    return None


def _bucket(graph: StepGraph, kind: str, args: Any) -> Layout:
    if kind == "all_reduce":
        members, axis, *rest = args
        sizes = tuple(prod(local_shape(graph, node)) for node in members)
        reduction = rest[0] if rest else "sum"
        return Layout(kind, axis, _ranks(graph, axis), tuple(members), (), sizes, reduction)
    members, dims, axis = args
    ranks = _ranks(graph, axis)
    sizes = tuple(_piece(graph, node, {dim: ranks}, axis) for node, dim in zip(members, dims, strict=True))
    return Layout(kind, axis, ranks, tuple(members), tuple(dims), sizes)


def _all_to_all(graph: StepGraph, args: Any) -> Layout:
    node, src, dst, axis = args
    ranks = _ranks(graph, axis)
    return Layout(
        "all_to_all", axis, ranks, (node,), ((src, dst),), (_piece(graph, node, {src: ranks, dst: ranks}, axis),)
    )  # fmt: skip


def _piece(graph: StepGraph, node: fx.Node, cuts: dict[int, int], axis: str) -> int:
    """Elements of the fullest piece of a value whose dims in ``cuts`` are cut on ``axis`` (other axes as it stands)."""
    index = graph.placement.axis(axis)
    nd = value.nd_of(node)
    shape = list(value.tensor_type(node).shape)
    for i, sbp in enumerate(nd):
        if i != index and sbp.is_split:
            shape[sbp.dim] = -(-shape[sbp.dim] // graph.placement.hierarchy[i])
    for dim, ranks in cuts.items():
        shape[dim] = -(-shape[dim] // ranks)
    return prod(shape)


def _ranks(graph: StepGraph, axis: str) -> int:
    return graph.placement.hierarchy[graph.placement.axis(axis)]


def local_shape(graph: StepGraph, node: fx.Node, rank: int | None = None) -> tuple[int, ...]:
    """Shape of a one-tensor node on ``rank``; by default on the first of the placement, which is always the fullest."""
    return shape_on(graph, value.tensor_type(node), value.nd_of(node), rank)


def shape_on(graph: StepGraph, type_: TensorType, nd: Nd, rank: int | None = None) -> tuple[int, ...]:
    """Shape that ``type_`` under ``nd`` has on ``rank``, by default the first of the placement."""
    if not any(sbp.is_split for sbp in nd):
        return type_.shape
    at = (0,) * len(nd) if rank is None else graph.placement.coordinate(rank)
    return piece_shape(type_.shape, nd, graph.placement.hierarchy, at)
