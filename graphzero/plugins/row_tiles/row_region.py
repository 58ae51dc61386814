"""The part of a step around its largest values, rows of which are computed apart from one another.

The logits of a language model [tokens, classes], their log-softmax and their gradient are larger than all that goes in
and comes out: hidden values [tokens, width], and sums over all tokens (parts of the loss, a weight's gradient).  What
may be cut into rows is known by the ops' rules, as if the rows were split over one more axis: what is S there belongs
to a tile of rows, what is P is a sum over tiles, and what an op reads in B every tile reads whole.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import fx

from graphzero.ir import calls, ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_stages import is_staged
from graphzero.ir.text.printer import op_name
from graphzero.ops import AS_GLOBAL, AS_LOCAL, CHECK, MOVE, UNIFORM_LIKE
from graphzero.passes.micro.loop_partition import SHAPED
from graphzero.passes.micro.micro_batch_types import MicroBatchTypes
from graphzero.sbp.shards import alike
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import B, S, Sbp

WIDER = 4  # how many times as many elements as anything that goes in or out by rows
LONGEST = 64  # ops of a tile, at most
NEVER = (AS_LOCAL, AS_GLOBAL, CHECK, UNIFORM_LIKE)  # they speak of all rows at once, or draw by the row's number


class NoRegion(Exception):
    """Raised where rows cannot be computed in tiles, with the reason."""


@dataclass
class RowRegion:
    """Ops that are computed in ``count`` tiles of rows, one after the other.

    nbytes: of the largest value, on one rank.  nodes: the ops of a tile, in order.  runs: how a tile runs each op.
    cut: how tiles have each value that they make or read: S, a tile's own rows; P, a tile's share of a sum; B, the
    whole of what they read.
    """

    largest: fx.Node
    count: int
    nbytes: int
    nodes: list[fx.Node] = field(default_factory=list)
    cut: dict[fx.Node, Sbp] = field(default_factory=dict)
    runs: dict[fx.Node, Signature] = field(default_factory=dict)

    @property
    def inputs(self) -> list[fx.Node]:
        """Values from outside that tiles read, in the order in which they read them."""
        inside = set(self.nodes)
        return list(dict.fromkeys(x for node in self.nodes for x in node.all_input_nodes if x not in inside))

    @property
    def results(self) -> list[fx.Node]:
        """Values of tiles that ops outside read."""
        inside = set(self.nodes)
        return [node for node in self.nodes if any(user not in inside for user in node.users)]


def row_region(graph: StepGraph, count: int) -> RowRegion:
    """The largest values of a step with what is around them, to be computed in about ``count`` tiles.

    Tiles are equal: where ``count`` does not divide the rows of a rank, it is the next number up to its double that
    does, else the next below.  Raises NoRegion where there is nothing of the kind; it says why of the largest values.
    """
    if any(value.repeats_of(node) for node in graph.nodes) and not is_staged(graph.nodes):
        raise NoRegion("micro-batches run one after the other, and cut it already")
    why = list[str]()
    for seed in _largest(graph):
        numbers = list(_counts(graph, seed, count))
        for number in numbers:
            try:
                return _Growing(graph, RowRegion(seed, number, _bytes_of(graph, seed))).find_region()
            except NoRegion as error:
                why.append(f"'{seed.name}' : {value.type_of(seed)}: {error}")
        if not numbers:
            why.append(f"the rows of '{seed.name}' : {value.type_of(seed)} on a rank are not to be cut in equal tiles")
    raise NoRegion(why[0] if why else "forward makes no value of the batch with rows")


def _largest(graph: StepGraph) -> list[fx.Node]:
    """Values of the batch that forward makes, at least half as large as its largest, largest first."""
    of_batch = set[fx.Node]()
    for node in graph.nodes:
        is_batch = node.op == "placeholder" and value.has_role(node, "batch")
        if is_batch or any(operand in of_batch for operand in node.all_input_nodes):
            of_batch.add(node)
    candidates = [
        node
        for node in graph.nodes
        if node in of_batch and node.op == "call_function" and value.phase_of(node) == "forward" and _has_rows(node)
    ]
    candidates.sort(key=lambda node: -_bytes_of(graph, node))
    return [node for node in candidates if 2 * _bytes_of(graph, node) >= _bytes_of(graph, candidates[0])]


def _has_rows(node: fx.Node) -> bool:
    return value.is_tensor(node) and len(value.tensor_type(node).shape) > 1


def _ranks(graph: StepGraph, node: fx.Node, dim: int | None = None) -> int:
    """Over how many ranks a value is split, or one of its dims."""
    nd = zip(value.nd_of(node), graph.placement.hierarchy, strict=True)
    return prod(n for sbp, n in nd if sbp.is_split and dim in (None, sbp.dim))


def _bytes_of(graph: StepGraph, node: fx.Node) -> int:
    """Bytes of one rank."""
    return value.tensor_type(node).nbytes // _ranks(graph, node)


def _counts(graph: StepGraph, seed: fx.Node, count: int) -> Iterator[int]:
    rows, ranks = value.tensor_type(seed).shape[0], _ranks(graph, seed, 0)
    for number in (*range(count, 2 * count + 1), *range(count - 1, 1, -1)):
        if rows % (ranks * number) == 0:
            yield number


class _Growing:
    """Grows a region from its largest value, until nothing large is made or read outside of it."""

    def __init__(self, graph: StepGraph, region: RowRegion) -> None:
        self.graph, self.region, self.cut = graph, region, region.cut
        self.least = value.tensor_type(region.largest).numel / WIDER
        self.pieces = region.count * _ranks(graph, region.largest, 0)
        self.nodes = list(graph.nodes)
        self.inside: set[fx.Node] = set()

    def find_region(self) -> RowRegion:
        self.cut[self.region.largest] = S(0)
        wanted: fx.Node | None = self.region.largest
        while wanted is not None:
            self._add(wanted)
            wanted = self._wanted()
        self.region.nodes = [node for node in self.nodes if node in self.inside]
        for node in (*self.region.inputs, *self.region.nodes):
            self._check_sections(node)
        if len(self._weights()) > 1:
            raise NoRegion("it depends on products with several weights, which micro-batches cut better")
        for node in self.region.results:
            if self.cut[node].is_broadcast:
                raise NoRegion(f"'{node.name}', which is read after it, is not a sum over rows and has none")
        self._check_moves()
        return self.region

    def _check_moves(self) -> None:
        """Raise NoRegion where another pipeline stage needs in forward what tiles would make in backward."""
        if all(value.phase_of(node) == "forward" for node in self.inside):
            return
        dependent = set(self.inside)
        for node in self.nodes:
            if node.target not in SHAPED and any(x in dependent for x in node.all_input_nodes):
                dependent.add(node)
                if node.target is MOVE and value.phase_of(node) == "forward":
                    raise NoRegion(f"another pipeline stage reads '{value.operand(node).name}' in forward")

    def _wanted(self) -> fx.Node | None:
        """The first op that has to be inside too: that reads a large value, or lies on a way from inside to inside."""
        after, before = set[fx.Node](), set[fx.Node]()
        for node in self.nodes:
            if node.target not in SHAPED and any(x in self.inside or x in after for x in node.all_input_nodes):
                after.add(node)
        for node in reversed(self.nodes):
            if any(x in self.inside or (x in before and x.target not in SHAPED) for x in node.users):
                before.add(node)
        for node in self.nodes:
            reads_large = any(x in self.inside and self._is_large(x) for x in node.all_input_nodes)
            if node not in self.inside and (reads_large or (node in after and node in before)):
                return node
        return None

    def _is_large(self, node: fx.Node) -> bool:
        """Return whether all readers have to be inside: as large as what the region is for, or results to be picked."""
        if value.is_multi(node):
            return True
        return self.cut[node].is_split and value.tensor_type(node).numel >= self.least

    def _add(self, node: fx.Node) -> None:
        """Put an op inside, and what makes large operands of it."""
        if node.op == "output" or value.phase_of(node) == "update":
            read = next((x for x in node.all_input_nodes if x in self.inside), None)
            if read is None:
                raise NoRegion(f"it reads '{node.name}', which is made when backward has ended")
            raise NoRegion(f"{'the step returns' if node.op == 'output' else 'the update reads'} '{read.name}'")
        if len(self.inside) == LONGEST:
            raise NoRegion(f"it is connected to more than {LONGEST} ops")
        self.inside.add(node)
        if node.target is operator.getitem:
            source = value.operand(node)
            if source not in self.inside:
                self._add(source)
            return
        signature = self.region.runs[node] = self._signature(node)
        for result, sbp in zip(_results(node), signature.outputs, strict=True):
            for one in result:
                self.cut[one] = sbp
        for operand, sbp in zip(value.own_operands(node), signature.inputs, strict=True):
            self.cut[operand] = sbp
            if operand not in self.inside and operand.op == "call_function" and self._is_large(operand):
                self._add(operand)

    def _signature(self, node: fx.Node) -> Signature:
        """The signature by which a tile runs an op, given the known SBPs of its operands and results."""
        for one in self._allowed(node):
            pairs = zip(value.own_operands(node), one.inputs, strict=True)
            reads = all(self.cut[x] is s if x in self.cut else not s.is_partial for x, s in pairs)
            results = zip(_results(node), one.outputs, strict=True)
            makes = all(self.cut.get(x, s) is s for some, s in results for x in some)
            is_cut = not all(s.is_broadcast for s in one.outputs)
            if reads and makes and is_cut and sized(node, node.args, node.kwargs, one, self.region.count):
                return one
        raise NoRegion(f"{op_name(node.target)} at '{node.name}' is of all rows")

    def _allowed(self, node: fx.Node) -> tuple[Signature, ...]:
        if node.target is ops.box and self._moves_nothing(node):
            return tuple(Signature((s,), (s,)) for s in (self.cut.get(x) for x in (node, *node.all_input_nodes)) if s)
        if not calls.is_op(node) or node.target in NEVER:
            return ()
        return calls.allowed_on(node, self.pieces)

    def _moves_nothing(self, box: fx.Node) -> bool:
        return alike(value.nd_of(box), value.nd_of(box.all_input_nodes[0]), self.graph.placement.hierarchy)

    def _weights(self) -> set[frozenset[fx.Node]]:
        """The parameters, vectors aside, of which each of the values is made that every tile reads whole."""
        weights_of: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self.nodes:
            is_weight = node.op == "placeholder" and value.has_role(node, "param") and _has_rows(node)
            read = () if node.target in SHAPED else node.all_input_nodes
            weights_of[node] = frozenset([node] if is_weight else ()).union(*(weights_of[x] for x in read))
        whole = (weights_of[x] for x in self.region.inputs if not self.cut.get(x, B).is_split)
        return {weights for weights in whole if weights}

    def _check_sections(self, node: fx.Node) -> None:
        mine = self.cut.get(node, B)
        if mine.is_split and any(s.is_split and s.dim == mine.dim and s.sections > 1 for s in value.nd_of(node)):
            raise NoRegion(f"ranks have the rows of '{node.name}' in sections")


def sized(node: fx.Node, args: Any, kwargs: Any, run: Signature, count: int) -> tuple[Any, Any] | None:
    """The arguments with sizes of a tile; None for an op that finds rows by their number."""
    if node.target is ops.box:
        return args, kwargs
    ins = [(shape, (s,)) for (shape, _), s in zip(calls.operand_pairs(node), run.inputs, strict=True)]
    outs = [(shape, (s,)) for (shape, _), s in zip(calls.result_pairs(node), run.outputs, strict=True)]
    return MicroBatchTypes(0, count).args(node, args, kwargs, ins, outs)


def _results(node: fx.Node) -> list[list[fx.Node]]:
    """The values that stand for each result that an op makes."""
    type_ = value.type_of(node)
    if not isinstance(type_, tuple):
        return [[node]]
    return [[user for user in node.users if user.args[1] == i] for i, one in enumerate(type_) if one is not None]
