"""Propagation follows the pins, introduces no split, and reduces where that is cheapest."""

from __future__ import annotations

import warnings

import pytest
from toys import STAGES, history, lines, lower, on_ranks, step

from graphzero.ir.graph import StepGraph
from graphzero.passes import Zero
from graphzero.sbp.registry import NoRuleWarning
from graphzero.testing import assert_graph, assert_same_step

DATA_PARALLEL = """
graph step(dp=4)
  x  = batch()      : f32[8, 16]
  w  = param()      : f32[16, 4]
  m  = state(w)     : f32[16, 4]
forward:
  wf = use(w)       : f32[16, 4]
  y  = mm(x, wf)    : f32[8, 4]
backward:
  xt = t(x)         : f32[16, 8]
  g  = mm(xt, y)    : f32[16, 4]  ; gradient(w)
update:
  wu = use(w)       : f32[16, 4]
  m0 = mul(m, 0.9)  : f32[16, 4]
  m1 = add(m0, g)   : f32[16, 4]
  w1 = sub(wu, m1)  : f32[16, 4]
  return y; update(w=w1, m=m1)
"""

STAGE_0 = """
graph step(dp=4) propagated
  x     = batch()        : f32[8, 16]  S(0)!
  w     = param()        : f32[16, 4]  B!
  m     = state(w)       : f32[16, 4]  B!
forward:
  wf    = use(w)         : f32[16, 4]  B!
  y     = mm(x, wf)      : f32[8, 4]   S(0)
backward:
  xt    = t(x)           : f32[16, 8]  S(1)
  g     = mm(xt, y)      : f32[16, 4]  P  ; gradient(w)
  g_pin = pin(g, -1)     : f32[16, 4]  B!  ; gradient(w)
update:
  wu    = use(w)         : f32[16, 4]  B!
  m0    = mul(m, 0.9)    : f32[16, 4]  B
  m1    = add(m0, g_pin) : f32[16, 4]  B
  w1    = sub(wu, m1)    : f32[16, 4]  B
  return y; update(w=w1, m=m1)
"""

STAGE_3 = """
graph step(dp=4) propagated
  x     = batch()        : f32[8, 16]  S(0)!
  w     = param()        : f32[16, 4]  S(0)!
  m     = state(w)       : f32[16, 4]  S(0)!
forward:
  wf    = use(w)         : f32[16, 4]  B!
  y     = mm(x, wf)      : f32[8, 4]   S(0)
backward:
  xt    = t(x)           : f32[16, 8]  S(1)
  g     = mm(xt, y)      : f32[16, 4]  P  ; gradient(w)
  g_pin = pin(g, -1)     : f32[16, 4]  S(0)!  ; gradient(w)
update:
  wu    = use(w)         : f32[16, 4]  S(0)!
  m0    = mul(m, 0.9)    : f32[16, 4]  S(0)
  m1    = add(m0, g_pin) : f32[16, 4]  S(0)
  w1    = sub(wu, m1)    : f32[16, 4]  S(0)
  return y; update(w=w1, m=m1)
"""


def forward(body: str, head: str = "x = batch() : f32[8, 16]", returned: str = "y", axes: str = "dp=4") -> str:
    return f"graph g({axes})\n  {head}\nforward:\n  {body}\n  return {returned}\n"


def sbps(text: str, zero: Zero | None = None) -> dict[str, str]:
    graph = history(text, zero)["propagate"].after
    return {n.name: str(n.meta["sbp"][0]) for n in graph.nodes if n.op != "output" and n.meta["sbp"]}


def collectives(graph: StepGraph) -> list[str]:
    """The lowered collectives, as ``kind of value``."""
    found = []
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        found += [f"{kind} {line.split(kind + '(')[1].split(',')[0]}" for line in lines(graph, f" {kind}(")]
    return sorted(found)


def moves(text: str, zero: Zero | None = None) -> list[str]:
    return collectives(history(text, zero)["localize"].after)


@pytest.mark.parametrize(("zero", "expected"), [(None, STAGE_0), (Zero(3), STAGE_3)])
def test_splits_spread_from_the_pins(zero: Zero | None, expected: str) -> None:
    assert_graph(history(DATA_PARALLEL, zero)["propagate"].after, expected)


def test_no_split_comes_to_be_without_a_pin() -> None:
    text = step(("linear 12", "bias", "relu", "norm", "linear 3"))
    for zero in STAGES:
        graph = history(text.replace("(dp=", "(tp="), zero)["propagate"].after
        assert not lines(graph, " S(")
        assert not lines(graph, " P")


def test_the_batch_is_not_gathered_for_a_statistic() -> None:
    body = """s = sum.dim_IntList(x, [0], True) : f32[1, 16]
  m = div(s, 8)      : f32[1, 16]
  c = sub(x, m)      : f32[8, 16]
  q = mul(c, c)      : f32[8, 16]
  v = sum.dim_IntList(q, [0], True) : f32[1, 16]
  e = add(v, 1e-05)  : f32[1, 16]
  r = rsqrt(e)       : f32[1, 16]
  y = mul(c, r)      : f32[8, 16]"""
    text = forward(body)
    assert moves(text) == ["all_reduce s", "all_reduce v"]
    assert sbps(text)["y"] == "S(0)"
    assert_same_step(lower(on_ranks(text, 1)), lower(text))


def test_a_chain_of_linear_ops_is_reduced_where_it_is_smallest() -> None:
    shrinking = forward("a = sum.dim_IntList(x, [0]) : f32[16]\n  b = mul(a, 2) : f32[16]\n  y = sum(b) : f32[]")
    assert moves(shrinking) == ["all_reduce y"]
    growing = forward("a = sum(x) : f32[]\n  b = mul(a, 2) : f32[]\n  y = expand(b, [64]) : f32[64]")
    assert moves(growing)[0] in ("all_reduce a", "all_reduce b")
    assert len(moves(growing)) == 1
    waist = forward(
        "a = sum.dim_IntList(x, [0]) : f32[16]\n  b = sum(a) : f32[]\n  c = mul(b, 3) : f32[]\n"
        "  y = expand(c, [64]) : f32[64]"
    )
    assert moves(waist)[0] in ("all_reduce b", "all_reduce c")
    for text in (shrinking, growing, waist):
        assert_same_step(lower(on_ranks(text, 1)), lower(text))


def test_a_value_with_two_readers_is_reduced_once() -> None:
    text = forward(
        "a = sum.dim_IntList(x, [0]) : f32[16]\n  b = relu(a) : f32[16]\n  c = exp(a) : f32[16]", returned="b, c"
    )
    assert moves(text) == ["all_reduce a"]


def test_a_sum_of_partial_sums_is_reduced_once() -> None:
    tied = forward("a = sum.dim_IntList(x, [0]) : f32[16]\n  q = mul(x, x) : f32[8, 16]\n"
                   "  b = sum.dim_IntList(q, [0]) : f32[16]\n  y = add(a, b) : f32[16]")  # fmt: skip
    assert moves(tied) == ["all_reduce y"]
    assert_same_step(lower(on_ranks(tied, 1)), lower(tied))


def test_a_gradient_that_two_uses_of_a_weight_make_is_reduced_once() -> None:
    text = step(("linear 6", "tied", "linear 3"), ranks=2)
    assert len(moves(text)) == len(moves(text.replace("tied", ""))) == 3  # two gradients and the loss
    assert len([move for move in moves(text, Zero(2)) if move.startswith("reduce_scatter")]) == 2


def test_an_added_bias_does_not_force_a_reduction_twice() -> None:
    text = forward("a = sum.dim_IntList(x, [0]) : f32[16]\n  b = add(a, w) : f32[16]\n  y = relu(b) : f32[16]",
                   head="x = batch() : f32[8, 16]\n  w = param() : f32[16]")  # fmt: skip
    assert len(moves(text)) == 1
    assert_same_step(lower(on_ranks(text, 1)), lower(text))


def test_maxima_and_minima_are_completed_by_their_own_reduction() -> None:
    text = forward("a = amax(x) : f32[]\n  b = amin(x, [0]) : f32[16]", returned="a, b")
    found = sbps(text)
    assert (found["a"], found["b"]) == ("P(max)", "P(min)")
    program = history(text)["lower_boxing"].after
    assert len(lines(program, "'max')")) == 1
    assert len(lines(program, "'min')")) == 1
    assert_same_step(lower(on_ranks(text, 1)), lower(text))


def test_sources_are_made_where_they_are_read() -> None:
    body = (
        "a = arange(8, dtype=torch.float32) : f32[8]\n  b = view(a, [8, 1]) : f32[8, 1]\n  c = mul(x, b) : f32[8, 16]\n"
    )
    body += "  o = ones([8, 16]) : f32[8, 16]\n  y = add(c, o) : f32[8, 16]"
    found = sbps(forward(body))
    assert (found["a"], found["b"], found["o"], found["y"]) == ("B", "S(0)", "S(0)", "S(0)")
    assert moves(forward(body)) == []
    assert_same_step(lower(on_ranks(forward(body), 1)), lower(forward(body)))


def test_a_whole_value_that_all_readers_cut_is_made_cut() -> None:
    text = DATA_PARALLEL.replace("m0 = mul(m, 0.9)", "k  = mul(wu, 0.1) : f32[16, 4]\n  m0 = add(m, k)   ")
    found = sbps(text.replace("wu = use(w)       : f32[16, 4]", "wu = use(w) : f32[16, 4]"), Zero(1))
    assert (found["k"], found["m0"]) == ("S(0)", "S(0)")


MEGATRON = """
graph megatron(tp=2)
  x  = batch()    : f32[8, 6]
  w1 = param()    : f32[6, 12]  S(1)!
  w2 = param()    : f32[12, 4]  S(0)!
forward:
  u1 = use(w1)    : f32[6, 12]
  h  = mm(x, u1)  : f32[8, 12]
  r  = relu(h)    : f32[8, 12]
  u2 = use(w2)    : f32[12, 4]
  y  = mm(r, u2)  : f32[8, 4]
backward:
  rt = t(r)       : f32[12, 8]
  g2 = mm(rt, y)  : f32[12, 4]  ; gradient(w2)
  b2 = use(w2)    : f32[12, 4]
  t2 = t(b2)      : f32[4, 12]
  gr = mm(y, t2)  : f32[8, 12]
  gh = threshold_backward(gr, r, 0) : f32[8, 12]
  b1 = use(w1)    : f32[6, 12]
  t1 = t(b1)      : f32[12, 6]
  gx = mm(gh, t1) : f32[8, 6]
  xt = t(x)       : f32[6, 8]
  g1 = mm(xt, gh) : f32[6, 12]  ; gradient(w1)
update:
  c1 = use(w1)    : f32[6, 12]
  c2 = use(w2)    : f32[12, 4]
  n1 = sub(c1, g1) : f32[6, 12]
  n2 = sub(c2, g2) : f32[12, 4]
  return y, gx; update(w1=n1, w2=n2)
"""


def test_two_split_matmuls_need_one_all_reduce_each_way() -> None:
    found = sbps(MEGATRON)
    assert (found["h"], found["r"], found["y"], found["gx"]) == ("S(1)", "S(1)", "P", "P")
    assert moves(MEGATRON) == ["all_reduce gx", "all_reduce y"]
    whole = MEGATRON.replace("tp=2", "tp=1")
    assert_same_step(lower(whole), lower(MEGATRON))


def test_a_bias_between_split_matmuls_needs_no_other_collective() -> None:
    text = MEGATRON.replace("w2 = param()", "b  = param() : f32[12]  S(0)!\n  w2 = param()")
    text = text.replace("  r  = relu(h) ", "  ub = use(b) : f32[12]\n  hb = add(h, ub) : f32[8, 12]\n  r  = relu(hb) ")
    assert moves(text) == ["all_reduce gx", "all_reduce y"]


def test_scalars_have_no_sbp_and_disturb_nothing() -> None:
    text = forward("a = operator.mul(c, 2.0) : float\n  y = mul(x, a) : f32[8, 16]",
                   head="x = batch() : f32[8, 16]\n  c = scalar() : float")  # fmt: skip
    assert sbps(text) == {"x": "S(0)", "y": "S(0)"}


def test_an_op_without_a_rule_runs_whole_and_warns_by_name() -> None:
    text = forward("y = frobenius_norm.dim(x, [1]) : f32[8]")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = sbps(text)
    names = [str(w.message) for w in caught if issubclass(w.category, NoRuleWarning)]
    assert found["y"] == "B"
    assert all("frobenius_norm" in name for name in names)


def test_on_two_axes_each_is_decided_alone() -> None:
    text = MEGATRON.replace("tp=2", "dp=2, tp=2").replace("S(1)!", "(B!, S(1)!)").replace("S(0)!", "(B!, S(0)!)")
    graph = history(text)["propagate"].after
    found = {n.name: str(n.meta["sbp"]) for n in graph.nodes if n.op != "output"}
    assert (found["h"], found["y"], found["g1"]) == ("(S(0), S(1))", "(S(0), P)", "(P, S(1))")
