"""The executor on one rank and on virtual ranks: values, state, lives, failures."""

from __future__ import annotations

import pytest
import torch

from graphzero.errors import GraphZeroError, SbpError, VerifyError
from graphzero.ir.text.parser import parse
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.sbp.shards import chunk

MOMENTUM = """
graph step(dp={n}) local
  x  = batch()      : f32[8, 7]  S(0)!
  w  = param()      : f32[7, 3]  S(0)!
  m  = state(w)     : f32[7, 3]  S(0)!
  lr = hyper(g, lr) : float
forward:
  wf = use(w)                           : f32[7, 3]  S(0)
  wg = all_gather(wf, 0, 'dp')          : f32[7, 3]  B
  y  = mm(x, wg)                        : f32[8, 3]  S(0)
  s  = sum(y)                           : f32[]  P
  l  = all_reduce(s, 'dp', 'sum')       : f32[]  B
backward:
  xt = t(x)                             : f32[7, 8]  S(1)
  o  = ones([8/dp, 3])                  : f32[8, 3]  S(0)
  g  = mm(xt, o)                        : f32[7, 3]  P
update:
  gs = reduce_scatter(g, 0, 'dp')       : f32[7, 3]  S(0)
  m0 = mul(m, 0.9)                      : f32[7, 3]  S(0)
  m1 = add(m0, gs)                      : f32[7, 3]  S(0)
  k  = operator.neg(lr)                 : float
  d  = mul(m1, k)                       : f32[7, 3]  S(0)
  wu = use(w)                           : f32[7, 3]  S(0)
  w1 = add(wu, d)                       : f32[7, 3]  S(0)
  aw = assign(w, w1)                    : f32[7, 3]  S(0)
  am = assign(m, m1)                    : f32[7, 3]  S(0)
  return l, y, None, 3; update(w=aw, m=am)
"""


def pieces(x: torch.Tensor, n: int, dim: int = 0) -> list[torch.Tensor]:
    """The ranks' shards, in storages of their own."""
    cuts = (chunk(x.shape[dim], n, r) for r in range(n))
    return [x.narrow(dim, start, length).clone() for start, length in cuts]


def on_virtual_ranks(text: str) -> Executor:
    graph = parse(text)
    return Executor(graph, VirtualWorld(graph.placement))


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_a_step_is_the_same_on_any_number_of_ranks_whatever_the_cut(n: int) -> None:
    torch.manual_seed(0)
    x, w, m = torch.randn(8, 7), torch.randn(7, 3), torch.randn(7, 3)
    executor = on_virtual_ranks(MOMENTUM.format(n=n))
    ws, ms = pieces(w, n), pieces(m, n)
    executor.bind({"w": ws, "m": ms})
    for _ in range(2):
        results = executor.run_step({"x": pieces(x, n), "lr": [0.1] * n})
        loss = (x @ w).sum()
        torch.testing.assert_close(torch.cat(results.outputs[1]), x @ w)
        m = m * 0.9 + x.t() @ torch.ones(8, 3)
        w = w - 0.1 * m
        for found in results.outputs[0]:
            torch.testing.assert_close(found, loss)
        torch.testing.assert_close(torch.cat(ws), w)
        torch.testing.assert_close(torch.cat(ms), m)
    assert results.outputs[2:] == [None, 3]


def test_what_was_written_in_the_step_is_returned_as_it_was_before() -> None:
    executor = on_virtual_ranks("""
    graph step(dp=2) local
      p = param()  : f32[4]  B!
      c = buffer() : f32[4]  B!
    forward:
      v  = view(p, [2, 2]) : f32[2, 2]  B
      q  = mul(p, 2.0)     : f32[4]  B
      ap = assign(p, q)    : f32[4]  B
      return p, v, c; update(p=ap)
    """)
    p, c = torch.arange(4.0), torch.zeros(4)
    executor.bind({"p": [p, p], "c": [c, c]})
    returned, viewed, buffer = executor.run_step({}).outputs
    assert returned[1].tolist() == [0, 1, 2, 3] and viewed[0].tolist() == [[0, 1], [2, 3]]
    assert p.tolist() == [0, 2, 4, 6], "a tensor that both ranks share is written once"
    buffer[0].fill_(7)
    assert c.tolist() == [0] * 4, "what is handed out is not the state itself"


def test_updates_without_assign_are_written_at_the_end_even_when_they_swap() -> None:
    executor = on_virtual_ranks("""
    graph step(dp=1) lowered
      a = state(w, a) : f32[2]  B!
      b = state(w, b) : f32[2]  B!
    update:
      ua = alias(a) : f32[2]  B
      vb = view(b, [2]) : f32[2]  B
      return update(a=vb, b=ua)
    """)
    a, b = torch.tensor([1.0, 2]), torch.tensor([3.0, 4])
    executor.bind({"a": [a], "b": [b]})
    executor.run_step({})
    assert a.tolist() == [3, 4] and b.tolist() == [1, 2]


@pytest.mark.same_kernels
def test_results_of_one_op_are_picked_and_lists_and_none_pass_as_arguments() -> None:
    executor = on_virtual_ranks("""
    graph step(dp=1) local
      x = batch() : f32[6, 4]  B
    forward:
      t = topk(x, 2)              : (f32[6, 2]  B, i64[6, 2]  B)
      i = t[1]                    : i64[6, 2]  B
      c = cat([i, i], 1)          : i64[6, 4]  B
      p = graphzero.pin.default(c, -1) : i64[6, 4]  B
      y = clamp.default(x, None, 0.5) : f32[6, 4]  B
      s = split.Tensor(x, 4)      : (f32[4, 4]  B, f32[2, 4]  B)
      z = s[1]                    : f32[2, 4]  B
      m = native_layer_norm(x, [4], None, None, 1e-05) : (f32[6, 4]  B, f32[6, 1]  B, f32[6, 1]  B)
      n = m[0]                    : f32[6, 4]  B
      f = full([2], inf)          : f32[2]  B
      return p, y, z, n, f
    """)
    x = torch.randn(6, 4)
    p, y, z, n, f = (out[0] for out in executor.run_step({"x": [x]}).outputs)
    best = x.topk(2).indices
    assert p.equal(torch.cat([best, best], 1)) and y.equal(x.clamp(max=0.5)) and z.equal(x[4:])
    assert n.equal(torch.nn.functional.layer_norm(x, [4])) and f.tolist() == [float("inf")] * 2


def test_sizes_and_starts_are_each_ranks_own_at_any_depth() -> None:
    executor = on_virtual_ranks("""
    graph step(dp=4) local
      k = seed() : i64[]  B
      x = batch() : f32[7, 2]  S(0)
    forward:
      v = view(x, [7/dp, 2, 1])                       : f32[7, 2, 1]  S(0)
      u = uniform_like(v, k, 3, [7@dp, 0, 0], [7, 2, 1]) : f32[7, 2, 1]  S(0)
      return u
    """)
    whole = on_virtual_ranks("""
    graph step(dp=1) local
      k = seed() : i64[]  B
      x = batch() : f32[7, 2]  B
    forward:
      v = view(x, [7, 2, 1])                          : f32[7, 2, 1]  B
      u = uniform_like(v, k, 3, [0, 0, 0], [7, 2, 1]) : f32[7, 2, 1]  B
      return u
    """)
    key, x = torch.tensor(11), torch.zeros(7, 2)
    parts = executor.run_step({"k": [key] * 4, "x": pieces(x, 4)}).outputs[0]
    assert torch.cat(parts).equal(whole.run_step({"k": [key], "x": [x]}).outputs[0][0])
    assert [len(part) for part in parts] == [2, 2, 2, 1]


def test_an_op_that_fails_shows_its_line_source_rank_and_shapes() -> None:
    text = """
    graph step(dp=2) local
      x = batch() : f32[4, 4]  S(0)
      w = param() : f32[4, 4]  B!
    forward:
      h = relu(x)  : f32[4, 4]  S(0)
      y = mm(h, w) : f32[4, 4]  S(0)
      return y
    """
    graph = parse(text)
    graph.node("y").meta["source"] = "model.py:31 in forward"
    executor = Executor(graph, VirtualWorld(graph.placement))
    executor.bind({"w": [torch.zeros(4, 4)] * 2})
    good = torch.zeros(2, 4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        executor.run_step({"x": [good, torch.zeros(2, 3)]})
    note = "\n".join(caught.value.__notes__)
    assert "rank 1 of" in note and "y = mm(h, w) : f32[4, 4]  S(0)    model.py:31 in forward" in note
    assert "h = relu(x) : f32[4, 4]  S(0)    here [2, 3]" in note
    assert executor.run_step({"x": [good, good]}).outputs[0][0].shape == (2, 4), "the next run is not harmed"


def test_wrong_bindings_and_missing_inputs_are_refused_by_name() -> None:
    executor = on_virtual_ranks(MOMENTUM.format(n=4))
    with pytest.raises(SbpError, match=r"rank 3 is torch.float32 of shape \[1, 3\], but was given .* \[2, 3\]"):
        executor.bind({"w": [torch.zeros(2, 3)] * 4})
    with pytest.raises(SbpError, match="one tensor for each of 4 local ranks, was given 1"):
        executor.bind({"w": [torch.zeros(2, 3)]})
    with pytest.raises(GraphZeroError, match="not given m, w"):
        executor.run_step({})
    executor.bind({name: pieces(torch.zeros(7, 3), 4) for name in "wm"})
    with pytest.raises(GraphZeroError, match="not given x, lr"):
        executor.run_step({})


def test_a_box_cannot_be_executed() -> None:
    with pytest.raises(VerifyError, match="'b' is still a box"):
        on_virtual_ranks("""
        graph step(dp=2) boxed
          x = batch() : f32[4]  S(0)
        forward:
          b = box(x) : f32[4]  B
          return b
        """)


def test_modes_of_the_caller_do_not_reach_the_program() -> None:
    executor = on_virtual_ranks("""
    graph step(dp=1) local
      x = batch() : f32[4, 4]  B
      w = param() : f32[4, 4]  B!
    forward:
      y  = mm(x, w)      : f32[4, 4]  B
      aw = assign(w, y)  : f32[4, 4]  B
      return y; update(w=aw)
    """)
    w = torch.nn.Parameter(torch.randn(4, 4))
    executor.bind({"w": [w]})
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = executor.run_step({"x": [torch.eye(4, requires_grad=True)]}).outputs[0][0]
    assert y.dtype == torch.float32 and not y.requires_grad and w.is_leaf
    with torch.inference_mode():
        executor.run_step({"x": [torch.eye(4)]})
    executor.run_step({"x": [torch.eye(4)]})


def test_host_numbers_are_computed_once_for_all_ranks() -> None:
    executor = on_virtual_ranks("""
    graph step(dp=2) local
      lr = hyper(g, lr) : float
      x  = batch() : f32[2]  S(0)
    forward:
      a = operator.mul(lr, 2.0) : float
      b = math.sqrt(a)          : float
      y = add(x, b)             : f32[2]  S(0)
      return y, b
    """)
    y, b = executor.run_step({"lr": [8.0, 8.0], "x": pieces(torch.zeros(2), 2)}).outputs
    assert b == [4.0, 4.0] and torch.cat(y).tolist() == [4, 4]


def test_a_long_program_is_cut_into_functions_and_runs_the_same() -> None:
    lines = [f"  a{i} = add(a{i - 1}, 1.0) : f32[2]  B" for i in range(1, 1500)]
    text = "graph step(dp=1) local\n  a0 = batch() : f32[2]  B\nforward:\n" + "\n".join(lines) + "\n  return a1499\n"
    executor = on_virtual_ranks(text)
    assert len(executor.program.steps) > 1
    assert executor.run_step({"a0": [torch.zeros(2)]}).outputs[0][0].tolist() == [1499, 1499]
