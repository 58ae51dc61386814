"""Loop-carried values of micro-batches: results that all of them accumulate, and buffers that each of them changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_stages import stages_of
from graphzero.ir.value import TensorType
from graphzero.passes.micro.loop_partition import LoopPartition
from graphzero.passes.micro.micro_batch_errors import MicroBatchErrors
from graphzero.passes.micro.micro_batch_types import MicroBatchTypes
from graphzero.sbp.types import Nd


@dataclass(frozen=True)
class LoopResult:
    """Result that micro-batches make together of ``source``: a sum, maximum or mean, or a concatenation along ``dim``.

    nd: its SBP on the other axes.  how: one of ``ops.ACCUMULATIONS``.
    """

    source: fx.Node
    nd: Nd
    how: str = "sum"
    dim: int | None = None


class LoopCarried:
    """Values that one micro-batch passes to the next.

    added_up_whole: values of pipeline stages whose gradients are reduced once.
    buffers: names of the placeholders of buffers that each micro-batch changes.
    results: by value of a micro-batch, what all of them accumulate of it.
    """

    def __init__(
        self, graph: StepGraph, partition: LoopPartition, types: MicroBatchTypes, errors: MicroBatchErrors,
        reduces_each: bool, whole_on: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.partition, self.types, self.errors, self.reduces_each = partition, types, errors, reduces_each
        stages = stages_of(graph.nodes) if whole_on else {}
        self.added_up_whole = {node for node, stage in stages.items() if stage in whole_on}
        self.outputs, self.aux, self.updates = graph.outputs, graph.aux, graph.updates
        self.buffers = self._find_buffers(graph)
        self.results: dict[fx.Node, list[LoopResult]] = {}
        for result in dict.fromkeys(self._find_results()):
            self.results.setdefault(result.source, []).append(result)

    def _find_buffers(self, graph: StepGraph) -> tuple[str, ...]:
        """Buffers that each micro-batch changes: those that forward changes by values of the micro-batch, and others
        of their modules.  In the order of the step, which is the same on all ranks.
        """
        buffers = {node.name: value.role_of(node).of for node in graph.placeholders("buffer")}  # type: ignore[union-attr]
        changed = [n for n in self.updates if n in buffers and self.partition.is_in_body(self.updates[n])]
        varying = {n for n in changed if self.updates[n] in self.partition.varying}
        modules = {buffers[name].rpartition(".")[0] for name in varying}
        return tuple(n for n in changed if n in varying or buffers[n].rpartition(".")[0] in modules)

    def _find_results(self) -> Iterator[LoopResult]:
        """Results that the epilogue and the outputs of the step read."""
        partition = self.partition
        accumulated = partition.completed - partition.hoisted - partition.estimated
        for node in partition.nodes:
            if node in accumulated:
                yield self.result_of_box(node)
            elif node.op != "placeholder" and not partition.is_in_body(node):
                for operand in node.all_input_nodes:
                    if operand in partition.varying:
                        yield self._mean(operand)
        new_states = [new for name, new in self.updates.items() if name not in self.buffers]
        for node in value.flat_nodes((self.outputs, self.aux, new_states)):
            if node in partition.varying:
                yield self._mean(node)
            elif value.is_tensor(node) and partition.sbp(node).is_split:
                yield LoopResult(node, self.types.others(node), dim=partition.sbp(node).dim)

    def result_of_box(self, box: fx.Node) -> LoopResult:
        """The result that a box on ``mb`` becomes."""
        source, want = value.operand(box), self.partition.sbp(box)
        have, source_nd, box_nd = self.partition.sbp(source), self.types.others(source), self.types.others(box)
        if not want.is_broadcast:
            raise self.errors.needs_whole_batch(source, self.errors.mismatch(source, box))
        if have.is_split:
            self.errors.check_plain(source)
            return LoopResult(source, self.types.concatenation_sbp(source_nd, box_nd, have.dim), dim=have.dim)
        is_gradient = value.has_role(box, "gradient") and box not in self.added_up_whole
        if self.reduces_each and is_gradient:  # on the axes that split it; on others ranks add up whole, reduce once
            pairs = zip(source_nd, box_nd, strict=True)
            source_nd = tuple(had if had.is_partial and not want.is_split else want for had, want in pairs)
        return LoopResult(source, source_nd, have.reduction)

    def _mean(self, node: fx.Node) -> LoopResult:
        type_ = value.type_of(node)
        is_mean = isinstance(type_, TensorType) and type_.dtype.is_floating_point
        return LoopResult(node, self.types.others(node), "mean" if is_mean else "max")
