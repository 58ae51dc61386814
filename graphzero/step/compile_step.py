"""From one call to the program that it runs: capture, passes, plan.  Touches no real tensor."""

from __future__ import annotations

import gc

from graphzero.capture import Captured, Step, capture
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import Role
from graphzero.logs import phase
from graphzero.ops import CHECK
from graphzero.passes.memory.dead_code import DeadCode
from graphzero.plan.variants import YOUNG
from graphzero.runtime.record import cuda_graph
from graphzero.runtime.record.garbage import collector_at_rest
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Nd
from graphzero.step.build_call import BuildCall
from graphzero.step.input_transform import active_transform
from graphzero.step.pass_settings import program_of
from graphzero.step.program import StepProgram


@collector_at_rest()  # each round of its own would look at all that compiling has made
def compile_step(
    step: Step, call: BuildCall, captured: Captured | None, room: int | None = None, verifies: bool = True,
    whole: Placement | None = None,
) -> StepProgram:  # fmt: skip
    """Capture (unless given), run the passes, plan.

    room: bytes that one rank may have, if the settings leave the stage to that.  verifies: see ``Pipeline``.
    whole: the placement with the axis ``pp``, where it has one.
    """
    state, settings = call.state, call.settings
    if settings.cuda_graph:
        cuda_graph.check(state.world.placement)
    if captured is None:
        with phase("capture"):
            captured = capture(step, call.inputs)
            transform = active_transform(settings)
            if transform is not None:
                captured = transform.rewrite_capture(step, call.inputs, call.transformed, captured)
            gc.collect(YOUNG)  # what tracing leaves is several times what it makes
    graph, placed = prepare_for_passes(call, captured)
    with phase("plan"):
        candidate = program_of(graph, settings, placed, room, verifies, step.modules, whole)
        gc.collect(YOUNG)
    return StepProgram(
        captured, candidate.graph, candidate.history, candidate.plan, candidate.arena, candidate.pipeline,
        settings.executor, settings.cuda_graph,
    )  # fmt: skip


def prepare_for_passes(call: BuildCall, captured: Captured) -> tuple[StepGraph, dict[Role, Nd]]:
    """The input of the passes: the captured step, and the SBP of everything that it may read."""
    state, graph = call.state, captured.graph
    placed = {Role("batch", leaf.name): leaf.nd for leaf in call.inputs.tensors}
    placed.update({Role("batch", x.name): x.nd for x in (call.transformed.added_inputs if call.transformed else ())})
    placed.update(state.placed(state.tensors(), captured.states))
    if not call.settings.check_values:
        leave_out_checks(graph)
    return graph, placed


def leave_out_checks(graph: StepGraph) -> None:
    """Take the checks out of a captured step, and what only they read."""
    aux = {name: node for name, node in graph.aux.items() if node.target is not CHECK}
    graph.set_output(graph.outputs, aux, graph.updates)
    DeadCode()(graph)
