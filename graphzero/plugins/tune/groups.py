"""Weights that may be split together over one placement axis, found in a captured step.

A split of one weight asks for others: what a column layer makes is split, so the layer that reads it must be a row, and
what is between, biases, norms of channels, the other half of a gate, is split along.  ``_Flood`` carries one split
as far as it goes, by the rules of the ops it meets and by nothing else: no names, no kinds of layers.  It goes through
every reader until a sum makes it partial, and up through every operand that an op needs split likewise, until it comes
to weights, or to a value that only whole ones make, of which each rank takes its piece.

What one such group saves and sends is estimated here, to choose among groups that need one weight split differently;
the plan of the program judges what is chosen (``proposal``).
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graphzero.ir import calls, ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.ops import PIN
from graphzero.passes.place import expand
from graphzero.plan.seconds import READS_PLACES, flops_of
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import B, S, Sbp

MARKS = (ops.use, PIN)  # a value as it is, for one reader


@dataclass
class ForwardReads:
    """Reads of a flood from the graph: ops of forward, readers of values, and values that depend on parameters
    alone."""

    graph: StepGraph
    axis: int
    params: dict[str, fx.Node]
    of_weights: set[fx.Node]
    known: dict[tuple[fx.Node, frozenset[int]], tuple[Signature, ...]] = field(default_factory=dict)

    @classmethod
    def from_graph(cls, graph: StepGraph, axis: int) -> ForwardReads:
        params = {value.role_of(node).of: node for node in graph.placeholders("param")}  # type: ignore[union-attr]
        of_weights: set[fx.Node] = set(params.values())
        for node in graph.nodes:
            operands = node.all_input_nodes
            if node.op == "call_function" and operands and all(x in of_weights for x in operands):
                of_weights.add(node)
        return cls(graph, axis, params, of_weights)

    @property
    def ranks(self) -> int:
        return self.graph.placement.hierarchy[self.axis]

    def seeds(self) -> Iterator[tuple[str, int]]:
        """(path, dim) of weights that an op sums over or looks up in: first the dims of the sums, then the others."""
        others = []
        for path, param in self.params.items():
            dims = range(len(value.tensor_type(param).shape))
            summed = [dim for dim in dims if self._is_summed(param, S(dim))]
            yield from ((path, dim) for dim in summed)
            others += [(path, dim) for dim in dims if summed and dim not in summed]
        yield from others

    def _is_summed(self, weight: fx.Node, sbp: Sbp) -> bool:
        """Return whether an op that reads a weight split so, or a view or cast of it, leaves a partial sum."""
        for reader in filter(is_forward, weight.users):
            if reader not in self.of_weights:
                if self._sums(reader, weight, sbp):
                    return True
            elif (carried := self._carried(reader, weight, sbp)) is not None and self._is_summed(reader, carried):
                return True
        return False

    def _carried(self, node: fx.Node, weight: fx.Node, sbp: Sbp) -> Sbp | None:
        """SBP of a view or cast of a weight that is split so; None where it is not split, or is not one tensor."""
        if node.target in MARKS:
            return sbp
        if not calls.is_op(node) or value.tensor_operands(node) != [weight]:
            return None
        outputs = (s.outputs[0] for s in self.allowed(node, (sbp,)) if s.inputs[0] is sbp)
        return next((out for out in outputs if out.is_split), None)

    def _sums(self, reader: fx.Node, weight: fx.Node, sbp: Sbp) -> bool:
        if not calls.is_op(reader):
            return False
        operands = value.tensor_operands(reader)
        at = [i for i, x in enumerate(operands) if x is weight]
        return any(
            s.outputs[0].is_partial and all(s.inputs[i] is sbp for i in at) for s in self.allowed(reader, (sbp,))
        )

    def allowed(self, node: fx.Node, stand: Sequence[Sbp | None]) -> tuple[Signature, ...]:
        """The signatures of an op, for splits in as many sections as those that are."""
        key = node, frozenset(sbp.sections for sbp in stand if sbp is not None)
        if key not in self.known:
            self.known[key] = calls.signatures_of(self.graph, node, self.axis, stand)
        return self.known[key]


def is_forward(node: fx.Node) -> bool:
    return node.op == "call_function" and value.phase_of(node) == "forward"


Result = tuple[fx.Node, int]  # an op, and which of its results
WAYS = ("vocabulary", "column", "along", "row")


@dataclass(frozen=True)
class WeightGroup:
    """Weights that are split together.

    splits: path of a parameter -> how it is split.  ways: path -> "column", "row", "vocabulary", or "along" for what
    has no product of its own.  flops: operations of forward that ranks share.
    nbytes: of the weights.  sent: bytes that all-reduces and gathers of activations bring, in forward and in backward.
    gathered: values that are gathered because a reader needs them whole.
    """

    splits: Mapping[str, Sbp]
    ways: Mapping[str, str]
    flops: float
    nbytes: int
    sent: float
    gathered: tuple[str, ...] = ()

    def agrees(self, other: Mapping[str, Sbp]) -> bool:
        """Return whether no weight would be split in two ways."""
        return all(other.get(path, sbp) is sbp for path, sbp in self.splits.items())


def groups(graph: StepGraph, axis: int) -> list[WeightGroup]:
    """Every group that follows from a split of one weight of a contraction, each once.

    graph: a captured step.  axis: number of the placement axis over which weights are to be split.
    """
    step = ForwardReads.from_graph(graph, axis)
    by_splits: dict[frozenset[tuple[str, Sbp]], WeightGroup] = {}
    seen: set[tuple[str, int]] = set()
    for path, dim in step.seeds():
        if (path, dim) in seen:
            continue
        group = _Flood(step).from_weight(path, S(dim))
        if group is None:
            continue
        seen |= {(name, sbp.dim) for name, sbp in group.splits.items()}
        by_splits.setdefault(frozenset(group.splits.items()), group)
    return list(by_splits.values())


class _Flood:
    """One split, carried through forward."""

    def __init__(self, step: ForwardReads) -> None:
        self.step = step
        self.found: dict[Result, Sbp] = {}
        self.waiting: deque[fx.Node] = deque()
        self.splits: dict[str, Sbp] = {}
        self.by_class = False  # whether rows of a softmax are split
        self.partial: dict[fx.Node, None] = {}
        self.gathered: dict[fx.Node, None] = {}
        self.whole: dict[fx.Node, None] = {}  # read whole by an op that makes its result split
        self.cut: dict[fx.Node, None] = {}  # made whole, of which each rank reads its piece

    def from_weight(self, path: str, sbp: Sbp) -> WeightGroup | None:
        """The group that this split of a weight leads to; None where the weight itself cannot be split so."""
        self._put((self.step.params[path], 0), sbp)
        while self.waiting:
            node = self.waiting.popleft()
            if node.op == "placeholder":
                self._settle_param(node)
            elif node.target in MARKS:
                self._through_mark(node)
            elif node.target is operator.getitem:
                self._through_item(node)
            else:
                self._through_op(node)
        if not self._shares_work():
            return None
        return self._group()

    def _put(self, at: Result, sbp: Sbp) -> None:
        """This result is split so: its producer and its readers must be checked again."""
        if at in self.found:
            if self.found[at] is not sbp:
                self.gathered[at[0]] = None
            return
        self.found[at] = sbp
        node = at[0]
        self.waiting.append(node)
        self.waiting.extend(user for user in node.users if is_forward(user) or user.op == "output")

    def _settle_param(self, node: fx.Node) -> None:
        role = value.role_of(node)
        if role is not None and role.kind == "param":
            self.splits[role.of] = self.found[node, 0]
        else:
            self.cut[node] = None  # a buffer or a part of the batch, whole on all ranks of the axis

    def _through_mark(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        for at, other in (((node, 0), (source, 0)), ((source, 0), (node, 0))):
            if at in self.found:
                self._put(other, self.found[at])

    def _through_item(self, node: fx.Node) -> None:
        source, index = node.args
        at: Result = (source, index)  # type: ignore[assignment]
        if at in self.found:
            self._put((node, 0), self.found[at])
        elif (node, 0) in self.found:
            self._put(at, self.found[node, 0])

    def _through_op(self, node: fx.Node) -> None:
        if node.op == "output":
            self.gathered.update({x: None for x in node.all_input_nodes if is_forward(x) and (x, 0) in self.found})
            return
        if not calls.is_op(node):
            return
        operands = value.tensor_operands(node)
        have = [self.found.get((x, 0)) for x in operands]
        results = _results(node)
        wanted = [self.found.get((node, i)) for i in results]
        if not any(sbp is not None for sbp in (*have, *wanted)):
            return
        fitting = [s for s in self._signatures(node, have, wanted) if self._fits(s, operands, have, wanted)]
        if not fitting:
            self._stop(node, operands, have)
            return
        taken = min(fitting, key=lambda s: self._new(s, operands, have))
        self.by_class |= taken not in self.step.allowed(node, (*have, *wanted))
        if any(sbp.is_partial for sbp in taken.outputs):
            self.partial[node] = None
        for x, stands, want in zip(operands, have, taken.inputs, strict=True):
            if want.is_split and stands is None:
                self._put((x, 0), want)
            elif want is B and any(sbp.is_split for sbp in taken.outputs) and x not in self.step.of_weights:
                self.whole[x] = None
        for i, sbp in zip(results, taken.outputs, strict=True):
            if sbp.is_split:
                self._put((node, i), sbp)

    def _signatures(
        self, node: fx.Node, have: Sequence[Sbp | None], wanted: Sequence[Sbp | None]
    ) -> Sequence[Signature]:
        signatures = self.step.allowed(node, (*have, *wanted))
        split = next((sbp for sbp in (*have, *wanted) if sbp is not None), None)
        if node.target in expand.TABLE and split is not None:  # whose definition takes any split
            signatures = (*signatures, Signature((split,) * len(have), (split,) * len(wanted)))
        return signatures

    def _fits(
        self, s: Signature, operands: Sequence[fx.Node], have: Sequence[Sbp | None], wanted: Sequence[Sbp | None]
    ) -> bool:
        """Return whether a signature goes with what is split already; only what depends on weights may be a summand."""
        if len(s.outputs) != len(wanted):
            return False
        stands = all(h is None or h is want for h, want in zip(have, s.inputs, strict=True))
        makes = all(w is None or w is output for w, output in zip(wanted, s.outputs, strict=True))
        summands = all(
            not want.is_partial or x in self.step.of_weights for x, want in zip(operands, s.inputs, strict=True)
        )
        splits = any(sbp.is_split for sbp in s.inputs)
        return stands and makes and summands and splits

    def _new(self, s: Signature, operands: Sequence[fx.Node], have: Sequence[Sbp | None]) -> tuple[bool, int, int]:
        """The signature to take of several: one that keeps splits, and requires least of other values."""
        asks = [x for x, h, want in zip(operands, have, s.inputs, strict=True) if h is None and want.is_split]
        partial = any(sbp.is_partial for sbp in s.outputs)
        return partial, sum(x not in self.step.of_weights for x in asks), len(asks)

    def _stop(self, node: fx.Node, operands: Sequence[fx.Node], have: Sequence[Sbp | None]) -> None:
        """The op does none of it: what it reads is gathered, what it makes is cut."""
        self.gathered.update({x: None for x, sbp in zip(operands, have, strict=True) if sbp is not None})
        if any((node, i) in self.found for i in _results(node)):
            self.cut[node] = None

    # ---- what came of it

    def _shares_work(self) -> bool:
        return bool(self.splits) and all(
            not sbp.is_split or value.tensor_type(self.step.params[path]).shape[sbp.dim] >= self.step.ranks
            for path, sbp in self.splits.items()
        )

    def _group(self) -> WeightGroup:
        step, n = self.step, self.step.ranks
        flops = sum(flops_of(node, _size) for node in self._ops() if self._is_shared(node))
        nbytes = sum(value.tensor_type(step.params[path]).nbytes for path in self.splits)
        sums = sum(_nbytes(node) for node in self.partial) + sum(_nbytes(x) for x in self.whole if _is_float(x))
        moved = sum(_nbytes(x) for x in self.gathered) + sum(_nbytes(x) for x in self.cut if is_forward(x))
        sent = (2 * sums + 2 * moved) * (n - 1) / n
        return WeightGroup(self.splits, self._ways(), flops, nbytes, sent, tuple(x.name for x in self.gathered))

    def _ways(self) -> dict[str, str]:
        """The split of each weight, in the usual words of tensor parallelism."""
        rows = {x for node in self.partial for x in self._weights(node)}
        looked_up = {x for node in self.partial if node.target in READS_PLACES for x in self._weights(node)}
        kinds = {}
        for path in self.splits:
            param = self.step.params[path]
            if param in looked_up or (self.by_class and param not in rows):
                kinds[path] = "vocabulary"
            elif param in rows:
                kinds[path] = "row"
            else:
                kinds[path] = "column" if len(value.tensor_type(param).shape) > 1 else "along"
        return kinds

    def _weights(self, node: fx.Node) -> Iterator[fx.Node]:
        """The split parameters that an op reads, through views and casts."""
        for x in value.tensor_operands(node):
            while x in self.step.of_weights and x.op != "placeholder" and (x, 0) in self.found:
                x = x.all_input_nodes[0]
            if (x, 0) in self.found and x.op == "placeholder":
                yield x

    def _ops(self) -> list[fx.Node]:
        touched = {node for node, _ in self.found}
        touched |= {user for node in touched for user in node.users if is_forward(user)}
        return [node for node in touched if node.op == "call_function"]

    def _is_shared(self, node: fx.Node) -> bool:
        return node not in self.cut and not any(x in self.gathered for x in node.all_input_nodes)


def _results(node: fx.Node) -> list[int]:
    """Numbers of the results that an op makes."""
    type_ = value.type_of(node)
    return [i for i, one in enumerate(type_) if one is not None] if isinstance(type_, tuple) else [0]


def _is_float(node: fx.Node) -> bool:
    type_ = value.type_of(node)
    return isinstance(type_, TensorType) and type_.dtype.is_floating_point


def _nbytes(node: fx.Node) -> int:
    type_ = value.type_of(node)
    types = type_ if isinstance(type_, tuple) else (type_,)
    return sum(one.nbytes for one in types if isinstance(one, TensorType))


def _size(node: fx.Node) -> Any:
    """The global shape of a value, of each result if there are several; None for what is not a tensor."""
    type_ = value.type_of(node)
    shapes = value.shapes(node)
    return shapes if isinstance(type_, tuple) else shapes[0] if isinstance(type_, TensorType) else None
