"""Uses of parameters: each phase reads a parameter through its own ``use``.

Values that are only views or casts of a parameter are made again in every phase that reads them, so that nothing of a
parameter's size crosses from forward to backward.  ZeRO's stage 3 depends on this.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from graphzero.capture.rewrite.canonicalise import shows_operand
from graphzero.ir import ops, value


def insert_uses(graph: fx.Graph) -> None:
    """Put ``use`` nodes after the parameters of ``graph``, in place."""
    _UseInserter(graph).insert()


class _UseInserter:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.params = {node for node in graph.find_nodes(op="placeholder") if value.has_role(node, "param")}
        self.derived: set[fx.Node] = set()
        self.made: dict[tuple[fx.Node, str], fx.Node] = {}

    def insert(self) -> None:
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            operands = node.all_input_nodes
            if shows_operand(node.target) and len(operands) == 1 and self._of_param(operands[0]):
                self.derived.add(node)
            phase = value.phase_of(node)
            if any(self._of_param(operand) for operand in operands):
                change = {x: self._in_phase(x, phase, node) for x in operands if self._of_param(x)}
                for old, new in change.items():
                    node.replace_input_with(old, new)
            if node in self.derived:
                self.made.setdefault((node, phase), node)
        self._outputs()

    def _of_param(self, node: fx.Node) -> bool:
        return node in self.params or node in self.derived

    def _in_phase(self, node: fx.Node, phase: str, before: fx.Node) -> fx.Node:
        """``node``, a parameter or what is derived from one, as ``phase`` reads it."""
        node = _plain(node)
        key = (node, phase)
        if key not in self.made:
            if node in self.params:
                self.made[key] = self._use(node, phase, before)
            else:
                operand = self._in_phase(node.all_input_nodes[0], phase, before)
                self.made[key] = self._again(node, operand, phase, before)
        return self.made[key]

    def _use(self, param: fx.Node, phase: str, before: fx.Node) -> fx.Node:
        with self.graph.inserting_before(before):
            node = self.graph.call_function(ops.use, (param,))
        node.meta = {"type": param.meta["type"], "val": param.meta["val"], "phase": phase}
        node.meta["source"] = value.source_of(before)
        return node

    def _again(self, node: fx.Node, operand: fx.Node, phase: str, before: fx.Node) -> fx.Node:
        with self.graph.inserting_before(before):
            copied = self.graph.node_copy(node, lambda x: operand)
        copied.meta = {**node.meta, "phase": phase}
        return copied

    def _outputs(self) -> None:
        """Copy parameters that are outputs: an output is a copy of what forward reads, a state of what the update
        reads."""
        output = self.graph.output_node()
        results: Any = output.args[0]
        outputs, aux, updates, *rest = results

        def read_in(phase: str, x: Any) -> Any:
            return fx.node.map_arg(x, lambda n: self._in_phase(n, phase, output) if n in self.params else n)

        output.args = ((*read_in("forward", (outputs, aux)), read_in("update", updates), *read_in("forward", rest)),)


def _plain(node: fx.Node) -> fx.Node:
    """The parameter itself where ``node`` is a use of it."""
    if node.target is ops.use:
        return value.operand(node)
    return node
