"""What settings ask of the passes and of the plan."""

from __future__ import annotations

from collections.abc import Mapping

from graphzero.config import AUTO, Settings
from graphzero.errors import ConfigError
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.arena import arena_of
from graphzero.ir.value import Role
from graphzero.passes import Options
from graphzero.plan import STAGES, Budget, Candidate, choose
from graphzero.sbp.types import Nd


def program_of(graph: StepGraph, settings: Settings, placed: Mapping[Role, Nd], room: int | None) -> Candidate:
    """The program of a captured step.

    placed: role -> how it lies, of all that the step may read.
    room: bytes that one rank may have, if the settings leave the stage to that.
    """
    stage, budget = settings.zero.stage, budget_of(settings, room)
    stages = (stage,) if isinstance(stage, int) else STAGES
    read = {value.role_of(node) for node in graph.placeholders()}
    placed = {role: nd for role, nd in placed.items() if role in read}
    found = choose(
        graph, options_of(settings, placed), settings.user_passes, stages=stages, budget=budget,
        activations=settings.activation_memory,
    )  # fmt: skip
    if not (settings.arena and settings.executor == "eager" and graph.placement.device_type == "cpu"):
        return found
    arena = arena_of(found.graph, settings.memory_budget)
    return found if arena is None else found.within(arena)


def budget_of(settings: Settings, room: int | None) -> Budget | None:
    """What a step may peak at, if anybody said."""
    if settings.memory_budget is not None:
        return Budget(settings.memory_budget)
    if settings.zero.stage != AUTO:
        return None
    if not room:
        raise ConfigError(
            'enable_zero(stage="auto") asks how much memory a cuda device has, and this process has none; say what '
            "a rank may have: config.set_memory_budget(bytes)"
        )
    return Budget(room, ", 0.9 of the device's memory")


def options_of(settings: Settings, placed: Mapping[Role, Nd]) -> Options:
    """What the built-in passes are told, but for what is chosen."""
    zero = settings.zero
    may_keep = settings.memory_budget is not None or zero.stage == AUTO
    return Options(
        placed=placed,
        shard_min_size=zero.shard_min_size,
        axis=zero.axes,
        optimizer_in_backward=settings.optimizer_in_backward,
        links=settings.links,
        keep_gathered=zero.keep_gathered or (() if may_keep else None),
        bucket_bytes=settings.bucket_bytes,
    )
