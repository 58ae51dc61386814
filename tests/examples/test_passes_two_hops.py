import itertools

import pytest
import torch
from pass_toys import assert_sends_what_is_planned, assert_trains_as_on_one_device, batch, clipped_graph, nodes, sent
from passes.two_hops import TwoHops

import graphzero as gz
from graphzero.passes import InsertBoxing, LowerBoxing, Pin, Propagate, Zero
from graphzero.testing import assert_graph, assert_same_step

STEP = gz.parse("""
graph step(dp_node=2, dp_gpu=2)
  x  = batch()                  : f32[8, 16]
  w  = param()                  : f32[16, 4]
  b  = param()                  : f32[6]
  c  = batch()                  : f32[8, 6]
forward:
  wf = use(w)                   : f32[16, 4]
  bf = use(b)                   : f32[6]
  y  = mm(x, wf)                : f32[8, 4]
  z  = mul(c, bf)               : f32[8, 6]
backward:
  xt = t(x)                     : f32[16, 8]
  gw = mm(xt, y)                : f32[16, 4]  ; gradient(w)
  gb = sum.dim_IntList(z, [0])  : f32[6]      ; gradient(b)
update:
  wu = use(w)                   : f32[16, 4]
  bu = use(b)                   : f32[6]
  w1 = add(wu, gw, alpha=-0.01) : f32[16, 4]
  b1 = add(bu, gb, alpha=-0.01) : f32[6]
  return y; update(w=w1, b=b1)
""")
EXPECTED = """
graph step(dp_node=2, dp_gpu=2) lowered
  x              = batch()                                     : f32[8, 16]  (S(0)!, S(0)!)
  w              = param()                                     : f32[16, 4]  (B!, B!)
  b              = param()                                     : f32[6]      (B!, B!)
  c              = batch()                                     : f32[8, 6]   (S(0)!, S(0)!)
forward:
  y              = mm(x, w)                                    : f32[8, 4]   (S(0), S(0))
  z              = mul(c, b)                                   : f32[8, 6]   (S(0), S(0))
backward:
  xt             = t(x)                                        : f32[16, 8]  (S(1), S(1))
  gw             = mm(xt, y)                                   : f32[16, 4]  (P, P)  ; gradient(w)
  gw_ps          = reduce_scatter(gw, 0, 'dp_gpu')             : f32[16, 4]  (P, S(0, 2))  ; gradient(w)
  gw_pin_1_ss    = reduce_scatter(gw_ps, 0, 'dp_node')         : f32[16, 4]  (S(0), S(0))  ; gradient(w)
  gb             = sum.dim_IntList(z, [0])                     : f32[6]      (P, P)  ; gradient(b)
  reduce_scatter = reduce_scatter(gb, 0, 'dp_node')            : f32[6]      (S(0), P)  ; gradient(b)
  gb_ss          = reduce_scatter(reduce_scatter, 0, 'dp_gpu') : f32[6]      (S(0), S(0))  ; gradient(b)
update:
  slice_shard    = slice_shard(w, 0, 'dp_node')                : f32[16, 4]  (S(0), B)  ; param(w)
  w_ss           = slice_shard(slice_shard, 0, 'dp_gpu')       : f32[16, 4]  (S(0), S(0))  ; param(w)
  slice_shard_1  = slice_shard(b, 0, 'dp_node')                : f32[6]      (S(0), B)  ; param(b)
  b_ss           = slice_shard(slice_shard_1, 0, 'dp_gpu')     : f32[6]      (S(0), S(0))  ; param(b)
  w1             = add(w_ss, gw_pin_1_ss, alpha=-0.01)         : f32[16, 4]  (S(0), S(0))
  all_gather     = all_gather(w1, 0, 'dp_node')                : f32[16, 4]  (B, S(0, 2))  ; param(w)
  w1_bb          = all_gather(all_gather, 0, 'dp_gpu')         : f32[16, 4]  (B, B)  ; param(w)
  b1             = add(b_ss, gb_ss, alpha=-0.01)               : f32[6]      (S(0), S(0))
  all_gather_1   = all_gather(b1, 0, 'dp_gpu')                 : f32[6]      (S(0), B)  ; param(b)
  b1_bb          = all_gather(all_gather_1, 0, 'dp_node')      : f32[6]      (B, B)  ; param(b)
  return y; update(w=w1_bb, b=b1_bb)
"""


def lowered(*passes):
    return gz.Pipeline([Pin(), Zero(stage=2), *passes, Propagate(), InsertBoxing(), LowerBoxing()])(STEP)


def test_a_gradient_is_reduced_in_the_node_first_and_one_that_cuts_unevenly_as_before():
    after = lowered(TwoHops())
    assert_graph(after, EXPECTED)
    assert_same_step(STEP, after, ranks=4)


@pytest.mark.parametrize(("stage", "steps"), [(1, 1), (2, 2), (3, 1)])
def test_it_trains_as_one_device_does(stage, steps):
    assert_trains_as_on_one_device(clipped_graph(TwoHops(), stage=stage, steps=steps))


@pytest.mark.parametrize("ranks", [2, 4])
def test_between_nodes_goes_one_micro_batch_of_several(ranks):
    """Micro-batches are added up between the two hops: between nodes goes what goes of one of them."""
    found = {}
    for steps, passes in itertools.product((1, 3), ([], [TwoHops()])):
        graph = clipped_graph(*passes, where=nodes(2, ranks), steps=steps).compile(batch(rows=48))
        found[steps, len(passes)] = sent(graph, "gradients")
        assert_sends_what_is_planned(graph, batch(rows=48))
    assert found[1, 0] == found[1, 1]
    assert found[3, 0] == {way: 3 * nbytes for way, nbytes in found[1, 0].items()}
    assert found[3, 1]["dp_gpu", "backward"] == found[3, 0]["dp_gpu", "backward"]
    assert found[3, 1]["dp_node", "backward"] == found[1, 0]["dp_node", "backward"] > 0


def test_where_one_hop_will_do_nothing_changes():
    line = gz.Pipeline([Pin(), Zero(stage=2), TwoHops("dp")])
    line(gz.parse(str(STEP).replace("dp_node=2, dp_gpu=2", "dp=4")))
    assert not line.history[-1].diff()
    apart = gz.Pipeline([Pin(), Zero(stage=2, axis=("dp_gpu",)), TwoHops()])
    apart(STEP)
    assert not apart.history[-1].diff()  # an all-reduce between nodes, of what each rank of a node holds
    with pytest.raises(gz.PlacementError, match="dp_nodes"):
        lowered(TwoHops("dp_nodes"))


def test_nodes_of_another_axis_order_reduce_so_without_it():
    where = gz.placement("cpu", torch.arange(4).view(2, 2).tolist(), names=("dp_gpu", "dp_node"), virtual=True)
    plans = [clipped_graph(*passes, where=where).compile(batch()).plan for passes in ([], [TwoHops()])]
    assert plans[0].to_dict() == plans[1].to_dict()
