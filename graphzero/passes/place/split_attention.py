"""SplitAttention: attention over a split sequence becomes attention over split heads.

Every query reads every key, so a rank that holds a piece of the sequence lacks most of what its queries read.  But no
head reads another: ranks exchange pieces of the sequence for heads in front of attention, and back behind it (Jacobs
et al., "DeepSpeed Ulysses", arXiv 2309.14509).

It moves no data: it pins what attention reads to a split along heads, and what it makes to the split that its queries
had.  Boxing makes the all_to_all between the two.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import fx

from graphzero.ir import calls, value
from graphzero.ir.aliases import is_copy, is_plain_view
from graphzero.ir.graph import StepGraph
from graphzero.ops import ATTENTION, ATTENTION_BACKWARD, PIN
from graphzero.passes.base import BuiltinPass
from graphzero.passes.place.forward_sweep import AxisPropagation, swept
from graphzero.sbp.link_costs import Links
from graphzero.sbp.shards import nests
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import B, P, S, Sbp

SUM = torch.ops.aten.sum.dim_IntList
HEADS, SEQUENCE = 1, 2  # dims of queries, keys and values


@dataclass(frozen=True)
class SplitAttention(BuiltinPass):
    """Pins what attention reads of a split sequence to a split along heads, and its results back.

    Keys and values whose heads are repeated for groups of queries are pinned in front of that, and their gradients
    behind the sum over each group, so that each head travels once.  Attention stays as it is where its heads cannot be
    split: keys are gathered then.

    links: what communication costs on each axis, () for bytes.

    Requires: pins on inputs, uses and gradients.
    Ensures: the same ops and pins, and further pins around attention; nothing is sent yet.

    Example::

        split_attention

        graph layer(cp=2) captured
          q    = batch()                              : f32[1, 4, 6, 8]   S(2)!
          k    = batch()                              : f32[1, 2, 6, 8]   S(2)!
          v    = batch()                              : f32[1, 4, 6, 8]   S(2)!
        forward:
          k1   = unsqueeze(k, 2)                      : f32[1, 2, 1, 6, 8]
          k2   = expand(k1, [1, 2, 2, 6, 8])          : f32[1, 2, 2, 6, 8]
          k3   = reshape(k2, [1, 4, 6, 8])            : f32[1, 4, 6, 8]
          pair = attention(q, k3, v, None, True, 0.5) : (f32[1, 4, 6, 8], f32[1, 4, 6])
          y    = pair[0]                              : f32[1, 4, 6, 8]
          return y
        ->
        graph layer(cp=2) captured
          q      = batch()                                      : f32[1, 4, 6, 8]   S(2)!
          k      = batch()                                      : f32[1, 2, 6, 8]   S(2)!
          v      = batch()                                      : f32[1, 4, 6, 8]   S(2)!
        forward:
          k1     = unsqueeze(k, 2)                              : f32[1, 2, 1, 6, 8]
          k1_pin = pin(k1, -1)                                  : f32[1, 2, 1, 6, 8]  S(1)!
          k2     = expand(k1_pin, [1, 2, 2, 6, 8])              : f32[1, 2, 2, 6, 8]
          k3     = reshape(k2, [1, 4, 6, 8])                    : f32[1, 4, 6, 8]
          q_pin  = pin(q, -1)                                   : f32[1, 4, 6, 8]   S(1)!
          v_pin  = pin(v, -1)                                   : f32[1, 4, 6, 8]   S(1)!
          pair   = attention(q_pin, k3, v_pin, None, True, 0.5) : (f32[1, 4, 6, 8], f32[1, 4, 6])
          y      = pair[0]                                      : f32[1, 4, 6, 8]
          y_pin  = pin(y, -1)                                   : f32[1, 4, 6, 8]   S(2)!
          return y_pin
    """

    links: Links = field(default=(), repr=False)

    def __call__(self, graph: StepGraph) -> StepGraph:
        while pins := _pins(graph, self.links):
            places = {node: i for i, node in enumerate(graph.nodes)}
            for pin in pins:
                pin.put_into(graph, places)
        return graph


@dataclass(frozen=True)
class _Pin:
    """A pin of a value for some of its readers.  like: the op whose phase and source it has."""

    node: fx.Node
    axis: int
    sbp: Sbp
    readers: tuple[fx.Node, ...]
    like: fx.Node = field(compare=False)

    def put_into(self, graph: StepGraph, places: Mapping[fx.Node, int]) -> None:
        """Add it behind the value; of a placeholder, in front of the first of its readers."""
        first = min(self.readers, key=places.__getitem__)
        with graph.graph.inserting_before(first if self.node.op == "placeholder" else self.node.next):
            name = f"{self.node.name}_pin"
            pin = graph.call(PIN, (self.node, -1), value.tensor_type(self.node), like=self.like, name=name)
        axes = range(len(graph.placement.names))
        pin.meta["sbp"] = tuple(self.sbp if i == self.axis else None for i in axes)
        pin.meta["pins"] = tuple(i == self.axis for i in axes)
        for reader in self.readers:
            reader.replace_input_with(self.node, pin)


def _pins(graph: StepGraph, links: Links) -> list[_Pin]:
    """The pins around all attention that reads a split sequence, on the first axis on which any does."""
    nodes = [node for node in graph.nodes if node.target is ATTENTION]
    for axis in swept(graph, links) if nodes else ():
        if pins := [pin for node in nodes for pin in _pins_around(axis, node)]:
            return list(dict.fromkeys(pins))
    return []


def _pins_around(axis: AxisPropagation, node: fx.Node) -> Iterator[_Pin]:
    """The pins around one attention and its backward, none where it reads no split sequence or cannot split heads."""
    query, *keys_and_values = operands = value.tensor_operands(node)[:3]
    sbps = [axis.sbp(operand) for operand in operands]
    if not all(sbp is B or _is_sequence(sbp) for sbp in sbps) or not any(map(_is_sequence, sbps[1:])):
        return
    heads = _heads(axis, query)
    backward = _backward_of(node)

    def pin(node: fx.Node, sbp: Sbp, like: fx.Node, past: Collection[fx.Node] = ()) -> _Pin:
        return _Pin(node, axis.axis, sbp, tuple(user for user in node.users if user not in past), like)

    if not all(_allows(axis, op, heads) for op in (node, *backward)):
        return
    yield pin(query, heads, node)
    for operand in keys_and_values:
        smallest, sbp = _before_repeat(axis, operand, heads)
        yield pin(smallest, sbp, node)
    for result in _results(node, 0):
        yield pin(result, sbps[0], result, backward)
    for op in backward:
        yield pin(value.operand(op), heads, op)
        for i, sequence in enumerate(sbps):
            for gradient in _results(op, i):
                smallest, sbp = _after_sum(axis, gradient, heads, sequence)
                yield pin(smallest, sbp, gradient)


def _is_sequence(sbp: Sbp) -> bool:
    return sbp.is_split and sbp.dim == SEQUENCE


def _backward_of(node: fx.Node) -> tuple[fx.Node, ...]:
    results = (user for i in (0, 1) for user in _results(node, i))
    return tuple(dict.fromkeys(op for result in results for op in result.users if op.target is ATTENTION_BACKWARD))


def _results(node: fx.Node, number: int) -> list[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == number]


# ---- which split of heads, and where


def _heads(axis: AxisPropagation, query: fx.Node) -> Sbp:
    """The split along heads, within what inner axes have cut of them already, so that nothing moves along those."""
    inner = (other for other in axis.axes[axis.axis + 1 :] if other.sbp(query).is_split)
    return S(HEADS, prod(other.ranks for other in inner if other.sbp(query).dim == HEADS))


def _allows(axis: AxisPropagation, op: fx.Node, heads: Sbp) -> bool:
    """Return whether attention can run with heads split so, beside what it does on the other axes."""
    signature = next((s for s in _signatures(axis, op, heads) if s.outputs[0] is heads), None)
    return signature is not None and not axis.misfit(op, signature)


def _before_repeat(axis: AxisPropagation, keys: fx.Node, heads: Sbp) -> tuple[fx.Node, Sbp]:
    """The smallest value that ``keys`` are a view or a copy of, and the split of it that gives them split by heads."""
    node, sbp = smallest = keys, heads
    while _moves_values(node):
        source = next((s.inputs[0] for s in _signatures(axis, node, sbp) if s.outputs[0] is sbp), B)
        node, sbp = value.operand(node), source
        if not _holds(axis, node, sbp):
            break
        smallest = _smaller((node, sbp), smallest)
    return smallest


def _after_sum(axis: AxisPropagation, gradient: fx.Node, heads: Sbp, sequence: Sbp) -> tuple[fx.Node, Sbp]:
    """The smallest value that follows from a gradient alone, each head by itself, and its split along the sequence."""
    node, smallest = gradient, (gradient, sequence)
    while len(node.users) == 1:
        (node,) = node.users
        if not (_moves_values(node) or node.target is SUM):
            break
        heads, sequence = (_result(axis, node, sbp) for sbp in (heads, sequence))
        if not _holds(axis, node, heads) or not (sequence is B or _holds(axis, node, sequence)):
            break
        smallest = _smaller((node, sequence), smallest)
    return smallest


def _moves_values(node: fx.Node) -> bool:
    return is_plain_view(node.target) or is_copy(node.target)


def _result(axis: AxisPropagation, node: fx.Node, sbp: Sbp) -> Sbp:
    """The SBP of what an op makes of one operand; P where it allows none."""
    return next((s.outputs[0] for s in _signatures(axis, node, sbp) if s.inputs[0] is sbp), P)


def _signatures(axis: AxisPropagation, node: fx.Node, sbp: Sbp) -> tuple[Signature, ...]:
    return calls.signatures_of(axis.graph, node, axis.axis, [sbp])


def _holds(axis: AxisPropagation, node: fx.Node, sbp: Sbp) -> bool:
    """Return whether ranks can hold a value split so, beside how the other axes split it."""
    nd = tuple(sbp if other is axis else other.sbp(node) for other in axis.axes)
    return sbp.is_split and nests(value.tensor_type(node).shape, nd, axis.graph.placement.hierarchy)


def _smaller(one: tuple[fx.Node, Sbp], other: tuple[fx.Node, Sbp]) -> tuple[fx.Node, Sbp]:
    return one if value.tensor_type(one[0]).nbytes < value.tensor_type(other[0]).nbytes else other
