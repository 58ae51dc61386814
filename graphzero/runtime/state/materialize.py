"""Tensors of the meta device come to life: each rank allocates what it is to hold, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero.runtime.state import modules as tree
from graphzero.runtime.state.modules import Found
from graphzero.runtime.state.state import Moved, State
from graphzero.runtime.state.tensor_ref import TensorRef
from graphzero.runtime.tensors.shards import is_whole, local_shape, wrap
from graphzero.sbp.dtensor import annotate
from graphzero.sbp.types import Nd


def lifeless(state: State) -> list[Found]:
    """Parameters and buffers on the meta device."""
    return [entry for entry in state.tensors().values() if entry.tensor.is_meta]


def allocated(entry: Found, nd: Nd, state: State) -> Tensor:
    """A tensor for an entry, without values, as the user is to hold it."""
    shape, placement, world = tuple(entry.tensor.shape), state.placement, state.world
    dtype, device = entry.tensor.dtype, world.device
    if placement.virtual or is_whole(nd) and not isinstance(entry.tensor, DTensor):
        return torch.empty(shape, dtype=dtype, device=device)
    local = local_shape(shape, nd, placement.hierarchy, world.local_ranks[0])
    return wrap(torch.empty(local, dtype=dtype, device=device), placement.mesh(), nd, shape)


def put(state: State, news: Mapping[str, tuple[Tensor, Nd]]) -> None:
    """Put tensors with values in place of those without: by path, with how each lies.

    Where ZeRO is the reason that one is split, a program for another stage still begins from how its user placed it.
    """
    for entry in lifeless(state):
        if entry.path in news:
            new, nd = news[entry.path]
            given, was_plain = state.given(entry), not isinstance(entry.tensor, DTensor)
            tree.replace(entry, new, state.optimizers)
            if not isinstance(new, DTensor):
                annotate(entry.tensor, state.placement, nd)
            state.moved[entry.path] = Moved(TensorRef(entry.tensor), was_plain, given, nd)
    state.invalidate()
