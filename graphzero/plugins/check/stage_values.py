"""A program at one stage of the pipeline, run on whole copies: its results, and every value on the way.

Up to ``propagate`` a program speaks of global values only, and runs op by op on one rank, whatever its pins say.
From there on, and where it holds per-rank code, it runs on virtual ranks, lowered by the built-in passes that are
still to come.  The parts of pipeline stages run in the order of their schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphzero import _compat
from graphzero.ir import ops, value
from graphzero.ir.aliases import is_name
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_parts import PipelineProgram
from graphzero.ir.text.printer import print_line
from graphzero.ir.transfer import delivered
from graphzero.ops import AS_GLOBAL
from graphzero.runtime import kernels
from graphzero.testing.simulate import RankValues, lower_parts, lower_program, run_program

_SEEN = "__seen_"
_HIDDEN = (ops.assign, ops.launch, ops.wait, *ops.HOST_COPIES, ops.accumulator, ops.host_room)  # the last two: no value


@dataclass
class StageRun:
    """Results of one run.

    program: the graph that ran.  results: outputs, norms, gradients, new states.  values: every tensor by the name
    that it prints as; on ranks only if the run was watched.  members: of ``pp``, each of as many ranks.
    """

    program: StepGraph
    results: dict[str, RankValues]
    values: dict[str, RankValues]
    members: int = 1

    @property
    def ranks(self) -> int:
        return 1 if _is_global(self.program) else self.program.placement.size * self.members


def run_stage(
    graph: StepGraph, values: Mapping[str, Any], names: Mapping[str, str], device: str, watch: bool = False,
    is_final: bool = False,
) -> StageRun:  # fmt: skip
    """Run ``graph`` from whole values by placeholder.

    names: how a placeholder's new value is called among the results.  watch: keep every value.  is_final: run it as it
    is, lowered by no pass.
    Raises whatever an op raises, with a note that shows its line.
    """
    if _is_global(graph):
        computed = walk(graph, values, torch.device(device))
        tensors = {node.name: RankValues([x], (), ()) for node, x in computed.items() if isinstance(x, Tensor)}
        results = {f"output {i}": x for i, x in enumerate(graph.outputs)} | graph.aux
        results |= {names[name]: x for name, x in graph.updates.items()}
        results |= {f"gradient {path}": x for path, x in graph.gradients().items()}
        outputs = {
            name: RankValues([computed[x] if isinstance(x, fx.Node) else x], (), ()) for name, x in results.items()
        }
        return StageRun(graph, outputs, tensors)
    program = lower_program(graph, device_type=device, is_final=is_final)
    watched = _watched(program) if watch else program
    everything = run_program(watched, {node.name: values[node.name] for node in watched.placeholders()})
    seen = {name.removeprefix(_SEEN): x for name, x in everything.items() if name.startswith(_SEEN)}
    return StageRun(program, _named(everything, names), seen)


def run_parts(
    graph: StepGraph, pipeline: PipelineProgram, parts: Sequence[StepGraph], values: Mapping[str, Any],
    names: Mapping[str, str], device: str, final: Collection[int],
) -> StageRun:  # fmt: skip
    """Run ``parts``, at any stage of their own passes, as the schedule does; otherwise as ``run_stage``.

    final: numbers of those that run as they are.
    """
    program, lowered = lower_parts(graph, pipeline, parts, device, final)
    results = run_program(program, {node.name: values[node.name] for node in program.placeholders()}, lowered)
    return StageRun(program, _named(results, names), {}, pipeline.schedule.ranks)


def _named(results: Mapping[str, RankValues], names: Mapping[str, str]) -> dict[str, RankValues]:
    """Results of a program, new states under their own names."""
    states = {f"new {name}": called for name, called in names.items()}
    return {states.get(name, name): x for name, x in results.items() if not name.startswith(_SEEN)}


def _is_global(graph: StepGraph) -> bool:
    return graph.level == "captured" and not graph.graph.find_nodes(op="call_function", target=AS_GLOBAL)


def walk(graph: StepGraph, values: Mapping[str, Any], device: torch.device) -> dict[fx.Node, Any]:
    """Compute every value of a graph of global values on one device."""
    env: dict[fx.Node, Any] = {}
    with _plain_numbers(device):
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = values[node.name]
            elif node.op == "call_function":
                args: Any = fx.node.map_arg(node.args, env.__getitem__)
                if is_name(node.target):
                    env[node] = args[0]
                    continue
                kwargs: Any = fx.node.map_arg(kernels.keywords(node, device), env.__getitem__)
                try:
                    env[node] = kernels.kernel(node.target)(*args, **kwargs)
                except Exception as error:
                    if hasattr(error, "add_note"):  # from Python 3.11
                        source = value.source_of(node)
                        error.add_note(f"while one rank ran graph {graph.name}:\n  > {print_line(node)}    {source}")
                    raise
    return env


@_compat.contextmanager
def _plain_numbers(device: torch.device) -> Iterator[None]:
    """Disable autograd and autocast: a graph contains its casts."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in {device.type, "cpu"}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _watched(program: StepGraph) -> StepGraph:
    """The program with a copy of every value, taken as soon as it is made, among what it hands out."""
    program = program.clone()
    seen: dict[str, fx.Node] = {}
    for node in list(program.nodes):
        if node.op == "call_function" and value.is_tensor(node) and node.target not in _HIDDEN:
            with program.graph.inserting_after(node):
                seen[_SEEN + node.name] = program.call(
                    torch.ops.aten.clone.default, (node,), value.type_of(node), sbp=value.sbp_of(node), like=node
                )
    program.set_output(program.outputs, program.aux | seen, program.updates)
    return program


def moved_from(node: fx.Node) -> fx.Node:
    """The value whose elements ``node`` holds too, only elsewhere: a collective's operand, a box's."""
    while node.op == "call_function":
        source: Any = node.args[0] if node.args else None
        delivery = delivered(node)
        if delivery is not None:
            node = delivery[0].members[delivery[1]]
        elif node.target in (*ops.MOVES, ops.box) or is_name(node.target):
            node = source
        else:
            break
    return node
