"""Layout of one tensor of the user for a program: the tensor that the user keeps, and those that local ranks use.

On real ranks a split tensor is a DTensor and its rank works on the piece in it.  On a virtual placement the user
keeps the whole tensor; ranks work on views of it where views are contiguous, else on pieces that are read from it
before a call and written back after.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero.errors import ConfigError
from graphzero.runtime.tensors import resplit
from graphzero.runtime.tensors.shards import as_dtensor, coordinates, is_whole, local_of, local_shape, piece, wrap
from graphzero.runtime.tensors.stage_tensors import has_stages, home_of, on_stage, without_values
from graphzero.runtime.tensors.submesh import nd_on, on_whole
from graphzero.runtime.world.world import World
from graphzero.sbp.dtensor import annotate, nd_of_dtensor
from graphzero.sbp.shards import window
from graphzero.sbp.types import Nd


@dataclass
class TensorLayout:
    """The tensor that the user holds from now on, ``tensor``, and one tensor per local rank, ``ranks``.

    copies: (view of the whole tensor, piece) where a rank's tensor is not a view of what the user holds.
    """

    tensor: Tensor
    ranks: list[Tensor]
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def lay_out(
    tensor: Tensor, nd: Nd, world: World, what: str, *, plain: bool = False, home: int | None = None
) -> TensorLayout:
    """Lay out a tensor that is on the device already.

    plain: give a tensor that every rank holds whole as a plain tensor, even if it comes as a DTensor.
    home: the member of ``pp`` whose ranks alone keep it; None for all.
    Raises PlacementError for a DTensor on other ranks.
    """
    if has_stages(world.whole):
        current_home = home_of(tensor, world.whole)
        if current_home not in (None, home):
            tensor = resplit.whole(tensor, world.whole)  # type: ignore[arg-type]
        if home is not None:
            return _on_stage(tensor, nd, world, what, home)
    current_nd = nd_on(tensor, world.placement, what) if isinstance(tensor, DTensor) else None
    if world.placement.virtual:
        return _virtual(tensor, nd, world)
    if isinstance(tensor, DTensor):
        if plain and is_whole(nd):
            tensor = resplit.whole(tensor, world.whole) if current_nd != nd else tensor.to_local()
        elif current_nd != nd:
            tensor = resplit.resplit(on_whole(tensor, world.placement), nd, world.whole).detach()
    elif not is_whole(nd):
        tensor = as_dtensor(tensor.detach(), world.placement, nd)
    if not isinstance(tensor, DTensor):
        annotate(tensor, world.placement, nd)
    return TensorLayout(tensor, [local_of(tensor)])


def _on_stage(tensor: Tensor, nd: Nd, world: World, what: str, home: int) -> TensorLayout:
    """Lay out a tensor on the ranks of one member of ``pp``: of others ``ranks`` is empty."""
    whole, mesh, is_here = world.whole, world.whole.stage_mesh(home), home == world.member
    if not isinstance(tensor, DTensor):
        tensor = on_stage(tensor, whole, home, nd)
    elif tensor.device_mesh != mesh or nd_of_dtensor(tensor) != nd:
        if is_here:
            nd_on(tensor, world.placement, what)
            tensor = resplit.resplit(on_whole(tensor, world.placement), nd, whole)
            tensor = wrap(local_of(tensor), mesh, nd, tensor.shape)
        else:
            tensor = without_values(tensor.shape, tensor.dtype, world.device, whole, home, nd)
    return TensorLayout(tensor, [local_of(tensor)] if is_here else [])


def _virtual(tensor: Tensor, nd: Nd, world: World) -> TensorLayout:
    annotate(tensor, world.placement, nd)
    whole = tensor.detach()
    if is_whole(nd):
        return TensorLayout(tensor, [whole] * len(world.local_ranks))
    hierarchy = world.placement.hierarchy
    pieces = [piece(whole, nd, hierarchy, position) for position in world.local_ranks]
    if all(p.is_contiguous() for p in pieces) and not any(sbp.sections > 1 for sbp in nd):
        return TensorLayout(tensor, pieces)
    own = [p.clone(memory_format=torch.contiguous_format) for p in pieces]
    windows = (window(whole, nd, hierarchy, coordinates(hierarchy, position)) for position in world.local_ranks)
    return TensorLayout(
        tensor, own, [(place, mine.view(place.shape)) for place, mine in zip(windows, own, strict=True)]
    )


def filled(
    shape: tuple[int, ...], dtype: torch.dtype, fill: float | None, nd: Nd, world: World, home: int | None = None,
    plain: bool = True,
) -> Tensor:  # fmt: skip
    """A new tensor of one value, of any values if ``fill`` is None, as the user keeps it; on real ranks only this
    rank's piece is allocated.

    home, plain: see ``lay_out``.
    """
    placement, whole = world.placement, world.whole
    home = home if has_stages(whole) else None
    if home is not None and home != world.member:
        return without_values(shape, dtype, world.device, whole, home, nd)
    is_plain = home is None and (placement.virtual or plain and is_whole(nd))
    here = shape if is_plain else local_shape(shape, nd, placement.hierarchy, world.local_ranks[0])
    new = torch.empty(here, dtype=dtype, device=world.device)
    if fill is not None:
        new.fill_(fill)
    return new if is_plain else wrap(new, placement.mesh() if home is None else whole.stage_mesh(home), nd, shape)


def check_real(tensor: Tensor, what: str) -> None:
    """Raise ConfigError for a tensor without values."""
    if tensor.is_meta:
        raise ConfigError(
            f"{what} is on the meta device: compile() takes it, a call does not. Give it values first: "
            'module.to_empty(device="cpu") and initialise, gz.materialize(graph, init), or load a checkpoint; '
            "buffers that are not persistent are in none"
        )
