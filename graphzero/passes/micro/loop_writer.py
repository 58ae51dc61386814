"""Writes a step in micro-batches: what comes before, what each computes, the last of them, and what comes behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.aliases import is_copy, is_view, unnamed
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import Role, TensorType
from graphzero.passes.memory.keep_gathered import KeepGathered
from graphzero.passes.micro.loop_carried import LoopCarried, LoopResult
from graphzero.passes.micro.loop_partition import SHAPED, LoopPartition
from graphzero.passes.micro.micro_batch_errors import MicroBatchErrors
from graphzero.passes.micro.micro_batch_types import EACH, LAST, MicroBatchTypes
from graphzero.passes.micro.op_writer import OpWriter
from graphzero.passes.micro.restore_broadcast import restore_broadcast_sums
from graphzero.passes.place.forward_sweep import HALF
from graphzero.sbp.placement import MICRO_BATCHES

aten = torch.ops.aten


class LoopWriter:
    """Writes a step once for a micro-batch, repeated, with what comes before and behind."""

    def __init__(self, graph: StepGraph, reduces_each: bool, keep_gathered: tuple[str, ...]) -> None:
        self.graph, self.keep_gathered = graph, keep_gathered
        axis = graph.placement.axis(MICRO_BATCHES)
        restore_broadcast_sums(graph, axis)
        self.sizes, self.parts = MicroBatchTypes(axis, graph.placement.hierarchy[axis]), LoopPartition(graph, axis)
        self.refusals = MicroBatchErrors(graph.name, graph.placement.names, self.parts, self.sizes)
        self.handed = LoopCarried(graph, self.parts, self.sizes, self.refusals, reduces_each)
        self.emit = OpWriter(graph, self.sizes, self.parts, self.refusals)
        self.rooms: dict[LoopResult, fx.Node] = {}  # what micro-batches before have left
        self.joined: dict[LoopResult, fx.Node] = {}
        self.carried: dict[fx.Node, fx.Node] = {}  # buffer -> its value for the next micro-batch
        self.kept: dict[fx.Node, fx.Node] = {}  # gathers of parameters that are made once
        self.wide: dict[fx.Node, fx.Node] = {}  # what was added up in float32, by its value in 16 bit

    def write(self) -> None:
        old, graph = self.graph.graph, self.graph
        graph.graph = fx.Graph()
        placeholders = [node for node in old.nodes if node.op == "placeholder"]
        for node in placeholders:
            made = graph.graph.create_node("placeholder", node.target, name=node.name)
            made.meta = self.sizes.meta(node)
            for done in self.emit.done.values():
                done[node] = made
        self._write_before()
        start = len(graph.graph.nodes)
        if self.handed.wanted or self.handed.carries:
            self._begin_buffers(placeholders)
            self._write_each()
        self._write_last()
        last = self.emit.done[LAST]
        graph.graph.output((
            fx.map_arg(self.handed.outputs, self._handed), {n: self._handed(x) for n, x in self.handed.aux.items()},
            {n: last[x] if n in self.handed.carries else self._handed(x) for n, x in self.handed.updates.items()},
        ))  # fmt: skip
        graph.placement = graph.placement.without_micro_batches()
        self._drop_unread(start)
        self.refusals.warn()

    def _write_before(self) -> None:
        """What has to be complete while micro-batches run, of the whole share of a rank; and what is gathered once."""
        once: dict[Any, fx.Node] = {}  # forward and backward read the same
        for node in self.parts.nodes:
            if node in self.parts.hoisted:
                self._whole(node)
            elif (param := self._kept_param(node)) is not None:
                key = param, value.type_of(node), value.nd_of(node)
                self.kept[node] = once.get(key) or self.emit.copy(node, "before", self._whole)
                once[key] = self.kept[node]
                self.kept[node].meta["phase"] = "forward"

    def _whole(self, node: fx.Node) -> fx.Node:
        """``node``, which depends only on what is known before any micro-batch runs."""
        done = self.emit.done["before"]
        if node not in done:
            source = node.args[0] if node.target is ops.box else None
            if isinstance(source, fx.Node) and self.sizes.others(source) == self.sizes.others(node):
                done[node] = self._whole(source)
            else:
                done[node] = self.emit.copy(node, "before", self._whole)
                done[node].meta["phase"] = "forward"
        return done[node]

    def _kept_param(self, node: fx.Node) -> fx.Node | None:
        """The parameter that a box gathers, or whose cast, and that stays so until all micro-batches are through."""
        if node.target is not ops.box or not self.keep_gathered or value.phase_of(node) == "update":
            return None
        source = value.operand(node)
        while is_copy(source.target):  # the cast of a master
            source = value.operand(source)
        role = value.role_of(source)
        if source.op != "placeholder" or role is None or role.kind != "param":
            return None
        return source if KeepGathered(self.keep_gathered).of([role.of]) else None

    def _begin_buffers(self, placeholders: list[fx.Node]) -> None:
        for node in placeholders:
            if node.name in self.handed.carries:
                held = self.emit.call(aten.clone.default, (self.emit.done[LAST][node],), node, self.sizes.others(node))
                self.emit.done[EACH][node] = self.carried[node] = held

    def _write_each(self) -> None:
        """One micro-batch, of which all but the last are."""
        for some in self.handed.wanted.values():
            for one in some:
                type_, role = self._whole_type(one), value.role_of(one.source)
                args = (list(type_.shape), type_.dtype)
                made = self.graph.call(
                    ops.accumulator, args, type_, sbp=one.nd, phase="forward", name=f"{one.source.name}_sum"
                )
                self.rooms[one] = made
                if role is not None and role.kind == "gradient":
                    made.meta["role"] = Role("accumulator", role.of)
        self.emit.number = self.graph.call(
            ops.micro_batch, (self.sizes.count,), value.ScalarType("int"), name=MICRO_BATCHES
        )
        self.emit.number.meta["repeat"] = self.sizes.count - 1
        for node in self.parts.nodes:
            if self.parts.is_each(node):
                self._write_one(node, EACH)
        for name in self.handed.carries:
            self._carry(name)

    def _write_last(self) -> None:
        """The last micro-batch, with what comes after all of them where the step has it."""
        self.emit.number = self.sizes.count - 1
        for buffer, held in self.carried.items():
            self.emit.done[LAST][buffer] = held
        for node in self.parts.nodes:
            if self.parts.is_each(node):
                self._write_one(node, LAST)
            elif node.op != "placeholder":
                self.emit.done[LAST][node] = self._after(node)

    def _after(self, node: fx.Node) -> fx.Node:
        if node in self.parts.hoisted:
            return self._whole(node)
        if node in self.parts.completed:
            return self.emit.box(self.joined[self.handed.by_box(node)], node, self.sizes.others(node))
        if node.target is ops.box and self.sizes.others(value.operand(node)) == self.sizes.others(node):
            return self._handed(value.operand(node))
        made = self.emit.copy(node, "after", self._handed)
        return self._unrounded(made) or made

    def _unrounded(self, cast: fx.Node) -> fx.Node | None:
        """What a cast gives back that was wide before it was 16 bit; the cast then goes."""
        source: Any = cast.args[0] if cast.target is aten._to_copy.default and cast.kwargs.keys() == {"dtype"} else None
        wide = None if source is None else self.wide.get(unnamed(source))
        if wide is None or value.type_of(wide) != value.type_of(cast):
            return None
        self.graph.graph.erase_node(cast)
        return wide

    def _handed(self, node: fx.Node) -> fx.Node:
        """A value as it is read behind all micro-batches."""
        return next(
            (self.joined[one] for one in self.handed.wanted.get(node, ()) if self._is_all(one)),
            self.emit.done[LAST][node],
        )

    def _is_all(self, one: LoopResult) -> bool:
        """Whether it stands for the value itself wherever that is read behind: pieces side by side, a mean."""
        return one.dim is not None and one.nd == self.sizes.others(one.source) or one.source in self.parts.varying

    def _write_one(self, node: fx.Node, part: str) -> None:
        done = self.emit.done[part]
        if node in self.kept:
            done[node] = self.kept[node]
        elif node in self.parts.hoisted:
            done[node] = self.emit.cut_out(self._whole(node), node, part)
        elif node.target is ops.box and self.parts.cut(node) != self.parts.cut(value.operand(node)):
            done[node] = self.emit.move(node, part)
        elif node.target in SHAPED and node.args[0] in self.parts.late:
            done[node] = self.emit.fill(node, part)
        else:
            done[node] = self.emit.copy(node, part, lambda operand: self.emit.read(operand, part))
        for one in self.handed.wanted.get(node, ()):
            self._join(one, done[node], node, part)

    def _whole_type(self, one: LoopResult) -> TensorType:
        type_ = value.tensor_type(one.source)
        widens = type_.dtype in HALF and one.how in ("sum", "mean") and one.dim is None
        return TensorType(torch.float32, type_.shape) if widens else type_

    def _join(self, one: LoopResult, x: fx.Node, node: fx.Node, part: str) -> None:
        if part == LAST and not self.rooms:
            self.joined[one] = x
            return
        x = self.emit.box(x, node, one.nd, part)
        room = self.rooms[one]
        if one.dim is None:
            args: tuple[Any, ...] = (room, x, self.emit.number, self.sizes.count, one.how)
            target: Any = ops.accumulate
        else:
            args, target = (room, x, one.dim, self.emit.number, self.sizes.count), ops.put
        made = self.emit.call(target, args, node, one.nd, part)
        self.rooms[one] = made
        if part == LAST:
            dtype = value.tensor_type(node).dtype
            if value.tensor_type(made).dtype is not dtype:
                wide, type_ = made, TensorType(dtype, value.tensor_type(made).shape)
                made = self.emit.call(aten._to_copy.default, (wide,), node, one.nd, part, type_)
                made.kwargs = {"dtype": dtype}
                self.wide[made] = wide
            self.joined[one] = made

    def _carry(self, name: str) -> None:
        """A buffer's new value, for the next micro-batch."""
        new = self.handed.updates[name]
        buffer = next(node for node in self.carried if node.name == name)
        made = self.emit.done[EACH][new]
        if new.op == "placeholder" or is_view(new.target):
            made = self.emit.call(aten.clone.default, (made,), new, self.sizes.others(new), EACH)
        self.carried[buffer] = self.emit.call(
            ops.carry, (self.emit.done[EACH][buffer], made), buffer, self.sizes.others(buffer), EACH
        )

    def _drop_unread(self, start: int) -> None:
        """Take out what nobody reads of the copies."""
        for node in list(reversed(self.graph.graph.nodes))[: -start or None]:
            if node.op == "call_function" and not node.users and node.target is not ops.micro_batch:
                self.graph.graph.erase_node(node)
