"""Boxes stand where producer and reader disagree, once per value and SBP; each becomes the move of the table."""

from __future__ import annotations

import itertools

import pytest
import torch
from toys import STAGES, history, lines, lower, run

from graphzero.ir.graph import StepGraph
from graphzero.ir.text.parser import parse
from graphzero.passes import InsertBoxing, Pin, Pipeline, Propagate, Zero
from graphzero.testing import assert_graph, assert_same_step

STEP = """
graph step(dp=4)
  x  = batch()      : f32[8, 16]
  w  = param()      : f32[16, 4]
  m  = state(w)     : f32[16, 4]
forward:
  wf = use(w)       : f32[16, 4]
  y  = mm(x, wf)    : f32[8, 4]
backward:
  wb = use(w)       : f32[16, 4]
  k  = mm(x, wb)    : f32[8, 4]
  xt = t(x)         : f32[16, 8]
  g  = mm(xt, k)    : f32[16, 4]  ; gradient(w)
update:
  wu = use(w)       : f32[16, 4]
  m1 = add(m, g)    : f32[16, 4]
  w1 = sub(wu, m1)  : f32[16, 4]
  return y; update(w=w1, m=m1)
"""

BOXED_STAGE_3 = """
graph step(dp=4) boxed
  x     = batch()       : f32[8, 16]  S(0)!
  w     = param()       : f32[16, 4]  S(0)!
  m     = state(w)      : f32[16, 4]  S(0)!
forward:
  w_b   = box(w)        : f32[16, 4]  B  ; param(w)
  wf    = use(w_b)      : f32[16, 4]  B!
  y     = mm(x, wf)     : f32[8, 4]   S(0)
backward:
  w_b_1 = box(w)        : f32[16, 4]  B  ; param(w)
  wb    = use(w_b_1)    : f32[16, 4]  B!
  k     = mm(x, wb)     : f32[8, 4]   S(0)
  xt    = t(x)          : f32[16, 8]  S(1)
  g     = mm(xt, k)     : f32[16, 4]  P  ; gradient(w)
  g_s   = box(g)        : f32[16, 4]  S(0)  ; gradient(w)
  g_pin = pin(g_s, -1)  : f32[16, 4]  S(0)!  ; gradient(w)
update:
  wu    = use(w)        : f32[16, 4]  S(0)!
  m1    = add(m, g_pin) : f32[16, 4]  S(0)
  w1    = sub(wu, m1)   : f32[16, 4]  S(0)
  return y; update(w=w1, m=m1)
"""

RETURNED_VIEW = """
graph step(tp=2)
  x = batch()            : f32[8, 4]
  w = param()            : f32[4, 6]  S(1)!
forward:
  u = use(w)             : f32[4, 6]
  y = mm(x, u)           : f32[8, 6]
  v = view(y, [2, 4, 6]) : f32[2, 4, 6]
  return v
"""

LOWERED_STAGE_2 = """
graph step(dp=4) lowered
  x    = batch()                    : f32[8, 16]  S(0)!
  w    = param()                    : f32[16, 4]  B!
  m    = state(w)                   : f32[16, 4]  S(0)!
forward:
  y    = mm(x, w)                   : f32[8, 4]   S(0)
backward:
  k    = mm(x, w)                   : f32[8, 4]   S(0)
  xt   = t(x)                       : f32[16, 8]  S(1)
  g    = mm(xt, k)                  : f32[16, 4]  P  ; gradient(w)
  g_s  = reduce_scatter(g, 0, 'dp') : f32[16, 4]  S(0)  ; gradient(w)
update:
  w_s  = slice_shard(w, 0, 'dp')    : f32[16, 4]  S(0)  ; param(w)
  m1   = add(m, g_s)                : f32[16, 4]  S(0)
  w1   = sub(w_s, m1)               : f32[16, 4]  S(0)
  w1_b = all_gather(w1, 0, 'dp')    : f32[16, 4]  B  ; param(w)
  return y; update(w=w1_b, m=m1)
"""


def test_stage_3_boxes_a_parameter_once_per_phase_that_reads_it() -> None:
    assert_graph(history(STEP, Zero(3))["insert_boxing"].after, BOXED_STAGE_3)


def test_stage_2_ends_in_a_gather_of_the_updated_parameter() -> None:
    assert_graph(history(STEP, Zero(2))["lower_boxing"].after, LOWERED_STAGE_2)


def test_zero_moves_no_data_where_there_is_one_rank() -> None:
    for zero in STAGES:
        program = lower(STEP.replace("dp=4", "dp=1"), zero)
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            assert not lines(program, kind)


def boxed(body: str, head: str, returned: str) -> StepGraph:
    text = f"graph g(dp=2)\n  {head}\nforward:\n  {body}\n  return {returned}\n"
    return history(text)["insert_boxing"].after


def test_a_value_is_boxed_to_one_sbp_once() -> None:
    head = "x = batch() : f32[4, 6]  S(1)!\n  v = batch() : f32[4, 6]  B!"
    graph = boxed("a = _softmax(x, 1, False) : f32[4, 6]\n  b = cumsum(x, 1) : f32[4, 6]\n"
                  "  c = _log_softmax(x, 1, False) : f32[4, 6]", head, "a, b, c")  # fmt: skip
    assert len(lines(graph, "box(x)")) == 1


def test_a_reduction_stands_after_what_it_reduces_and_a_gather_before_its_reader() -> None:
    head = "x = batch() : f32[4, 6]\n  z = batch() : f32[4, 6]"
    graph = boxed("s = sum(x) : f32[]\n  c = relu(z) : f32[4, 6]\n  d = exp(c) : f32[4, 6]\n"
                  "  e = relu(s) : f32[]\n  f = sort.default(d, 0) : (f32[4, 6], i64[4, 6])\n  h = f[0] : f32[4, 6]",
                  head, "e, h")  # fmt: skip
    order = [line.split()[0] for line in str(graph).splitlines()]
    assert order.index("s_b") == order.index("s") + 1
    assert order.index("d_b") == order.index("f") - 1


def test_a_batch_split_output_stays_split_and_others_leave_whole() -> None:
    graph = boxed("a = relu(x) : f32[4, 6]\n  b = t(a) : f32[6, 4]\n  c = sum(a) : f32[]",
                  "x = batch() : f32[4, 6]", "a, b, c, 7")  # fmt: skip
    assert [str(o.meta["sbp"][0]) for o in graph.outputs[:3]] == ["S(0)", "B", "B"]
    assert graph.outputs[3] == 7


def test_a_returned_parameter_and_gradient_are_whole() -> None:
    text = STEP.replace("return y", "return y, wf, g, w1")
    for zero in STAGES:
        program = lower(text, zero)
        assert [str(o.meta["sbp"][0]) for o in program.outputs] == ["S(0)", "B", "B", "B"]
        assert_same_step(lower(text.replace("dp=4", "dp=1")), program)


def test_a_reduction_for_an_output_belongs_to_the_phase_that_made_it() -> None:
    text = "graph g(dp=2)\n  x = batch() : f32[8, 4]\nforward:\n  a = sum(x) : f32[]\n  y = relu(x) : f32[8, 4]\n"
    for record in history(text + "  return a, y\n").values():
        assert "update:" not in str(record.after)


def test_a_gathered_view_for_an_output_is_of_the_phase_of_its_gather() -> None:
    boxed = Pipeline([Pin(), Propagate(), InsertBoxing()])(parse(RETURNED_VIEW))
    gather = next(node for node in boxed.nodes if node.name == "y_b")
    assert [node.meta["phase"] for node in (gather, *gather.users)] == ["update", "update"]


# ---- the table, numerically

ONE_AXIS = ("B", "S(0)", "S(1)", "P")


def transition(src: str, dst: str, ranks: int, shape: str) -> str:
    """A value in SBP ``src``, boxed to ``dst``; it comes in and leaves as every rank can hold it."""
    given = "B" if src.startswith("P") else src
    make = "box(x)" if src.startswith("P") else "relabel(x)"
    body = f"v = {make} : f32[{shape}]  {src}\n  b = box(v) : f32[{shape}]  {dst}\n  y = box(b) : f32[{shape}]  B"
    return f"graph g(dp={ranks}) boxed\n  x = batch() : f32[{shape}]  {given}\nforward:\n  {body}\n  return y\n"


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("src", "dst"), list(itertools.product(ONE_AXIS, ONE_AXIS)))
def test_every_transition_keeps_the_value(src: str, dst: str, ranks: int) -> None:
    for shape in ("8, 4", "5, 3", "1, 2"):
        identity = transition("B", "B", 1, shape)
        assert_same_step(parse(identity), parse(transition(src, dst, ranks, shape)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dst", ["B", "S(0)", "P"])
@pytest.mark.parametrize("reduction", ["max", "min"])
def test_partial_maxima_and_minima_complete_and_split(reduction: str, dst: str) -> None:
    def text(ranks: int, to: str) -> str:
        made = f"P({reduction})" if ranks > 1 else "B"
        body = f"m = a{reduction}(x, [0]) : f32[6]  {made}\n  b = box(m) : f32[6]  {to}\n  y = box(b) : f32[6]  B"
        return (
            f"graph g(dp={ranks}) boxed\n  x = batch() : f32[8, 6]  {'S(0)' if ranks > 1 else 'B'}\n"
            f"forward:\n  {body}\n  return y\n"
        )

    assert_same_step(parse(text(1, "B")), parse(text(4, dst)), rtol=0, atol=1e-6)


def test_a_whole_value_is_a_partial_maximum_as_it_is() -> None:
    program = history_of(transition("P(max)", "B", 2, "4, 4"))
    assert len(lines(program, "relabel(x)")) == 1


def history_of(text: str) -> StepGraph:
    from graphzero.passes import LowerBoxing

    return Pipeline([LowerBoxing()])(parse(text))


@pytest.mark.parametrize(
    ("src", "dst", "move"),
    [
        ("B", "S(1)", "slice_shard(v, 1, 'dp')"),
        ("S(0)", "B", "all_gather(v, 0, 'dp')"),
        ("P", "S(1)", "reduce_scatter(v, 1, 'dp')"),
        ("P", "B", "all_reduce(v, 'dp', 'sum')"),
        ("P(max)", "B", "all_reduce(v, 'dp', 'max')"),
        ("S(0)", "S(1)", "all_to_all(v, 0, 1, 'dp')"),
        ("B", "P", "keep_first(v, 'dp')"),
        ("S(1)", "P", "place_shard(v, 1, 'dp')"),
    ],
)
def test_each_transition_becomes_the_move_of_the_table(src: str, dst: str, move: str) -> None:
    assert lines(history_of(transition(src, dst, 2, "4, 4")), move)


def test_insert_boxing_asks_for_propagation_first() -> None:
    def spoil(graph: StepGraph) -> StepGraph:
        graph.level = "propagated"
        return graph

    with pytest.raises(Exception, match="Run `propagate`|has no SBP"):
        Pipeline([Pin(), spoil, InsertBoxing()])(parse(STEP))
    Pipeline([Pin(), Propagate(), InsertBoxing()])(parse(STEP))


# ---- localize


def test_sizes_in_arguments_become_those_of_the_rank() -> None:
    body = """a = view(x, [32])           : f32[32]
  b = view(a, [8, 4])         : f32[8, 4]
  o = ones([8, 4])            : f32[8, 4]
  c = add(b, o)               : f32[8, 4]
  n = new_zeros(x, [3, 3])    : f32[3, 3]
  e = sum.dim_IntList(c, [1], True) : f32[8, 1]
  f = expand(e, [8, 4])       : f32[8, 4]
  y = mul(c, f)               : f32[8, 4]"""
    text = f"graph g(dp=4)\n  x = batch() : f32[8, 4]\nforward:\n  {body}\n  return y, n\n"
    program = history(text)["localize"].after
    for line in (
        "view(x, [32/dp])",
        "view(a, [8/dp, 4])",
        "ones([8/dp, 4])",
        "new_zeros(x, [3, 3])",
        "expand(e, [8/dp, 4])",
    ):
        assert lines(program, line), line
    assert_same_step(lower(text.replace("dp=4", "dp=1")), lower(text))


def test_random_draws_do_not_depend_on_the_number_of_ranks() -> None:
    body = "u = uniform_like(x, k, 3, [0, 0], [8, 4]) : f32[8, 4]"
    text = f"graph g(dp=4)\n  x = batch() : f32[8, 4]\n  k = seed() : i64[]\nforward:\n  {body}\n  return u\n"
    assert lines(history(text)["localize"].after, "uniform_like(x, k, 3, [8@dp, 0], [8, 4])")
    whole = run(lower(text.replace("dp=4", "dp=1")))["output 0"][0]
    assert torch.equal(torch.cat(run(lower(text))["output 0"]), whole)
    assert len(whole.unique()) == whole.numel()
