"""Cuts a program of pipeline stages into the parts that a schedule runs.

Each stage has a part for what comes before the micro-batches, one for their forward and one for their backward, and one
or more for what comes after; each part is a program of its own.  What one part computes and another reads is handed
over: it is an output of the first and a ``saved`` input of the second, whichever stage that is on.  So a ``move`` is an
op only where it copies a state, in the prologue of its stage.  What micro-batches add up is an ``accumulator``, an
input that the parts of its stage write over; what tiles of rows add up within one part is its part's own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import ops, value
from graphzero.ir.aliases import is_read_only_view, is_view
from graphzero.ir.graph import StepGraph, copy_op
from graphzero.ir.pipeline_parts import (
    BACKWARD,
    BACKWARD_WEIGHT,
    BODY,
    EPILOGUE,
    FORWARD,
    PROLOGUE,
    PartKey,
    PipelineParts,
    StagePart,
    ValueKey,
)
from graphzero.ir.pipeline_stages import is_of_params, stages_of
from graphzero.ir.value import Role
from graphzero.ops import CHECK, MOVE


def cut_parts(graph: StepGraph, splits_backward: bool = False) -> PipelineParts:
    """The parts of a program on which ``AssignStages`` has put stages.

    splits_backward: whether what backward sends to other stages is a part by itself, and the rest of it another one.
    Raises ConfigError for values that move to an earlier stage in forward, or to a later one in backward.
    """
    return _PartCutter(graph, splits_backward).cut()


class _PartCutter:
    """keys: the part that computes each value of a stage.

    after: the parts from which a value comes: its own, or those of its operands where each reader makes it again.
    """

    def __init__(self, graph: StepGraph, splits_backward: bool) -> None:
        self.graph, self.splits_backward = graph, splits_backward
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self.stages = dict(stages_of(self.nodes))
        self.count = 1 + max(stage for stage in self.stages.values() if stage is not None)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        repeated = [i for i, node in enumerate(self.nodes) if value.repeats_of(node)]
        self.body = range(repeated[0], repeated[-1] + 1) if repeated else range(len(self.nodes), len(self.nodes))
        self.micro_batches = value.repeats_of(self.nodes[repeated[0]]) if repeated else 1
        self.carried: dict[fx.Node, fx.Node] = {}  # what lies in a storage first -> what each micro-batch leaves there
        self.of_tiles: set[fx.Node] = set()  # what tiles of rows write over, and what they write
        self.roots = self._written_roots()
        self.sent = self._sent_values() if splits_backward else set()
        self.keys: dict[fx.Node, PartKey] = {}
        self.after: dict[fx.Node, frozenset[PartKey]] = {}
        self.checked = 0  # the level of the last check: what no check depends on runs at no earlier one
        checks = [node for node in self.nodes if node.target is CHECK]
        before = {x for check in checks for x in value.ancestors(check)}
        self._place(node for node in self.nodes if node in before)
        self.checked = max((self.keys[check].level for check in checks), default=0)
        self._place(node for node in self.nodes if node not in before)
        self.parts: dict[PartKey, _PartWriter] = {}

    # ---- where each value is computed

    def _written_roots(self) -> dict[fx.Node, fx.Node]:
        """Value that micro-batches write over another -> what lies in that storage first."""
        roots: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            if node.target in ops.WRITING:
                into = value.operand(node)
                roots[node] = roots[into] = root = roots.get(into, into)
                if root.target is ops.accumulator and self.region(root) == self.region(node):
                    self.of_tiles |= {root, node}
                elif self.stages[node] is None:  # a sum over micro-batches that has no stage goes to the last one
                    self.stages[node] = self.count - 1
                self.stages[root] = self.stages[node]
                if node.target is ops.carry:
                    self.carried[root] = node
        return {node: root for node, root in roots.items() if node not in self.of_tiles}

    def _sent_values(self) -> set[fx.Node]:
        """The values of micro-batches that a move of them to another stage depends on, and tiles, which are one."""
        sent = set(self.of_tiles)
        for node in reversed(self.nodes):
            if self.region(node) == FORWARD and (node.target is MOVE or node in sent):
                sent.update(node.all_input_nodes)
        return sent

    def _place(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            before = frozenset(key for x in node.all_input_nodes for key in self.after[x])
            self.after[node] = before
            if (key := self._key(node, before)) is not None:
                self.keys[node], self.after[node] = key, frozenset([key])

    def region(self, node: fx.Node) -> int:
        if self.body:
            at = self.position[node]
            return FORWARD if at in self.body else PROLOGUE if at < self.body.start else EPILOGUE
        if value.phase_of(node) == "update":
            return EPILOGUE
        return PROLOGUE if node in self.moved_params else FORWARD  # the whole batch is computed at once

    @cached_property
    def moved_params(self) -> set[fx.Node]:
        """Parameters as other stages read them, and what they are made of."""
        params: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if node.target is MOVE and value.phase_of(node) != "update" and is_of_params(value.operand(node)):
                params.add(node)
            if node in params:
                params.update(node.all_input_nodes)
        return params

    def _key(self, node: fx.Node, before: Iterable[PartKey]) -> PartKey | None:
        """The part of a value; None for what is made where it is read, and for inputs."""
        stage = self.stages[node]
        is_of_step = node.target is ops.accumulator and node not in self.of_tiles
        if stage is None or node.op == "placeholder" or is_of_step:
            return None
        if node.target is MOVE:  # of a state: its stage copies it before the step changes it
            home = self.stages[value.operand(node)]
            return PartKey(PROLOGUE, 0, home) if home is not None and not before else None
        if value.is_scalar(node) or (is_read_only_view(node.target) and not self._is_moved_part(node)):
            return None
        if node.target is operator.getitem and (source := value.operand(node)) in self.keys:
            return self.keys[source]  # a result is handed over by itself, not with all others of its op
        region, is_check = self.region(node), node.target is CHECK
        if region == FORWARD:
            kinds = [key.kind for key in before if key.stage == stage and key.kind in BODY]
            kind = BACKWARD if value.phase_of(node) != "forward" else FORWARD
            if kind == BACKWARD and self.splits_backward and node not in self.sent:
                kind = BACKWARD_WEIGHT
            key = PartKey(max([kind, *kinds]), 0, stage)
        else:  # a check is after what it reads on its own stage too: then this has been sent to the others
            levels = [key.level + (key.stage != stage or is_check) for key in before if key.kind == region]
            levels.append(self.checked if region == EPILOGUE else 0)
            key = PartKey(region, max(levels), stage)
        for other in before:
            self._check_direction(node, key, other)
        return key

    def _is_moved_part(self, node: fx.Node) -> bool:
        """Whether a view shows fewer elements than its operand and goes to a stage that is not sent all of them."""
        operand = value.operand(node)
        if is_of_params(node) or not (value.is_tensor(node) and value.is_tensor(operand)):
            return False
        if value.tensor_type(node).numel >= value.tensor_type(operand).numel:
            return False
        stages, sent_whole = ({user.args[1] for user in x.users if user.target is MOVE} for x in (node, operand))
        return not stages <= sent_whole

    def _check_direction(self, node: fx.Node, key: PartKey, other: PartKey) -> None:
        """Raise ConfigError where a part would read what is computed after it."""
        is_wrong = other.kind > key.kind
        if other.stage != key.stage and key.kind in BODY and other.kind in BODY:
            runs_later = other.stage > key.stage if other.kind == FORWARD else other.stage < key.stage
            is_wrong = is_wrong or other.kind == BACKWARD_WEIGHT or (other.kind == key.kind and runs_later)
        if is_wrong:
            source = value.source_of(node)
            raise ConfigError(
                f"'{node.name}'{f' ({source})' if source else ''} in {key} reads what {other} computes, which runs "
                "later\n  Mark modules in the order in which build calls them: config.set_stage(module, stage)"
            )

    # ---- writing the parts

    def cut(self) -> PipelineParts:
        for node, key in self.keys.items():
            self.writer(key).nodes.append(node)
        for key in sorted(self.parts, reverse=True):
            self.parts[key].write_nodes()  # and says what parts before it hand over
        aux = {name: self._hand_out(node) for name, node in self.graph.aux.items()}
        outputs = [self._hand_out(x) if isinstance(x, fx.Node) else x for x in self.graph.outputs]
        self._write_updates()
        parts = [self.parts[key].finish() for key in sorted(self.parts, reverse=True)]
        accumulators = {
            self.value_key(root): root for root in dict.fromkeys(self.roots.values()) if root.target is ops.accumulator
        }
        return PipelineParts(self.count, self.micro_batches, parts[::-1], accumulators, outputs, aux)

    def writer(self, key: PartKey) -> _PartWriter:
        if key not in self.parts:
            self.parts[key] = _PartWriter(self, key)
        return self.parts[key]

    def value_key(self, node: fx.Node) -> ValueKey:
        stage = self.stages[node]
        assert stage is not None
        return ValueKey(node.name, stage)

    def _hand_out(self, node: fx.Node) -> ValueKey:
        """The key of a value that the step returns, as its part hands it over."""
        if node in self.roots:
            return self.value_key(self.roots[node])
        key = max(self.after[node], default=PartKey(PROLOGUE, 0, self.count - 1))
        return self.writer(key).hand_over(node)

    def _update_part(self, stage: int | None, able: Iterable[PartKey], source: Iterable[PartKey]) -> PartKey:
        """The part that writes a state of ``stage``: after those that read it, ``able``, and those of ``source``."""
        own = self.count - 1 if stage is None else stage
        levels = [key.level + (key.stage > own) for key in source if key.kind == EPILOGUE]
        first = PartKey(EPILOGUE, max([*levels, self.checked]), own)
        return max([first, *(key for key in able if key.kind == EPILOGUE)])

    def _write_updates(self) -> None:
        """A state is written after all micro-batches, by the last part of its stage that reads it or may compute its
        new value; one of no stage, which each stage reads, by the last part of all."""
        placeholders = {node.name: node for node in self.graph.placeholders()}
        for name, new in self.graph.updates.items():
            state = placeholders[name]
            stage = self.stages[state]
            if new is state:
                continue
            able = [key for key, part in self.parts.items() if stage in (None, key.stage) and state in part.copies]
            source = self.after[self.roots.get(new, new)]
            writer = self.writer(self._update_part(stage, able, source))
            writer.updates[writer.read_value(state).name] = writer.read_value(new)


class _PartWriter:
    """Writes the program of one part.  copies: value of the whole program -> what it is here."""

    def __init__(self, cutter: _PartCutter, key: PartKey) -> None:
        self.cutter, self.key = cutter, key
        whole = cutter.graph
        name = f"{whole.name}.{key}"
        self.part = StagePart(key, StepGraph(name, whole.placement, fx.Graph(), whole.level))
        self.part.graph.is_read = whole.is_read
        self.nodes: list[fx.Node] = []  # that the part computes
        self.copies: dict[fx.Node, fx.Node] = {}
        self.updates: dict[str, fx.Node] = {}
        self._handed_over: dict[ValueKey, fx.Node] = {}
        self._writes: list[fx.Node] = []

    def write_nodes(self) -> None:
        for node in (*self.nodes, *self._handed_over.values()):
            self.read_value(node)

    def finish(self) -> StagePart:
        written = {node.name: node for node in self._writes}
        handed_over = {node.name: self.read_value(node) for node in self._handed_over.values()}
        self.part.outputs = list(self._handed_over)
        self.part.graph.graph.output(((), written | handed_over, self.updates))
        first = next(node for node in self.part.graph.nodes if node.op != "placeholder")
        for node in list(self.part.graph.placeholders()):
            first.prepend(node)
        return self.part

    def hand_over(self, node: fx.Node) -> ValueKey:
        """Make a value of the whole program an output; returns its key."""
        key = ValueKey(node.name, self.key.stage)
        self._handed_over[key] = node
        return key

    def read_value(self, node: fx.Node) -> fx.Node:
        """Return a value of the whole program in this part: computed here, recomputed here, or an input."""
        if node not in self.copies:
            self.copies[node] = self._read_anew(node)
        return self.copies[node]

    def _read_anew(self, node: fx.Node) -> fx.Node:
        cutter = self.cutter
        if node.op == "placeholder":
            return self._placeholder(node, node.meta)
        if node.target is ops.micro_batch:
            self.part.micro_batch = node.name
            role = Role("scalar", node.name)
            return self._placeholder(node, {**node.meta, "role": role})
        if cutter.keys.get(node) == self.key:
            return self._copy(node)
        if node.target is MOVE and node not in cutter.keys:
            return self.read_value(value.operand(node))
        if (root := cutter.roots.get(node)) is not None:
            self._check_carried(root, node)
            if node is not root:
                return self.read_value(root)
            return self._saved(node, "accumulator", cutter.keys.get(node))
        if node in cutter.keys:
            return self._saved(node, "saved", cutter.keys[node])
        is_shared = cutter.stages[node] is None and cutter.region(node) == PROLOGUE != self.key.kind
        if is_shared and not value.is_scalar(node) and not is_view(node.target):
            return self._saved(node, "saved", PartKey(PROLOGUE, 0, self.key.stage))
        return self._copy(node)

    def _check_carried(self, root: fx.Node, node: fx.Node) -> None:
        """Raise ConfigError where another part than that which changes a buffer reads it while micro-batches run."""
        carry = self.cutter.carried.get(root)
        if carry is not None and self.key.kind in BODY and self.key != self.cutter.keys[carry]:
            raise ConfigError(
                f"'{node.name}', a buffer that each micro-batch changes in {self.cutter.keys[carry]}, is read in "
                f"{self.key}, which runs when other micro-batches have changed it\n  Read it where it is changed, or "
                "take one micro-batch: config.set_gradient_accumulation_steps(1)"
            )

    def _copy(self, node: fx.Node) -> fx.Node:
        copy = copy_op(self.part.graph, node, self.read_value)
        copy.meta.pop("repeat", None)
        if node in self.cutter.roots:
            self._writes.append(copy)
        return copy

    def _saved(self, node: fx.Node, kind: str, home: PartKey | None) -> fx.Node:
        """An input that another part hands over, or that the step allocates."""
        stage = self.cutter.stages[node] if home is None else home.stage
        assert stage is not None
        if home is not None and home != self.key:
            self.cutter.writer(home).hand_over(node)
        copy = self._placeholder(node, {**node.meta, "role": Role(kind, node.name)})
        self.part.inputs[copy.name] = ValueKey(node.name, stage)
        return copy

    def _placeholder(self, node: fx.Node, meta: dict[str, Any]) -> fx.Node:
        copy = self.part.graph.graph.create_node("placeholder", node.name, name=node.name)
        copy.meta = {**meta, "phase": "input"}
        copy.meta.pop("repeat", None)
        copy.meta.pop("stage", None)
        return copy
