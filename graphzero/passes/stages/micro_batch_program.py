"""The program of one micro-batch on some stages: its forward, then its backward, as searches over memory read it."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph, copy_op
from graphzero.ir.pipeline_stages import stages_of
from graphzero.ir.value import Role
from graphzero.ops import MOVE


def micro_batch_program(graph: StepGraph, stages: Collection[int]) -> StepGraph:
    """Return the program of one micro-batch on ``stages``, of a program on which ``AssignStages`` has put stages.

    What it reads of other stages arrives by their moves, whose operands are ``saved`` placeholders, as is what the
    prologue makes; what it moves to other stages is read by the move alone.  Names are those of ``graph``.
    """
    stage_of, program = stages_of(graph.nodes), StepGraph(graph.name, graph.placement, fx.Graph(), graph.level)
    is_repeated = any(map(value.repeats_of, graph.nodes))
    ops = [node for node in graph.nodes if node.op == "call_function"]
    body = [node for node in ops if (value.repeats_of(node) if is_repeated else value.phase_of(node) != "update")]
    own = {node for node in body if stage_of[node] in stages}
    own |= {node for node in body if node.target is MOVE and stage_of[value.operand(node)] in stages}
    for node in reversed(body):  # what no stage has, as a mask, is computed where it is read
        if stage_of[node] is None and any(user in own for user in node.users):
            own.add(node)
    nodes, copies = [node for node in body if node in own], dict[fx.Node, fx.Node]()
    for x in dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in own):
        copies[x] = program.graph.create_node("placeholder", x.name, name=x.name)
        copies[x].meta = {**x.meta, "phase": "input"}
        copies[x].meta.pop("repeat", None)
        if x.op != "placeholder":
            copies[x].meta["role"] = Role("saved", x.name)
            if stage_of[x] is not None:
                copies[x].meta["stage"] = stage_of[x]
    for node in nodes:
        copies[node] = copy_op(program, node, copies.__getitem__)
        copies[node].meta.pop("repeat", None)
    read_after = {
        node.name: copies[node]
        for node in nodes
        if any(user.op == "output" or value.phase_of(user) == "update" for user in node.users)
    }
    program.graph.output(((), read_after, {}))
    return program
