"""What micro-batches hand on: what they make together, and buffers that each of them changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.passes.micro.loop_partition import LoopPartition
from graphzero.passes.micro.micro_batch_errors import MicroBatchErrors
from graphzero.passes.micro.micro_batch_types import MicroBatchTypes
from graphzero.sbp.types import Nd


@dataclass(frozen=True)
class LoopResult:
    """What micro-batches make together of ``source``: a sum, a maximum, a mean, or pieces side by side (``dim``).

    nd: how it is held on the other axes.  how: of ``ops.ACCUMULATIONS``.
    """

    source: fx.Node
    nd: Nd
    how: str = "sum"
    dim: int | None = None


class LoopCarried:
    """carries: buffers, by placeholder, that are carried from one micro-batch to the next.

    wanted: by value of a micro-batch, what all of them make of it together.
    """

    def __init__(
        self,
        graph: StepGraph,
        parts: LoopPartition,
        sizes: MicroBatchTypes,
        refusals: MicroBatchErrors,
        reduces_each: bool,
    ) -> None:
        self.parts, self.sizes, self.refusals, self.reduces_each = parts, sizes, refusals, reduces_each
        self.outputs, self.aux, self.updates = graph.outputs, graph.aux, graph.updates
        self.carries = self._find_carries(graph)
        self.wanted = self._all_joined()

    def _find_carries(self, graph: StepGraph) -> tuple[str, ...]:
        """Buffers that each micro-batch changes: those that forward changes by what is the micro-batch's, and others
        of their modules.  In the order of the step, which is the same on all ranks.
        """
        buffers = {node.name: value.role_of(node).of for node in graph.placeholders("buffer")}  # type: ignore[union-attr]
        own = [n for n in self.updates if n in buffers and self.parts.is_each(self.updates[n])]
        varying = {n for n in own if self.updates[n] in self.parts.varying}
        modules = {buffers[name].rpartition(".")[0] for name in varying}
        return tuple(n for n in own if n in varying or buffers[n].rpartition(".")[0] in modules)

    def _all_joined(self) -> dict[fx.Node, list[LoopResult]]:
        """By source, what micro-batches hand on."""
        found: dict[fx.Node, dict[LoopResult, None]] = {}
        for one in self._asked():
            found.setdefault(one.source, {})[one] = None
        return {source: list(some) for source, some in found.items()}

    def _asked(self) -> Iterator[LoopResult]:
        parts = self.parts
        joining = parts.completed - parts.hoisted - parts.estimated
        for node in parts.nodes:
            if node in joining:
                yield self.by_box(node)
            elif node.op != "placeholder" and not parts.is_each(node):
                for operand in node.all_input_nodes:
                    if operand in parts.varying:
                        yield self._mean(operand)
        kept = [new for name, new in self.updates.items() if name not in self.carries]
        for node in value.flat_nodes((self.outputs, self.aux, kept)):
            if node in parts.varying:
                yield self._mean(node)
            elif value.is_tensor(node) and parts.sbp(node).is_split:
                yield LoopResult(node, self.sizes.others(node), dim=parts.sbp(node).dim)

    def by_box(self, box: fx.Node) -> LoopResult:
        """What a box on ``mb`` becomes."""
        source, made = value.operand(box), self.parts.sbp(box)
        have, held, wanted = self.parts.sbp(source), self.sizes.others(source), self.sizes.others(box)
        if not made.is_broadcast:
            raise self.refusals.all_at_once(source, self.refusals.mismatch(source, box))
        if have.is_split:
            self.refusals.check_plain(source)
            return LoopResult(source, self.sizes.side_by_side(held, wanted, have.dim), dim=have.dim)
        if self._reduces_each(box):  # on the axes that split it; on others ranks add up whole, and reduce once
            held = tuple(
                had if had.is_partial and not want.is_split else want for had, want in zip(held, wanted, strict=True)
            )
        return LoopResult(source, held, have.reduction)

    def _reduces_each(self, box: fx.Node) -> bool:
        role = value.role_of(box)
        return self.reduces_each and role is not None and role.kind == "gradient"

    def _mean(self, node: fx.Node) -> LoopResult:
        type_ = value.type_of(node)
        is_mean = isinstance(type_, TensorType) and type_.dtype.is_floating_point
        return LoopResult(node, self.sizes.others(node), "mean" if is_mean else "max")
