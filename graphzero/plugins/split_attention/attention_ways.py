"""The ways of attention over a split sequence, as pins.

``exchange``: no head reads another, so ranks exchange pieces of the sequence for heads before attention, and back
after it (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509).  ``gather``: queries stay split, and each rank gathers
keys and values; what its queries add to their gradients is reduced to the pieces.

``ring``: the same pins as of a gather; ``RingAttention`` then lets keys and values go round in blocks.

Where heads are repeated for groups of queries, keys and values travel before that, and their gradients after the sum
over each group, so that each head travels once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import fx

from graphzero.ir import calls, ops, value
from graphzero.ir.aliases import is_copy, is_plain_view
from graphzero.ops import ATTENTION_BACKWARD
from graphzero.ops.attention_contract import wide
from graphzero.passes.place.forward_sweep import AxisPropagation
from graphzero.sbp.link_costs import Costs
from graphzero.sbp.op_call import argument_names
from graphzero.sbp.shards import nests
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import B, P, S, Sbp

SUM = torch.ops.aten.sum.dim_IntList
HEADS, SEQUENCE = 1, 2  # dims of queries, keys and values
RING = "ring"
WAYS = ("exchange", "gather", RING)


class Box(NamedTuple):
    """A change of the SBP that a value has on an axis."""

    node: fx.Node
    have: Sbp
    want: Sbp

    def price(self, axis: AxisPropagation) -> float:
        """Bytes that a rank sends, seconds with links; what is a split already is not sent."""
        if self.have is self.want:
            return 0.0
        return axis.costs.box(self.have, self.want, axis.nbytes(self.node), axis.axis)


@dataclass(frozen=True)
class PlannedPin:
    """A pin of a value for some of its readers.

    box: the value, the SBP that it has and that of the pin.  like: the op whose phase and source the pin has.
    """

    box: Box
    readers: tuple[fx.Node, ...]
    like: fx.Node = field(compare=False)


@dataclass(frozen=True)
class AttentionWay:
    """One way of an attention over a split sequence, its backward included.

    sent_bytes: that one rank sends.  price: the same, or what ``Costs`` makes of it where links are set.
    held_bytes: that one rank holds of what forward reads and makes; mask_bytes: of these, of a mask for each query and
    key.
    """

    name: str
    pins: tuple[PlannedPin, ...] = field(repr=False)
    sent_bytes: float
    price: float
    held_bytes: float
    mask_bytes: float


def has_equal_pieces(split: Sbp, length: int, ranks: int) -> bool:
    """Return whether ranks hold as many tokens each, in a row or dealt out in turn: what can go round in a ring."""
    return length % ranks == 0 and split.sections in (1, length // ranks)


def split_sequence(axis: AxisPropagation, node: fx.Node) -> SplitSequence | None:
    """Return the way of an attention on an axis where it reads pieces of a sequence; None if it reads none of keys."""
    sbps = [axis.sbp(operand) for operand in value.tensor_operands(node)[:3]]
    is_split = [sbp.is_split and sbp.dim == SEQUENCE for sbp in sbps]
    if not any(is_split[1:]) or not all(split or sbp is B for split, sbp in zip(is_split, sbps, strict=True)):
        return None
    return SplitSequence(axis, node)


@dataclass(frozen=True)
class SplitSequence:
    """One attention and its backward, which read pieces of a sequence on an axis."""

    axis: AxisPropagation
    node: fx.Node

    @cached_property
    def ways(self) -> dict[str, AttentionWay]:
        """The ways that are possible, by name."""
        pins: dict[str, Callable[[], Iterator[PlannedPin]]] = {"exchange": self._exchange, "gather": self._gather}
        splits = {"exchange": self._heads, "gather": self._sbps[0]}
        ways = {name: self._way(name, pins[name](), split) for name, split in splits.items() if self._can_split(split)}
        if "gather" in ways and self._can_go_round:
            ways[RING] = self._way(RING, ways["gather"].pins, splits["gather"])
        return ways

    @property
    def is_unequal(self) -> bool:
        """Whether pieces of the queries have unequal work: those of contiguous rows under a causal mask alone."""
        is_causal = bool(_argument(self.node, "causal")) and _argument(self.node, "bias") is None
        return is_causal and self._sbps[0].sections == 1

    @property
    def is_inner(self) -> bool:
        """Whether an axis outside of this one splits the sequence too."""
        outer = (axis.sbp(self._operands[0]) for axis in self.axis.axes[: self.axis.axis])
        return any(sbp.is_split and sbp.dim == SEQUENCE for sbp in outer)

    # ---- what a way costs

    def _way(self, name: str, pins: Iterable[PlannedPin], split: Sbp) -> AttentionWay:
        pins = tuple(pin for pin in pins if pin.box.have is not pin.box.want)
        boxes, hierarchy = list(dict.fromkeys(pin.box for pin in pins)), self.axis.graph.placement.hierarchy
        sent, price = (
            sum(self._price(name, box, costs) for box in boxes) for costs in (Costs(hierarchy), self.axis.costs)
        )
        signature = _signature(self.axis, self.node, split)
        assert signature is not None
        operands = value.tensor_operands(self.node)
        operand_bytes = [
            self.axis.bytes_in_line(x) / self._pieces(sbp) for x, sbp in zip(operands, signature.inputs, strict=True)
        ]
        if name == RING:  # the block that is read and the one that is on its way
            operand_bytes[1:3] = (min(2 / self.axis.ranks, 1.0) * nbytes for nbytes in operand_bytes[1:3])
        result = self.axis.bytes_in_line(operands[0]) / self._pieces(signature.outputs[0])
        mask = operand_bytes[3] if isinstance(_argument(self.node, "bias"), fx.Node) else 0.0
        return AttentionWay(name, pins, sent, price, sum(operand_bytes) + result, mask)

    def _price(self, name: str, box: Box, costs: Costs) -> float:
        """The price of a box; in a ring, of the steps that are in its place."""
        nbytes, ranks, axis = self.axis.bytes_in_line(box.node), self.axis.ranks, self.axis.axis
        if name == RING and box.have.is_partial:
            dtype = value.tensor_type(box.node).dtype
            return ranks * costs.price_of("shift", nbytes * wide(dtype).itemsize / dtype.itemsize, axis)
        if name == RING and any(node is box.node for node in self._gathered):
            return (ranks - 1) * (1 + len(self._backward)) * costs.price_of("shift", nbytes, axis)
        return costs.box(box.have, box.want, nbytes, axis)

    @cached_property
    def _gathered(self) -> list[fx.Node]:
        """Keys and values, where they travel."""
        return [_before_repeat(self.axis, operand, B).node for operand in self._operands[1:]]

    def _pieces(self, sbp: Sbp) -> int:
        return self.axis.ranks if sbp.is_split else 1

    # ---- pins

    def _exchange(self) -> Iterator[PlannedPin]:
        heads, (query, *keys_and_values) = self._heads, self._operands
        yield self._pin(Box(query, self.axis.sbp(query), heads), self.node)
        for operand in keys_and_values:
            yield self._pin(_before_repeat(self.axis, operand, heads), self.node)
        yield from self._mask_pins(heads)
        for result in _results(self.node, 0):
            yield self._pin(Box(result, heads, self._sbps[0]), result, past=self._backward)
        for op in self._backward:
            gradient = value.operand(op)
            yield self._pin(Box(gradient, self.axis.sbp(gradient), heads), op)
            yield from self._gradient_pins(op, (heads, heads, heads))

    def _gather(self) -> Iterator[PlannedPin]:
        for operand in self._operands[1:]:
            yield self._pin(_before_repeat(self.axis, operand, B), self.node)
        yield from self._mask_pins(self._sbps[0])
        for op in self._backward:
            yield from self._gradient_pins(op, (self._sbps[0], P, P))

    def _gradient_pins(self, op: fx.Node, sbps: tuple[Sbp, Sbp, Sbp]) -> Iterator[PlannedPin]:
        """Pins that give the gradients of queries, keys and values, made in those SBPs, the split of these."""
        for i, have in enumerate(sbps):
            for gradient in _results(op, i):
                yield self._pin(_after_sum(self.axis, gradient, have, self._sbps[i]), gradient)

    def _mask_pins(self, split: Sbp) -> Iterator[PlannedPin]:
        """Pins of the inputs from which a mask is made, if it would have to travel itself, which is larger."""
        mask = _argument(self.node, "bias")
        signature = _signature(self.axis, self.node, split)
        if not isinstance(mask, fx.Node) or signature is None or not self.axis.sbp(mask).is_split:
            return
        ancestors = dict.fromkeys(value.ancestors(mask))
        if self.axis.sbp(mask) in signature.inputs[3:] or any(node.target is ops.use for node in ancestors):
            return
        for leaf in ancestors:
            if leaf.op == "placeholder" and leaf is not mask and self.axis.sbp(leaf).is_split:
                readers = tuple(user for user in leaf.users if user in ancestors)
                yield PlannedPin(Box(leaf, self.axis.sbp(leaf), B), readers, self.node)

    def _pin(self, box: Box, like: fx.Node, *, past: Collection[fx.Node] = ()) -> PlannedPin:
        """A pin for all readers but those in ``past``."""
        return PlannedPin(box, tuple(user for user in box.node.users if user not in past), like)

    # ---- what is split

    @property
    def _operands(self) -> list[fx.Node]:
        """Queries, keys and values."""
        return value.tensor_operands(self.node)[:3]

    @property
    def _sbps(self) -> list[Sbp]:
        return [self.axis.sbp(operand) for operand in self._operands]

    @property
    def _heads(self) -> Sbp:
        """The split along heads, within what inner axes have cut of them already: then nothing moves along those."""
        axis, query = self.axis, self._operands[0]
        inner = (other for other in axis.axes[axis.axis + 1 :] if other.sbp(query).is_split)
        return S(HEADS, prod(other.ranks for other in inner if other.sbp(query).dim == HEADS))

    @property
    def _can_go_round(self) -> bool:
        """Whether keys and values are pieces of the queries' sequence, equally long, and on no other axis."""
        lengths = {value.tensor_type(operand).shape[SEQUENCE] for operand in self._operands}
        others = (axis.sbp(self._operands[0]) for axis in self.axis.axes if axis is not self.axis)
        is_alone = not any(sbp.is_split and sbp.dim == SEQUENCE for sbp in others)
        is_one = len(lengths) == len({*self._sbps}) == 1
        return is_one and is_alone and has_equal_pieces(self._sbps[0], lengths.pop(), self.axis.ranks)

    @cached_property
    def _backward(self) -> tuple[fx.Node, ...]:
        return backward_ops(self.node)

    def _can_split(self, sbp: Sbp) -> bool:
        """Return whether forward and backward can run with queries split so, besides what they do on other axes."""
        if not sbp.is_split:
            return False
        signatures = [(op, _signature(self.axis, op, sbp)) for op in (self.node, *self._backward)]
        return all(signature is not None and not self.axis.misfit(op, signature) for op, signature in signatures)


def backward_ops(node: fx.Node) -> tuple[fx.Node, ...]:
    """The backward of an attention: ops that read its logsumexp.

    Its result may also be an operand of another attention, whose backward reads it too.
    """
    users = (user for result in _results(node, 1) for user in result.users)
    return tuple(dict.fromkeys(user for user in users if user.target is ATTENTION_BACKWARD))


def _argument(node: fx.Node, name: str) -> object:
    return node.args[argument_names(node.target).index(name)]


def _results(node: fx.Node, number: int) -> list[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == number]


def _signature(axis: AxisPropagation, op: fx.Node, sbp: Sbp) -> Signature | None:
    """The signature of attention or its backward with queries split so."""
    return next((s for s in _signatures(axis, op, sbp) if s.outputs[0] is sbp), None)


# ---- where a value travels, before heads are repeated or after the sum over them


def _before_repeat(axis: AxisPropagation, keys: fx.Node, sbp: Sbp) -> Box:
    """The cheapest box that gives ``keys`` an SBP: of them, or of a value of which they are a view or a copy."""
    node, want, boxes = keys, sbp, [Box(keys, axis.sbp(keys), sbp)]
    while _moves_values(node):
        source = next((s.inputs[0] for s in _signatures(axis, node, want) if s.outputs[0] is want), None)
        node = value.operand(node)
        if source is None or not _nests(axis, node, source):
            break
        want = source
        boxes.append(Box(node, axis.sbp(node), want))
    return min(boxes, key=lambda box: box.price(axis))


def _after_sum(axis: AxisPropagation, gradient: fx.Node, have: Sbp, want: Sbp) -> Box:
    """The cheapest box that gives a gradient an SBP: of it, or of what follows from it alone by views and sums."""
    node, boxes = gradient, [Box(gradient, have, want)]
    while len(node.users) == 1:
        (node,) = node.users
        if not (_moves_values(node) or node.target is SUM):
            break
        sbps = [calls.result_sbp(axis.graph, node, axis.axis, sbp) for sbp in boxes[-1][1:]]
        nested = [sbp for sbp in sbps if sbp is not None and _nests(axis, node, sbp)]
        if len(nested) < len(sbps):
            break
        boxes.append(Box(node, *nested))
    return min(boxes, key=lambda box: box.price(axis))


def _moves_values(node: fx.Node) -> bool:
    return is_plain_view(node.target) or is_copy(node.target)


def _signatures(axis: AxisPropagation, node: fx.Node, sbp: Sbp) -> tuple[Signature, ...]:
    return calls.signatures_of(axis.graph, node, axis.axis, [sbp])


def _nests(axis: AxisPropagation, node: fx.Node, sbp: Sbp) -> bool:
    """Return whether ranks can hold a value so, besides how the other axes split it."""
    nd = tuple(sbp if other is axis else other.sbp(node) for other in axis.axes)
    return nests(value.tensor_type(node).shape, nd, axis.graph.placement.hierarchy)
