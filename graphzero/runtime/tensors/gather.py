"""Gathers of many split tensors at once: their pieces share few large all-gathers.

``resplit.whole`` gathers one tensor; ``sbp.shards`` says where a rank's piece is in the full tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphzero.runtime.tensors import resplit
from graphzero.runtime.tensors.shards import coordinates, local_of
from graphzero.runtime.tensors.stage_tensors import home_of
from graphzero.sbp.dtensor import nd_of_dtensor
from graphzero.sbp.placement import Placement
from graphzero.sbp.shards import cut, window
from graphzero.sbp.types import Nd

WINDOW = 64 * 2**20  # bytes of all ranks' pieces that one gather brings, besides the whole tensors
_SMALLEST = 1 << 16  # bytes of one rank's pieces: with so many ranks that the window gives each less, it is larger
_ALIGNED = 16  # bytes: a piece begins where its dtype may
Box = tuple[slice, ...]  # a block of neighbouring elements; beyond the end of a piece there are none


def wholes(xs: Sequence[DTensor], placement: Placement, nbytes: int = WINDOW) -> list[Tensor]:
    """Return all values of each as a plain tensor, which may be its own storage; every rank of ``placement`` calls it.

    Tensors split along the same axes of one mesh share buffers, whatever their dtypes and dims.  Besides the result a
    rank holds at most ``nbytes`` of pieces, or 64 KiB a rank.
    """
    full: dict[int, Tensor] = {}
    groups: dict[tuple[DeviceMesh, tuple[int, ...], torch.device], list[_GatheredTensor]] = {}
    for at, x in enumerate(xs):
        nd = nd_of_dtensor(x)
        if home_of(x, placement) is not None:
            full[at] = resplit.whole(x, placement)
            continue
        axes = tuple(axis for axis, sbp in enumerate(nd) if sbp.is_split and x.device_mesh.size(axis) > 1)
        if not axes or any(sbp.is_partial for sbp in nd):
            full[at] = resplit.whole(x, placement)
        else:
            split = _GatheredTensor(x, nd, axes)
            full[at] = split.whole
            groups.setdefault((x.device_mesh, axes, split.whole.device), []).append(split)
    for (mesh, axes, _), members in groups.items():
        _gather(members, mesh, axes, placement, nbytes)
    return [full[at] for at in range(len(xs))]


def take_piece(x: DTensor, whole: Tensor) -> None:
    """Write this rank's piece of ``whole`` into ``x``, in place; a rank of another pipeline stage has none."""
    at = x.device_mesh.get_coordinate()
    if at is None:
        return
    local_of(x).copy_(cut(whole, nd_of_dtensor(x), tuple(x.device_mesh.shape), at))


class _GatheredTensor:
    """A tensor that is being gathered; ``split`` over some axes of its mesh.

    whole: receives all ranks' pieces; places: a view of it for each piece; piece: this rank's, of its place's shape.
    """

    def __init__(self, x: DTensor, nd: Nd, axes: Sequence[int]) -> None:
        mesh, local = x.device_mesh, local_of(x)
        self.whole = torch.empty(tuple(x.shape), dtype=local.dtype, device=local.device)
        by, hierarchy = tuple(nd[axis] for axis in axes), tuple(mesh.size(axis) for axis in axes)
        every = (coordinates(hierarchy, position) for position in range(prod(hierarchy)))
        self.places = [window(self.whole, by, hierarchy, at) for at in every]
        self.piece = local.reshape(self.places[resplit.place_on(mesh, axes)].shape)

    def boxes(self, nbytes: int) -> Iterator[tuple[Box, int]]:
        """Yield blocks that together cover the piece of any rank, each of at most ``nbytes``, with its size in bytes.

        Elements of a block are contiguous in a dense piece.
        """
        sizes = [max(place.shape[dim] for place in self.places) for dim in range(self.places[0].dim())]
        itemsize = self.whole.element_size()
        most = max(nbytes // itemsize, 1)
        dim = next(dim for dim in range(len(sizes)) if prod(sizes[dim + 1 :]) <= most)
        row = prod(sizes[dim + 1 :])
        if not row:
            return
        step = most // row
        for before in itertools.product(*map(range, sizes[:dim])):
            for start in range(0, sizes[dim], step):
                count = min(step, sizes[dim] - start)
                box = (*(slice(i, i + 1) for i in before), slice(start, start + count))
                yield box, count * row * itemsize


@dataclass(frozen=True)
class _GatheredBlock:
    """A block of a tensor's pieces, and where it begins in each rank's line of a buffer, in bytes."""

    split: _GatheredTensor
    box: Box
    offset: int

    def view_in(self, line: Tensor, piece: Tensor) -> Tensor:
        """Return the part of ``line`` that holds the block of ``piece``, in the block's dtype and shape."""
        block = piece[self.box]
        end = self.offset + block.numel() * block.element_size()
        return line[self.offset : end].view(block.dtype).view(block.shape)


def _gather(
    members: Sequence[_GatheredTensor], mesh: DeviceMesh, axes: tuple[int, ...], placement: Placement, nbytes: int
) -> None:
    """Fill the full tensors that the same axes split."""
    hierarchy = tuple(mesh.size(axis) for axis in axes)
    ranks, own = prod(hierarchy), resplit.place_on(mesh, axes)
    buckets = list(_buckets(members, max(nbytes // ranks, _SMALLEST)))
    longest = max((size for _, size in buckets), default=0)
    buffer = torch.empty(ranks * longest, dtype=torch.uint8, device=members[0].whole.device)
    for parts, size in buckets:
        lines = buffer[: ranks * size].view(ranks, size)
        _copy([(part.view_in(lines[own], part.split.piece), part.split.piece[part.box]) for part in parts])
        resplit.gather_lines(lines.view(*hierarchy, size), mesh, axes, placement)
        arrived = ((part, *pair) for part in parts for pair in zip(lines, part.split.places, strict=True))
        _copy([(place[part.box], part.view_in(line, place)) for part, line, place in arrived])


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    filled = [(to, of) for to, of in pairs if to.numel()]
    if filled:
        torch._foreach_copy_([to for to, _ in filled], [of for _, of in filled])


def _buckets(members: Sequence[_GatheredTensor], nbytes: int) -> Iterator[tuple[list[_GatheredBlock], int]]:
    """Yield groups of blocks of all tensors, in order, each with its bytes on one rank, at most ``nbytes``."""
    parts: list[_GatheredBlock] = []
    end = 0
    for split in members:
        for box, size in split.boxes(nbytes):
            room = -(-size // _ALIGNED) * _ALIGNED
            if parts and end + room > nbytes:
                yield parts, end
                parts, end = [], 0
            parts.append(_GatheredBlock(split, box, end))
            end += room
    if parts:
        yield parts, end
