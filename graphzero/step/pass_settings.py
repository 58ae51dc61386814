"""Options of the passes and of the plan, from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from torch import nn

from graphzero.config import AUTO, Settings
from graphzero.config.stages import resolve_marks
from graphzero.errors import ConfigError
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.arena import arena_of
from graphzero.ir.value import Role
from graphzero.passes import Options
from graphzero.plan import STAGES, Budget, Candidate, choose
from graphzero.plan.pipelines.pipeline import PipelinePrograms, with_seconds
from graphzero.plan.pipelines.pipeline_fit import choose_pipeline
from graphzero.plan.pipelines.stage_chooser import StageRequest, chosen_stages
from graphzero.plan.seconds import plain
from graphzero.sbp.placement import MICRO_BATCHES, Placement
from graphzero.sbp.types import B, Nd, S
from graphzero.schedules import count_stages
from graphzero.step.input_transform import active_transform


def program_of(
    graph: StepGraph, settings: Settings, placed: Mapping[Role, Nd], room: int | None, verifies: bool,
    modules: Mapping[str, nn.Module], whole: Placement | None = None,
) -> Candidate:  # fmt: skip
    """The program of a captured step.

    placed: role -> how it lies, of all that the step may read.  verifies: see ``Pipeline``.
    room: bytes that one rank may have, if the settings leave the stage to that.
    modules: of the Graph, by attribute.  whole: the placement with the axis ``pp``, if it has one.
    """
    whole, pipeline_stages = whole or graph.placement, resolve_marks(settings.stages, modules)
    check_pipeline(settings, whole.pipeline_members)
    stage, budget = settings.zero.stage, budget_of(settings, room)
    stages = (stage,) if isinstance(stage, int) else STAGES
    read = {value.role_of(node) for node in graph.placeholders()}
    placed = {role: nd for role, nd in placed.items() if role in read}
    if settings.gradient_accumulation_steps > 1:
        graph, placed = in_micro_batches(graph, settings, placed)
    options = options_of(settings, placed, pipeline_stages)
    if pipeline_stages or settings.auto_stages is not None:
        decisions, device = list[str](), plain(whole.device_type)
        if (auto := settings.auto_stages) is not None:
            device, members = auto.device or device, whole.pipeline_members
            count = count_stages(settings.pipeline, members) if auto.stages is None else auto.stages
            nbytes = budget.nbytes if budget is not None else None
            request = StageRequest(count, members, auto.device, modules, nbytes)
            cut_options = replace(options, stage=stages[-1])  # which holds least
            marks, decision = chosen_stages(auto.chooser, graph, cut_options, settings.user_passes, request)
            options, decisions = replace(options, pipeline_stages=marks), [decision]
        programs = PipelinePrograms(graph, options, settings.user_passes, settings.pipeline, whole, verifies)
        offload = settings.offload.activations
        assert not isinstance(offload, str)
        candidate = choose_pipeline(programs, options, stages, budget, settings.activation_memory, offload)
        return with_seconds(candidate.decided(*decisions), device)
    candidate = choose(
        graph, options, settings.user_passes, stages=stages, budget=budget,
        activations=settings.activation_memory, offload=settings.offload.activations, verifies=verifies,
    )  # fmt: skip
    if not (settings.arena and settings.executor == "eager" and graph.placement.device_type == "cpu"):
        return candidate
    arena = arena_of(candidate.graph, settings.memory_budget)
    return candidate if arena is None else candidate.within(arena)


def check_pipeline(settings: Settings, members: int) -> None:
    """Raise ConfigError for an axis ``pp`` without stages, and for settings that programs of stages do not have yet."""
    has_stages = bool(settings.stages) or settings.auto_stages is not None
    if members > 1 and not has_stages:
        raise ConfigError(
            f"the placement has {members} ranks along pp, and no module is marked for a stage\n  Mark modules, "
            'config.set_stage(module, stage), for each stage from 0 on, or let them be chosen: config.set_stage("auto")'
        )
    instead = {  # by settings that are on: what works with stages
        "set_optimizer_in_backward": settings.optimizer_in_backward
        and "the default: a rank steps after backward of its last micro-batch, until which it has to hold sums of "
        "gradients anyway. To hold less, config.enable_zero(stage=3), config.set_memory_budget(bytes)",
        'enable_offload(activations="auto")': settings.offload.activations == AUTO
        and "a number of bytes, config.enable_offload(activations=nbytes), and config.set_memory_budget(bytes) without "
        "it, which recomputes",
        "set_cuda_graph": settings.cuda_graph and 'compiled parts, config.set_executor("inductor")',
    }
    for name, alternative in instead.items():
        if has_stages and alternative:
            raise ConfigError(
                f"pipeline stages do not work with {name} yet\n  Leave it out; what works with them is {alternative}"
            )


def in_micro_batches(
    graph: StepGraph, settings: Settings, placed: Mapping[Role, Nd]
) -> tuple[StepGraph, Mapping[Role, Nd]]:
    """The step on a placement with an axis for its micro-batches, and how everything lies there.

    An input that is split over the data axes is cut in micro-batches.  Where there are none, every one is that has
    rows, but for those of which the user has said how they lie.
    """
    whole, at = graph.placement, graph.placement.with_micro_batches(settings.gradient_accumulation_steps)
    axis, said = at.axis(MICRO_BATCHES), {name for name, _ in settings.inputs}
    data = [whole.axis(name) for name in whole.data_axes]
    rows = {value.role_of(node) for node in graph.placeholders("batch") if value.tensor_type(node).shape}
    if (transform := active_transform(settings)) is not None:
        said |= {*transform.uncut_inputs(settings)}

    def on_time(role: Role, nd: Nd) -> Nd:
        follows = any(nd[i] is S(0) for i in data) if data else role.of not in said
        return (*nd[:axis], S(0) if role in rows and follows else B, *nd[axis:])

    with_axis = graph.with_axes(at, [*range(axis), None, *range(axis, len(whole.names))])
    nds = {role: on_time(role, nd) for role, nd in placed.items()}
    for node in graph.placeholders("batch"):
        role = value.role_of(node)
        if role in nds and nds[role][axis].is_split:
            _check_rows(role.of, value.tensor_type(node).shape, nds[role], at, axis)
    return with_axis, nds


def _check_rows(name: str, shape: tuple[int, ...], nd: Nd, placement: Placement, axis: int) -> None:
    """Raise ConfigError for an input of which not every micro-batch of every rank gets as many rows."""
    count = placement.hierarchy[axis]
    cuts = zip(nd, placement.hierarchy, strict=True)
    ranks = prod(n for i, (sbp, n) in enumerate(cuts) if i != axis and sbp.is_split and sbp.dim == 0)
    if shape[0] % (ranks * count):
        each = f"{shape[0] // ranks} rows" if shape[0] % ranks == 0 else f"no equal share of {shape[0]} rows"
        raise ConfigError(
            f"set_gradient_accumulation_steps({count}): input {name} of shape {list(shape)} gives each rank {each}, "
            f"which {count} micro-batches do not divide\n  Choose a number that divides it, or a batch of a multiple "
            f"of {ranks * count} rows: a call takes all micro-batches of a rank (with a JSON of DeepSpeed's that is "
            "config.deepspeed.batch_per_rank rows); for an input with other rows call "
            f"config.set_input({name!r}, sbp=...)"
        )


def budget_of(settings: Settings, room: int | None) -> Budget | None:
    """The bytes at which a step may peak, if a budget is set."""
    if settings.memory_budget is not None:
        return Budget(settings.memory_budget)
    if not settings.needs_budget:
        return None
    if not room:
        said = 'enable_zero(stage="auto")' if settings.zero.stage == AUTO else 'enable_offload(activations="auto")'
        raise ConfigError(
            f"{said} asks how much memory a cuda device has, and this process has none; say what "
            "a rank may have: config.set_memory_budget(bytes)"
        )
    return Budget(room, ", 0.9 of the device's memory")


def options_of(settings: Settings, placed: Mapping[Role, Nd], pipeline_stages: tuple[str, ...] = ()) -> Options:
    """The options of the built-in passes, except those that the plan chooses."""
    zero = settings.zero
    may_keep = settings.memory_budget is not None or settings.needs_budget
    return Options(
        placed=placed,
        shard_min_size=zero.shard_min_size,
        axis=zero.axes,
        masters=settings.amp.dtype is not None,
        optimizer_in_backward=settings.optimizer_in_backward,
        pipeline_stages=pipeline_stages,
        micro_batches=settings.gradient_accumulation_steps,
        links=settings.links,
        offload_states=settings.offload.states,
        keep_gathered=zero.keep_gathered or (() if may_keep else None),
        bucket_bytes=settings.bucket_bytes,
        cuda_graph=settings.cuda_graph,
        plugins=dict(settings.plugins),
    )
