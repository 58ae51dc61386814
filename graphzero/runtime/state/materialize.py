"""Materialisation of tensors on the meta device: each rank allocates what it is to hold, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero.runtime.state import modules as tree
from graphzero.runtime.state.layout import filled
from graphzero.runtime.state.modules import ModuleTensor
from graphzero.runtime.state.state import Moved, State
from graphzero.runtime.state.tensor_ref import TensorRef
from graphzero.sbp.dtensor import annotate
from graphzero.sbp.types import Nd


def meta_tensors(state: State) -> list[ModuleTensor]:
    """Parameters and buffers on the meta device."""
    return [entry for entry in state.tensors().values() if entry.tensor.is_meta]


def allocate_tensors(state: State, entries: Mapping[str, tuple[ModuleTensor, Nd]], homes: Mapping[str, int]) -> None:
    """Put tensors without values, as the user is to hold them, in place of tensors on the meta device, by path.

    homes: path -> the member of ``pp`` whose ranks alone keep it.
    """
    new_tensors = {}
    for path, (entry, nd) in entries.items():
        shape, dtype, is_plain = tuple(entry.tensor.shape), entry.tensor.dtype, not isinstance(entry.tensor, DTensor)
        new_tensors[path] = filled(shape, dtype, None, nd, state.world, homes.get(path), is_plain), nd
    replace_tensors(state, new_tensors)


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
