"""On several placement axes: every transition of a value is carried out right, and sends what the table says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from math import prod

import pytest
import torch

from graphzero.errors import VerifyError
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.parser import parse
from graphzero.ir.verifier.verify import verify
from graphzero.passes import Localize, LowerBoxing, Pipeline
from graphzero.passes.boxing.lower_boxing import SMALL as SMALL_BYTES
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.tensors.shards import join, local_shape
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.sbp.boxing import wire_bytes
from graphzero.sbp.route import Step, route
from graphzero.sbp.shards import nests
from graphzero.sbp.types import B, Nd, P, S, Sbp, partial, replace_at
from graphzero.testing import assert_graph

MAX = partial("max")
TWO = list(itertools.product((B, S(0), S(1), P), repeat=2))
SMALL, LARGE = (8, 4), (64, 64)  # small tensors count collectives, large ones bytes
UNEVEN = [(5, 3), (1, 2), (7, 0), (66, 65)]


def box_of(src: Nd, dst: Nd, shape: tuple[int, ...], hierarchy: tuple[int, ...]) -> StepGraph:
    """A graph that boxes its input from ``src`` to ``dst``, as it runs."""
    axes = ", ".join(f"a{i}={n}" for i, n in enumerate(hierarchy))
    given, made = (f"({', '.join(map(str, nd))})" for nd in (src, dst))
    type_ = f"f64{list(shape)}"
    text = (
        f"graph g({axes}) boxed\n  x = batch() : {type_}  {given}\nforward:\n  y = box(x) : {type_}  {made}\n  return"
    )
    graph = parse(f"{text} 0\n")
    graph.set_output([graph.node("y")], {}, {})  # after verify: a partial value may not leave a real step
    lowered = Localize()(LowerBoxing()(graph))
    for node in lowered.nodes:
        if node.op == "call_function":
            assert len(node.all_input_nodes) == 1
    return lowered


def held(src: Nd, shape: tuple[int, ...], hierarchy: tuple[int, ...]) -> list[torch.Tensor]:
    """Random pieces of a value in ``src``: every rank of a partial one has its own, equal ranks hold equal ones."""
    size = torch.Size(hierarchy).numel()
    shapes = [local_shape(shape, src, hierarchy, position) for position in range(size)]
    pieces = []
    for position, one in enumerate(shapes):
        at = torch.unravel_index(torch.tensor(position), hierarchy)
        seed = sum(100**i * int(place) for i, (place, sbp) in enumerate(zip(at, src, strict=True)) if sbp is not B)
        pieces.append(torch.randn(one, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return pieces


def bytes_of(steps: Sequence[Step], src: Nd, hierarchy: tuple[int, ...], nbytes: int) -> float:
    """Bytes that one rank sends when a tensor of ``nbytes`` in all takes these steps from ``src``, padding apart."""
    nd, total = src, 0.0
    for axis, step in steps:
        others = (ranks for i, ranks in enumerate(hierarchy) if i != axis and nd[i].is_split)
        total += wire_bytes(step.kind, nbytes, hierarchy[axis]) / prod(others)
        nd = replace_at(nd, axis, step.dst)
    return total


def check(src: Nd, dst: Nd, shape: tuple[int, ...], hierarchy: tuple[int, ...]) -> None:
    graph = box_of(src, dst, shape, hierarchy)
    world = VirtualWorld(graph.placement)
    world.trace = []
    given = held(src, shape, hierarchy)
    whole = join(given, src, hierarchy)
    (found,) = Executor(graph, world).run_step({"x": [piece.clone() for piece in given]}).outputs
    what = f"{src} -> {dst} of {shape} on {hierarchy}"
    torch.testing.assert_close(join(found, dst, hierarchy), whole, msg=lambda m: f"{what}: {m}")
    for position, piece in enumerate(found):
        assert tuple(piece.shape) == local_shape(shape, dst, hierarchy, position), what
        if B in dst and not any(sbp.is_partial for sbp in dst):
            here = [p.equal(piece) for i, p in enumerate(found) if _same_part(dst, hierarchy, i, position)]
            assert all(here), what
    sent = sum(entry.nbytes for entry in world.trace)
    steps = route(src, dst, hierarchy, shape, is_small=whole.numel() * 8 < SMALL_BYTES)
    table = bytes_of(steps, src, hierarchy, whole.numel() * 8)
    if all(size % len(given) == 0 for size in shape):
        assert sent == pytest.approx(table, rel=1e-12), what
    else:  # padding
        assert sent >= table - 1e-9, what


def _same_part(nd: Nd, hierarchy: tuple[int, ...], i: int, j: int) -> bool:
    one, other = (torch.unravel_index(torch.tensor(k), hierarchy) for k in (i, j))
    return all(sbp is B or a == b for sbp, a, b in zip(nd, one, other, strict=True))


@pytest.mark.parametrize("src", TWO, ids=str)
def test_all_transitions_on_two_axes_keep_the_value_and_send_what_the_table_says(src: Nd) -> None:
    for dst in TWO:
        for shape in (SMALL, LARGE, (66, 65), (5, 3)):
            check(src, dst, shape, (2, 2))


@pytest.mark.parametrize("shape", UNEVEN, ids=str)
def test_uneven_pieces_of_uneven_pieces_move_as_well(shape: tuple[int, ...]) -> None:
    for src, dst in itertools.product(TWO[::2], TWO[1::2]):
        check(src, dst, shape, (3, 2))
    for src, dst in itertools.product([(S(0), S(0)), (S(1), S(0)), (S(0), B), (P, S(0))], repeat=2):
        check(src, dst, shape, (2, 3))


@pytest.mark.parametrize("seed", range(24))
def test_random_transitions_on_random_hierarchies_keep_the_value(seed: int) -> None:
    draw = random.Random(seed)
    hierarchy = tuple(draw.choice((1, 2, 2, 3)) for _ in range(draw.choice((2, 2, 3))))
    even = torch.Size(hierarchy).numel()
    shape = tuple(draw.choice((even, 2 * even, 5, 7)) for _ in range(draw.choice((1, 2))))
    options = (B, P, S(0), S(0), S(len(shape) - 1), partial("max"))
    for _ in range(6):
        src, dst = (tuple(draw.choice(options) for _ in hierarchy) for _ in range(2))
        if not any(sbp is MAX for sbp in dst) or MAX in src:
            check(src, dst, shape, hierarchy)


def test_three_axes_nest_three_deep() -> None:
    nested = (S(0), S(0), S(0))
    ends: list[Nd] = [(B, B, B), (P, P, P), (S(0), B, S(0)), (B, S(0), S(1)), (S(1), S(0), P), (P, B, S(0))]
    for end, shape in itertools.product(ends, [(16, 8), (64, 64), (11, 3)]):
        check(nested, end, shape, (2, 2, 2))
        check(end, nested, shape, (2, 2, 2))


def test_maxima_complete_from_the_inside_where_axes_combine_by_different_reductions() -> None:
    ends: list[Nd] = [(B, B), (S(0), B), (B, S(0)), (S(0), S(0)), (P, MAX), (MAX, MAX), (MAX, P), (S(1), MAX)]
    for src, dst in itertools.product([(MAX, MAX), (P, MAX), (MAX, P), (MAX, S(0)), (S(0), MAX)], ends):
        for shape in (SMALL, LARGE, (5, 3)):
            check(src, dst, shape, (2, 2))


def test_an_axis_of_one_rank_moves_nothing() -> None:
    for src, dst in itertools.product(TWO, TWO):
        for hierarchy in ((1, 2), (2, 1), (1, 1)):
            check(src, dst, SMALL, hierarchy)


def words(src: Nd, dst: Nd, is_small: bool = False) -> list[tuple[str, int]]:
    steps = route(src, dst, (2, 2), (64, 64), is_small=is_small)
    return [(step.kind, axis) for axis, step in steps if step.kind != "same"]


def test_the_way_of_a_gradient_is_the_cheapest_one() -> None:
    # a large sum is scattered over the inner axis first, so that the outer one sees a part of it only
    assert words((P, P), (B, B)) == [("reduce_scatter", 1), ("all_reduce", 0), ("all_gather", 1)]
    assert words((P, P), (B, B), is_small=True) == [("all_reduce", 1), ("all_reduce", 0)]
    assert words((P, P), (B, S(0))) == [("reduce_scatter", 1), ("all_reduce", 0)]
    assert words((P, P), (S(0), S(0))) == [("reduce_scatter", 1), ("reduce_scatter", 0)]
    assert words((S(0), S(0)), (B, B)) == [("all_gather", 0), ("all_gather", 1)]
    assert words((B, B), (S(0), S(0))) == [("slice", 0), ("slice", 1)]


def test_a_split_that_goes_outside_another_of_the_same_dim_is_no_cut() -> None:
    assert words((B, S(0)), (S(0), S(0)), is_small=True) == [("all_gather", 1), ("slice", 0), ("slice", 1)]
    text = """
    graph g(dp=2, tp=2) lowered
      x = batch() : f32[8, 4]  (B, S(0))
    forward:
      y = slice_shard(x, 0, 'dp') : f32[8, 4]  (S(0), S(0))
      return y
    """
    with pytest.raises(VerifyError, match="slice_shard does not"):
        verify(parse(text))


CHAIN = """
graph g(dp_replicate=2, dp_shard=2) lowered
  x              = batch()                                           : f32[64, 64]  (P, P)
forward:
  reduce_scatter = reduce_scatter(x, 0, 'dp_shard')                  : f32[64, 64]  (P, S(0))  ; gradient(w)
  y              = all_reduce(reduce_scatter, 'dp_replicate', 'sum') : f32[64, 64]  (B, S(0))  ; gradient(w)
  z              = all_gather(y, 0, 'dp_shard')                      : f32[64, 64]  (B, B)
  return z
"""


def test_a_lowered_box_is_a_chain_of_collectives_of_one_axis_each() -> None:
    text = """
    graph g(dp_replicate=2, dp_shard=2) boxed
      x = batch() : f32[64, 64]  (P, P)
    forward:
      y = box(x)  : f32[64, 64]  (B, S(0))  ; gradient(w)
      z = box(y)  : f32[64, 64]  (B, B)
      return z
    """
    assert_graph(Pipeline([LowerBoxing()])(parse(text)), CHAIN)


MIN = partial("min")
SECTIONED = (B, P, S(0), S(1), S(0, 2), S(0, 4), S(1, 2))


def sectioned(shape: tuple[int, ...], hierarchy: tuple[int, ...], sbps: tuple[Sbp, ...] = SECTIONED) -> list[Nd]:
    """What a value may be on a hierarchy, sections and their pieces even."""
    return [nd for nd in itertools.product(sbps, repeat=len(hierarchy)) if nests(shape, nd, hierarchy)]


def check_all(shape: tuple[int, ...], hierarchy: tuple[int, ...], nds: list[Nd], share: int = 1) -> None:
    """All transitions among ``nds``, or one in ``share`` of them."""
    for src, dst in itertools.islice(itertools.product(nds, nds), 0, None, share):
        check(src, dst, shape, hierarchy)


@pytest.mark.parametrize("hierarchy", [(2, 2), (2, 3), (3, 2)], ids=str)
def test_splits_in_sections_go_to_all_others_on_two_axes(hierarchy: tuple[int, ...]) -> None:
    check_all((48, 12), hierarchy, sectioned((48, 12), hierarchy), share=31)


@pytest.mark.slow
@pytest.mark.parametrize("hierarchy", [(2, 2), (2, 3), (1, 2), (2, 1)], ids=str)
def test_more_transitions_of_splits_in_sections_on_two_axes(hierarchy: tuple[int, ...]) -> None:
    check_all((48, 12), hierarchy, sectioned((48, 12), hierarchy), share=5)


def test_splits_in_sections_go_to_all_others_on_three_axes() -> None:
    check_all((64, 16), (2, 2, 2), sectioned((64, 16), (2, 2, 2)), share=3001)


@pytest.mark.parametrize("shape", [(0, 6), (6, 0), (0, 0)], ids=str)
def test_tensors_without_elements_go_from_sections_to_sections(shape: tuple[int, ...]) -> None:
    ends = [one for one in (B, S(0), S(1), S(1, 3), S(0, 2), S(0, 3)) if nests(shape, (one,), (2,))]
    for src, dst in itertools.product(ends, repeat=2):
        check((src,), (dst,), shape, (2,))
        text = f"graph g(dp=2) boxed\n  x = batch() : f64{list(shape)}  {src}\nforward:\n  y = box(x)"
        Pipeline([LowerBoxing(), Localize()])(parse(f"{text} : f64{list(shape)}  {dst}\n  return y\n"))


def test_maxima_and_minima_go_to_splits_in_sections() -> None:
    nds = sectioned((48, 12), (2, 3), (B, S(1), S(0, 2), S(0, 4), MAX, MIN))
    check_all((48, 12), (2, 3), [nd for nd in nds if MAX in nd or MIN in nd] + nds[:9], share=7)
