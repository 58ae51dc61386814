import pytest
import torch
from graphs import TrainGraph, mean_square
from pass_toys import assert_sends_what_is_planned, batch, clipped_graph, model, nodes, sent
from passes.int8_gathers import Int8Gathers, from_int8, int8_blocks
from passes.node_local_copy import NodeLocalCopy
from passes.two_hops import TwoHops

import graphzero as gz
from graphzero.passes import InsertBoxing, LowerBoxing, Pin, Propagate, Zero
from graphzero.testing import assert_graph, assert_same_step, check_rule

BLOCK = 8
STEP = gz.parse("""
graph step(dp=2)
  x  = batch()                    : f32[8, 6]
  w  = param()                    : f32[16, 6]
  b  = param()                    : f32[16]
forward:
  wf = use(w)                     : f32[16, 6]
  bf = use(b)                     : f32[16]
  wt = t(wf)                      : f32[6, 16]
  y  = addmm(bf, x, wt)           : f32[8, 16]
backward:
  yt = t(y)                       : f32[16, 8]
  gw = mm(yt, x)                  : f32[16, 6]  ; gradient(w)
  wb = use(w)                     : f32[16, 6]
  dx = mm(y, wb)                  : f32[8, 6]
update:
  wu = use(w)                     : f32[16, 6]
  w1 = add(wu, gw, alpha=-0.01)   : f32[16, 6]
  return dx; update(w=w1)
""")
EXPECTED = """
graph step(dp=2) lowered
  x           = batch()                                                  : f32[8, 6]         S(0)!
  w           = param()                                                  : f32[16, 6]        S(0)!
  b           = param()                                                  : f32[16]           S(0)!
forward:
  w_int8      = examples.int8_blocks.default(w, 4)                       : (i8[16, 6]  S(0), f32[16, 2]  S(0))
  w_q         = w_int8[0]                                                : i8[16, 6]         S(0)  ; param(w)
  w_scale     = w_int8[1]                                                : f32[16, 2]        S(0)  ; param(w)
  w_q_b       = all_gather(w_q, 0, 'dp')                                 : i8[16, 6]         B  ; param(w)
  w_scale_b   = all_gather(w_scale, 0, 'dp')                             : f32[16, 2]        B  ; param(w)
  wf_wide     = examples.from_int8.default(w_q_b, w_scale_b, 4, torch.float32) : f32[16, 6]        B
  b_b         = all_gather(b, 0, 'dp')                                   : f32[16]           B  ; param(b)
  wt          = t(wf_wide)                                               : f32[6, 16]        B
  y           = addmm(b_b, x, wt)                                        : f32[8, 16]        S(0)
backward:
  yt          = t(y)                                                     : f32[16, 8]        S(1)
  gw          = mm(yt, x)                                                : f32[16, 6]        P  ; gradient(w)
  gw_s        = reduce_scatter(gw, 0, 'dp')                              : f32[16, 6]        S(0)  ; gradient(w)
  w_q_b_1     = all_gather(w_q, 0, 'dp')                                 : i8[16, 6]         B  ; param(w)
  w_scale_b_1 = all_gather(w_scale, 0, 'dp')                             : f32[16, 2]        B  ; param(w)
  wb_wide     = examples.from_int8.default(w_q_b_1, w_scale_b_1, 4, torch.float32) : f32[16, 6]        B
  dx          = mm(y, wb_wide)                                           : f32[8, 6]         S(0)
update:
  w1          = add(w, gw_s, alpha=-0.01)                                : f32[16, 6]        S(0)
  return dx; update(w=w1)
"""


def lowered(*passes, stage=3):
    return gz.Pipeline([Pin(), Zero(stage=stage), *passes, Propagate(), InsertBoxing(), LowerBoxing()])(STEP)


def test_both_phases_gather_int8_and_scales_and_a_vector_is_gathered_as_before():
    after = lowered(Int8Gathers(4))
    assert_graph(after, EXPECTED)
    with pytest.raises(AssertionError, match="the steps differ in output 0"):  # it changes values, and says by how much
        assert_same_step(STEP, after, ranks=2)
    assert_same_step(gz.Pipeline([Int8Gathers(4)])(gz.Pipeline([Pin(), Zero(stage=3)])(STEP)), after, ranks=2)


def test_what_is_whole_or_split_along_another_dim_is_left_alone():
    for pipeline in (
        gz.Pipeline([Pin(), Zero(stage=2), Int8Gathers()]),
        gz.Pipeline([Pin(), lambda graph: graph.pin("w", "dp", gz.sbp.S(1)) and graph, Int8Gathers()]),
    ):
        pipeline(STEP)
        assert not pipeline.history[-1].diff()


def test_the_rules_of_both_ops_are_right():
    x = torch.randn(8, 6, 5, dtype=torch.float64)
    check_rule(int8_blocks, (x, 4), (x[:, :, 0], 4), (x[:7], 100))
    check_rule(from_int8, (*int8_blocks(x, 4), 4, torch.float64), (*int8_blocks(x[:, 0], 3), 3, torch.float32))


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_is_read_within_half_the_scale_of_its_block(block, dtype):
    x = (torch.randn(9, 5, 13) * torch.logspace(-6, 6, 9).view(9, 1, 1)).to(dtype)
    x[3] = 0
    numbers, scale = int8_blocks(x, block)
    bound = scale.repeat_interleave(block, 1)[:, :65].view(x.shape) / 2
    error = (from_int8(numbers, scale, block, torch.float32) - x.float()).abs()
    assert (error <= bound * (1 + 1e-5)).all() and (error[3] == 0).all()
    assert block == 1 or (error > bound / 4).any()  # as coarse as said, and no finer


def of_int8(net, block=BLOCK):
    """The same model with the weights that its int8 form says; one device knows nothing of rows of ranks."""
    with torch.no_grad():
        for weight in (p for p in net.parameters() if p.dim() > 1):
            weight.copy_(from_int8(*int8_blocks(weight, block), block, weight.dtype))
    return net


ALONE, BEFORE = (Int8Gathers(BLOCK),), (Int8Gathers(BLOCK), NodeLocalCopy(), TwoHops())
BEHIND = NodeLocalCopy(), Int8Gathers(BLOCK), TwoHops()  # the copy is in full precision then, and read in int8


@pytest.mark.parametrize("passes", [ALONE, BEFORE, BEHIND])
def test_a_step_is_that_of_one_device_whose_weights_are_what_int8_says(passes):
    """Losses and gradients to rounding; the weights that the optimizer steps are those of full precision."""
    graph, told = gradient_graph(*passes), of_int8(model())
    before = {name: p.detach().clone() for name, p in graph.model.named_parameters()}
    loss = told(batch()).square().mean()
    loss.backward()
    torch.testing.assert_close(graph(batch()), loss.detach(), rtol=1e-12, atol=1e-12)
    for name, p in told.named_parameters():
        stepped = dict(graph.model.named_parameters())[name].detach()
        torch.testing.assert_close(stepped, before[name] - p.grad, rtol=1e-12, atol=1e-12, msg=name)


def gradient_graph(*passes):
    """A step by the gradients alone."""
    net = model()
    graph = TrainGraph(net, mean_square, torch.optim.SGD(net.parameters(), lr=1.0), placement=nodes(), stage=3)
    for one in passes:
        graph.config.add_pass(one, after="cast_before_gather")
    return graph


@pytest.mark.parametrize(("amp", "wide"), [(False, 4), (True, 2)])
def test_gathers_send_a_quarter_of_float32_or_half_of_16_bit_and_a_scale_a_block(amp, wide):
    """Per number a byte and the 16th part of a scale's four, in the place of 4 or of 2."""

    def compiled(*passes):
        net = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(32, 16, bias=False))
        graph = clipped_graph(*passes, net=net)
        if amp:
            graph.config.enable_amp()
        return graph.compile(torch.randn(16, 64))

    before, after = compiled(), compiled(Int8Gathers(16))
    old, new = sent(before, "parameters"), sent(after, "parameters")
    assert {key: nbytes * wide for key, nbytes in new.items()} == {key: nbytes * 1.25 for key, nbytes in old.items()}
    assert len(old) == 4 and sent(after, "gradients") == sent(before, "gradients")
    assert_sends_what_is_planned(after, torch.randn(16, 64))


def test_with_the_other_two_passes_a_node_keeps_the_copy_in_int8():
    """ZeRO++ whole, but for the rounding of gradients: what the node keeps for backward is int8."""
    three, two = (
        clipped_graph(*passes).compile(batch()) for passes in ([Int8Gathers(BLOCK), NodeLocalCopy()], [NodeLocalCopy()])
    )
    assert sent(three, "parameters")["dp_node", "backward"] == 0
    assert sent(three, "parameters")["dp_gpu", "backward"] < sent(two, "parameters")["dp_gpu", "backward"] / 4
