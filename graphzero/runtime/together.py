"""Updates that stand next to each other become one call: one over many parameters costs hardly more than over one.

The program says what steps each parameter; here is how many calls that takes.  An update waits for more as long as
nothing follows that would run otherwise: views, names and host numbers do not mind, what reads a result or begins a
transfer ends it.  No memory is taken meanwhile, so what the updates have read last is freed behind the call as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from graphzero.ir import inplace, ops, value
from graphzero.ir.memory import SAME
from graphzero.ops import ADAM, ADAMS_
from graphzero.runtime import kernels
from graphzero.runtime.code import Code
from graphzero.runtime.places import Places
from graphzero.runtime.writes import Writes

# What steps many at once, in place, and how many of an op's arguments it takes as lists.
FORMS: Mapping[Any, tuple[Any, int]] = {ADAM: (ADAMS_, 5)}


class Together:
    """The updates that wait, in order."""

    def __init__(self, places: Places, code: Code, writes: Writes) -> None:
        self.places, self.code, self.writes = places, code, writes
        self._waiting: list[fx.Node] = []
        self._emptied: list[tuple[int, fx.Node]] = []

    def takes(self, node: fx.Node) -> bool:
        """Whether an update waits from now on; calls those before it that it cannot go with."""
        form = FORMS.get(node.target)
        if form is None or node not in self.places.results or not self._writes_alone(node):
            return False
        lists = form[1]
        alike = all(other.target is node.target and other.args[lists:] == node.args[lists:] for other in self._waiting)
        if not alike or self._reads_waiting(node) or self._dtype_differs(node):
            self.call()
        self._waiting.append(node)
        return True

    def lets_pass(self, node: fx.Node) -> bool:
        """Whether the updates may as well run behind ``node``."""
        if node.target is ops.slice_shard:
            return not self._reads_waiting(node)
        return value.is_scalar(node) or node.target in SAME or self.places.is_picked(node)

    def empty(self, place: int, node: fx.Node) -> None:
        """``place`` is not read behind ``node``."""
        if self._waiting:
            self._emptied.append((place, node))
        else:
            self.code.empty(place, node)

    def call(self) -> None:
        """Step all that wait."""
        nodes, self._waiting = self._waiting, []
        if len(nodes) == 1:
            self.writes.over_operands(nodes[0])
        elif nodes:
            form, lists = FORMS[nodes[0].target]
            words = [self.code.text([node.args[i] for node in nodes]) for i in range(lists)]
            words += map(self.code.text, nodes[0].args[lists:])
            self.writes.over_many(nodes, f"{self.code.name(kernels.kernel(form))}({', '.join(words)})")
        for place, node in self._emptied:
            self.code.empty(place, node)
        self._emptied.clear()

    def _writes_alone(self, node: fx.Node) -> bool:
        """Whether it works in its operands' storage, in tensors that are this rank's own."""
        outs = inplace.outs_of(node)
        homes = (self.places.home(node, i) for i in range(len(outs)))
        return bool(outs) and all(outs) and not any(map(self.writes.is_shared, homes))

    def _dtype_differs(self, node: fx.Node) -> bool:
        return any(value.type_of(other)[0].dtype != value.type_of(node)[0].dtype for other in self._waiting)

    def _reads_waiting(self, node: fx.Node) -> bool:
        """Whether it reads what an update that waits is to write."""
        written = {root for other in self._waiting for root in self.places.roots[other]}
        return any(root in written for arg in node.all_input_nodes for root in self.places.roots.get(arg, ()))
