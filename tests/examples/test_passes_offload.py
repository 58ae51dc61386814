import pytest
import torch
from pass_toys import Block, batch, clipped_graph
from passes.offload import Offload, offload, reload

import graphzero as gz
from graphzero.ir import value
from graphzero.ir.storage.liveness import liveness
from graphzero.passes import host_memory
from graphzero.testing import assert_graph, assert_same_step, check_rule, fake_world, measure_step

STEP = gz.parse("""
graph step(dp=2) local
  x  = batch()                 : f32[8, 4]  S(0)
  w  = param()                 : f32[4, 4]  B
  s  = batch()                 : f32[2]     S(0)
forward:
  a  = mm(x, w)                : f32[8, 4]  S(0)
  v  = view(a, [32/dp])        : f32[32]    S(0)
  h  = add(v, v, alpha=2.0)    : f32[32]    S(0)
  q  = view(h, [8/dp, 4])      : f32[8, 4]  S(0)
  y  = mm(q, w)                : f32[8, 4]  S(0)
  r  = exp(s)                  : f32[2]     S(0)
  k  = sigmoid(y)              : f32[8, 4]  S(0)
backward:
  e  = sign(k)                 : f32[8, 4]  S(0)
  wt = t(w)                    : f32[4, 4]  B
  f  = mm(e, wt)               : f32[8, 4]  S(0)
  fv = view(f, [32/dp])        : f32[32]    S(0)
  d  = tanh_backward(fv, h)    : f32[32]    S(0)
  qt = t(q)                    : f32[4, 8]  S(1)
  g  = mm(qt, e)               : f32[4, 4]  P  ; gradient(w)
  gb = all_reduce(g, 'dp', 'sum') : f32[4, 4]  B  ; gradient(w)
  m  = mul(r, r)               : f32[2]     S(0)
update:
  w1 = add(w, gb, alpha=-0.1)  : f32[4, 4]  B
  return d, y, m; update(w=w1)
""")
EXPECTED = """
graph step(dp=2) local
  x      = batch()                         : f32[8, 4]  S(0)
  w      = param()                         : f32[4, 4]  B
  s      = batch()                         : f32[2]     S(0)
forward:
  a      = mm(x, w)                        : f32[8, 4]  S(0)
  v      = view(a, [32/dp])                : f32[32]    S(0)
  h      = add(v, v, alpha=2.0)            : f32[32]    S(0)
  q      = view(h, [8/dp, 4])              : f32[8, 4]  S(0)
  y      = mm(q, w)                        : f32[8, 4]  S(0)
  h_host = examples.offload.default(h)     : f32[32]    S(0)
  r      = exp(s)                          : f32[2]     S(0)
  k      = sigmoid(y)                      : f32[8, 4]  S(0)
backward:
  e      = sign(k)                         : f32[8, 4]  S(0)
  wt     = t(w)                            : f32[4, 4]  B
  f      = mm(e, wt)                       : f32[8, 4]  S(0)
  fv     = view(f, [32/dp])                : f32[32]    S(0)
  h_back = examples.reload.default(h_host) : f32[32]    S(0)
  q_back = view(h_back, [8/dp, 4])         : f32[8, 4]  S(0)
  d      = tanh_backward(fv, h_back)       : f32[32]    S(0)
  qt     = t(q_back)                       : f32[4, 8]  S(1)
  g      = mm(qt, e)                       : f32[4, 4]  P  ; gradient(w)
  gb     = all_reduce(g, 'dp', 'sum')      : f32[4, 4]  B  ; gradient(w)
  m      = mul(r, r)                       : f32[2]     S(0)
update:
  w1     = add(w, gb, alpha=-0.1)          : f32[4, 4]  B
  return d, y, m; update(w=w1)
"""


def test_a_storage_goes_once_and_its_views_are_made_anew_of_what_comes_back():
    """y is the caller's too, k is read at once, r is small."""
    after = gz.Pipeline([Offload(least_bytes=32, apart=4)])(STEP)
    assert_graph(after, EXPECTED)
    assert_same_step(STEP, after, rtol=0, atol=0)
    assert str(gz.parse(str(after))) == str(after)
    assert str(gz.Pipeline([Offload(least_bytes=1000)])(STEP)) == str(STEP)


def test_the_rules_of_both_ops_are_right():
    for op in (offload, reload):
        assert len(check_rule(op, (torch.randn(8, 6, dtype=torch.float64),))) == 6


@pytest.mark.parametrize("options", [{}, {"steps": 2}, {"stage": 1}])
def test_a_step_has_the_same_bits(options):
    plain, moved = (clipped_graph(*passes, after="fuse", **options) for passes in ([], [Offload(64, 4)]))
    for step in range(2):
        assert torch.equal(plain(batch(step)), moved(batch(step)))
    for old, new in zip(plain.model.parameters(), moved.model.parameters(), strict=True):
        assert torch.equal(old, new)
    assert "offload" in str(moved.program) and moved.plan.memory.host > 0


def test_activations_leave_the_device_and_the_plan_says_what_the_host_takes_to_the_byte():
    """Of five blocks no more than what one needs at a time is left on the device at the worst moment."""
    found = {}
    with fake_world(2):
        for passes in ((), (Offload(1024, 4),)):
            net = torch.nn.Sequential(*(Block(16) for _ in range(5)))
            graph = clipped_graph(*passes, where=gz.placement("cpu", range(2)), stage=2, net=net, after="fuse")
            x = torch.randn(32, 8, 16)
            graph(x)
            memory, measured = graph.plan.memory, measure_step(graph, x)
            assert measured.peak == memory.peak and measured.host == memory.host
            assert measured.at_peak == {name: nbytes for name, nbytes in memory.at_peak.items() if nbytes}
            found[passes] = memory
    before, after = found.values()
    assert before.host == 0 and after.host + after.activations >= before.activations
    assert after.activations < before.activations / 4 and after.peak < before.peak / 2


def test_where_recomputation_runs_too_it_does_not_move_what_is_on_the_host():
    """Recompute comes later: it may drop what it likes of the rest, and the copy out runs once."""
    graph = clipped_graph(Offload(64, 4), after="fuse")
    graph.config.set_activation_memory("checkpoint")
    plain = clipped_graph(after="fuse")
    assert torch.equal(graph(batch()), plain(batch()))
    outs = [node for node in graph.program.nodes if "offload" in str(node.target)]
    assert outs and all(value.phase_of(node) == "forward" for node in outs)


def test_nothing_but_what_brings_it_back_may_read_host_memory():
    moved = gz.Pipeline([Offload(least_bytes=32, apart=4)])(STEP)

    def reads(graph):
        host = graph.node("h_host")
        with graph.graph.inserting_after(host):
            graph.call(torch.ops.aten.neg.default, (host,), value.type_of(host), sbp=value.nd_of(host), like=host)
        return graph

    def returns(graph):
        graph.hand_out({graph.node("y"): graph.node("h_host")})
        return graph

    with pytest.raises(gz.VerifyError, match="'neg_default' = neg reads 'h_host', which is in host memory"):
        gz.Pipeline([reads])(moved)
    with pytest.raises(gz.VerifyError, match="the step returns 'h_host', which is in host memory"):
        gz.Pipeline([returns])(moved)


def test_a_box_of_what_lies_in_host_memory_is_refused_where_it_is_put_in():
    """A pass that offloads before SBPs are settled may get one; on a GPU a collective could not read it there."""
    early = gz.parse("""
graph g(dp=2)
  x  = batch()                        : f32[8, 4]  S(0)!
forward:
  h  = examples.offload.default(x)    : f32[8, 4]
  hp = pin(h, -1)                     : f32[8, 4]  B!
  r  = examples.reload.default(hp)    : f32[8, 4]
  return r
""")
    with pytest.raises(gz.VerifyError, match="'hp' = pin reads 'h', which is in host memory"):
        gz.Pipeline([lambda graph: graph])(early)


def test_what_is_said_of_ops_is_checked():
    @torch.library.custom_op("examples::no_rule", mutates_args=())
    def no_rule(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with pytest.raises(gz.ConfigError, match="no_rule.default has no SBP rule"):
        host_memory(no_rule, reload)
    with pytest.raises(gz.ConfigError, match="cannot both put values into host memory and bring them back"):
        host_memory(reload, offload)


def test_lives_on_the_host_are_apart_from_those_of_the_device():
    at = liveness(gz.Pipeline([Offload(least_bytes=32, apart=4)])(STEP))
    ((storage, begin, end, nbytes, category),) = [vars(span).values() for span in at.on_host()]
    assert (storage[0].name, nbytes, category) == ("h_host", 64, "host") and begin < end
    assert storage not in {span.storage for span in at.spans()}
