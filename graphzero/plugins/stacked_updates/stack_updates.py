"""StackUpdates: what an optimizer does with whole matrices is done for many at once, a share of them on each rank.

An optimizer that multiplies matrices, as Muon's Newton-Schulz products do (Jordan et al., "Muon", 2024), needs each of
them whole, and ZeRO leaves every rank a piece of each.  Rather than gather all to all, ranks exchange: pieces of n
matrices against one whole one, and what has become of it goes back in pieces.  That moves 2/n of a gather's bytes, and
no rank computes what another one computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.ops import PIN
from graphzero.passes.base import BuiltinPass
from graphzero.passes.place.forward_sweep import AxisPropagation, swept
from graphzero.passes.schedule.bucket import default_limit
from graphzero.plugins.stacked_updates.stacked_op import Lifted, StackedOp, stacked_op, stacked_type
from graphzero.plugins.stacked_updates.whole_chains import Chain, whole_chains
from graphzero.sbp.link_costs import Links
from graphzero.sbp.types import B, S, Sbp

aten = torch.ops.aten


@dataclass(frozen=True)
class StackUpdates(BuiltinPass):
    """Stacks equal chains of an update that need whole values, so that each rank computes a share of them.

    links: what communication costs on each axis, () for bytes.
    bucket_bytes: of the whole values in a stack, at most, where that is more than one for each rank; see ``Bucket``.

    A stack whose number of values does not divide by the ranks has its last one several times: that takes no more time
    than ranks that wait, and no kernel meets an empty or a made-up matrix.

    Requires: pins on states, gradients and uses, which say how ranks share parameters.
    Ensures: of chains of a kind, where there are two or more, one is left that reads stacks, pinned to S(0) on the axes
        that split their values; results keep their names, and are pinned as they are read.

    Example::

        stack_updates

         graph step(dp=2) captured
           g = batch() : f32[4, 4]  S(0)!
           h = batch() : f32[4, 4]  S(0)!
           v = param() : f32[4, 4]  S(0)!
           w = param() : f32[4, 4]  S(0)!
         update:
        -  gt = t(g) : f32[4, 4]
        -  gg = mm(g, gt) : f32[4, 4]
        +  stack = stack([g, h], 0) : f32[2, 4, 4]
        +  pin = pin(stack, -1) : f32[2, 4, 4]  S(0)!
        +  transpose = transpose.int(pin, 1, 2) : f32[2, 4, 4]
        +  bmm = bmm(pin, transpose) : f32[2, 4, 4]
        +  pin_1 = pin(bmm, -1) : f32[2, 4, 4]  S(1)!
        +  gg = select.int(pin_1, 0, 0) : f32[4, 4]
        +  hh = select.int(pin_1, 0, 1) : f32[4, 4]
           v1 = add(v, gg, alpha=-0.1) : f32[4, 4]
        -  ht = t(h) : f32[4, 4]
        -  hh = mm(h, ht) : f32[4, 4]
           w1 = add(w, hh, alpha=-0.1) : f32[4, 4]
           return update(v=v1, w=w1)
    """

    links: Links = field(default=(), repr=False)
    bucket_bytes: int | None = None

    def __call__(self, graph: StepGraph) -> StepGraph:
        axes = swept(graph, self.links)
        kin: dict[Any, list[Chain]] = defaultdict(list)
        for chain in whole_chains(graph, axes):
            kin[chain.key].append(chain)
        limit = self.bucket_bytes or default_limit(graph)
        for chains in kin.values():
            over = [axis for axis in axes if any(_split(axis, entry) is not None for entry in chains[0].entries)]
            if len(chains) > 1 and over:
                after = _before_update(graph)
                for some in _parts(chains, prod(axis.ranks for axis in over), limit):
                    after = _Stack(graph, over, some).write_chain(after)
        return graph


def _split(axis: AxisPropagation, node: fx.Node) -> Sbp | None:
    sbp = axis.sbp(node)
    return sbp if axis.ranks > 1 and sbp.is_split else None


def _parts(chains: list[Chain], ranks: int, limit: int) -> Iterator[list[Chain]]:
    """Parts of as many chains for each rank as fit in a bucket of ``limit`` bytes, at least one."""
    nbytes = sum(value.tensor_type(entry).nbytes for entry in chains[0].entries)
    size, left = ranks * max(limit // (ranks * max(nbytes, 1)), 1), iter(chains)
    while part := list(islice(left, size)):
        yield part


class _Stack:
    """Some chains of a kind, and the chain of stacks that replaces them."""

    def __init__(self, graph: StepGraph, axes: Sequence[AxisPropagation], chains: list[Chain]):
        self.graph, self.axes, self.chains = graph, axes, chains
        ranks = prod(axis.ranks for axis in axes)
        self.count = -(-len(chains) // ranks) * ranks
        self.stacked: dict[fx.Node, fx.Node] = {}  # value of the first chain -> the stack of it and its like
        self.stacks: set[fx.Node] = set()  # those of which it is a stack, and not what all chains share
        self.order = {node: i for i, node in enumerate(graph.nodes)}

    def write_chain(self, after: fx.Node) -> fx.Node:
        """Put it after ``after`` and the last value that a chain reads; what reads results above that comes after it.

        Returns its last op.
        """
        first, *_ = self.chains
        read = [entry for chain in self.chains for entry in chain.entries]
        read += {x for node in first.nodes for x in node.all_input_nodes}.difference(first.nodes, read)  # by all alike
        place = max((after, *read), key=self.order.__getitem__)
        late = self._late(place)
        if not late.isdisjoint(read):
            return after  # one chain follows from another
        with self.graph.graph.inserting_before(place.next):
            for alike in zip(*(chain.entries for chain in self.chains), strict=True):
                self._enter(alike)
            for node in first.nodes:
                self._write_op(node)
            pinned = [self._pinned(self.stacked[result], self._wanted(result)) for result in first.results]
        self._hand_back(pinned, late)
        return pinned[-1]

    def _hand_back(self, stacks: Sequence[fx.Node], late: set[fx.Node]) -> None:
        """Read each result from its stack from now on, under its old name, and erase the rest of the chains."""
        results = [chain.results for chain in self.chains]
        for i, own in enumerate(results):
            for result, stack in zip(own, stacks, strict=True):
                result.target, result.args, result.kwargs = aten.select.int, (stack, 0, i), {}
        all_results = {result for own in results for result in own}
        tail = stacks[-1]
        for node in sorted(all_results | late, key=self.order.__getitem__):
            tail.append(node)
            tail = node
        for chain in self.chains:
            for node in reversed(chain.nodes):
                if node not in all_results:
                    self.graph.graph.erase_node(node)

    def _late(self, place: fx.Node) -> set[fx.Node]:
        """Nodes above ``place`` that depend on a result."""
        inside = {node for chain in self.chains for node in chain.nodes}
        late: set[fx.Node] = set()
        for node in islice(self.graph.nodes, self.order[place] + 1):
            operands = node.all_input_nodes
            if node not in inside and any(x in inside or x in late for x in operands):
                late.add(node)
        return late

    def _enter(self, alike: Sequence[fx.Node]) -> None:
        """Stack what the chains read, and cut the stack between its values."""
        some = [*alike, *[alike[-1]] * (self.count - len(alike))]
        type_ = stacked_type(value.type_of(alike[0]), self.count)
        stack = self.graph.call(aten.stack.default, (some, 0), type_, like=self.chains[0].nodes[0], name="stack")
        self.stacks.add(alike[0])
        self.stacked[alike[0]] = self._pinned(stack, self._shares())

    def _shares(self) -> list[Sbp]:
        """The shares by which a stack is cut between its values.

        Which go to which rank is free.  Pieces that several axes have cut get there by one exchange on each axis, the
        innermost first, if that one makes the outermost cut.
        """
        return [S(0, prod(axis.ranks for axis in self.axes[i + 1 :])) for i in range(len(self.axes))]

    def _write_op(self, node: fx.Node) -> None:
        """The op at a node of the first chain, for stacks of what it reads."""
        op, type_ = StackedOp(node.target, node.args, node.kwargs), value.type_of(node)
        if not self.stacks.isdisjoint(node.all_input_nodes):
            op, type_ = stacked_op(node, self.stacks, self.count) or op, stacked_type(type_, self.count)
            self.stacks.add(node)
        args, kwargs = self._stacked_arguments((op.args, dict(op.kwargs)))
        name = op.target._opname if isinstance(op.target, torch._ops.OpOverload) else None
        self.stacked[node] = self.graph.call(op.target, args, type_, kwargs=kwargs, like=node, name=name)

    def _stacked_arguments(self, args: Any) -> Any:
        """Arguments with what has been made in the place of values of the first chain."""
        if isinstance(args, Lifted):
            return self._lifted(args)
        if isinstance(args, fx.Node):
            return self.stacked.get(args, args)
        if isinstance(args, dict):
            return {name: self._stacked_arguments(arg) for name, arg in args.items()}
        return type(args)(map(self._stacked_arguments, args)) if isinstance(args, (list, tuple)) else args

    def _lifted(self, operand: Lifted) -> fx.Node:
        node = self.stacked[operand.node]
        for _ in range(operand.ones):
            dtype, (count, *shape) = value.tensor_type(node).dtype, value.tensor_type(node).shape
            type_ = TensorType(dtype, (count, 1, *shape))
            node = self.graph.call(aten.unsqueeze.default, (node, 1), type_, like=node, name="unsqueeze")
        return node

    def _wanted(self, result: fx.Node) -> list[Sbp]:
        """SBPs in which readers of a result need it on each axis, as dims of a stack: in pieces of one kind, or
        whole."""
        readers = [user for user in result.users if user not in self.chains[0].nodes]
        sbps = []
        for axis in self.axes:
            wants = {want for user in readers for want in axis.wants(user, result)}
            want = next(iter(wants)) if len(wants) == 1 else B
            sbps.append(S(want.dim + 1, want.sections) if want.is_split else B)
        return sbps

    def _pinned(self, node: fx.Node, sbps: Sequence[Sbp]) -> fx.Node:
        """A stack as it lies on the axes that split what is stacked, for those who read this and not the stack."""
        nd: list[Sbp | None] = [None] * len(self.graph.placement.names)
        for axis, sbp in zip(self.axes, sbps, strict=True):
            nd[axis.axis] = sbp
        pinned = self.graph.call(PIN, (node, -1), value.tensor_type(node), sbp=tuple(nd), like=node, name="pin")
        pinned.meta["pins"] = tuple(sbp is not None for sbp in nd)
        return pinned


def _before_update(graph: StepGraph) -> fx.Node:
    """The last node above the first op of the update."""
    return next(x.prev for x in graph.nodes if x.op == "call_function" and value.phase_of(x) == "update")
