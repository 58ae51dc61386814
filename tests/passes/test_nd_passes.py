"""Passes on placements of several axes: nested splits in arguments, chains of collectives, ZeRO's choices."""

from __future__ import annotations

import operator
from collections import defaultdict

import pytest
from toys import STAGES, history, lines, lower, random_step, step

from graphzero.errors import VerifyError
from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.parser import parse
from graphzero.ir.transfer_layout import layout_of
from graphzero.ir.verifier.verify import verify
from graphzero.passes import Bucket, Zero
from graphzero.sbp.types import Nd, S
from graphzero.testing import assert_graph, assert_same_step

GRIDS = ["dp_replicate=2, dp_shard=2", "dp=2, tp=2", "dp_a=2, dp_b=3", "dp_a=3, dp_b=2", "tp=2, dp=2", "a=1, dp=4"]


def on_grid(text: str, axes: str) -> str:
    """The same step on other placement axes."""
    head, rest = text.split("\n", 1)
    return f"{head.split('(')[0]}({axes})\n{rest}"


@pytest.mark.parametrize("seed", range(12))
def test_steps_that_nobody_thought_of_do_the_same_on_grids_as_on_one_rank(seed: int) -> None:
    text = random_step(seed).replace("f32", "f64")
    whole = lower(on_grid(text, "dp=1"))
    zero = STAGES[seed % 4]
    axes = GRIDS[seed % len(GRIDS)]
    for bucket in (Bucket(1), Bucket(400), None):
        assert_same_step(whole, lower(on_grid(text, axes), zero, bucket))
    if "dp_shard" in axes:
        assert_same_step(whole, lower(on_grid(text, axes), Zero(3, axis=("dp_shard",))))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 22))
def test_many_more_steps_do_the_same_on_grids(seed: int) -> None:
    text = random_step(seed).replace("f32", "f64")
    whole = lower(on_grid(text, "dp=1"))
    for axes in (GRIDS[seed % len(GRIDS)], "dp_a=2, dp_b=2, dp_c=3"):
        for zero in STAGES:
            assert_same_step(whole, lower(on_grid(text, axes), zero, Bucket(1 + 100 * (seed % 7))))


# ---- buckets and their order

LAYERS = ("linear 8", "relu", "linear 8", "bias", "relu", "linear 8", "relu", "linear 4")


def program(zero: Zero | None, nbytes: int | None = None) -> StepGraph:
    text = step(LAYERS, batch=8, width=8, optimizer="sgd")
    return lower(on_grid(text, "dp_replicate=2, dp_shard=2"), zero, Bucket(nbytes))


def changed_axes(have: Nd, made: Nd) -> list[int]:
    """The axes on which a value changes; the same cut in other sections is no change."""
    plain = [[S(sbp.dim) if sbp.is_split else sbp for sbp in nd] for nd in (have, made)]
    return [axis for axis, (a, b) in enumerate(zip(*plain, strict=True)) if a is not b]


@pytest.mark.parametrize("zero", [*STAGES, Zero(2, axis=("dp_shard",))], ids=str)
@pytest.mark.parametrize("nbytes", [1, 300, None])
def test_a_bucket_holds_collectives_of_one_axis_and_continues_one_bucket(zero: Zero | None, nbytes: int | None) -> None:
    graph = program(zero, nbytes)
    for launch in graph.graph.find_nodes(op="call_function", target=ops.launch):
        layout = layout_of(graph, launch)
        assert layout is not None
        index = graph.placement.axis(layout.moves.axis)
        for member, made in zip(layout.moves.members, value.sbp_of(launch), strict=True):
            assert changed_axes(value.nd_of(member), made) == [index]
        continued = {m.args[0] for m in layout.moves.members if m.target is operator.getitem}
        assert len(continued) <= 1


def test_two_axes_need_twice_the_collectives_of_one_and_no_more() -> None:
    text = step(LAYERS, batch=8, width=8, optimizer="sgd")
    for zero in (Zero(1), Zero(2), Zero(3)):
        for nbytes in (1, 300, None):
            line, grid = lower(text, zero, Bucket(nbytes)), program(zero, nbytes)
            for kind in ("reduce_scatter", "all_gather"):
                launches = [len(lines(graph, f"launch('bucket_{kind}'")) for graph in (line, grid)]
                assert launches[1] == 2 * launches[0], (zero, nbytes, kind)


def test_what_carries_a_bucket_on_is_launched_with_the_next_bucket() -> None:
    """A pipeline: while the inner axis works on one bucket, the outer one works on the last, and the ops go on."""
    graph = program(Zero(2), 300)
    order = {node: i for i, node in enumerate(graph.nodes)}
    launches: dict[str, list[int]] = defaultdict(list)
    computed = [order[n] for n in graph.nodes if value.phase_of(n) == "backward" and "mm" in str(n.target)]
    waits: dict[str, list[int]] = defaultdict(list)
    for node in graph.graph.find_nodes(op="call_function", target=ops.launch):
        layout = layout_of(graph, node)
        assert layout is not None
        if layout.moves.kind == "reduce_scatter":
            launches[layout.moves.axis].append(order[node])
            waits[layout.moves.axis].append(order[next(iter(node.users))])
    outer, inner = launches["dp_replicate"], launches["dp_shard"]
    for i in range(len(outer) - 1):
        assert waits["dp_shard"][i] < outer[i] < inner[i + 1]
        assert any(inner[i] < at < waits["dp_shard"][i] for at in computed)


PREFETCHED = ["dp_replicate", "dp_replicate", "dp_shard", "dp_replicate", "dp_shard", "dp_replicate", "dp_shard"]


def test_gathers_along_both_axes_are_prefetched() -> None:
    graph = program(Zero(3), 300)
    forward = [n for n in graph.nodes if n.op == "call_function" and value.phase_of(n) == "forward"]
    launches = [n for n in forward if n.target is ops.launch and "all_gather" in str(n.args[0])]
    assert [launch.args[4] for launch in launches][:7] == PREFETCHED
    products = [forward.index(n) for n in forward if "mm" in str(n.target)]
    inner = [forward.index(n) for n in launches if n.args[4] == "dp_shard"]
    for k in range(2):  # the weight of the next layer is on its way when this layer begins
        assert inner[k + 1] < products[k]


# ---- ZeRO's choice


@pytest.mark.parametrize(
    ("axes", "given", "shape", "wanted"),
    [
        ("dp_a=2, dp_b=2", ("B", "B"), "8, 6", "(S(0)!, S(0)!)"),
        ("dp_a=2, dp_b=2", ("B", "B"), "6, 8", "(S(1)!, S(1)!)"),  # 6 rows over 4 ranks would be padded
        ("dp=2, tp=2", ("B", "S(0)"), "8, 6", "(S(1)!, S(0)!)"),
        ("dp=2, tp=2", ("B", "S(0)"), "8", "(S(0, 2)!, S(0)!)"),  # within the inner axis' cuts, it comes and goes alone
        ("dp=2, tp=2", ("B", "S(0)"), "6", "(B!, S(0)!)"),  # three rows a rank are not cut in two
        ("tp=2, dp=2", ("S(0)", "B"), "8", "(S(0)!, S(0)!)"),
        ("dp=2, tp=2", ("B", "B"), "8, 6", "(S(0)!, B!)"),
        ("dp=1, dp_b=4", ("B", "B"), "8, 6", "(B!, S(0)!)"),
    ],
)
def test_zero_nests_its_splits_in_one_dim_that_is_free(
    axes: str, given: tuple[str, str], shape: str, wanted: str
) -> None:
    pins = ", ".join(f"{sbp}!" for sbp in given)
    text = f"""
graph g({axes})
  w  = param() : f32[{shape}]  ({pins})
  m  = state(w) : f32[{shape}]  ({pins})
update:
  wu = use(w) : f32[{shape}]
  m1 = add(m, wu) : f32[{shape}]
  return 0; update(m=m1)
"""
    assert lines(history(text, Zero(3))["zero"].after, "state(w)")[0].endswith(wanted)


# ---- sizes and cuts


def test_sizes_and_starts_of_nested_splits_are_cut_outside_first() -> None:
    body = """a = view(x, [32])           : f32[32]
  b = view(a, [8, 4])         : f32[8, 4]
  u = uniform_like(x, k, 3, [0, 0], [8, 4]) : f32[8, 4]
  y = add(b, u)               : f32[8, 4]"""
    text = f"graph g(dp_a=2, dp_b=2)\n  x = batch() : f32[8, 4]\n  k = seed() : i64[]\nforward:\n  {body}\n  return y\n"
    local = history(text)["localize"].after
    for line in ("view(x, [32/dp_a/dp_b])", "view(a, [8/dp_a/dp_b, 4])", "[8@dp_a@dp_b, 0], [8, 4])"):
        assert lines(local, line), line
    assert_graph(parse(str(local)), str(local))
    assert_same_step(lower(on_grid(text, "dp=1")), lower(text))


def test_a_view_does_not_carry_cuts_that_are_not_the_same_cuts() -> None:
    head, body = (
        "graph g(dp_a=2, dp_b=2)\n  x = batch() : f32[6, 4]  {given}",
        "y = view(x, [24]) : f32[24]\n  return y",
    )
    text = f"{head}\nforward:\n  {body}\n"
    whole = lower(on_grid(text.format(given=""), "dp=1"))
    assert_same_step(whole, lower(text.format(given="(S(0)!, S(0)!)")))
    unsound = """
    graph g(dp=2, tp=2) boxed
      x = batch() : f32[6, 4]  (S(0), S(0))
    forward:
      y = view(x, [24]) : f32[24]  (S(0), S(0))
      return y
    """
    with pytest.raises(VerifyError, match="a dim over several axes"):
        verify(parse(unsound))
    verify(parse(unsound.replace("6, 4", "8, 3")))


def test_a_gather_whose_pieces_other_axes_cut_unevenly_goes_through_a_slot() -> None:
    """5 rows over 2 x 2 are pieces of 2, 1, 1 and 1: lines of the buffer have gaps within the second group."""
    text = """graph g(dp_a=2, dp_b=2)
  w = param() : f32[5, 3]  (S(0)!, S(0)!)
forward:
  f = use(w) : f32[5, 3]  (B!, B!)
  y = relu(f) : f32[5, 3]
  return y
"""
    graph = lower(text)
    launches = list(graph.graph.find_nodes(op="call_function", target=ops.launch))
    assert [(launch.args[4], launch.args[1] is None) for launch in launches] == [("dp_b", False), ("dp_a", True)]
    assert_same_step(lower(on_grid(text.replace("(S(0)!, S(0)!)", "B!").replace("(B!, B!)", "B!"), "dp=1")), graph)
    even = lower(text.replace("5, 3", "8, 3"))  # the outer axis first, by pieces, which then come as two sections
    launches = list(even.graph.find_nodes(op="call_function", target=ops.launch))
    assert [(launch.args[4], launch.args[1] is None) for launch in launches] == [("dp_a", True), ("dp_b", False)]
