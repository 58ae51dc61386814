"""Materialisation of tensors on the meta device: each rank allocates what it is to hold, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero.runtime.state import modules as tree
from graphzero.runtime.state.layout import filled
from graphzero.runtime.state.modules import ModuleTensor
from graphzero.runtime.state.state import Moved, State
from graphzero.runtime.state.tensor_ref import TensorRef
from graphzero.runtime.tensors.shards import is_whole, local_shape, wrap
from graphzero.sbp.dtensor import annotate
from graphzero.sbp.types import Nd


def meta_tensors(state: State) -> list[ModuleTensor]:
    """Parameters and buffers on the meta device."""
    return [entry for entry in state.tensors().values() if entry.tensor.is_meta]


def allocate_tensors(state: State, entries: Mapping[str, tuple[ModuleTensor, Nd]], homes: Mapping[str, int]) -> None:
    """Put tensors without values, as the user is to hold them, in place of tensors on the meta device, by path.

    homes: path -> the member of ``pp`` whose ranks alone keep it.
    """
    news = {path: (_allocate(entry, nd, state, homes.get(path)), nd) for path, (entry, nd) in entries.items()}
    replace_tensors(state, news)


def _allocate(entry: ModuleTensor, nd: Nd, state: State, home: int | None) -> Tensor:
    shape, placement, world = tuple(entry.tensor.shape), state.placement, state.world
    dtype, device = entry.tensor.dtype, world.device
    if home is not None:
        return filled(shape, dtype, 0.0, nd, world, home)
    if placement.virtual or is_whole(nd) and not isinstance(entry.tensor, DTensor):
        return torch.empty(shape, dtype=dtype, device=device)
    local = local_shape(shape, nd, placement.hierarchy, world.local_ranks[0])
    return wrap(torch.empty(local, dtype=dtype, device=device), placement.mesh(), nd, shape)


def replace_tensors(state: State, new_tensors: Mapping[str, tuple[Tensor, Nd]]) -> None:
    """Put allocated tensors in place of those on the meta device: by path, with the SBP of each.

    Where ZeRO is the reason that one is split, a program for another stage still begins from how its user placed it.
    """
    for entry in meta_tensors(state):
        if entry.path in new_tensors:
            new, nd = new_tensors[entry.path]
            given, was_plain = state.given(entry), not isinstance(entry.tensor, DTensor)
            tree.replace_tensor(entry, new, state.optimizers)
            if not isinstance(new, DTensor):
                annotate(entry.tensor, state.placement, nd)
            state.moved[entry.path] = Moved(TensorRef(entry.tensor), was_plain, given, nd)
    state.invalidate()
