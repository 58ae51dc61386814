import pytest
import torch
from graphs import TrainGraph, mean_square, virtual
from pass_toys import assert_sends_what_is_planned, batch, clipped_graph, nodes, sent
from passes.narrow_sums import NarrowSums
from torch import nn

import graphzero as gz
from graphzero.passes import InsertBoxing, LowerBoxing, Pin, Propagate, Zero
from graphzero.testing import assert_graph, assert_same_step

STEP = gz.parse("""
graph step(dp=2)
  x  = batch()                  : f32[8, 16]
  w  = param()                  : f32[16, 4]
  b  = param()                  : f32[4]
forward:
  wf = use(w)                   : f32[16, 4]
  bf = use(b)                   : f32[4]
  y  = addmm(bf, x, wf)         : f32[8, 4]
backward:
  xt = t(x)                     : f32[16, 8]
  gw = mm(xt, y)                : f32[16, 4]  ; gradient(w)
  gb = sum.dim_IntList(y, [0])  : f32[4]      ; gradient(b)
update:
  wu = use(w)                   : f32[16, 4]
  bu = use(b)                   : f32[4]
  w1 = add(wu, gw, alpha=-0.01) : f32[16, 4]
  b1 = add(bu, gb, alpha=-0.01) : f32[4]
  return y; update(w=w1, b=b1)
""")
EXPECTED = """
graph step(dp=2) lowered
  x         = batch()                                 : f32[8, 16]      S(0)!
  w         = param()                                 : f32[16, 4]      B!
  b         = param()                                 : f32[4]          B!
forward:
  y         = addmm(b, x, w)                          : f32[8, 4]       S(0)
backward:
  xt        = t(x)                                    : f32[16, 8]      S(1)
  gw        = mm(xt, y)                               : f32[16, 4]      P  ; gradient(w)
  gw_own    = as_local(gw, ['P'], [16, 4])            : f32[16, 4]      B
  gw_narrow = _to_copy(gw_own, dtype=torch.bfloat16)  : bf16[16, 4]     B
  gw_row    = unsqueeze(gw_narrow, 0)                 : bf16[1, 16, 4]  B
  gw_all    = as_global(gw_row, ['S(0)'], [2, 16, 4]) : bf16[2, 16, 4]  S(0)
  gw_all_s  = all_to_all(gw_all, 0, 1, 'dp')          : bf16[2, 16, 4]  S(1)  ; gradient(w)
  gw_wide   = _to_copy(gw_all_s, dtype=torch.float32) : f32[2, 16, 4]   S(1)
  gw_sum    = sum.dim_IntList(gw_wide, [0])           : f32[16, 4]      S(0)
  gb        = sum.dim_IntList(y, [0])                 : f32[4]          P  ; gradient(b)
  gb_b      = all_reduce(gb, 'dp', 'sum')             : f32[4]          B  ; gradient(b)
update:
  w_s       = slice_shard(w, 0, 'dp')                 : f32[16, 4]      S(0)  ; param(w)
  w1        = add(w_s, gw_sum, alpha=-0.01)           : f32[16, 4]      S(0)
  w1_b      = all_gather(w1, 0, 'dp')                 : f32[16, 4]      B  ; param(w)
  b1        = add(b, gb_b, alpha=-0.01)               : f32[4]          B
  return y; update(w=w1_b, b=b1)
"""


def lowered(*passes):
    zero = Zero(stage=2, shard_min_size=8)
    return gz.Pipeline([Pin(), zero, *passes, Propagate(), InsertBoxing(), LowerBoxing()])(STEP)


def test_addends_travel_narrow_and_a_gradient_that_is_whole_is_reduced_as_before():
    after = lowered(NarrowSums())
    assert_graph(after, EXPECTED)
    assert_same_step(STEP, after, ranks=2, rtol=1e-2, atol=1e-3)
    with pytest.raises(AssertionError, match="the steps differ in new w"):  # it changes values, by so much
        assert_same_step(STEP, after, ranks=2)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gradient_is_the_sum_of_what_ranks_have_rounded_once(ranks, stage):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Tanh(), nn.Linear(8, 12, bias=False))
    start = [p.detach().clone() for p in net.parameters()]
    x = torch.randn(16, 16)
    exact, rounded = ([torch.zeros_like(p) for p in net.parameters()] for _ in range(2))
    for share in x.chunk(ranks):
        loss = net(share).square().sum() / (len(x) * 12)
        for i, addend in enumerate(torch.autograd.grad(loss, [*net.parameters()])):
            exact[i] += addend
            rounded[i] += addend.bfloat16().float()
    graph = TrainGraph(net, mean_square, torch.optim.SGD(net.parameters(), lr=1.0), placement=ranks, stage=stage)
    graph.config.add_pass(NarrowSums(), after="zero")
    graph(x)
    stepped = graph.full_state_dict()["modules"]["model"].values()
    for before, after, gradient, other in zip(start, stepped, rounded, exact, strict=True):
        torch.testing.assert_close(before - after, gradient, rtol=1e-5, atol=1e-7)
        assert (gradient - other).abs().max() > 1e-5  # which is not what is summed in full


def test_half_of_the_bytes_of_gradients_are_sent():
    graphs = [clipped_graph(*passes, where=virtual(4), stage=2) for passes in ((), (NarrowSums(torch.float32),))]
    wide, narrow = (sum(sent(graph.compile(batch()), "gradients").values()) for graph in graphs)
    assert narrow == wide / 2  # of the float64 numbers of this model
    assert_sends_what_is_planned(graphs[1], batch())


def test_what_it_would_not_halve_is_left_alone():
    for where, stage, steps, dtype in (
        (virtual(2), 0, 1, torch.bfloat16),  # gradients are whole
        (virtual(2), 2, 2, torch.bfloat16),  # micro-batches are added up first
        (nodes(2, 2), 2, 1, torch.bfloat16),  # split over two axes
        (virtual(2), 2, 1, torch.float64),  # as wide as they are
    ):
        graph = clipped_graph(NarrowSums(dtype), where=where, stage=stage, steps=steps, after="zero")
        graph.compile(batch())
        assert not next(record for record in graph.history if record.name == "narrow_sums").diff()
