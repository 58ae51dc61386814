"""Candidates for sending less, by member of a pipeline: what to hold over all micro-batches, its bytes and seconds.

What is held is there for the whole step, so that the bytes of candidates simply add up.
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_parts import BODY, PipelineProgram
from graphzero.ir.pipeline_stages import stages_of
from graphzero.ir.transfer_layout import nbytes_on
from graphzero.passes import Options
from graphzero.plan.memory.gather_candidates import BANDWIDTH, param_bytes
from graphzero.plan.memory.memory_candidate import MemoryCandidate
from graphzero.plan.program_costs import collectives_of
from graphzero.sbp.types import B

ACCUMULATORS = ""  # the name of the candidate that stands for a member's accumulators: that they are whole


def traffic_candidates(
    graph: StepGraph, pipeline: PipelineProgram, options: Options
) -> dict[int, list[MemoryCandidate]]:
    """Of each member, the parameters that may be gathered once a step, and the sums of gradients reduced once.

    graph: the program before it is cut, as ``keep_gathered`` is given it.
    pipeline: gathers parameters in each micro-batch twice, and reduces gradients in each.
    """
    candidates: dict[int, list[MemoryCandidate]] = defaultdict(list)
    gathers, reductions = _seconds(graph, pipeline, options)
    if options.stage == 3 and options.keep_gathered == ():
        stages = stages_of(graph.nodes)
        for path, (node, nbytes) in _gathered(graph).items():
            stage = stages[node]
            if stage is not None and gathers[path] > 0:
                candidates[pipeline.member_of(stage)].append(_candidate(path, nbytes, gathers[path]))
    if options.stage >= 2 and options.micro_batches > 1:
        for member, nbytes in _more_if_whole(pipeline, options).items():
            if nbytes > 0:
                candidates[member].append(_candidate(ACCUMULATORS, nbytes, reductions[member]))
    return dict(candidates)


def _candidate(name: str, nbytes: int, seconds: float) -> MemoryCandidate:
    return MemoryCandidate(name, nbytes, seconds, 0, 1, changes=((0, 1, nbytes),))


def _seconds(
    graph: StepGraph, pipeline: PipelineProgram, options: Options
) -> tuple[dict[str, float], dict[int, float]]:
    """The seconds of a step for gathering each parameter, and for reducing on each member, beyond doing it once."""
    count, sizes = options.micro_batches, param_bytes(graph)
    gathers, reductions = defaultdict[str, float](float), defaultdict[int, float](float)
    for part in pipeline.parts.parts:
        for one, _ in collectives_of(part.graph, options.links) if part.key.kind in BODY else ():
            seconds = one.bytes / BANDWIDTH if one.seconds is None else one.seconds
            if one.what_for == "gradients":
                reductions[pipeline.member_of(part.key.stage)] += (count - 1) * seconds
            elif one.what_for == "parameters":
                times = count - (one.phase == "forward")
                whole = max(sum(sizes.get(path, 0) for path in one.names), 1)
                for path in one.names:
                    gathers[path] += times * seconds * sizes.get(path, 0) / whole
    return gathers, reductions


def _gathered(graph: StepGraph) -> dict[str, tuple[fx.Node, int]]:
    """Of each parameter what forward gathers of it, and the bytes of that on a rank."""
    gathered: dict[str, tuple[fx.Node, int]] = {}
    for node in graph.nodes:
        role = value.role_of(node)
        is_whole = node.target in ops.COLLECTIVES and value.phase_of(node) == "forward"
        if is_whole and role is not None and role.kind == "param":
            nbytes = nbytes_on(graph, value.tensor_type(node), value.nd_of(node))
            if role.of not in gathered or nbytes > gathered[role.of][1]:
                gathered[role.of] = node, nbytes
    return gathered


def _more_if_whole(pipeline: PipelineProgram, options: Options) -> dict[int, int]:
    """Bytes that the accumulators of each member hold more where no data axis splits them."""
    more = defaultdict[int, int](int)
    for key, node in pipeline.parts.accumulators.items():
        if value.has_role(node, "accumulator"):
            graph = next(part.graph for part in pipeline.parts.parts if part.key.stage == key.stage)
            axes = options.axis if options.axis is not None else graph.placement.data_axes
            pairs = zip(value.nd_of(node), graph.placement.names, strict=True)
            whole = tuple(B if name in axes else sbp for sbp, name in pairs)
            type_ = value.tensor_type(node)
            added = nbytes_on(graph, type_, whole) - nbytes_on(graph, type_, value.nd_of(node))
            more[pipeline.member_of(key.stage)] += added
    return more
