"""AssignStages: each value of a step on the pipeline stage that computes it, with moves between stages.

Modules are marked by the user; ``ValueStages`` carries the marks on to forward, backward and update.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ops import CHECK, MOVE
from graphzero.passes.base import BuiltinPass
from graphzero.passes.stages.stage_marks import StageMarks
from graphzero.passes.stages.value_stages import ValueStages
from graphzero.sbp.placement import MICRO_BATCHES
from graphzero.sbp.types import B


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
        marks = StageMarks(self.pipeline_stages)
        stages = ValueStages(graph, marks)
        stages.check_work()
        _MoveWriter(graph, stages, marks.count).insert_moves()
        return graph


class _MoveWriter:
    """Writes the stages of values into a program, and the moves between them.

    moved: what a stage has of a value that another one computes.
    """

    def __init__(self, graph: StepGraph, values: ValueStages, count: int) -> None:
        self.graph, self.values, self.count = graph, values, count
        self.stages, self.recomputed = values.stages, values.recomputed
        self.last_input = [node for node in values.nodes if node.op == "placeholder"][-1]
        self.moved: dict[tuple[fx.Node, int], fx.Node] = {}

    def insert_moves(self) -> None:
        graph, stages = self.graph, self.stages
        if MICRO_BATCHES in graph.placement.names:  # a share is moved once, when all micro-batches have added to it
            for share in self.values.gradient_shares():
                stages[graph.pin(share, MICRO_BATCHES, B)] = stages[share]
        placeholders = {node.name: node for node in graph.placeholders()}
        for node in self.values.nodes:
            stage = stages[node]
            if node.op == "placeholder" and stage is not None:
                node.meta["stage"] = stage
            elif stage is not None:
                for x in node.all_input_nodes:
                    if (there := self._on_stage(x, stage)) is not x:
                        node.replace_input_with(x, there)
        updates = {name: self._on_stage(new, stages[placeholders[name]]) for name, new in graph.updates.items()}
        graph.set_output(graph.outputs, self._checks_of_all_stages(), updates)
        for node in reversed([*self.recomputed, *(node for node in self.values.nodes if node.target is CHECK)]):
            if not node.users:
                graph.graph.erase_node(node)

    def _on_stage(self, x: fx.Node, stage: int | None) -> fx.Node:
        """A value as ops of a stage read it."""
        if stage is None or self.stages[x] in (stage, None):
            return x
        x = self.recomputed.get(x, x)
        if (x, stage) not in self.moved:
            is_input = x.op == "placeholder"
            with self.graph.graph.inserting_after(self.last_input if is_input else x):
                self.moved[x, stage] = self._move(x, stage, "forward" if is_input else "")
        return self.moved[x, stage]

    def _move(self, x: fx.Node, stage: int, phase: str) -> fx.Node:
        return self.graph.call(MOVE, (x, stage), value.type_of(x), like=x, name="move", phase=phase)

    def _checks_of_all_stages(self) -> dict[str, fx.Node]:
        """The auxiliary results of the step, with each check made on every stage of what one stage computes."""
        graph, aux = self.graph, dict[str, fx.Node]()
        first = next(node for node in graph.nodes if node.op == "output" or value.phase_of(node) == "update")
        for name, check in graph.aux.items():
            if check.target is not CHECK:
                aux[name] = check
                continue
            ok = value.operand(check)
            after = ok.next if value.phase_of(ok) == "update" else first
            for stage in range(self.count):
                with graph.graph.inserting_before(after):
                    there = ok if self.stages[ok] == stage else self._move(ok, stage, "update")
                    aux[f"{name}.{stage}"] = graph.call(
                        CHECK, (there, check.args[1]), value.type_of(check), like=check, name="check", phase="update"
                    )
        return aux
