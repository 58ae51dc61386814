"""Pieces of tensors on ranks. The only module that knows how splits are cut: as torch.chunk cuts.

On several placement axes the outermost cuts first and each further one cuts what it finds, so that nested splits of
one dim, ``(S(0), S(0))``, are chunks of chunks, as two ``Shard(0)`` of a DTensor are.  With sections, ``S(0, k)``, a
dim is seen as [k, size / k] and the inner part is cut; axes that cut a dim in different numbers of sections cut
different parts of it, so that ``(S(0, 2), S(0))`` on 2 x 2 cuts inside first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from graphzero.sbp.types import B, Nd, S, Sbp


def chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """(start, length) of ``rank``'s piece when a dim of ``size`` is cut over ``ranks``; a length may be 0."""
    step = -(-size // ranks)
    start = min(rank * step, size)
    return start, min(step, size - start)


def cutting(nd: Nd, hierarchy: Sequence[int]) -> Nd:
    """``nd`` without what cuts nothing: splits on axes of one rank."""
    return tuple(B if sbp.is_split and ranks == 1 else sbp for sbp, ranks in zip(nd, hierarchy, strict=True))


def cuts(nd: Nd, hierarchy: Sequence[int]) -> list[tuple[int, int, int]]:
    """The cuts that make a rank's piece, outermost first: (placement axis, dim, sections of what is there to cut).

    Of the sections of a dim, an axis further out that cuts it in fewer has left to each rank a part.
    """
    all_cuts = []
    for axis, sbp in enumerate(cutting(nd, hierarchy)):
        if sbp.is_split:
            outside = zip(nd[:axis], hierarchy[:axis], strict=True)
            coarser = (n for s, n in outside if s.is_split and s.dim == sbp.dim and s.sections < sbp.sections)
            all_cuts.append((axis, sbp.dim, sbp.sections // prod(coarser)))
    return all_cuts


def alike(a: Nd, b: Nd, hierarchy: Sequence[int]) -> bool:
    """Return whether every rank holds the same values under both: ``(S(0), S(0, 2))`` on 2 x 2 is ``(S(0), S(0))``."""
    plain = [[B if sbp.is_split else sbp for sbp in cutting(nd, hierarchy)] for nd in (a, b)]
    return plain[0] == plain[1] and cuts(a, hierarchy) == cuts(b, hierarchy)


def lifted(nd: Nd, axis: int, to: Sbp, hierarchy: Sequence[int]) -> Nd:
    """``nd`` with ``to`` in the place of the split on one axis, and every other cut where it is.

    Axes inside that cut what that axis has left to each rank go on cutting just that, in as many sections as it has
    ranks: ``(S(0), S(0))`` on 2 x 4 becomes ``(B, S(0, 2))``.  So one collective, along that axis, leads from one to
    the other.  Whether a tensor's sizes allow the sections says ``nests``.
    """
    mine = nd[axis]
    if not mine.is_split:
        return nd
    inside = (S(mine.dim, mine.sections * hierarchy[axis]) if sbp is mine else sbp for sbp in nd[axis + 1 :])
    return (*nd[:axis], to, *inside)


def sections_at(nd: Nd, hierarchy: Sequence[int], axis: int) -> int:
    """Number of sections in which a rank holds what ``axis`` splits, after the cuts of all other axes."""
    mine = nd[axis]
    others = (i for i, s in enumerate(nd) if i != axis and s.is_split and s.dim == mine.dim)
    return mine.sections // prod(hierarchy[i] for i in others if nd[i].sections < mine.sections)


def steps_of(shape: Sequence[int], nd: Nd) -> list[int]:
    """The distance between neighbours in a rank's piece in each dim: the length of a section, 1 if there is only one.

    So where each rank has one place of a section; ``nd`` is without what cuts nothing.
    """
    sections = [max((s.sections for s in nd if s.is_split and s.dim == dim), default=1) for dim in range(len(shape))]
    return [1 if count == 1 else size // count for size, count in zip(shape, sections, strict=True)]


def nests(shape: Sequence[int], nd: Nd, hierarchy: Sequence[int]) -> bool:
    """Return whether ranks can hold a tensor so: the sections of each dim, and their pieces over all axes, are even.

    Cuts without sections may be uneven, one within the other.
    """
    splits: dict[int, dict[int, int]] = {}  # dim -> sections -> pieces that each is cut into
    for sbp, ranks in zip(nd, hierarchy, strict=True):
        if sbp.is_split and ranks > 1:
            levels = splits.setdefault(sbp.dim, {})
            levels[sbp.sections] = levels.get(sbp.sections, 1) * ranks
    for dim, levels in splits.items():
        if max(levels) > 1:
            bounds = sorted(levels) + [shape[dim]]
            if any(finer % (sections * levels[sections]) for sections, finer in itertools.pairwise(bounds)):
                return False
    return True


@dataclass(frozen=True)
class Unfolded:
    """A tensor's dims taken apart where sections begin, so that every split is without sections.

    shape: with dims apart; dims: which of them each dim became; splits: what each split given is then.
    """

    shape: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    splits: Mapping[Sbp, Sbp]

    def nd(self, nd: Nd) -> Nd:
        return tuple(self.splits.get(sbp, sbp) for sbp in nd)


def unfold(shape: Sequence[int], sbps: Iterable[Sbp]) -> Unfolded:
    """``S(1, 3)`` of [4, 12] is ``S(2)`` of [4, 3, 4]."""
    given = {sbp for sbp in sbps if sbp.is_split}
    sizes: list[int] = []
    dims: list[tuple[int, ...]] = []
    splits: dict[Sbp, Sbp] = {}
    for dim, size in enumerate(shape):
        bounds = sorted({1, *(sbp.sections for sbp in given if sbp.dim == dim)})
        places = range(len(sizes), len(sizes) + len(bounds))
        splits |= {S(dim, sections): S(place) for sections, place in zip(bounds, places, strict=True)}
        sizes += [inner // outer for outer, inner in itertools.pairwise([*bounds, size])]
        dims.append(tuple(places))
    return Unfolded(tuple(sizes), tuple(dims), splits)


def bounds(shape: Sequence[int], nd: Nd, hierarchy: Sequence[int], at: Sequence[int]) -> list[tuple[int, int]]:
    """(start, length) per dim of the piece of the rank that is at ``at``, of a tensor split without sections."""
    dim_bounds = [(0, size) for size in shape]
    for sbp, ranks, place in zip(nd, hierarchy, at, strict=True):
        if sbp.is_split:
            start, length = dim_bounds[sbp.dim]
            offset, length = chunk(length, ranks, place)
            dim_bounds[sbp.dim] = (start + offset, length)
    return dim_bounds


def piece_shape(shape: Sequence[int], nd: Nd, hierarchy: Sequence[int], at: Sequence[int]) -> tuple[int, ...]:
    """The shape of that piece, of any tensor.  No rank's is longer in any dim than that of the rank at (0, 0, ...)."""
    nd = cutting(nd, hierarchy)
    apart = unfold(shape, nd)
    lengths = bounds(apart.shape, apart.nd(nd), hierarchy, at)
    return tuple(prod(lengths[i][1] for i in dims) for dims in apart.dims)


def window(whole: Tensor, nd: Nd, hierarchy: Sequence[int], at: Sequence[int]) -> Tensor:
    """A view of that piece in ``whole``, with a dim for each part of a dim cut in sections."""
    nd = cutting(nd, hierarchy)
    apart = unfold(whole.shape, nd)
    view = whole
    for dim, places in reversed(list(enumerate(apart.dims))):
        if len(places) > 1:
            view = torch.unflatten(view, dim, [apart.shape[i] for i in places])
    for dim, (start, length) in enumerate(bounds(apart.shape, apart.nd(nd), hierarchy, at)):
        if length != view.shape[dim]:
            view = view.narrow(dim, start, length)
    return view


def cut(whole: Tensor, nd: Nd, hierarchy: Sequence[int], at: Sequence[int]) -> Tensor:
    """Cut out the piece at ``at``: a view of ``whole``, except where it is cut in sections."""
    view = window(whole, nd, hierarchy, at)
    return view.reshape(piece_shape(whole.shape, nd, hierarchy, at)) if view.dim() > whole.dim() else view


def joined(pieces: Sequence[Tensor], dim: int, sections: int) -> Tensor:
    """The pieces of one axis, put together again along ``dim``, which each holds in so many sections (``cuts``)."""
    if sections == 1:
        return torch.cat(list(pieces), dim)
    return torch.cat([torch.unflatten(x, dim, (sections, -1)) for x in pieces], dim + 1).flatten(dim, dim + 1)


@dataclass(frozen=True)
class LocalSize:
    """The length of this rank's piece of a dim of ``size`` cut over placement axis ``axis``, printed ``8/dp``.

    Localised programs hold it where a global size was, so that one program serves all ranks.  The size of a dim
    that an outer axis has cut already is a LocalSize itself: ``8/dp/tp``.
    """

    size: int | LocalSize
    axis: str

    def __repr__(self) -> str:
        return f"{self.size}/{self.axis}"


@dataclass(frozen=True)
class LocalStart:
    """Start of this rank's piece of a dim in the whole dim, printed ``8@dp``, nested ``8@dp@tp``."""

    size: int | LocalStart
    axis: str

    def __repr__(self) -> str:
        return f"{self.size}@{self.axis}"


def resolve(x: LocalSize | LocalStart, ranks_and_place: Callable[[str], tuple[int, int]]) -> int:
    """The number that ``x`` is on the rank of which ``ranks_and_place`` tells (ranks, own place) along each axis."""
    start, length = _resolved(x, ranks_and_place)
    return start if isinstance(x, LocalStart) else length


def _resolved(x: int | LocalSize | LocalStart, ranks_and_place: Callable[[str], tuple[int, int]]) -> tuple[int, int]:
    if isinstance(x, int):
        return 0, x
    start, length = _resolved(x.size, ranks_and_place)
    offset, length = chunk(length, *ranks_and_place(x.axis))
    return start + offset, length
