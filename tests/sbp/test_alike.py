"""Layouts of two names that are one: found by ``alike`` only where every rank holds the same values, and boxed free."""

from __future__ import annotations

import itertools

import pytest
import torch

import graphzero as gz
from graphzero.sbp import B, P, S
from graphzero.sbp.route import route
from graphzero.sbp.shards import alike, cut, lifted, nests
from graphzero.sbp.types import Nd

OPTIONS = (B, P, S(0), S(0, 2), S(0, 4), S(1))
SHAPE = (48, 48)


def pieces(nd: Nd, hierarchy: tuple[int, ...]) -> list[list[float]]:
    whole = torch.arange(48.0 * 48).reshape(SHAPE)
    at = itertools.product(*map(range, hierarchy))
    return [cut(whole, nd, hierarchy, place).flatten().tolist() for place in at]


@pytest.mark.parametrize("hierarchy", [(2, 2), (2, 3), (4, 2), (1, 2), (2, 1, 2)])
def test_alike_is_where_every_rank_holds_the_same(hierarchy: tuple[int, ...]) -> None:
    options = OPTIONS if len(hierarchy) == 2 else (B, S(0), S(0, 2), S(0, 4))
    nds = [nd for nd in itertools.product(options, repeat=len(hierarchy)) if nests(SHAPE, nd, hierarchy)]
    held = {nd: pieces(nd, hierarchy) for nd in nds}
    found = 0
    for a, b in itertools.combinations(nds, 2):
        partial = [[sbp.is_partial for sbp in nd] for nd in (a, b)]
        if alike(a, b, hierarchy):
            assert held[a] == held[b] and partial[0] == partial[1], (a, b)
            found += 1
    assert found


def test_a_box_between_two_names_of_one_layout_moves_nothing() -> None:
    for src, dst in (((S(0), S(0)), (S(0), S(0, 2))), ((S(0), S(0, 2)), (S(0), S(0)))):
        (step,) = route(src, dst, (2, 2), (8, 8))
        assert step[0] == 1 and step[1].kind == "same"


def test_a_step_between_two_names_of_one_layout_sends_nothing() -> None:
    where = gz.placement("cpu", [[0, 1], [2, 3]], names=("dp", "tp"), virtual=True)

    class Pinned(gz.Graph):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            h = gz.to_global(x, sbp=(S(0), S(0)))
            return gz.to_global(h * 2, sbp=(S(0), S(0, 2))) + 1

    graph = Pinned(where)
    graph.config.set_input("x", sbp=(S(0), S(0)))
    x = torch.randn(8, 3)
    torch.testing.assert_close(graph(x), x * 2 + 1)
    before_the_output = [entry for entry in graph.plan.collectives if "output" not in str(entry.what_for)]
    assert len(before_the_output) <= 1, graph.program  # the output is gathered along tp
    assert str(gz.parse(str(graph.program))) == str(graph.program)


def test_a_longer_way_takes_another_name_of_its_layout_for_nothing() -> None:
    """A sum is made in each node first, then between nodes: what arrives is the nested split under its other name."""
    steps = route((P, S(0, 2)), (S(0), S(0)), (2, 2), (8, 8))
    assert [(axis, step.kind) for axis, step in steps] == [(0, "reduce_scatter"), (1, "same")]
    back = route((S(0), S(0)), (B, S(0, 2)), (2, 2), (8, 8))
    assert [(axis, step.kind) for axis, step in back] == [(1, "same"), (0, "all_gather")]
    other = route((P, S(0, 4)), (S(0), S(0)), (2, 2), (16, 8))  # other sections are other cuts
    assert "all_gather" in [step.kind for _, step in other]


@pytest.mark.parametrize("hierarchy", [(2, 2), (2, 3), (4, 2), (2, 1, 2)])
def test_a_lifted_split_is_one_gather_away(hierarchy: tuple[int, ...]) -> None:
    """And every rank keeps of each part that is joined the piece that it had."""
    options = (B, S(0), S(0, 2), S(1))
    for nd in itertools.product(options, repeat=len(hierarchy)):
        for axis, sbp in enumerate(nd):
            up = lifted(nd, axis, B, hierarchy)
            if not sbp.is_split:
                assert up == nd
            elif hierarchy[axis] > 1 and nests(SHAPE, nd, hierarchy) and nests(SHAPE, up, hierarchy):
                moved = [(i, step.kind) for i, step in route(nd, up, hierarchy, SHAPE) if step.kind != "same"]
                finer = any(s.is_split and s.dim == sbp.dim and s.sections < sbp.sections for s in nd[axis + 1 :])
                assert finer or moved == [(axis, "all_gather")], (nd, axis, up, moved)
