"""Route of a tensor from one SBP to another on several placement axes: a shortest path of one-axis moves.

A move on one axis works within groups of ranks that differ on that axis alone.  Each holds a piece as the axes
outside have cut it, so a split of a dim may come or go on an axis only while no axis inside splits the same dim:

    (S(0), S(0)) -> (B, B)     gathers inside first, then outside, whole values
    (B, B) -> (S(0), S(0))     cuts outside first, then inside
    (B, S(0)) -> (S(0), S(0))  is not a cut: rank (0, 1) of 2 x 2 holds rows 4-7 of 8 and needs 2-3
    (B, S(0)) -> (S(0, 2), S(0))  is one: it comes within what the inner axis has cut

Cuts of two names may be one, as ``(S(0), S(0, 2))`` and ``(S(0), S(0))`` on 2 x 2 are: then nothing moves.  By the
first name the outer split may come or go while the inner one stays, so that what the outer axis carries is cut:

    (S(0), S(0)) = (S(0), S(0, 2)) -> (B, S(0, 2)) -> (B, B)     gathers outside first, pieces alone
    (P, P) -> (P, S(0, 2)) -> (S(0), S(0, 2)) = (S(0), S(0))     reduces inside first

Partial values complete inside first where the axes combine by different reductions.  An axis of one rank cuts nothing
and completes nothing, whatever it says.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

from graphzero.sbp.boxing import Move, move
from graphzero.sbp.collectives import COLLECTIVES
from graphzero.sbp.link_costs import Costs, Links
from graphzero.sbp.shards import alike, nests
from graphzero.sbp.types import B, Nd, S, Sbp, replace_at

Step = tuple[int, Move]  # placement axis, and what happens on it


def route(
    src: Nd,
    dst: Nd,
    hierarchy: tuple[int, ...],
    shape: Sequence[int],
    *,
    is_small: bool = False,
    links: Links = (),
    nbytes: int = 0,
) -> tuple[Step, ...]:
    """The moves that take a tensor of global ``shape`` from ``src`` to ``dst``, in order.

    It is the way with the fewest bytes on the wire, or, if ``is_small``, with the fewest collectives; between equals,
    the one with fewer bytes on the outer axes, which are the slower ones.  With ``links`` it is the way that takes the
    least time for a tensor of ``nbytes`` in all.  The same on every rank.
    """
    changed = [axis for axis, (a, b) in enumerate(zip(src, dst, strict=True)) if a is not b]
    if len(changed) == 1 and alike(src, dst, hierarchy):
        return ((changed[0], Move("same", src[changed[0]], dst[changed[0]])),)
    if len(changed) == 1 and hierarchy[changed[0]] > 1:
        steps = tuple((changed[0], step) for step in move(src[changed[0]], dst[changed[0]]).steps)
        if all(is_possible(src, axis, step.src, step.dst, hierarchy) for axis, step in steps):
            return steps
    few, ranks = is_small and not links, prod(hierarchy)
    even = tuple(dim for dim, size in enumerate(shape) if size and size % ranks == 0)
    named = any(sbp.sections > 1 for sbp in (*src, *dst))
    # where no sections are given, only even dims get some: all even sizes are alike, and share one way
    sizes = tuple(shape) if named else tuple(ranks if dim in even else 1 for dim in range(len(shape)))
    size = nbytes if links else ranks**2  # without links any does; of this one pieces are whole numbers
    return _shortest(src, dst, Costs(hierarchy, links), size, () if few else even[:2], few, sizes)


def is_possible(nd: Nd, axis: int, src: Sbp, dst: Sbp, hierarchy: Sequence[int]) -> bool:
    """Return whether one move on ``axis`` takes a value from ``src`` to ``dst`` while other axes stay as in ``nd``."""
    if src is dst or hierarchy[axis] == 1:
        return True
    inside = [sbp for sbp, ranks in zip(nd[axis + 1 :], hierarchy[axis + 1 :], strict=True) if ranks > 1]
    if any(s.is_split and s in (src, dst) for s in inside):  # other numbers of sections are cuts of other parts
        return False
    return not (src.is_partial and any(s.is_partial and s is not src for s in inside))


@lru_cache(maxsize=2**14)
def _shortest(
    src: Nd,
    dst: Nd,
    costs: Costs,
    nbytes: int,
    spare: tuple[int, ...],
    few: bool,
    shape: tuple[int, ...],
) -> tuple[Step, ...]:
    """Dijkstra's way through the SBPs that the moves of the table join.

    spare: dims that a value may be split along on the way without padding; shape: what sections must fit.
    """
    hierarchy = costs.hierarchy
    options = _options(src, dst, hierarchy, spare)
    count = itertools.count(1)  # what was found first wins between equals
    queue: list[tuple[tuple[int, ...], int, Nd, tuple[Step, ...]]] = [((0,) * (len(src) + 3), 0, src, ())]
    done: set[Nd] = set()
    while queue:
        cost, _, nd, steps = heapq.heappop(queue)
        if nd == dst:
            return steps
        if nd in done:
            continue
        done.add(nd)
        for axis, step in _moves(nd, options, hierarchy):
            if not nests(shape, replace_at(nd, axis, step.dst), hierarchy):
                continue
            further = tuple(a + b for a, b in zip(cost, _cost(nd, axis, step, costs, nbytes, few), strict=True))
            heapq.heappush(queue, (further, next(count), replace_at(nd, axis, step.dst), (*steps, (axis, step))))
    raise AssertionError(f"no moves lead from {src} to {dst} on {hierarchy}")


def _options(src: Nd, dst: Nd, hierarchy: tuple[int, ...], spare: tuple[int, ...]) -> list[list[Sbp]]:
    """Per axis, what a value may be there on the way.  It becomes partial only if that is where it goes."""
    splits = {*map(S, spare), *(sbp for sbp in (*src, *dst) if sbp.is_split)}
    options = []
    for axis, (a, b) in enumerate(zip(src, dst, strict=True)):
        parts = {S(sbp.dim, sbp.sections * n) for sbp in splits for n in _left_by(axis, sbp, src, dst, hierarchy)}
        ordered = sorted(splits | parts, key=lambda sbp: (sbp.dim, sbp.sections))
        options.append(list(dict.fromkeys((b, B, *ordered, a))) if hierarchy[axis] > 1 else [a, b])
    return options


def _left_by(axis: int, sbp: Sbp, src: Nd, dst: Nd, hierarchy: tuple[int, ...]) -> Iterator[int]:
    """Into how many pieces neighbouring axes outside ``axis``, which come or go as it does, cut what it splits as
    ``sbp``.  An axis that stays is left alone: what is whole there needs no transfers of its own."""
    for first, last in itertools.combinations(range(axis + 1), 2) if src[axis] is not dst[axis] else ():
        if all(src[i] is not dst[i] for i in range(first, last)):
            yield prod(hierarchy[first:last])


def _moves(nd: Nd, options: list[list[Sbp]], hierarchy: tuple[int, ...]) -> Iterator[Step]:
    for axis, sbps in enumerate(options):
        for sbp in sbps:
            if sbp is nd[axis]:
                continue
            if hierarchy[axis] == 1 or _is_renamed(nd, axis, sbp, hierarchy):
                yield axis, Move("same", nd[axis], sbp)
            elif not move(nd[axis], sbp).via and is_possible(nd, axis, nd[axis], sbp, hierarchy):
                yield axis, move(nd[axis], sbp)


def _is_renamed(nd: Nd, axis: int, sbp: Sbp, hierarchy: tuple[int, ...]) -> bool:
    """Return whether the cut on ``axis`` is the same one in as many sections as ``sbp`` has."""
    same_dim = sbp.is_split and nd[axis].is_split and sbp.dim == nd[axis].dim
    return same_dim and alike(nd, replace_at(nd, axis, sbp), hierarchy)


def _cost(nd: Nd, axis: int, step: Move, costs: Costs, nbytes: int, few: bool) -> tuple[int, ...]:
    """The cost of a step, its parts in the order in which they count; whole numbers, so that equal costs are equal."""
    price = round(costs.price_of(step.kind, nbytes / _cuts(nd, costs.hierarchy, axis), axis))
    talks = int(step.kind in COLLECTIVES)
    by_axis = [price if i == axis else 0 for i in range(len(costs.hierarchy))]
    return (talks, price, *by_axis, 1) if few else (price, talks, *by_axis, 1)


def _cuts(nd: Nd, hierarchy: tuple[int, ...], axis: int) -> int:
    """Into how many pieces the axes other than ``axis`` cut a value."""
    return prod(ranks for i, (sbp, ranks) in enumerate(zip(nd, hierarchy, strict=True)) if i != axis and sbp.is_split)
