"""On nested axes the outer one carries what the inner ones cut: no way sends fewer bytes over it, or in all."""

from itertools import combinations, product
from math import prod

import pytest

from graphzero.sbp.boxing import wire_bytes
from graphzero.sbp.route import route
from graphzero.sbp.shards import alike, nests, sections_at
from graphzero.sbp.types import B, P, S

GRIDS = [(2, 2), (2, 3), (3, 2), (2, 4), (8, 8), (1, 4), (4, 1), (2, 2, 2), (2, 1, 3), (3, 2, 2)]


def sent(src, dst, hierarchy, shape):
    """Bytes on each axis, in multiples of the whole tensor's."""
    nd, found = src, [0.0] * len(src)
    for axis, move in route(src, dst, hierarchy, shape):
        others = (n for i, (sbp, n) in enumerate(zip(nd, hierarchy, strict=True)) if i != axis and sbp.is_split)
        found[axis] += wire_bytes(move.kind, 1, hierarchy[axis]) / prod(others)
        nd = (*nd[:axis], move.dst, *nd[axis + 1 :])
    return found


@pytest.mark.parametrize("hierarchy", GRIDS, ids=str)
@pytest.mark.parametrize("dims", [1, 2])
def test_each_axis_carries_only_what_the_axes_inside_it_cut(hierarchy, dims):
    shape = (2 * prod(hierarchy),) * dims
    least = [(n - 1) / n / prod(hierarchy[i + 1 :]) for i, n in enumerate(hierarchy)]
    split, whole, partial = ((sbp,) * len(hierarchy) for sbp in (S(0), B, P))
    assert sent(split, whole, hierarchy, shape) == pytest.approx(least)
    assert sent(partial, split, hierarchy, shape) == pytest.approx(least)
    assert sent(whole, split, hierarchy, shape) == [0.0] * len(hierarchy)
    if len(hierarchy) == 2 or dims == 2:
        assert sent(partial, whole, hierarchy, shape) == pytest.approx([2 * part for part in least])


@pytest.mark.parametrize("hierarchy", [(2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_what_cuts_unevenly_has_no_sections_on_its_way(hierarchy):
    split, whole, partial = ((sbp,) * len(hierarchy) for sbp in (S(0), B, P))
    for src, dst in ((split, whole), (partial, split), (partial, whole)):
        steps = route(src, dst, hierarchy, (prod(hierarchy) + 1, 7))
        assert all(sbp.sections == 1 for _, move in steps for sbp in (move.src, move.dst))


@pytest.mark.parametrize("hierarchy", [(2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_two_names_of_one_cut_hold_as_many_sections_of_what_each_axis_splits(hierarchy):
    """So a gather or reduction reads its sections off either name."""
    options = (B, S(0), S(0, 2), S(0, 4)) if len(hierarchy) == 3 else (B, S(0), S(0, 2), S(0, 3), S(0, 4), S(1))
    nds = [nd for nd in product(options, repeat=len(hierarchy)) if nests((48, 48), nd, hierarchy)]
    pairs = [(a, b) for a, b in combinations(nds, 2) if alike(a, b, hierarchy)]
    assert pairs
    for a, b in pairs:
        for axis in (i for i, sbp in enumerate(a) if sbp.is_split):
            assert sections_at(a, hierarchy, axis) == sections_at(b, hierarchy, axis), (a, b, axis)
