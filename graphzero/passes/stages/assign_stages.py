"""AssignStages: each value of a step on the pipeline stage that computes it, with moves between stages.

Modules are marked by the user; this pass carries the marks on to forward, backward and update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import ops, value
from graphzero.ir.aliases import is_name
from graphzero.ir.graph import StepGraph
from graphzero.ops import CHECK, MOVE, PIN
from graphzero.passes.base import BuiltinPass
from graphzero.passes.stages.recomputed_values import recomputed_values
from graphzero.passes.stages.stage_marks import StageMarks
from graphzero.sbp.placement import MICRO_BATCHES
from graphzero.sbp.types import B

aten = torch.ops.aten
FREE = -1  # the stage of what depends on parameters that are not marked, until their readers decide it


@dataclass(frozen=True)
class AssignStages(BuiltinPass):
    """Puts parameters and states on pipeline stages, and moves between ops of different stages.

    ======== =======================================================================================================
    op       its stage
    ======== =======================================================================================================
    forward  that of its module's mark; else the last stage of what it reads
    backward that of its module's mark; else the last stage of what it reads of forward, but no later one than the
             gradients that it reads; a sum of two gradients no later than these in any case.  A value that backward
             computes again is where forward computes it
    update   that of the parameters and states that it leads to; where these are on several, the last stage of what
             it reads
    check    all stages, before the update, so that a step stops on all of them or on none
    ======== =======================================================================================================

    A value of forward that backward computes again, as ``torch.utils.checkpoint`` has it, is read on other stages as
    forward has moved it there.

    A parameter lives on its mark's stage, or on the first one that reads it, where that is earlier or it has no mark; a
    state lives with its parameter.  What reads nothing of a stage, as a mask, is computed on each stage that reads it.

    pipeline_stages: the marks, "model.layers.0@1"; see ``StageMarks``.
    Raises ConfigError for a stage without work, and for ops whose marks would move a value of forward to an earlier
    stage, or a gradient to a later one.

    Requires: a captured graph.
    Ensures: the operands of each op are on one stage (``ir.pipeline_stages``); a value is moved once to each stage that
    reads it.

    Example::

        assign_stages{pipeline_stages=('a@0', 'b@1')}

         graph step(dp=2) captured
           x = batch() : f32[8, 4]  S(0)!
        -  a_w = param(a.w) : f32[4, 4]  B!
        -  b_w = param(b.w) : f32[4, 2]  B!
        +  a_w = param(a.w) : f32[4, 4]  B!  @0
        +  b_w = param(b.w) : f32[4, 2]  B!  @1
         forward:
        -  ua = use(a_w) : f32[4, 4]  B!
        -  h = mm(x, ua) : f32[8, 4]
        -  ub = use(b_w) : f32[4, 2]  B!
        -  y = mm(h, ub) : f32[8, 2]
        +  ua = use(a_w) : f32[4, 4]  B!  @0
        +  h = mm(x, ua) : f32[8, 4]  @0
        +  move = move(h, 1) : f32[8, 4]  @1
        +  ub = use(b_w) : f32[4, 2]  B!  @1
        +  y = mm(move, ub) : f32[8, 2]  @1
         backward:
        -  ht = t(h) : f32[4, 8]
        -  gb = mm(ht, y) : f32[4, 2]  ; gradient(b.w)
        +  ht = t(move) : f32[4, 8]  @1
        +  gb = mm(ht, y) : f32[4, 2]  @1  ; gradient(b.w)
         update:
        -  b1 = add(b_w, gb) : f32[4, 2]
        +  b1 = add(b_w, gb) : f32[4, 2]  @1
           return y; update(b_w=b1)
    """

    pipeline_stages: tuple[str, ...] = ()

    def __call__(self, graph: StepGraph) -> StepGraph:
        assignment = _Assignment(graph, StageMarks(self.pipeline_stages))
        assignment.assign()
        assignment.check_work()
        assignment.insert_moves()
        return graph


class _Assignment:
    """stages: of each node; None for what each stage computes for itself.

    gradients: the values of backward that depend on a gradient, or that a module's mark has placed.
    recomputed: see ``recomputed_values``.
    """

    def __init__(self, graph: StepGraph, marks: StageMarks) -> None:
        self.graph, self.marks = graph, marks
        self.stages: dict[fx.Node, int | None] = {}
        self.gradients: set[fx.Node] = set()
        self.needed: dict[fx.Node, int] = {}
        self.wanted: dict[fx.Node, set[int]] = {}
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self.recomputed = recomputed_values(self.nodes)
        self.params = {node.meta["role"].of: node for node in graph.placeholders("param")}

    # ---- which stage

    def assign(self) -> None:
        for node in self.graph.placeholders():
            self.stages[node] = self._placeholder_stage(node)
        computed = [node for node in self.nodes if node.op != "placeholder"]
        forward = [node for node in computed if value.phase_of(node) == "forward"]
        for node in forward:
            self.stages[node] = self._stage_of(node, self._forward_stage)
        self._settle_free(forward)
        backward = [node for node in computed if value.phase_of(node) == "backward"]
        self.needed = self._needed_stages(backward)
        for node in backward:
            if node in self.recomputed:
                self.stages[node] = self.stages[self.recomputed[node]]
                continue
            is_placed = self._marked_stage(node) is not None and not value.has_role(node, "param")  # its 16-bit cast
            if is_placed or self.gradients & {*node.all_input_nodes}:
                self.gradients.add(node)
            self.stages[node] = self._stage_of(node, self._backward_stage)
        self._settle_saved(backward)
        self._settle_spread(backward)
        self._assign_update([node for node in computed if value.phase_of(node) == "update"])

    def _placeholder_stage(self, node: fx.Node) -> int | None:
        role = value.role_of(node)
        kind = role.kind if role is not None else ""
        if kind == "param" or (kind == "buffer" and node.name in self.graph.updates):
            marked = self.marks.stage_of(value.module_of(node))
            return FREE if marked is None else min([marked, *self._reading_marks(node)])
        return None  # of a state, when its parameter's is known

    def _reading_marks(self, param: fx.Node) -> list[int]:
        """The stages of the marked modules whose forward reads a parameter: of a tied one, others than its own."""
        uses = [user for user in param.users if value.phase_of(user) == "forward"]
        readers = [reader for use in uses for reader in (use.users if use.target is ops.use else (use,))]
        forward = (reader for reader in readers if value.phase_of(reader) == "forward")
        return _known(self.marks.stage_of(value.module_of(reader)) for reader in forward)

    def _marked_stage(self, node: fx.Node) -> int | None:
        """The mark of an op of backward: of the gradient of a tied parameter, where that lives."""
        marked = self.marks.stage_of(value.module_of(node))
        param = self.params.get(node.meta["role"].of) if value.has_role(node, "gradient") else None
        return marked if marked is None or param is None else self.stages[param]

    def _operand_stages(self, nodes: Iterable[fx.Node]) -> list[int]:
        return _known(self.stages[x] for x in nodes)

    def _stage_of(self, node: fx.Node, decide: Callable[[fx.Node], int]) -> int | None:
        """The stage of an op: as ``decide`` says, but of what follows its operand, and of what reads nothing of one."""
        if not self._operand_stages(node.all_input_nodes):
            return None
        return self.stages[node.all_input_nodes[0]] if self._follows(node) else decide(node)

    def _follows(self, node: fx.Node) -> bool:
        """Whether a node is where its operand is: a name of it, or one of its results."""
        return is_name(node.target) or value.is_multi(node.all_input_nodes[0]) if node.all_input_nodes else False

    def _forward_stage(self, node: fx.Node) -> int:
        last = max(self._operand_stages(node.all_input_nodes))
        marked = self.marks.stage_of(value.module_of(node))
        if marked is None:
            return last  # FREE where that is all it reads
        if last > marked:
            raise self._wrong_way(node, marked, last, "a value of forward")
        return marked

    def _settle_free(self, forward: list[fx.Node]) -> None:
        """Decide what depends on unmarked parameters alone: the first stage that reads it."""
        for node in reversed([*self.graph.placeholders("param", "buffer"), *forward]):
            if self.stages[node] == FREE:
                read_by = _known(self.stages.get(user) for user in node.users)
                is_of_update = node.op == "placeholder" and not read_by
                self.stages[node] = None if is_of_update else min((x for x in read_by if x != FREE), default=0)

    def _backward_stage(self, node: fx.Node) -> int:
        operands = node.all_input_nodes
        gradients = [x for x in operands if x in self.gradients]
        first = min(self._operand_stages(gradients), default=None)
        marked = self._marked_stage(node)
        if marked is not None:
            if first is not None and first < marked:
                if node.target is aten.add.Tensor and len(gradients) == 2:  # of a value that an earlier stage reads too
                    return first
                raise self._wrong_way(node, marked, first, "a gradient")
            return marked
        saved = self._operand_stages(x for x in operands if x not in self.gradients)
        stage = min(_known((max(saved, default=None), first)))
        return max(stage, self.needed.get(node, stage))

    def _needed_stages(self, backward: list[fx.Node]) -> dict[fx.Node, int]:
        """For what no mark places: the last stage of the marked values of backward that it leads to."""
        needed: dict[fx.Node, int] = {}
        for node in reversed(backward):
            marked = self._marked_stage(node)
            stage = needed.get(node) if marked is None else marked
            if stage is not None:
                for x in node.all_input_nodes:
                    needed[x] = max(stage, needed.get(x, stage))
        return needed

    def _settle_saved(self, backward: list[fx.Node]) -> None:
        """Compute what backward makes of values of forward alone, as their transposes, where it is read first."""
        for node in reversed(backward):
            stage, is_saved = self.stages[node], node not in self.gradients and node not in self.recomputed
            if is_saved and stage is not None and node.target is not ops.use:
                first = min(_known(self.stages.get(user) for user in node.users), default=stage)
                self.stages[node] = max(stage, first)
        for node in backward:
            if self._follows(node):
                self.stages[node] = self.stages[node.all_input_nodes[0]]

    def _settle_spread(self, backward: list[fx.Node]) -> None:
        """Compute what spreads a value of backward over more elements, as the gradient of a slice or of one of several
        pieces, where it is read.

        Not what is added to the gradient of a parameter, which is moved once a step.
        """
        shares = {*self._gradient_shares()}
        for node in reversed(backward):
            stage, read_by = self.stages[node], [self.stages.get(user) for user in node.users]
            if stage is not None and node not in shares and node not in self.recomputed and self._spreads(node):
                last = max((stage if reader is None else reader for reader in read_by), default=stage)
                self.stages[node] = min(stage, last)

    def _spreads(self, node: fx.Node) -> bool:
        """Whether a value has more bytes than the one value of backward on a stage that it is made of."""
        nodes = [node, *(x for x in node.all_input_nodes if self.stages[x] is not None)]
        if len(nodes) != 2 or not all(map(value.is_tensor, nodes)) or value.phase_of(nodes[1]) != "backward":
            return False
        return value.tensor_type(node).nbytes > value.tensor_type(nodes[1]).nbytes

    def _assign_update(self, update: list[fx.Node]) -> None:
        """Decide for the update, and for states whose parameter is not known: again for those that are found on the
        way to live on a stage."""
        for node in self.graph.placeholders("state"):
            param = self.params.get(node.meta["role"].of)
            self.stages[node] = self.stages[param] if param is not None else None
        placeholders = {node.name: node for node in self.graph.placeholders()}
        while True:
            self.wanted = self._wanted_stages(update, placeholders)
            for node in update:
                self.stages[node] = self._stage_of(node, self._update_stage)
            changed = False
            for name, new in self.graph.updates.items():
                if self.stages[placeholders[name]] is None and self.stages[new] is not None:
                    self.stages[placeholders[name]], changed = self.stages[new], True
            if not changed:
                return

    def _wanted_stages(self, update: list[fx.Node], placeholders: dict[str, fx.Node]) -> dict[fx.Node, set[int]]:
        """The stages of what an op of the update leads to."""
        wanted: dict[fx.Node, set[int]] = {}
        for name, new in self.graph.updates.items():
            stage = self.stages[placeholders[name]]
            if stage is not None:
                wanted.setdefault(new, set()).add(stage)
        for node in reversed(update):
            for operand in node.all_input_nodes:
                wanted.setdefault(operand, set()).update(wanted.get(node, ()))
        return wanted

    def _update_stage(self, node: fx.Node) -> int:
        wanted = self.wanted.get(node, set())
        return next(iter(wanted)) if len(wanted) == 1 else max(self._operand_stages(node.all_input_nodes))

    # ---- checks

    def check_work(self) -> None:
        """Raise ConfigError for a stage on which nothing of forward runs."""
        working = {self.stages[node] for node in self.nodes if node.op != "placeholder"}
        for stage in range(self.marks.count):
            if stage not in working:
                marked = ", ".join(".".join(pattern) for pattern, at in self.marks.marks if at == stage) or "nothing"
                raise ConfigError(
                    f"stage {stage} of {self.marks.count} has no work: {marked} is marked for it, and no op of the "
                    "step runs there\n  Mark modules that build calls, by their paths: "
                    f"{', '.join(list(dict.fromkeys(map(value.module_of, self.nodes)))[1:5])}"
                )

    def _wrong_way(self, node: fx.Node, marked: int, other: int, what: str) -> ConfigError:
        way = "later" if other > marked else "earlier"
        source = value.source_of(node)
        return ConfigError(
            f"'{node.name}' of module {value.module_of(node)}{f' ({source})' if source else ''} is marked for stage "
            f"{marked} and reads {what} of the {way} stage {other}\n  Values of forward go to later stages, and "
            "gradients to earlier ones: mark modules in the order in which build calls them, config.set_stage(...)"
        )

    # ---- moves

    def _gradient_shares(self) -> list[fx.Node]:
        """The summands of a parameter's gradient that are computed on another stage than the sum."""
        shares: list[fx.Node] = []
        sums = [node for node in self.nodes if (role := value.role_of(node)) is not None and role.kind == "gradient"]
        while sums:
            total = sums.pop()
            if total.target is PIN:
                sums.append(value.operand(total))
            elif total.target is aten.add.Tensor:
                for x in total.all_input_nodes:
                    if len(x.users) == 1 and value.phase_of(x) == "backward":
                        sums.append(x)
                        shares += [x] if self.stages[x] != self.stages[total] else []
        return shares

    def insert_moves(self) -> None:
        graph, moved = self.graph, dict[tuple[fx.Node, int], fx.Node]()
        if MICRO_BATCHES in graph.placement.names:  # a share is moved once, when all micro-batches have added to it
            for share in self._gradient_shares():
                self.stages[graph.pin(share, MICRO_BATCHES, B)] = self.stages[share]
        for node in self.graph.placeholders():
            if self.stages[node] is not None:
                node.meta["stage"] = self.stages[node]
        last_input = [node for node in self.nodes if node.op == "placeholder"][-1]

        def on_stage(x: fx.Node, stage: int | None) -> fx.Node:
            if stage is None or self.stages[x] in (stage, None):
                return x
            x = self.recomputed.get(x, x)
            if (x, stage) not in moved:
                with graph.graph.inserting_after(last_input if x.op == "placeholder" else x):
                    phase = "forward" if x.op == "placeholder" else ""
                    moved[x, stage] = graph.call(MOVE, (x, stage), value.type_of(x), like=x, name="move", phase=phase)
            return moved[x, stage]

        for node in self.nodes:
            stage = self.stages[node]
            if node.op != "placeholder" and stage is not None:
                for x in node.all_input_nodes:
                    if (there := on_stage(x, stage)) is not x:
                        node.replace_input_with(x, there)
        placeholders = {node.name: node for node in graph.placeholders()}
        updates = {name: on_stage(new, self.stages[placeholders[name]]) for name, new in graph.updates.items()}
        graph.set_output(graph.outputs, self._checks_of_all_stages(), updates)
        for node in reversed([*self.recomputed, *(node for node in self.nodes if node.target is CHECK)]):
            if not node.users:
                graph.graph.erase_node(node)

    def _checks_of_all_stages(self) -> dict[str, fx.Node]:
        """The auxiliary results of the step, with each check made on every stage of what one stage computes."""
        graph, aux = self.graph, dict[str, fx.Node]()
        first = next(node for node in graph.nodes if node.op == "output" or value.phase_of(node) == "update")
        for name, check in graph.aux.items():
            if check.target is not CHECK:
                aux[name] = check
                continue
            ok = value.operand(check)
            behind = ok.next if value.phase_of(ok) == "update" else first
            for stage in range(self.marks.count):
                with graph.graph.inserting_before(behind):
                    there = ok
                    if self.stages[ok] != stage:
                        there = graph.call(MOVE, (ok, stage), value.type_of(ok), like=ok, name="move", phase="update")
                    aux[f"{name}.{stage}"] = graph.call(
                        CHECK, (there, check.args[1]), value.type_of(check), like=check, name="check", phase="update"
                    )
        return aux


def _known(stages: Iterable[int | None]) -> list[int]:
    return [stage for stage in stages if stage is not None]
