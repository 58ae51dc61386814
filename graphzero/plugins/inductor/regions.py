"""Regions: stretches of compute that are compiled to one call each.

This module decides which ops form a region; ``compiled`` compiles it.

A region ends at ops that it must not contain: collectives, writes to states, and ops that gain nothing from a compiler
(``COMPILED`` lists those that do).  Ending it at every such op would leave very small regions, because backward
launches a reduction whenever a bucket is full.  So these ops are moved before or after the region where that is legal:

* An op that does not read the region's results runs before it.  ``wait`` and the ops of the update run after it, so
  that ``wait`` blocks for less time.
* An op that reads the region's results, or the result of an op that runs after the region, runs after it.  The region
  ends at the first op that could be compiled and depends on one of these.
* The region also ends at a check that runs after it, since later ops may rely on what is checked, and when a launch
  has been delayed by more than one ``LAG``-th of the program's work: a transfer that begins late ends late.

Collectives keep their order, and a storage is written after its readers.  Results that the InPlace pass puts into the
storage of a temporary get storage from the compiler.  Values that only the region reads are not materialized.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import prod

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.aliases import is_name, is_view, unnamed
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import inplace
from graphzero.ir.storage.liveness import Liveness, liveness
from graphzero.ir.storage.roots import Storage, written_by
from graphzero.ir.transfer import is_transfer
from graphzero.ops import CHECK, CROSS_ENTROPY_BACKWARD

aten = torch.ops.aten

LAG = 50  # of so many parts of a program's work, a launch may begin one later than its operands are there
LEAST = 1e7  # operations, a fraction of a millisecond, by which it always may
FEWEST = 2  # ops that a compiler may fuse: fewer are not a region
FLOPS_PER_BYTE = 8  # that a CPU core computes in the time in which it moves a byte

PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)  # called as they are
FACTORIES = (
    aten.full.default, aten.ones.default, aten.zeros.default, aten.arange.default, aten.arange.start,
    aten.arange.start_step, aten.scalar_tensor.default, aten.full_like.default, aten.ones_like.default,
    aten.zeros_like.default,
)  # fmt: skip
# Besides pointwise ops, reductions and views: what Inductor writes kernels of its own for, not slower than ATen's.
FUSED = (
    aten._softmax.default, aten._softmax_backward_data.default, aten._safe_softmax.default,
    aten._log_softmax.default, aten._log_softmax_backward_data.default,
    aten.nll_loss_forward.default, aten.nll_loss_backward.default,
    aten.native_layer_norm.default, aten.native_layer_norm_backward.default,
    aten.native_group_norm.default, aten.native_group_norm_backward.default,
    aten._to_copy.default, aten.cat.default, aten.stack.default, aten.constant_pad_nd.default,
    aten.select_backward.default, aten.slice_backward.default, aten.select_scatter.default, aten.slice_scatter.default,
    aten.tril.default, aten.triu.default, aten.copy.default, aten.repeat.default,
)  # fmt: skip
COMPOSED = (CROSS_ENTROPY_BACKWARD,)  # graphzero's own that a compiler is given as ops of ATen
COMPILED = frozenset((*PRODUCTS, *FACTORIES, *FUSED, *COMPOSED))
# What Inductor's C++ takes a fifth to four times longer for than ATen's kernels, which call MKL: fusion does not make
# up for it.  Of ``gelu`` that is so for the exact one.
SLOW_ON_CPU = (
    aten.tanh.default, aten.log.default, aten.gelu.default, aten.gelu_backward.default, aten.native_group_norm.default,
)  # fmt: skip


@dataclass(frozen=True)
class Region:
    """nodes: its ops, in order.  inputs: values from outside that they read.

    results: values read outside, each once, whatever names it has there.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


def form(graph: StepGraph) -> list[fx.Node | Region]:
    """The ops of a program in the order in which they are to run, what is compiled together joined."""
    left: set[fx.Node] = set()
    while True:
        former = _RegionFormer(graph, left)
        regions = former.form()
        if not former.too_small:
            return regions
        left |= former.too_small


def compiles(node: fx.Node, device_type: str) -> bool:
    """Return whether a region may hold an op, by what it does."""
    target = node.target
    if device_type == "cpu" and target in SLOW_ON_CPU and node.kwargs.get("approximate") != "tanh":
        return False
    if value.phase_of(node) == "update" or not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace != "aten" and target not in COMPOSED:
        return False
    operands, types = value.flat_nodes((node.args, node.kwargs)), value.type_of(node)
    results = types if isinstance(types, tuple) else (types,)
    if any(value.is_scalar(arg) for arg in operands) or not all(isinstance(t, value.TensorType) for t in results):
        return False
    if any(t.dtype.is_complex for t in results) or any(map(_is_complex, operands)):
        return False
    return (
        target in COMPILED or is_view(target) or not {torch.Tag.pointwise, torch.Tag.reduction}.isdisjoint(target.tags)
    )


def _is_complex(node: fx.Node) -> bool:
    return value.is_tensor(node) and value.tensor_type(node).dtype.is_complex


def is_named(node: fx.Node) -> bool:
    """Return whether a node only gives a value another name."""
    return is_name(node.target) or node.target is operator.getitem


def is_name_or_view(node: fx.Node) -> bool:
    return is_named(node) or is_view(node.target)


def is_fusible(node: fx.Node) -> bool:
    """Return whether a compiler may join the op with others."""
    return not (is_name_or_view(node) or node.target in PRODUCTS or node.target in FACTORIES)


def work(node: fx.Node) -> float:
    """Cost of an op, in operations of a core; coarse, and equal on every rank."""
    if node.op != "call_function" or is_name_or_view(node):
        return 0.0
    operands = value.flat_nodes(node.args)
    moved = FLOPS_PER_BYTE * float(sum(type_.nbytes for arg in (node, *operands) for type_ in _tensor_types(arg)))
    if node.target in PRODUCTS:  # [..., a, b] of [..., a, inner]
        return moved + 2.0 * value.tensor_type(node).numel * value.tensor_type(operands[-2]).shape[-1]
    if node.target is aten.convolution.default:
        return moved + 2.0 * value.tensor_type(node).numel * prod(value.tensor_type(operands[1]).shape[1:])
    return moved


def _tensor_types(node: fx.Node) -> list[value.TensorType]:
    types = value.type_of(node)
    return [t for t in (types if isinstance(types, tuple) else (types,)) if isinstance(t, value.TensorType)]


@dataclass
class _OpenRegion:
    """A region that is being formed, and the ops that will run after it."""

    nodes: dict[fx.Node, None] = field(default_factory=dict)
    after: dict[fx.Node, None] = field(default_factory=dict)
    lag: float | None = None  # work since a launch was put after the region


class _RegionFormer:
    """One walk over the program.  too_small: ops of regions with too few ops, which the next walk leaves out."""

    def __init__(self, graph: StepGraph, outside: Collection[fx.Node]) -> None:
        self.graph, self.outside = graph, outside
        self.at = liveness(graph)
        self.too_small: set[fx.Node] = set()
        self._done: list[fx.Node | Region] = []
        self._placed: set[fx.Node] = set()  # earlier than in the program
        self._open = _OpenRegion()
        self._longest = max(sum(map(work, graph.nodes)) / LAG, LEAST)

    def form(self) -> list[fx.Node | Region]:
        before, part = orders(self.at, self._takes), 0
        for node in self.graph.nodes:
            if self.at.section[node][0] != part:  # what is repeated begins, or ends
                self._close_all()
                part = self.at.section[node][0]
            if node.op == "call_function":
                self._place(node, before.get(node, ()))
        self._close_all()
        return self._done

    def _close_all(self) -> None:
        while self._open.nodes or self._open.after:
            self._close()

    def _takes(self, node: fx.Node) -> bool:
        if node in self.outside or not compiles(node, self.graph.placement.device_type):
            return False
        return all(self.at.roots[room][0][0].op != "placeholder" for room in inplace.outs_of(node) if room is not None)  # type: ignore[index]

    def _place(self, node: fx.Node, orders: Iterable[fx.Node]) -> None:
        if node in self._placed:
            return
        taken, region = self._takes(node), self._open
        waits_for = (*(read_by(node) if taken else node.all_input_nodes), *orders)
        depends_on_later = any(other in region.after for other in waits_for)
        reads = any(other in region.nodes for other in waits_for)
        if taken and not is_name_or_view(node) and (depends_on_later or (region.lag or 0) > self._longest):
            self._close()
            self._place(node, orders)
        elif depends_on_later:
            self._put_after(node)
        elif reads and is_named(node) or taken:
            region.nodes[node] = None
            region.lag = None if region.lag is None else region.lag + work(node)
        elif reads or (region.nodes and (node.target is ops.wait or value.phase_of(node) == "update")):
            self._put_after(node)
        else:
            self._done.append(node)

    def _put_after(self, node: fx.Node) -> None:
        self._open.after[node] = None
        if node.target is ops.launch and self._open.lag is None:
            self._open.lag = 0.0
        if node.target is CHECK:
            self._close()

    def _close(self) -> None:
        """End the region; views that are after it begin the next one, unless something before that reads them."""
        region, self._open = self._open, _OpenRegion()
        self._pick_all(region)
        edge = _views_at_the_edge(region.nodes)
        self._done += edge
        inside = [node for node in region.nodes if node not in edge]
        if sum(map(is_fusible, inside)) >= FEWEST:
            self._done.append(region_of(inside))
        else:
            self.too_small.update(node for node in inside if not is_name_or_view(node))
            self._done += inside
        for node in reversed(region.after):
            if self._takes(node) and is_name_or_view(node) and all(self._is_free(user, region) for user in node.users):
                self._open.nodes[node] = None
        self._open.nodes = dict.fromkeys(reversed(self._open.nodes))
        self._done += [node for node in region.after if node not in self._open.nodes]

    def _pick_all(self, region: _OpenRegion) -> None:
        """Add the nodes that select a result of a region's op to the region, also where other ops are between the
        two."""
        for node in [node for node in region.nodes if value.is_multi(node)]:
            for user in node.users:
                if user.target is operator.getitem and user not in region.nodes and user not in region.after:
                    region.nodes[user] = None
                    self._placed.add(user)

    def _is_free(self, user: fx.Node, closed: _OpenRegion) -> bool:
        return user not in closed.after or user in self._open.nodes


def region_of(nodes: Collection[fx.Node]) -> Region:
    """The region that some ops are, in their order."""
    members = set(nodes)
    inputs = dict.fromkeys(arg for node in nodes for arg in read_by(node) if arg not in members)
    read = [node for node in nodes if not value.is_multi(node) and any(user not in members for user in node.users)]
    return Region(tuple(nodes), tuple(inputs), tuple(dict.fromkeys(map(unnamed, read))))


def read_by(node: fx.Node) -> list[fx.Node]:
    """Operands, without the room that a result was given."""
    return value.flat_nodes((node.args, value.own_kwargs(node)))


def _views_at_the_edge(nodes: Collection[fx.Node]) -> dict[fx.Node, None]:
    """Views of what a region is given that are read outside of it, with those that they are views of.

    A result of a region must not be a view of its input; as a line of its own it is what the program says.
    """
    chains: set[fx.Node] = set()
    for node in nodes:
        source = node.args[0] if node.args else None
        if is_name_or_view(node) and (source not in nodes or source in chains):
            chains.add(node)
    edge: set[fx.Node] = set()
    for node in reversed([*nodes]):
        if node in chains and any(user not in nodes or user in edge for user in node.users):
            edge.add(node)
    for node in nodes:  # of several results, all
        if node.target is operator.getitem and node.args[0] in edge:
            edge.add(node)
    return {node: None for node in nodes if node in edge}


def orders(at: Liveness, takes: Callable[[fx.Node], bool]) -> dict[fx.Node, list[fx.Node]]:
    """Nodes that must run before an op besides its operands: readers of a storage that it writes, the collective before
    it.

    takes: whether an op may be part of a region, where it writes nothing.
    """
    roots, readers = at.roots, dict[Storage, list[fx.Node]]()
    before: dict[fx.Node, list[fx.Node]] = {}
    last: fx.Node | None = None
    bound = {root for node in at.graph.placeholders() for root in roots[node] if root is not None}
    for node in at.nodes:
        if node.op != "call_function":
            continue
        if not takes(node):
            for storage in _written(at, node):
                before.setdefault(node, []).extend(readers.pop(storage, ()))
        if is_transfer(node):
            if last is not None:
                before.setdefault(node, []).append(last)
            last = node
        read = {root for arg in node.all_input_nodes for root in roots[arg] if root is not None}
        for storage in read | (
            bound if node.target is CHECK else set()
        ):  # states stay as they were until all is checked
            readers.setdefault(storage, []).append(node)
    return before


def _written(at: Liveness, node: fx.Node) -> set[Storage]:
    written, moves = written_by(node, at.roots), at.transfers.get(node)
    if moves is not None and moves.is_direct:  # an all-reduce works there, and a reduce-scatter may
        written |= {root for operand in node.all_input_nodes for root in at.roots[operand] if root is not None}
    return written
