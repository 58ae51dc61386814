"""Writes a step in micro-batches: the prologue, the repeated body, the last iteration and the epilogue."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.aliases import is_copy, is_name, is_view, unnamed
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_stages import is_of_params, is_staged
from graphzero.ir.value import Role, TensorType
from graphzero.ops import MOVE
from graphzero.passes.memory.keep_gathered import KeepGathered
from graphzero.passes.micro.loop_carried import LoopCarried, LoopResult
from graphzero.passes.micro.loop_partition import SHAPED, LoopPartition, restore_broadcast_sums
from graphzero.passes.micro.micro_batch_errors import MicroBatchErrors
from graphzero.passes.micro.micro_batch_types import BODY, EPILOGUE, LAST, PROLOGUE, MicroBatchTypes
from graphzero.passes.micro.op_writer import OpWriter
from graphzero.passes.place.forward_sweep import HALF
from graphzero.sbp.placement import MICRO_BATCHES

aten = torch.ops.aten


class LoopWriter:
    """Writer of the whole program: prologue, repeated body, last iteration, epilogue.

    In a program of pipeline stages the body is that of all micro-batches: its stages do not run one after the other.
    """

    def __init__(
        self, graph: StepGraph, reduces_each: bool, keep_gathered: tuple[str, ...], whole_on: tuple[int, ...]
    ) -> None:
        self.graph, self.keep_gathered = graph, keep_gathered
        axis = graph.placement.axis(MICRO_BATCHES)
        restore_broadcast_sums(graph, axis)
        count, self.is_staged = graph.placement.hierarchy[axis], is_staged(graph.placeholders())
        self.types = MicroBatchTypes(axis, count, count if self.is_staged else count - 1)
        self.partition = LoopPartition(graph, axis)
        self.errors = MicroBatchErrors(graph.name, graph.placement.names, self.partition, self.types)
        self.loop_carried = LoopCarried(graph, self.partition, self.types, self.errors, reduces_each, whole_on)
        self.writer = OpWriter(graph, self.types, self.partition, self.errors)
        self.accumulators: dict[LoopResult, fx.Node] = {}  # the value of each accumulator so far
        self.results: dict[LoopResult, fx.Node] = {}  # the value of each after the last micro-batch
        self.carried_buffers: dict[fx.Node, fx.Node] = {}  # buffer -> its value for the next micro-batch
        self.gathered_once: dict[fx.Node, fx.Node] = {}  # gathers of parameters that are made once
        self.unrounded: dict[fx.Node, fx.Node] = {}  # what was added up in float32, by its value in 16 bit

    def write_program(self) -> None:
        """Replace the graph by the program in micro-batches, without the axis ``mb``."""
        old, graph = self.graph.graph, self.graph
        graph.graph = fx.Graph()
        placeholders = [node for node in old.nodes if node.op == "placeholder"]
        for node in placeholders:
            copy = graph.graph.create_node("placeholder", node.target, name=node.name)
            copy.meta = self.types.meta(node)
            for written in self.writer.written.values():
                written[node] = copy
        self._write_prologue()
        start = len(graph.graph.nodes)
        if self.loop_carried.results or self.loop_carried.buffers:
            self._clone_buffers(placeholders)
            self._write_body()
        if self.is_staged:
            self._write_epilogue()
        else:
            self._write_last()
        loop = self.loop_carried
        graph.graph.output((
            fx.map_arg(loop.outputs, self._final_value),
            {name: self._final_value(x) for name, x in loop.aux.items()},
            {name: self._new_state(name, x) for name, x in loop.updates.items()},
        ))  # fmt: skip
        graph.placement = graph.placement.without_micro_batches()
        self._erase_unused(start)
        self.errors.warn()

    def _write_prologue(self) -> None:
        """Write values that must be complete before any micro-batch runs, and parameters that are gathered once."""
        once: dict[Any, fx.Node] = {}  # forward and backward read the same
        for node in self.partition.nodes:
            if node in self.partition.hoisted:
                self._prologue_value(node)
            elif (param := self._param_gathered_once(node) or self._param_moved(node)) is not None:
                key = param, node.args[1:], value.type_of(node), value.nd_of(node)
                self.gathered_once[node] = once.get(key) or self.writer.copy_op(node, PROLOGUE, self._prologue_value)
                once[key] = self.gathered_once[node]
                self.gathered_once[node].meta["phase"] = "forward"

    def _prologue_value(self, node: fx.Node) -> fx.Node:
        """The value of ``node`` in the prologue: it depends only on what is known before any micro-batch runs."""
        written = self.writer.written[PROLOGUE]
        if node not in written:
            source = node.args[0] if node.target is ops.box else None
            if isinstance(source, fx.Node) and self.types.others(source) == self.types.others(node):
                written[node] = self._prologue_value(source)
            else:
                written[node] = self.writer.copy_op(node, PROLOGUE, self._prologue_value)
                written[node].meta["phase"] = "forward"
        return written[node]

    def _param_gathered_once(self, node: fx.Node) -> fx.Node | None:
        """The parameter that ``node`` gathers, as it is or cast, if it stays gathered for all micro-batches."""
        if node.target is not ops.box or not self.keep_gathered or value.phase_of(node) == "update":
            return None
        source = value.operand(node)
        while is_copy(source.target):  # the cast of a master
            source = value.operand(source)
        role = value.role_of(source)
        if source.op != "placeholder" or role is None or role.kind != "param":
            return None
        return source if KeepGathered(self.keep_gathered).matching_paths([role.of]) else None

    def _param_moved(self, node: fx.Node) -> fx.Node | None:
        """The parameter that ``node`` moves to another pipeline stage, or what is computed of parameters alone.

        It is moved once for all micro-batches.
        """
        if node.target is not MOVE or value.phase_of(node) == "update" or not self.partition.is_in_body(node):
            return None
        source = value.operand(node)
        while is_copy(source.target) or is_name(source.target) or source.target is ops.box:
            source = value.operand(source)
        return source if is_of_params(source) else None

    def _clone_buffers(self, placeholders: list[fx.Node]) -> None:
        """Begin each loop-carried buffer as a copy of the step's."""
        for node in placeholders:
            if node.name in self.loop_carried.buffers:
                buffer = self.writer.written[LAST][node]
                clone = self.writer.call(aten.clone.default, (buffer,), node, self.types.others(node))
                self.writer.written[BODY][node] = self.carried_buffers[node] = clone

    def _write_body(self) -> None:
        """Write the accumulators, and one micro-batch, which is repeated for all but the last."""
        for results in self.loop_carried.results.values():
            for result in results:
                type_, role = self._accumulator_type(result), value.role_of(result.source)
                args = (list(type_.shape), type_.dtype)
                accumulator = self.graph.call(
                    ops.accumulator, args, type_, sbp=result.nd, phase="forward", name=f"{result.source.name}_sum"
                )
                self.accumulators[result] = accumulator
                if role is not None and role.kind == "gradient":
                    accumulator.meta["role"] = Role("accumulator", role.of)
        self.writer.index = self.graph.call(
            ops.micro_batch, (self.types.count,), value.ScalarType("int"), name=MICRO_BATCHES
        )
        self.writer.index.meta["repeat"] = self.types.repeats
        for node in self.partition.nodes:
            if self.partition.is_in_body(node):
                self._write_value(node, BODY)
        for name in self.loop_carried.buffers:
            self._carry_buffer(name)

    def _write_last(self) -> None:
        """Write the last micro-batch and the epilogue, in the order of the step, so that transfers overlap."""
        self.writer.index = self.types.count - 1
        self.writer.written[LAST].update(self.carried_buffers)
        for node in self.partition.nodes:
            if self.partition.is_in_body(node):
                self._write_value(node, LAST)
            elif node.op != "placeholder":
                self.writer.written[LAST][node] = self._epilogue_value(node)

    def _carried_value(self, node: fx.Node) -> fx.Node | None:
        """The buffer that the last micro-batch has left, if ``node`` is its new value; None if it depends on none.

        Raises ConfigError for what else is computed of such a buffer: after the loop that would be of the next one.
        """
        for buffer, carried in self.carried_buffers.items():
            if self.loop_carried.updates[buffer.name] is node:
                return carried
        if any(x in self.carried_buffers for x in value.ancestors(node)):
            raise self.errors.needs_whole_batch(node, "reads a buffer that micro-batches change, in a pipeline")
        return None

    def _write_epilogue(self) -> None:
        """Write what comes after all micro-batches."""
        self.writer.written[LAST].update(self.carried_buffers)
        for result, accumulator in self.accumulators.items():
            self._complete_result(result, accumulator)
        for node in self.partition.nodes:
            if node.op != "placeholder" and not self.partition.is_in_body(node):
                self.writer.written[LAST][node] = self._epilogue_value(node)

    def _epilogue_value(self, node: fx.Node) -> fx.Node:
        """Write ``node`` after all micro-batches; returns its value there."""
        if node in self.partition.hoisted:
            return self._prologue_value(node)
        if node in self.partition.completed:
            return self.writer.box(self.results[self.loop_carried.result_of_box(node)], node, self.types.others(node))
        if node.target is ops.box and self.types.others(value.operand(node)) == self.types.others(node):
            return self._final_value(value.operand(node))
        if self.is_staged and node.target in SHAPED and self.partition.is_per_micro_batch(value.operand(node)):
            return self.writer.fill_constant(node, EPILOGUE)  # as 1, the gradient of the loss, is of no micro-batch
        copy = self.writer.copy_op(node, EPILOGUE, self._final_value)
        return self._without_rounding(copy) or copy

    def _without_rounding(self, cast: fx.Node) -> fx.Node | None:
        """The float32 sum that ``cast`` widens again from 16 bit, if there is one; the cast is then erased."""
        source: Any = cast.args[0] if cast.target is aten._to_copy.default and cast.kwargs.keys() == {"dtype"} else None
        wide = None if source is None else self.unrounded.get(unnamed(source))
        if wide is None or value.type_of(wide) != value.type_of(cast):
            return None
        self.graph.graph.erase_node(cast)
        return wide

    def _new_state(self, name: str, new: fx.Node) -> fx.Node:
        """The new value of a state of the step."""
        if name not in self.loop_carried.buffers:
            return self._final_value(new)
        if not self.is_staged:
            return self.writer.written[LAST][new]
        return next(carried for buffer, carried in self.carried_buffers.items() if buffer.name == name)

    def _final_value(self, node: fx.Node) -> fx.Node:
        """The value that the epilogue reads for ``node``."""
        for result in self.loop_carried.results.get(node, ()):
            is_concatenation = result.dim is not None and result.nd == self.types.others(node)
            if is_concatenation or node in self.partition.varying:  # or a mean
                return self.results[result]
        written = self.writer.written[LAST]
        if self.is_staged and node not in written:  # what all micro-batches compute alike
            assert not self.partition.is_per_micro_batch(node), node.name
            written[node] = self._carried_value(node) or self._epilogue_value(node)
        return written[node]

    def _write_value(self, node: fx.Node, part: str) -> None:
        """Write ``node`` for one micro-batch, and add it to its results."""
        written = self.writer.written[part]
        if node in self.gathered_once:
            written[node] = self.gathered_once[node]
        elif node in self.partition.hoisted:
            written[node] = self.writer.slice_of(self._prologue_value(node), node, part)
        elif node.target is ops.box and self.partition.cut(node) != self.partition.cut(value.operand(node)):
            written[node] = self.writer.write_box(node, part)
        elif node.target in SHAPED and node.args[0] in self.partition.epilogue:
            written[node] = self.writer.fill_constant(node, part)
        else:
            written[node] = self.writer.copy_op(node, part, lambda operand: self.writer.read_operand(operand, part))
        for result in self.loop_carried.results.get(node, ()):
            self._accumulate(result, written[node], node, part)

    def _accumulator_type(self, result: LoopResult) -> TensorType:
        """The type in which a result is added up: sums of 16-bit values in float32."""
        type_ = value.tensor_type(result.source)
        widens = type_.dtype in HALF and result.how in ("sum", "mean") and result.dim is None
        return TensorType(torch.float32, type_.shape) if widens else type_

    def _accumulate(self, result: LoopResult, x: fx.Node, node: fx.Node, part: str) -> None:
        """Add the value of one micro-batch to its accumulator; the last one completes the result."""
        if part == LAST and not self.accumulators:
            self.results[result] = x
            return
        x = self.writer.box(x, node, result.nd, part)
        accumulator = self.accumulators[result]
        if result.dim is None:
            args: tuple[Any, ...] = (accumulator, x, self.writer.index, self.types.count, result.how)
            target: Any = ops.accumulate
        else:
            args, target = (accumulator, x, result.dim, self.writer.index, self.types.count), ops.put
        self.accumulators[result] = total = self.writer.call(target, args, node, result.nd, part)
        if part == LAST:
            self._complete_result(result, total)

    def _complete_result(self, result: LoopResult, total: fx.Node) -> None:
        """Note the value of a result after the last micro-batch, in the dtype of what was added up."""
        dtype = value.tensor_type(result.source).dtype
        if value.tensor_type(total).dtype is not dtype:
            wide, type_ = total, TensorType(dtype, value.tensor_type(total).shape)
            total = self.writer.call(aten._to_copy.default, (wide,), result.source, result.nd, LAST, type_)
            total.kwargs = {"dtype": dtype}
            self.unrounded[total] = wide
        self.results[result] = total

    def _carry_buffer(self, name: str) -> None:
        """Hand a buffer's new value to the next micro-batch."""
        new = self.loop_carried.updates[name]
        buffer = next(node for node in self.carried_buffers if node.name == name)
        new_value = self.writer.written[BODY][new]
        if new.op == "placeholder" or is_view(new.target):
            new_value = self.writer.call(aten.clone.default, (new_value,), new, self.types.others(new), BODY)
        self.carried_buffers[buffer] = self.writer.call(
            ops.carry, (self.writer.written[BODY][buffer], new_value), buffer, self.types.others(buffer), BODY
        )

    def _erase_unused(self, start: int) -> None:
        """Erase copies that nothing reads."""
        for node in list(reversed(self.graph.graph.nodes))[: -start or None]:
            if node.op == "call_function" and not node.users and node.target is not ops.micro_batch:
                self.graph.graph.erase_node(node)
