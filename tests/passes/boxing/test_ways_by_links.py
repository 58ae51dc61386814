"""With links, boxing takes the ways of least time: fewer messages where values are small, slow axes last."""

from itertools import product

import pytest

from graphzero.ir.text.parser import parse
from graphzero.passes import InsertBoxing, LowerBoxing, Pin, Pipeline, Propagate
from graphzero.sbp.boxing import wire_bytes
from graphzero.sbp.link_costs import Link
from graphzero.sbp.route import route
from graphzero.sbp.types import B, P, S
from graphzero.testing import assert_same_step

FAST, SLOW, LATE = Link(1e-6, 1e11), Link(2e-5, 1e9), Link(1e-4, 1e9)
SHAPE, BIG = (64, 64), 1 << 26


def kinds(steps):
    return [(axis, move.kind) for axis, move in steps if move.kind != "same"]


def seconds(steps, src, hierarchy, links, nbytes):
    """By hand, from what each step sends."""
    nd, total = list(src), 0.0
    for axis, move in steps:
        piece = nbytes
        for i, sbp in enumerate(nd):
            piece /= hierarchy[i] if sbp.is_split and i != axis else 1
        total += links[axis].seconds(move.kind, wire_bytes(move.kind, piece, hierarchy[axis]), hierarchy[axis])
        nd[axis] = move.dst
    return total


def test_a_small_value_takes_the_way_of_fewest_messages_and_a_large_one_that_of_fewest_bytes():
    ways = [kinds(route((B, S(0)), (S(0), B), (2, 4), SHAPE, links=(LATE, LATE), nbytes=n)) for n in (1 << 10, 1 << 30)]
    assert ways[0] == [(1, "all_gather"), (0, "slice")]
    assert ways[1] == kinds(route((B, S(0)), (S(0), B), (2, 4), SHAPE))


def test_a_slow_outer_axis_carries_pieces_that_the_inner_one_still_cuts():
    src, dst = (S(0), S(0)), (B, B)
    for links in ((), (SLOW, FAST)):
        found = kinds(route(src, dst, (2, 4), SHAPE, links=links, nbytes=BIG))
        assert found == [(0, "all_gather"), (1, "all_gather")]
    found = kinds(route(src, dst, (2, 4), (63, 64), links=(SLOW, FAST), nbytes=BIG))  # no sections of 63
    assert found == [(1, "all_to_all"), (0, "all_gather"), (1, "all_gather")]


@pytest.mark.parametrize("hierarchy", [(2, 4), (4, 2)])
@pytest.mark.parametrize("links", [(SLOW, FAST), (FAST, SLOW), (LATE, LATE)])
@pytest.mark.parametrize("nbytes", [1 << 8, BIG])
def test_no_way_with_links_is_slower_than_the_one_of_fewest_bytes(hierarchy, links, nbytes):
    nds = list(product((B, S(0), S(1), P), repeat=2))
    for src, dst in product(nds, nds):
        by_time = route(src, dst, hierarchy, SHAPE, links=links, nbytes=nbytes)
        by_bytes = route(src, dst, hierarchy, SHAPE)
        assert (
            seconds(by_time, src, hierarchy, links, nbytes)
            <= seconds(by_bytes, src, hierarchy, links, nbytes) * (1 + 1e-6) + 1e-9
        ), f"{src} -> {dst}: {kinds(by_time)}, not {kinds(by_bytes)}"


WHERE = """
graph choice(tp=4)
  c = batch()        : bool[8, 8] S(0)!
  x = batch()        : f16[8, 8]  S(0)!
  y = batch()        : f64[8, 8]  S(1)!
forward:
  z = where.self(c, x, y) : f64[8, 8]
  return z
"""


def test_an_op_boxes_one_large_operand_rather_than_two_small_ones_where_messages_count():
    def sbp_of(links):
        graph = Pipeline([Pin(), Propagate(links)])(parse(WHERE))
        return next(str(node.meta["sbp"][0]) for node in graph.nodes if node.name == "z")

    assert sbp_of(()) == sbp_of((Link(0, 1e9),)) == "S(1)"
    assert sbp_of((LATE,)) == "S(0)"


NESTED = """
graph nested(dp=2, tp=4)
  x = batch()  : f32[8, 8]  (S(0)!, S(0)!)
  w = param()  : f32[8, 8]  (B!, S(1)!)
forward:
  y = mm(x, w) : f32[8, 8]
  z = relu(y)  : f32[8, 8]
  return z
"""


@pytest.mark.parametrize("links", [(SLOW, FAST), (FAST, SLOW), (LATE, LATE)])
def test_whatever_links_say_the_step_computes_the_same(links):
    before = parse(NESTED)
    after = Pipeline([Pin(), Propagate(links), InsertBoxing(links), LowerBoxing(links)])(parse(NESTED))
    assert_same_step(before, after, ranks=8)
