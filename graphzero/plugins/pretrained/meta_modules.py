"""``gz.materialize``: modules that begin on the meta device are initialised shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from graphzero import _compat
from graphzero.checkpoint.expected_sbp import ExpectedSbp
from graphzero.errors import ConfigError, hides_frames
from graphzero.graph import Graph
from graphzero.plugins.pretrained.deferred_init import DeferredInit, NoMemoryAccess, default_init, stand_ins_for
from graphzero.plugins.pretrained.host_memory import freed_at_once
from graphzero.runtime.state.materialize import meta_tensors, replace_tensors
from graphzero.runtime.state.modules import ModuleTensor
from graphzero.runtime.state.placement_checks import check_trained_apart
from graphzero.runtime.world.consensus import Topic
from graphzero.runtime.world.launch import has_fake_world
from graphzero.sbp.types import Nd
from graphzero.serialization import checkpointer_of
from graphzero.step.program import StepProgram
from graphzero.step.user_graph import UserGraph

_INIT = Topic("gz.materialize of {}", "what is materialised", "Every rank must hold the same modules")


@hides_frames
@_compat.cpu_by_default
def materialize(graph: Graph, init: Callable[[nn.Module], Any] | None = None) -> None:
    """Give values to everything in ``graph`` that is on the meta device; no rank ever holds the whole model.

    init: called with each module, children first, as by ``nn.Module.apply``; by default ``reset_parameters`` of modules
    that hold such tensors.  It is code for one device and sees whole tensors, one of which at a time is real.  The
    result equals, to the bit, that of one process that calls ``model.to_empty(device=...)`` and ``model.apply(init)``
    with the first rank's random state.

    Each rank keeps the pieces that its program reads: a shard at stage 3, and under AMP from stage 1 on, else
    everything.  So set the stage first, and call this before the first step.  Optimizers that exist already follow.
    Every rank calls it.

    Raises ConfigError for tensors that no code initialises (nothing has changed then).
    """
    checkpointer = checkpointer_of(graph, "materialize", "loaded")
    source, program = checkpointer.source, checkpointer.program
    ranks, state = source.ranks, source.state()
    check_values_exist(source.name)
    with ranks.together(f"gz.materialize of {source.name}"):
        entries = meta_tensors(state)
        nds, homes = ranks.agree_on(_INIT, lambda: expected_places(source, program), describe_places)
        if not source.placement.virtual:
            state.ensure_world()
        own_rng_state = torch.get_rng_state()
        is_first = source.placement.virtual or not ranks.active or dist.get_rank() == int(ranks.placement.ranks.flat[0])
        torch.set_rng_state(ranks.share(torch.get_rng_state))
        try:
            with freed_at_once(), stand_ins_for(entries, state.world.device) as stand_ins, torch.no_grad():
                placed = {entry.path for entry in entries if isinstance(entry.tensor, DTensor)}
                everyone = source.whole_placement
                with DeferredInit(stand_ins, nds, placed, everyone, homes) as mode, NoMemoryAccess(mode):
                    for module in source.modules.values():
                        module.apply(init or _default_init_of(entries))
                values = ranks.agree_on(_INIT, mode.result, lambda _: {})
        finally:
            if not is_first:
                torch.set_rng_state(own_rng_state)
        replace_tensors(state, values)


def _default_init_of(entries: Sequence[ModuleTensor]) -> Callable[[nn.Module], None]:
    """``default_init`` of the modules that hold these tensors."""
    modules = {id(module) for entry in entries for module, _ in entry.places}
    return lambda module: default_init(module) if id(module) in modules else None


def check_values_exist(name: str) -> None:
    """Raise ConfigError in a fake world."""
    if has_fake_world():
        raise ConfigError(f"{name} has no values in a fake world: its other ranks are not there; compile() needs none")


def expected_places(source: UserGraph, program: StepProgram | None) -> tuple[dict[str, Nd], dict[str, int]]:
    """SBP of what is on the meta device, by path, and the member of ``pp`` of what not all keep."""
    expected, entries = ExpectedSbp(source, program), meta_tensors(source.state())
    check_trained_apart(entries)
    nds = {entry.path: expected.of_tensor(entry) for entry in entries}
    return nds, {path: home for path, home in expected.homes.items() if path in nds}


def describe_places(places: tuple[dict[str, Nd], dict[str, int]]) -> dict[str, str]:
    """The places as facts that ranks compare."""
    nds, homes = places
    return {path: f"{nd} on {homes.get(path, 'all')}" for path, nd in nds.items()}
