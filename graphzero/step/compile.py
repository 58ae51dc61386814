"""From one call to the program that it runs: capture, passes, plan.  Touches no real tensor."""

from __future__ import annotations

import gc

from graphzero.capture import Captured, Step, capture
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import Role
from graphzero.ops import CHECK
from graphzero.runtime.record import cuda_graph
from graphzero.runtime.record.garbage import collector_at_rest
from graphzero.step.call import Call
from graphzero.step.choice import program_of
from graphzero.step.program import Part, Program

YOUNG = 1  # generations of the collector in which is what compiling has made


@collector_at_rest()  # each round of its own would look at all that compiling has made
def make(step: Step, call: Call, captured: Captured | None, room: int | None = None) -> Program:
    """Capture (unless given), run the passes, plan.

    room: bytes that one rank may have, if the settings leave the stage to that.
    """
    state, settings = call.state, call.settings
    if settings.cuda_graph:
        cuda_graph.check(state.world.placement)
    if captured is None:
        captured = capture(step, call.inputs)
        gc.collect(YOUNG)  # what tracing leaves is several times what it makes
    placed = {Role("batch", leaf.name): leaf.nd for leaf in call.inputs.tensors}
    placed.update(state.placed(state.tensors(), captured.states))
    graph = captured.graph
    if not settings.check_values:
        leave_out_checks(graph)
    found = program_of(graph, settings, placed, room)
    gc.collect(YOUNG)
    part = Part(found.graph, found.arena, settings.executor, settings.cuda_graph)
    return Program(captured, part, found.history, found.plan)


def leave_out_checks(graph: StepGraph) -> None:
    """Take the checks out of a captured step, and what only they read."""
    aux = {name: node for name, node in graph.aux.items() if node.target is not CHECK}
    graph.set_output(graph.outputs, aux, graph.updates)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.graph.erase_node(node)
