"""The optimizer steps in backward: its ops move up to where what they need is there, and compute the same."""

from __future__ import annotations

import pytest
import torch
from toys import lower, measured, random_step, run, step

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.text.parser import parse
from graphzero.passes import Bucket, Zero
from graphzero.passes.schedule.optimizer_in_backward import describe_early
from graphzero.testing import assert_graph

MOMENTUM = step(("linear 8", "relu", "linear 4"), optimizer="momentum", ranks=2)
DEEP = step(("linear 32", "relu") * 4 + ("linear 4",), width=32, ranks=2, batch=4)


def early(text: str, stage: int, nbytes: int = 1) -> StepGraph:
    return lower(text, Zero(stage, optimizer_in_backward=True) if stage else None, Bucket(nbytes), in_backward=True)


def late(text: str, stage: int, nbytes: int = 1) -> StepGraph:
    return lower(text, Zero(stage) if stage else None, Bucket(nbytes))


def test_a_parameter_steps_when_its_gradient_has_come_and_backward_has_read_it() -> None:
    assert_graph(
        early(MOMENTUM, 3),
        """
        graph toy(dp=2) local
          x        = batch()                                                 : f32[8, 6]         S(0)!
          t        = batch()                                                 : f32[8, 4]         S(0)!
          w0       = param()                                                 : f32[6, 8]         S(0)!
          w1       = param()                                                 : f32[8, 4]         S(0)!
          w0_m     = state(w0, m)                                            : f32[6, 8]         S(0)!
          w1_m     = state(w1, m)                                            : f32[8, 4]         S(0)!
          lr       = hyper(optimizer0.group0, lr)                            : float
        forward:
          launch   = launch('bucket_all_gather', None, [w0], [0], 'dp')      : (f32[6, 8]  B)
          wait     = wait(launch)                                            : (f32[6, 8]  B)
          launch_1 = launch('bucket_all_gather', None, [w1], [0], 'dp')      : (f32[8, 4]  B)
          w0_b     = wait[0]                                                 : f32[6, 8]         B  ; param(w0)
          v1       = mm(x, w0_b)                                             : f32[8, 8]         S(0)
          v2       = relu(v1, out=v1)                                        : f32[8, 8]         S(0)
          wait_1   = wait(launch_1)                                          : (f32[8, 4]  B)
          w1_b_1   = wait_1[0]                                               : f32[8, 4]         B  ; param(w1)
          v3       = mm(v2, w1_b_1)                                          : f32[8, 4]         S(0)
          v4       = sub(v3, t)                                              : f32[8, 4]         S(0)
          v5       = mul(v4, v4)                                             : f32[8, 4]         S(0)
          v6       = sum(v5)                                                 : f32[]             P
          launch_2 = launch('bucket_all_reduce', None, [v6], 'dp', 'sum')    : (f32[]  B)
          wait_2   = wait(launch_2)                                          : (f32[]  B)
          v6_b     = wait_2[0]                                               : f32[]             B
          v7       = div(v6_b, 32)                                           : f32[]             B  ; loss()
        backward:
          v8       = mul(v4, 0.0625, out=v4)                                 : f32[8, 4]         S(0)
          v9       = t(v2)                                                   : f32[8, 8]         S(1)
          v10      = mm(v9, v8)                                              : f32[8, 4]         P  ; gradient(w1)
          launch_3 = launch('bucket_reduce_scatter', None, [v10], [0], 'dp') : (f32[8, 4]  S(0))
          launch_4 = launch('bucket_all_gather', None, [w1], [0], 'dp')      : (f32[8, 4]  B)
          wait_4   = wait(launch_4)                                          : (f32[8, 4]  B)
          w1_b_2   = wait_4[0]                                               : f32[8, 4]         B  ; param(w1)
          v11      = t(w1_b_2)                                               : f32[4, 8]         B
          v12      = mm(v8, v11)                                             : f32[8, 8]         S(0)
          v13      = threshold_backward(v12, v2, 0, out=v12)                 : f32[8, 8]         S(0)
          v14      = t(x)                                                    : f32[6, 8]         S(1)
          v15      = mm(v14, v13)                                            : f32[6, 8]         P  ; gradient(w0)
          launch_5 = launch('bucket_reduce_scatter', None, [v15], [0], 'dp') : (f32[6, 8]  S(0))
          wait_3   = wait(launch_3)                                          : (f32[8, 4]  S(0))
          v10_s    = wait_3[0]                                               : f32[8, 4]         S(0)  ; gradient(w1)
        update:
          v20      = mul(w1_m, 0.9, out=w1_m)                                : f32[8, 4]         S(0)
          v21      = add(v20, v10_s, out=v20)                                : f32[8, 4]         S(0)
          v22      = mul(v21, lr)                                            : f32[8, 4]         S(0)
          v23      = sub(w1, v22, out=w1)                                    : f32[8, 4]         S(0)
        backward:
          wait_5   = wait(launch_5)                                          : (f32[6, 8]  S(0))
          v15_s    = wait_5[0]                                               : f32[6, 8]         S(0)  ; gradient(w0)
        update:
          v16      = mul(w0_m, 0.9, out=w0_m)                                : f32[6, 8]         S(0)
          v17      = add(v16, v15_s, out=v16)                                : f32[6, 8]         S(0)
          v18      = mul(v17, lr)                                            : f32[6, 8]         S(0)
          v19      = sub(w0, v18, out=w0)                                    : f32[6, 8]         S(0)
          return v7, v3; update(w0_m=v17, w0=v19, w1_m=v21, w1=v23)
        """,
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_any_step_computes_the_same_to_the_bit(seed: int, stage: int) -> None:
    text = random_step(seed)
    for nbytes in (1, 400, 2**20):
        one, other = run(late(text, stage, nbytes)), run(early(text, stage, nbytes))
        for name, ranks in one.items():
            assert all(torch.equal(a, b) for a, b in zip(ranks, other[name], strict=True)), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_printed_is_read_again(stage: int) -> None:
    text = str(early(DEEP, stage))
    assert str(parse(text)) == text


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_not_all_held_at_once(stage: int) -> None:
    graph = early(DEEP, stage)
    assert liveness(graph).total().max() < liveness(late(DEEP, stage)).total().max()
    assert measured(graph).peak == liveness(graph).total().max()


@pytest.mark.parametrize("stage", [1, 2])
def test_an_updated_parameter_is_gathered_while_backward_goes_on_when_nobody_reads_the_old(stage: int) -> None:
    graph = early(DEEP, stage)
    nodes = list(graph.nodes)
    end = max(i for i, node in enumerate(nodes) if value.phase_of(node) == "backward")
    sent = [i for i, node in enumerate(nodes) if node.target is ops.launch and value.phase_of(node) == "update"]
    assert sum(i < end for i in sent) >= 2


def test_stage_1_sends_what_it_sends_otherwise() -> None:
    def kinds(graph: StepGraph) -> list[str]:
        return sorted(str(node.args[0]) for node in graph.nodes if node.target is ops.launch)

    assert kinds(early(DEEP, 1)) == kinds(late(DEEP, 1))


NORM_OF_ALL = """
graph step(dp=2)
  x  = batch()           : f32[8, 4]
  w  = param()           : f32[4, 4]
  v  = param()           : f32[4, 4]
forward:
  wf = use(w)            : f32[4, 4]
  vf = use(v)            : f32[4, 4]
  h  = mm(x, wf)         : f32[8, 4]
  y  = mm(h, vf)         : f32[8, 4]
backward:
  ht = t(h)              : f32[4, 8]
  gv = mm(ht, y)         : f32[4, 4]  ; gradient(v)
  vb = use(v)            : f32[4, 4]
  vt = t(vb)             : f32[4, 4]
  d  = mm(y, vt)         : f32[8, 4]
  xt = t(x)              : f32[4, 8]
  gw = mm(xt, d)         : f32[4, 4]  ; gradient(w)
update:
  a  = sum(gw)           : f32[]
  b  = sum(gv)           : f32[]
  n  = add(a, b)         : f32[]
  wu = use(w)            : f32[4, 4]
  cw = mul(gw, n)        : f32[4, 4]
  w1 = sub(wu, cw)       : f32[4, 4]
  vu = use(v)            : f32[4, 4]
  cv = mul(gv, n)        : f32[4, 4]
  v1 = sub(vu, cv)       : f32[4, 4]
  return y; update(w=w1, v=v1)
"""


def test_what_needs_all_gradients_waits_for_the_last_and_is_said_to() -> None:
    graph = early(NORM_OF_ALL, 0)
    assert describe_early(graph) == (
        "optimizer in backward: 0 of 2 parameters step before backward ends; 2 wait until every gradient is there: "
        "their step needs those of others too"
    )
    assert describe_early(early(MOMENTUM, 0)) == "optimizer in backward: 1 of 2 parameters step before backward ends"
