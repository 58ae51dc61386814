import pytest
from pass_toys import assert_sends_what_is_planned, assert_trains_as_on_one_device, batch, clipped_graph, nodes, sent
from passes.node_local_copy import NodeLocalCopy
from passes.two_hops import TwoHops

import graphzero as gz
from graphzero.ir import value
from graphzero.ir.storage.liveness import liveness
from graphzero.passes import InsertBoxing, LowerBoxing, Pin, Propagate, Zero
from graphzero.testing import assert_graph, assert_same_step

STEP = gz.parse("""
graph step(dp_node=2, dp_gpu=2)
  x  = batch()                  : f32[8, 16]
  w  = param()                  : f32[16, 16]
  b  = param()                  : f32[6]
  c  = batch()                  : f32[8, 6]
forward:
  wf = use(w)                   : f32[16, 16]
  bf = use(b)                   : f32[6]
  y  = mm(x, wf)                : f32[8, 16]
  z  = mul(c, bf)               : f32[8, 6]
backward:
  wb = use(w)                   : f32[16, 16]
  d  = mm(y, wb)                : f32[8, 16]
  bb = use(b)                   : f32[6]
  e  = mul(z, bb)               : f32[8, 6]
  return d, e
""")
EXPECTED = """
graph step(dp_node=2, dp_gpu=2) lowered
  x            = batch()                                : f32[8, 16]   (S(0)!, S(0)!)
  w            = param()                                : f32[16, 16]  (S(0)!, S(0)!)
  b            = param()                                : f32[6]       (S(0)!, S(0)!)
  c            = batch()                                : f32[8, 6]    (S(0)!, S(0)!)
forward:
  w_bs         = all_gather(w, 0, 'dp_node')            : f32[16, 16]  (B, S(0, 2))  ; param(w)
  w_node_bb    = all_gather(w_bs, 0, 'dp_gpu')          : f32[16, 16]  (B, B)  ; param(w)
  all_gather   = all_gather(b, 0, 'dp_gpu')             : f32[6]       (S(0), B)  ; param(b)
  b_bb         = all_gather(all_gather, 0, 'dp_node')   : f32[6]       (B, B)  ; param(b)
  y            = mm(x, w_node_bb)                       : f32[8, 16]   (S(0), S(0))
  z            = mul(c, b_bb)                           : f32[8, 6]    (S(0), S(0))
backward:
  w_node_bb_1  = all_gather(w_bs, 0, 'dp_gpu')          : f32[16, 16]  (B, B)  ; param(w)
  d            = mm(y, w_node_bb_1)                     : f32[8, 16]   (S(0), S(0))
  all_gather_1 = all_gather(b, 0, 'dp_gpu')             : f32[6]       (S(0), B)  ; param(b)
  b_bb_1       = all_gather(all_gather_1, 0, 'dp_node') : f32[6]       (B, B)  ; param(b)
  e            = mul(z, b_bb_1)                         : f32[8, 6]    (S(0), S(0))
  return d, e
"""


def lowered(*passes, stage=3):
    return gz.Pipeline([Pin(), Zero(stage=stage), *passes, Propagate(), InsertBoxing(), LowerBoxing()])(STEP)


def test_backward_gathers_a_copy_in_the_node_and_what_cuts_unevenly_as_before():
    after = lowered(NodeLocalCopy())
    assert_graph(after, EXPECTED)
    assert_same_step(STEP, after, ranks=4)


@pytest.mark.parametrize(("passes", "steps"), [((NodeLocalCopy(),), 1), ((NodeLocalCopy(), TwoHops()), 2)])
def test_it_trains_as_one_device_does(passes, steps):
    assert_trains_as_on_one_device(clipped_graph(*passes, steps=steps))


@pytest.mark.parametrize("ranks", [2, 4])
def test_backward_sends_nothing_between_nodes_and_holds_the_parameters_once_a_node(ranks):
    before, after = (
        clipped_graph(*passes, where=nodes(2, ranks)).compile(batch()) for passes in ([], [NodeLocalCopy()])
    )
    old, new = sent(before, "parameters"), sent(after, "parameters")
    assert old["dp_node", "backward"] > 0 == new["dp_node", "backward"]
    assert new["dp_node", "forward"] == old["dp_node", "forward"]
    assert held_from_forward(before) == 0
    read_again = {p for p in after.program.placeholders("param") if value.role_of(p).of in names(before, "backward")}
    assert held_from_forward(after) * ranks == sum(value.type_of(p).nbytes for p in read_again) > 0
    assert_sends_what_is_planned(after, batch())


def names(graph, phase):
    found = (one for one in graph.plan.collectives if one.phase == phase and one.what_for == "parameters")
    return {name for one in found for name in one.names}


def held_from_forward(graph):
    """Bytes of parameters that forward has gathered, in part or whole, and that are there when it ends."""
    at = liveness(graph.program)
    end = at.phase_end["forward"]
    params = {root for x in at.roots if (role := value.role_of(x)) and role.kind == "param" for root in at.roots[x]}
    return sum(span.nbytes for span in at.spans() if span.storage in params and 0 <= span.begin <= end < span.end)


def test_parameters_that_no_node_splits_are_left_alone():
    whole = gz.Pipeline([Pin(), Zero(stage=2), NodeLocalCopy()])
    whole(STEP)
    assert not whole.history[-1].diff()
    apart = gz.Pipeline([Pin(), Zero(stage=3, axis=("dp_gpu",)), NodeLocalCopy()])
    apart(STEP)
    assert not apart.history[-1].diff()
