"""First sweep of propagation: a greedy walk forward that gives each value an SBP.

Each op takes the signature whose operands need least boxing.  A split is never introduced: an op may split only along
what an operand is already split along.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from graphzero.ir import calls, ops, value
from graphzero.ir.aliases import ANNOTATIONS, is_whole_view
from graphzero.ir.graph import StepGraph
from graphzero.sbp.link_costs import Costs, Links, costs_on
from graphzero.sbp.shards import alike, nests
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import B, Sbp, replace_at

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Sweep:
    """Sweeps every axis of a graph."""

    links: Links
    notes: bool

    def __call__(self, graph: StepGraph) -> list[AxisPropagation]:
        costs = costs_on(graph.placement, self.links)
        axes: list[AxisPropagation] = []
        for i in range(len(graph.placement.names)):
            axes.append(AxisPropagation(graph, i, axes, costs, self.notes))
        for axis in axes:
            axis.sweep()
        return axes


def swept(graph: StepGraph, links: Links, notes: bool = False) -> list[AxisPropagation]:
    """The state of each axis after the first sweep, of the graph as it is now; ``expand`` and ``propagate`` share it.

    notes: whether all that ops might have done is noted, for an explanation.
    """
    return graph.analysis(_Sweep(links, notes))


@dataclass(frozen=True)
class Option:
    """One signature of an op, with its cost in the first sweep.

    moves: (operand, SBP it has, SBP it would be boxed to); nbytes: on the wire for those that are not made yet.
    gathers: whether a weight that its user has split would be made whole: only where the op can do nothing else.
    barred: why it is not considered; "" if it is.
    """

    signature: Signature
    moves: tuple[tuple[fx.Node, Sbp, Sbp], ...]
    nbytes: float
    gathers: bool
    barred: str

    @property
    def cost(self) -> float:
        """B -> P costs no wire but work; between equals the one that boxes less is simpler."""
        return self.nbytes + 1e-3 * len(self.moves)

    @property
    def order(self) -> tuple[bool, float, bool]:
        """Sort key: the smallest is taken.  If data is moved anyway, ranks should share the work."""
        shares = any(sbp.is_split for sbp in self.signature.outputs)
        return self.gathers, self.cost, self.nbytes > 0 and not shares


class AxisPropagation:
    """Propagation on one placement axis: ``found`` holds the SBP of each result of each node, ``chosen`` each op's
    signature."""

    def __init__(self, graph: StepGraph, axis: int, axes: Sequence[AxisPropagation], costs: Costs, notes: bool):
        self.graph, self.axis, self.notes = graph, axis, notes
        self.axes = axes  # of all placement axes, this one too
        self.ranks = graph.placement.hierarchy[axis]
        self.costs = costs
        self.found: dict[fx.Node, tuple[Sbp | None, ...]] = {}
        self.chosen: dict[fx.Node, Signature] = {}
        self.boxed: dict[tuple[fx.Node, Sbp], set[fx.Node]] = {}  # what is moved, to where -> for which readers
        self.before: dict[tuple[fx.Node, Sbp], set[fx.Node]] = {}  # the same, of the walk before
        self.returned, self.aux = set(value.flat_nodes(graph.outputs)), set(graph.aux.values())
        self.replaced: dict[fx.Node, list[fx.Node]] = {}  # new value -> the states that it becomes
        placeholders = {node.name: node for node in graph.placeholders("param", "buffer", "state")}
        for name, new in graph.updates.items():
            self.replaced.setdefault(new, []).append(placeholders[name])
        self.seen: dict[fx.Node, tuple[list[Option], Signature]] = {}  # what the first sweep saw and took, if it notes
        self.weights: set[fx.Node] = set()  # weights that the user has split here, through views and casts
        self.is_data = graph.placement.names[axis] in graph.placement.batch_axes

    def sweep(self) -> None:
        """Walk forward; where something is gathered, once more, knowing what later readers gather anyway."""
        self._walk()
        if any(self.sbp(node).is_split for node, _ in self.boxed):
            self.before, self.boxed = self.boxed, {}
            self._walk()

    def _walk(self) -> None:
        for node in self.graph.nodes:
            if node.op != "output" and not value.is_scalar(node):
                self.found[node] = self.forward_of(node)

    def sbp(self, node: fx.Node) -> Sbp:
        """The SBP found for a node that is one tensor."""
        first_sbp = self.found[node][0]
        assert first_sbp is not None
        return first_sbp

    def pinned(self, node: fx.Node) -> Sbp | None:
        nd = value.sbp_of(node)
        pins = value.pins_of(node)
        return nd[self.axis] if pins and pins[self.axis] else None

    def nbytes(self, node: fx.Node) -> float:
        """Bytes of a value for its price.  With links, which weigh bytes against messages, those that are left of it by
        the axes that have been swept.
        """
        return self.bytes_in_line(node) if self.costs.links else value.tensor_type(node).nbytes

    def bytes_in_line(self, node: fx.Node) -> float:
        """Bytes of a value that the ranks of one line of the axis have together, as far as axes have been swept."""
        others = (axis for axis in self.axes if axis is not self and node in axis.found)
        return value.tensor_type(node).nbytes / prod(axis.ranks for axis in others if axis.sbp(node).is_split)

    def price(self, node: fx.Node, want: Sbp) -> float:
        """The price of boxing a value to another SBP."""
        return self.costs.box(self.sbp(node), want, self.nbytes(node), self.axis)

    def cost(self, reader: fx.Node, node: fx.Node, have: Sbp, want: Sbp) -> float:
        """The price of boxing a value for ``reader`` (``Costs``); what is boxed so for another one is free."""
        key = _moved(node, have, want)
        if have is want or key in self.boxed or self.before.get(key, set()) - {reader}:
            return 0.0
        if have.is_split and want.is_split and self._alike(node, have, want):
            return 0.0
        return self.costs.box(have, want, self.nbytes(node), self.axis)

    def _alike(self, node: fx.Node, have: Sbp, want: Sbp) -> bool:
        """Return whether both are the same cut within those of the axes that have been swept."""
        nd = [axis.sbp(node) if node in axis.found else B for axis in self.axes]
        outside, inside = nd[: self.axis], nd[self.axis + 1 :]
        return alike((*outside, have, *inside), (*outside, want, *inside), self.graph.placement.hierarchy)

    # ---- sweep 1

    def forward_of(self, node: fx.Node) -> tuple[Sbp | None, ...]:
        """The SBPs of a node's results, from those of its operands."""
        pinned = self.pinned(node)
        self._note_weight(node, pinned)
        if pinned is not None:
            return (pinned,)
        if node.op == "placeholder":
            return (B,)
        if node.target is operator.getitem:
            source, index = node.args
            return (self.found[source][index],)  # type: ignore[index]
        if node.target in ANNOTATIONS:
            return (self._with_other_axes(node, self.sbp(value.operand(node))),)
        operands = value.tensor_operands(node)
        have = [self.sbp(operand) for operand in operands]
        signature = self.chosen[node] = self._best(node, have)
        for operand, stands, want in zip(operands, have, signature.inputs, strict=True):
            if stands is not want:
                self.boxed.setdefault(_moved(operand, stands, want), set()).add(node)
        return _spread(node, signature.outputs)

    def _best(self, node: fx.Node, have: list[Sbp]) -> Signature:
        """The signature that comes first in order.  One that moves nothing does, and most ops have it: the others are
        priced where there is none.
        """
        signatures = calls.signatures_of(self.graph, node, self.axis, have)
        if not self.notes:
            split, others = _split(have), self._others(node)
            for signature in signatures:
                stays = all(map(operator.is_, have, signature.inputs))
                if stays and not (_barred(node, signature, split) or self.misfit(node, signature, others)):
                    return signature
        options = self.options(node, have, signatures)
        best = min((o for o in options if not o.barred), key=lambda o: o.order, default=options[0]).signature
        if self.notes:
            self.seen[node] = options, best
        return best

    def options(self, node: fx.Node, have: list[Sbp], signatures: Iterable[Signature]) -> list[Option]:
        """The options of the op at ``node``, given the SBPs of its operands and the boxes so far; all-B first."""
        operands, options = value.tensor_operands(node), []
        split, others = _split(have), self._others(node)
        for signature in signatures:
            stands = zip(operands, have, signature.inputs, strict=True)
            moves = tuple(dict.fromkeys((o, h, w) for o, h, w in stands if h is not w))
            total = sum(self.cost(node, *move) for move in moves)
            gathers = any(o in self.weights and h.is_split for o, h, _ in moves)
            barred = _barred(node, signature, split) or self.misfit(node, signature, others)
            options.append(Option(signature, moves, total, gathers, barred))
        return options

    def misfit(self, node: fx.Node, signature: Signature, others: dict[int, Signature] | None = None) -> str:
        """Say why a signature cannot be combined with what the op does on the other axes; "" if it can.

        others: the latter, where it has been asked for.
        """
        others = self._others(node) if others is None else others
        return calls.misfit(self.graph, node, others | {self.axis: signature}) if others else ""

    def _others(self, node: fx.Node) -> dict[int, Signature]:
        """The signatures of the op on the other axes, by number, as far as they are known."""
        return {axis.axis: axis.chosen[node] for axis in self.axes if axis is not self and node in axis.chosen}

    def _with_other_axes(self, node: fx.Node, have: Sbp) -> Sbp:
        """``have`` for a free value, or B where that and what other axes make of it leave no even sections."""
        nd = [axis.pinned(node) or (axis.sbp(node) if node in axis.found else B) for axis in self.axes]
        nd[self.axis] = have
        return have if nests(value.tensor_type(node).shape, tuple(nd), self.graph.placement.hierarchy) else B

    def _note_weight(self, node: fx.Node, pinned: Sbp | None) -> None:
        if self.is_data or node.op != "call_function":
            return
        operands = value.tensor_operands(node)
        alone = len(operands) == 1 and (node.target is ops.use or operands[0] in self.weights)
        if alone and (node.target is not ops.use or (pinned is not None and pinned.is_split)):
            self.weights.add(node)

    # ---- readers

    def wants(self, user: fx.Node, node: fx.Node) -> set[Sbp]:
        """SBPs in which ``user`` reads ``node``.

        At the step's end a state needs its own; a batch-split output stays split, what else is returned is whole.
        """
        if user in self.chosen:
            operands = value.tensor_operands(user)
            return {w for o, w in zip(operands, self.chosen[user].inputs, strict=True) if o is node}
        if user.op != "output":
            return {self.sbp(user)}
        wants = {value.nd_of(state)[self.axis] for state in self.replaced.get(node, ())}
        wants |= {output_sbp(self.graph, node, self.axis, self.sbp(node))} if node in self.returned else set()
        return wants | ({B} if node in self.aux else set())

    # ---- what is found

    def write_sbps(self) -> None:
        """Give every node its SBP on this axis."""
        unknown = (None,) * len(self.graph.placement.names)
        for node, sbps in self.found.items():
            olds = [nd or unknown for _, nd in value.results_of(node)]
            nds = (None if s is None else replace_at(old, self.axis, s) for old, s in zip(olds, sbps, strict=True))
            node.meta["sbp"] = tuple(nds) if value.is_multi(node) else next(nds)


def output_sbp(graph: StepGraph, node: fx.Node, axis: int, have: Sbp) -> Sbp:
    """The SBP in which build returns a value: this rank's share of the batch, or the whole."""
    share = have.is_split and have.dim == 0 and graph.placement.names[axis] in graph.placement.batch_axes
    return have if share and value.phase_of(node) != "update" and not value.has_role(node, "gradient") else B


def _moved(node: fx.Node, have: Sbp, want: Sbp) -> tuple[fx.Node, Sbp]:
    """The value that is moved, and its new SBP.  The gather of a view is one of the viewed value."""
    while have.is_split and want is B and is_whole_view(node.target):
        node = value.operand(node)
    return node, want


def _split(have: Sequence[Sbp]) -> frozenset[tuple[int, int]]:
    """The splits of operands, as ``signature.splits``."""
    return frozenset((k, sbp.dim) for k, sbp in enumerate(have) if sbp.is_split)


def _barred(node: fx.Node, signature: Signature, split: Set[tuple[int, int]]) -> str:
    """Say why a signature is not allowed; "" if it is.  split: as ``signature.splits``, of how the operands are."""
    if signature.splits and split.isdisjoint(signature.splits):
        return "would split where no operand is split so yet"
    if any(signature.inputs[k].is_partial for k, _ in split):
        return "would put pieces into zeros, and work on the whole from there on"
    if _rounds_in_update(node, signature):
        return "would add up 16-bit pieces, which rounds as one device does not"
    return ""


def _rounds_in_update(node: fx.Node, signature: Signature) -> bool:
    """Return whether ranks would add up 16-bit pieces in an update, as in Muon's products of whole matrices.

    Where a model is split, its user has asked for that rounding; an optimizer has one meaning, whatever the stage.
    """
    if value.phase_of(node) != "update" or not any(sbp.is_partial for sbp in signature.outputs):
        return False
    return any(meta is not None and meta.dtype in HALF for meta in calls.result_metas(node))


def _spread(node: fx.Node, sbps: tuple[Sbp, ...]) -> tuple[Sbp | None, ...]:
    """One SBP for each result in the node's type, None for results that are not made."""
    type_ = value.type_of(node)
    if not isinstance(type_, tuple):
        return sbps
    remaining = iter(sbps)
    return tuple(None if t is None else next(remaining) for t in type_)
