"""Recompute: values of forward that backward reads are computed again there, instead of being held until then.

This is activation checkpointing.  It trades time for memory and changes no bit: an op that runs again reads what it
read before, draws of random numbers are functions of what they read.  A value that is computed again needs its
operands: those that are named too are also computed again, the others are held.  The choice of values is not made
here: see ``plan``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import memory_space, ops, value
from graphzero.ir.graph import StepGraph, copy_op
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.text.printer import op_name
from graphzero.ir.value import Role
from graphzero.ops import CHECK, MOVE
from graphzero.passes.base import BuiltinPass, is_pattern
from graphzero.passes.memory.keep_gathered import follows_parameter, gathered_again, read_first

_NEVER_RECOMPUTED = (*ops.COMMUNICATING, *ops.WRITING, CHECK, MOVE)  # ranks meet there, or it has an effect
AGAIN = "recompute"  # the role of what is computed again


@dataclass(frozen=True)
class Recompute(BuiltinPass):
    """Recomputes values of forward right before backward first reads them, instead of holding them; the same bits.

    recompute: names of values, or patterns as of a shell; all that can be by default.
    Raises ConfigError for a name of no value of forward, and of one that has to be held.

    A parameter that forward gathers for such a value is gathered again for it, once in backward for all its readers.
    What else moves between ranks, what checks, and what the update or the caller reads, is never computed again.

    Requires: collectives that are not in buckets yet.
    Ensures: backward reads recomputed values instead of the named ones of forward; the same bits.

    Example::

        recompute{recompute=(h)}

         graph step(dp=1) local
           x = batch() : f32[8, 4]  B
           w = param() : f32[4, 4]  B
         forward:
           a = mm(x, w) : f32[8, 4]  B
           h = tanh(a) : f32[8, 4]  B
           y = mm(h, w) : f32[8, 4]  B
         backward:
           e = sign(y) : f32[8, 4]  B
        -  t = t(h) : f32[4, 8]  B
        +  h_r = tanh(a) : f32[8, 4]  B  ; recompute(h)
        +  t = t(h_r) : f32[4, 8]  B
           gw = mm(t, e) : f32[4, 4]  B  ; gradient(w)
           d = mul(e, a) : f32[8, 4]  B
           return gw, d
    """

    recompute: tuple[str, ...] = ("*",)

    def __call__(self, graph: StepGraph) -> StepGraph:
        merge_gathers(graph)
        forward = ForwardOps(graph)
        dropped = self._ops_of(graph, forward) | forward.gathers
        _read_again(graph, forward, dropped)
        return graph

    def _ops_of(self, graph: StepGraph, forward: ForwardOps) -> set[fx.Node]:
        """The ops that make what is named."""
        named = {node.name: node for node in forward.maker}
        ops = set[fx.Node]()
        for name in self.recompute:
            if is_pattern(name):
                makers = {forward.maker[named[one]] for one in named if fnmatchcase(one, name)}
                ops |= makers & forward.free.keys()
                continue
            maker = forward.maker.get(named[name]) if name in named else None
            if maker is None:
                shown = ", ".join(node.name for node in forward.free)
                raise ConfigError(
                    f"recompute={name!r}: there is no such value of forward in {graph.name}; it has {shown:.400}"
                )
            if maker not in forward.free:
                raise ConfigError(f"recompute={name!r}: it is held, for {forward.why_held(maker)}")
            ops.add(maker)
        return ops


class ForwardOps:
    """Ops of forward that may be computed again.

    maker: per value of forward, the op whose storage it lives in.  free: the ops, in order, that may run again.
    gathers: those that move parameters between ranks, and what follows from them: they always may.
    """

    def __init__(self, graph: StepGraph):
        at = liveness(graph)
        self.position = at.position
        self.maker: dict[fx.Node, fx.Node] = {}
        self._handed_on = set[fx.Node]()
        for node in at.nodes:
            if node.op != "call_function" or value.phase_of(node) != "forward" or value.is_scalar(node):
                continue
            maker = next((storage[0] for storage in at.roots[node] if storage is not None), node)
            if maker.op == "call_function" and not (at.repeated and at.position[maker] < at.repeated.start):
                self.maker[node] = maker  # what is there before the first micro-batch stays for all
                if any(_hands_on(user) for user in node.users):
                    self._handed_on.add(maker)
        self.gathers = {self.maker[node] for node in follows_parameter(graph) if node in self.maker}
        makers = dict.fromkeys(self.maker.values())
        self.free = {one: None for one in makers if one not in self.gathers and not self.why_held(one)}

    def why_held(self, maker: fx.Node) -> str:
        """Say why an op is not to run again; "" if it may."""
        target: Any = maker.target
        if target in _NEVER_RECOMPUTED:
            return f"{op_name(target)} runs once"
        if memory_space.is_offload(target):
            return "it is in host memory"
        if isinstance(target, torch._ops.OpOverload):
            if target._schema.is_mutable:
                return f"{op_name(target)} writes over what it reads"
            if torch.Tag.nondeterministic_seeded in target.tags:
                return f"{op_name(target)} draws its own numbers"
        return "the update or the caller reads it" if maker in self._handed_on else ""


def _hands_on(user: fx.Node) -> bool:
    return user.op == "output" or value.phase_of(user) == "update"


def merge_gathers(graph: StepGraph) -> None:
    """Let backward read what forward gathers, as if it stayed: where it is gathered again then follows from readers."""
    for pairs in gathered_again(graph).values():
        read_first(graph, pairs)


def _read_again(graph: StepGraph, forward: ForwardOps, dropped: set[fx.Node]) -> None:
    """Put copies of what follows from ``dropped`` before their first readers in backward."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or value.phase_of(node) != "backward":
            continue
        read = [x for x in node.all_input_nodes if forward.maker.get(x) in dropped]
        for one in sorted(_missing(read, forward, dropped, copies), key=forward.position.__getitem__):
            with graph.graph.inserting_before(node):
                copies[one] = _copy(graph, one, copies)
        if read:
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda x: copies.get(x, x))


def _missing(
    read: list[fx.Node], forward: ForwardOps, dropped: set[fx.Node], copies: dict[fx.Node, fx.Node]
) -> Iterator[fx.Node]:
    """Nodes that must be copied for a reader of dropped values."""
    seen, unvisited = set[fx.Node](), list(read)
    while unvisited:
        one = unvisited.pop()
        if one not in seen and one not in copies and forward.maker.get(one) in dropped:
            seen.add(one)
            yield one
            unvisited += one.all_input_nodes
            if value.is_multi(one):  # all its results are right after it
                unvisited += one.users


def _copy(graph: StepGraph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    copy = copy_op(graph, node, lambda x: copies.get(x, x), f"{node.name}_r", phase="backward")
    if not value.has_role(node, "param"):
        graph.set_role(copy, Role(AGAIN, node.name))
    return copy
