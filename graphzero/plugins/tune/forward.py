"""Forward of a captured step, as the search for weights to split reads it: where to begin, and what ops allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from graphzero.ir import calls, ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ops import PIN
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import S, Sbp

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
        """The signatures of an op, for splits in as many sections as those that stand."""
        key = node, frozenset(sbp.sections for sbp in stand if sbp is not None)
        if key not in self.known:
            self.known[key] = calls.signatures_of(self.graph, node, self.axis, stand)
        return self.known[key]


def is_forward(node: fx.Node) -> bool:
    return node.op == "call_function" and value.phase_of(node) == "forward"
