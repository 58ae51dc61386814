"""Moves of DTensors that a user asks for: to another SBP, another arrangement of the same ranks, or a larger mesh."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero import _compat
from graphzero.runtime.tensors.resplit import resplit, whole
from graphzero.runtime.tensors.shards import as_dtensor, check_mesh, local_of, wrap
from graphzero.runtime.tensors.submesh import nd_on, on_whole
from graphzero.runtime.world.consensus import tensor_text
from graphzero.sbp.dtensor import nd_of_dtensor
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Nd


def describe_distribution(x: Tensor, placement: Placement) -> str:
    """Describe ``x`` and its distribution, equally on all ranks of ``placement`` that may place it together."""
    text = tensor_text(x) + " on meta" * x.is_meta
    if not isinstance(x, DTensor):
        return text
    axes = placement.axes_of(x.device_mesh)
    where = f"ranks {x.device_mesh.mesh.tolist()}" if axes is None else ", ".join(placement.names[i] for i in axes)
    return f"{text} ({', '.join(map(str, nd_of_dtensor(x)))}) over {where}"


def check_ranks(x: DTensor, placement: Placement, what: str) -> None:
    """Raise PlacementError unless ``x`` is on the ranks of ``placement``, in any arrangement, or on axes of it."""
    if not placement.virtual and placement.axes_of(x.device_mesh) is not None:
        return
    mesh = x.device_mesh.mesh.flatten().tolist()
    if placement.virtual or sorted(mesh) != sorted(placement.ranks.ravel().tolist()):
        check_mesh(x, placement, what)


def nd_here(x: DTensor, placement: Placement) -> Nd | None:
    """Return the SBP of ``x`` on the axes of ``placement``; None where its ranks are arranged otherwise."""
    return None if placement.axes_of(x.device_mesh) is None else nd_on(x, placement, "a value")


def relocate(x: DTensor, placement: Placement, nd: Nd) -> DTensor:
    """Return the same values under ``nd`` on ``placement``, in storage of its own; every rank calls it."""
    if x.is_meta:
        return as_dtensor(torch.empty(x.shape, dtype=x.dtype, device="meta"), placement, nd)
    if nd_here(x, placement) is None:
        return as_dtensor(whole(x, placement), placement, nd)
    moved = resplit(on_whole(x, placement), nd, placement)
    local = local_of(moved)
    if moved is x or _compat.local_tensor(moved).untyped_storage().nbytes() == local.numel() * local.element_size():
        return moved
    return wrap(local.clone(memory_format=torch.contiguous_format), placement.mesh(), nd, x.shape)
