"""OptimizerInBackward: each op of the update is where what it needs is there, while backward runs.

A parameter steps when its gradient is complete and backward has read it for the last time.  Then gradients need not all
be held until backward ends.  It is the graph that says what may move: an update that needs the norm of all gradients
is where the last of them is complete, which is after backward, as it would otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import inplace
from graphzero.ir.storage.liveness import Liveness, liveness
from graphzero.ir.transfer import delivered
from graphzero.passes.base import BuiltinPass

MANY = ""  # for the name of a parameter: several


@dataclass(frozen=True)
class OptimizerInBackward(BuiltinPass):
    """Moves each op of the update up, after the last op of another phase on which it depends.

    Requires: updates after backward.
    Ensures: each op of the update directly follows its last dependency; no op is added.

    Example::

        optimizer_in_backward

         graph step(dp=1) local
           x = batch() : f32[8, 4]  B
           w = param() : f32[4, 4]  B
           v = param() : f32[4, 4]  B
         forward:
           h = mm(x, w) : f32[8, 4]  B
           y = mm(h, v) : f32[8, 4]  B
         backward:
           ht = t(h) : f32[4, 8]  B
           gv = mm(ht, y) : f32[4, 4]  B  ; gradient(v)
           vt = t(v) : f32[4, 4]  B
           dh = mm(y, vt) : f32[8, 4]  B
        +update:
        +  v1 = add(v, gv, alpha=-0.1) : f32[4, 4]  B
        +backward:
           xt = t(x) : f32[4, 8]  B
           gw = mm(xt, dh) : f32[4, 4]  B  ; gradient(w)
         update:
           w1 = add(w, gw, alpha=-0.1) : f32[4, 4]  B
        -  v1 = add(v, gv, alpha=-0.1) : f32[4, 4]  B
           return y; update(w=w1, v=v1)
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        at = liveness(graph)
        ready = _Ready(at)
        tail: dict[int, fx.Node] = {}
        for node in sorted(ready.of, key=lambda node: (ready.of[node], at.position[node])):
            after = ready.of[node]
            tail.get(after, at.nodes[after]).append(node)
            tail[after] = node
        return graph


class _Ready:
    """of: op of the update -> position of the last op of another phase that it waits for.

    It waits for what it reads, and for the last reader of an old parameter: its new value then takes the storage of the
    old.  What follows from states and numbers alone waits for the first that reads it.
    """

    def __init__(self, at: Liveness):
        self.position, nodes = at.position, at.nodes
        others = (i if not _is_update(node) else -1 for i, node in enumerate(nodes))
        self.above = [-1, *accumulate(others, max)]  # per position, that of the last op of another phase above it
        self.first = next((i for i, node in enumerate(nodes) if value.phase_of(node) == "backward"), len(nodes))
        self.free = self._last_readers(at)
        self.of: dict[fx.Node, int] = {}
        last_operand: dict[fx.Node, int] = {}  # the last op of another phase that something follows from; -1 for none
        update = [node for node in nodes if _is_update(node)]
        for node in update:
            operands = node.all_input_nodes
            self.free[node] = max((self.free.get(x, -1) for x in operands), default=-1)
            last_operand[node] = max(
                (last_operand[x] if _is_update(x) else self._made_at(x) for x in operands), default=-1
            )
            if last_operand[node] >= 0:
                ready = max(last_operand[node], self.free[node], self.first)
                self.of[node] = min(ready, self.above[self.position[node]])
        for node in reversed(update):
            if node not in self.of:
                self.of[node] = min(map(self._wanted, node.users), default=self.above[self.position[node]])

    def _last_readers(self, at: Liveness) -> dict[fx.Node, int]:
        """Parameter or state that the step changes -> the last op outside the update that reads its storage."""
        ops_outside = {i for i, node in enumerate(at.nodes[:-1]) if not _is_update(node)}
        states = (node for node in at.graph.placeholders() if node.name in at.graph.updates)
        return {node: max(ops_outside.intersection(at.readers[node, 0]), default=-1) for node in states}

    def _made_at(self, operand: fx.Node) -> int:
        """Position at which an operand is available, with all values that arrive together with it; -1 for values before
        the step."""
        delivery = delivered(operand)
        together = delivery[0].end.users if delivery is not None and delivery[0].is_launch else (operand,)
        return -1 if operand.op == "placeholder" else max(self.position[one] for one in together)

    def _wanted(self, user: fx.Node) -> int:
        """After which position something has to be that ``user`` reads."""
        return self.of[user] if _is_update(user) else self.above[self.position[user]]


def _is_update(node: fx.Node) -> bool:
    return node.op == "call_function" and value.phase_of(node) == "update"


def describe_early(graph: StepGraph) -> str:
    """For a final program: the number of parameters that step before backward ends, the number that cannot, and why."""
    at = liveness(graph)
    end = at.phase_end.get("backward", -1)
    follows = _gradients_after(graph)
    params = {node.name for node in graph.placeholders("param")}
    new = [node for name, node in graph.updates.items() if name in params]
    early = sum(at.position[node] < end for node in new)
    late = sum(follows.get(node) == MANY for node in new)
    line = f"optimizer in backward: {early} of {len(new)} parameters step before backward ends"
    if not late:
        return line
    why = " (clip_grad_norm)" if any(name.startswith("grad_norm") for name in graph.aux) else ""
    return f"{line}; {late} wait until every gradient is there: their step needs those of others too{why}"


def _gradients_after(graph: StepGraph) -> dict[fx.Node, str]:
    """The parameter from whose gradient each value follows, or MANY."""
    parameter: dict[fx.Node, str] = {}
    for node in graph.nodes:
        role = value.role_of(node)
        if role is not None and role.kind == "gradient":
            parameter[node] = role.of
        elif node.op == "call_function" and node.target not in (ops.launch, ops.wait):
            owners = {parameter[operand] for operand in _operands(node) if operand in parameter}
            if owners:
                parameter[node] = owners.pop() if len(owners) == 1 else MANY
    return parameter


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    """Operands of a value; for one of several results of a collective or an update, those from which it is made."""
    source: Any = node.args[0] if node.target is operator.getitem else None
    delivery = delivered(node)
    if delivery is not None:
        yield delivery[0].members[delivery[1]]
    elif source is not None and source.target in inplace.OVER_OPERANDS:
        index: Any = node.args[1]
        yield from (arg[index % len(arg)] for arg in source.args if isinstance(arg, list) and arg)
    else:
        yield from value.flat_nodes((node.args, value.own_kwargs(node)))
