"""Collectives in programs: buckets, slots, uneven and empty shards, two axes, what is sent."""

from __future__ import annotations

import pytest
import torch

from graphzero.ir.text.parser import parse
from graphzero.ir.transfer_layout import layout_of
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.sbp.shards import chunk

N = 4

SINGLE = """
graph step(dp=4) local
  a = batch() : f32[7, 3]  S(0)
  b = batch() : f32[2, 6]  S(1)
  c = batch() : f32[2, 3]  S(0)
  p = batch() : f32[7, 3]  P
  q = batch() : f32[5]  P
forward:
  ga = all_gather(a, 0, 'dp')       : f32[7, 3]  B
  gb = all_gather(b, 1, 'dp')       : f32[2, 6]  B
  gc = all_gather(c, 0, 'dp')       : f32[2, 3]  B
  rp = reduce_scatter(p, 0, 'dp')   : f32[7, 3]  S(0)
  rq = reduce_scatter(q, 0, 'dp')   : f32[5]  S(0)
  sp = all_reduce(p, 'dp', 'sum')   : f32[7, 3]  B
  sq = all_reduce(q, 'dp', 'sum')   : f32[5]  B
  return ga, gb, gc, rp, rq, sp, sq
"""

BUCKETS = """
graph step(dp=4) local
  a = batch() : f32[7, 3]  S(0)
  b = batch() : f32[2, 6]  S(1)
  c = batch() : f32[2, 3]  S(0)
  p = batch() : f32[7, 3]  P
  q = batch() : f32[5]  P
forward:
  g  = bucket_all_gather([a, b, c], [0, 1, 0], 'dp') : (f32[7, 3]  B, f32[2, 6]  B, f32[2, 3]  B)
  ga = g[0] : f32[7, 3]  B
  gb = g[1] : f32[2, 6]  B
  gc = g[2] : f32[2, 3]  B
  r  = bucket_reduce_scatter([p, q], [0, 0], 'dp')   : (f32[7, 3]  S(0), f32[5]  S(0))
  rp = r[0] : f32[7, 3]  S(0)
  rq = r[1] : f32[5]  S(0)
  s  = bucket_all_reduce([p, q], 'dp')               : (f32[7, 3]  B, f32[5]  B)
  sp = s[0] : f32[7, 3]  B
  sq = s[1] : f32[5]  B
  return ga, gb, gc, rp, rq, sp, sq
"""

LAUNCHED = """
graph step(dp=4) local
  a = batch() : f32[7, 3]  S(0)
  b = batch() : f32[2, 6]  S(1)
  c = batch() : f32[2, 3]  S(0)
  p = batch() : f32[7, 3]  P
  q = batch() : f32[5]  P
forward:
  h  = launch('bucket_all_gather', 0, [a, b, c], [0, 1, 0], 'dp') : (f32[7, 3]  B, f32[2, 6]  B, f32[2, 3]  B)
  i  = launch('bucket_reduce_scatter', 1, [p, q], [0, 0], 'dp')   : (f32[7, 3]  S(0), f32[5]  S(0))
  g  = wait(h) : (f32[7, 3]  B, f32[2, 6]  B, f32[2, 3]  B)
  ga = g[0] : f32[7, 3]  B
  gb = g[1] : f32[2, 6]  B
  gc = g[2] : f32[2, 3]  B
  j  = launch('bucket_all_reduce', 0, [p, q], 'dp')               : (f32[7, 3]  B, f32[5]  B)
  r  = wait(i) : (f32[7, 3]  S(0), f32[5]  S(0))
  rp = r[0] : f32[7, 3]  S(0)
  rq = r[1] : f32[5]  S(0)
  s  = wait(j) : (f32[7, 3]  B, f32[5]  B)
  sp = s[0] : f32[7, 3]  B
  sq = s[1] : f32[5]  B
  return ga, gb, gc, rp, rq, sp, sq
"""


def shards(x: torch.Tensor, n: int, dim: int) -> list[torch.Tensor]:
    return [x.narrow(dim, *chunk(x.shape[dim], n, r)).contiguous() for r in range(n)]


def inputs() -> tuple[dict[str, list[torch.Tensor]], dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    whole = {"a": torch.randn(7, 3), "b": torch.randn(2, 6), "c": torch.randn(2, 3)}
    given = {name: shards(x, N, 1 if name == "b" else 0) for name, x in whole.items()}
    given |= {"p": [torch.randn(7, 3) for _ in range(N)], "q": [torch.randn(5) for _ in range(N)]}
    whole |= {name: given[name][0] + given[name][1] + given[name][2] + given[name][3] for name in "pq"}
    return given, whole


def run(text: str, given: dict[str, list[torch.Tensor]]) -> tuple[list[list[torch.Tensor]], Executor]:
    graph = parse(text)
    executor = Executor(graph, VirtualWorld(graph.placement))
    executor.world.trace = []
    outputs = executor.run_step(given).outputs
    if executor.slots:
        for slot in executor.slots.values():  # what a slot held before must not matter
            for tensor in slot:
                tensor.fill_(255)
        outputs = executor.run_step(given).outputs
    return outputs, executor


@pytest.mark.parametrize("text", [SINGLE, BUCKETS, LAUNCHED], ids=["single", "bucket", "launched"])
def test_collectives_join_cut_and_sum_uneven_and_empty_shards_exactly(text: str) -> None:
    given, whole = inputs()
    (ga, gb, gc, rp, rq, sp, sq), _ = run(text, given)
    for found, name in ((ga, "a"), (gb, "b"), (gc, "c"), (sp, "p"), (sq, "q")):
        assert all(x.equal(whole[name]) and x.is_contiguous() for x in found), name
    for found, name in ((rp, "p"), (rq, "q")):
        assert [x.tolist() for x in found] == [x.tolist() for x in shards(whole[name], N, 0)]
    assert [len(x) for x in rp] == [2, 2, 2, 1] and [len(x) for x in rq] == [2, 2, 1, 0]


def test_a_collective_sends_what_its_layout_says_padding_included() -> None:
    given, _ = inputs()
    for text in (SINGLE, BUCKETS):
        _, executor = run(text, given)
        layouts = [layout_of(executor.graph, node) for node in executor.graph.nodes]
        wanted = [(x.moves.kind, x.moves.axis, x.wire_bytes) for x in layouts if x is not None]
        assert [(s.kind, s.axis, s.nbytes) for s in executor.world.trace or []] == wanted
    # 7 x 3 over 4 ranks: pieces of 2 x 3; 2 x 6 by columns: 2 x 2; 2 x 3: 1 x 3, each sent to three ranks
    assert wanted[0] == ("all_gather", "dp", 3 * (6 + 4 + 3) * 4)
    assert wanted[1] == ("reduce_scatter", "dp", 3 * (6 + 2) * 4)


def test_slots_are_allocated_once_and_as_large_as_their_largest_collective() -> None:
    given, _ = inputs()
    _, executor = run(LAUNCHED, given)
    before = {slot: [x.data_ptr() for x in tensors] for slot, tensors in executor.slots.items()}
    executor.run_step(given)
    assert {slot: [x.data_ptr() for x in tensors] for slot, tensors in executor.slots.items()} == before
    assert {slot: tensors[0].nbytes for slot, tensors in executor.slots.items()} == {0: 256, 1: 192}
    # slot 0: 4 x 13 floats, slot 1: 4 x 8 + 8 floats, rounded up to 64 bytes


def test_what_a_wait_gives_outlives_the_slot() -> None:
    given, whole = inputs()
    outputs, executor = run(LAUNCHED, given)
    for tensor in executor.slots[0]:
        tensor.fill_(0)
    assert outputs[0][0].equal(whole["a"])


@pytest.mark.parametrize("rows, columns", [(8, 4), (7, 6), (2, 3), (1, 1)])
def test_all_to_all_moves_a_split_to_another_dim(rows: int, columns: int) -> None:
    x = torch.randn(rows, columns)
    text = f"""
    graph step(dp=4) local
      x = batch() : f32[{rows}, {columns}]  S(0)
    forward:
      y = all_to_all(x, 0, 1, 'dp') : f32[{rows}, {columns}]  S(1)
      return y
    """
    (y,), executor = run(text, {"x": shards(x, N, 0)})
    assert all(a.equal(b) for a, b in zip(y, shards(x, N, 1), strict=True))
    assert executor.world.trace is not None
    piece = -(-rows // N) * -(-columns // N) * 4
    assert executor.world.trace[0].nbytes == 3 * piece


def test_moves_without_a_message_slice_keep_and_place() -> None:
    x = torch.randn(7, 2)
    text = """
    graph step(dp=4) local
      x = batch() : f32[7, 2]  B
    forward:
      s = slice_shard(x, 0, 'dp') : f32[7, 2]  S(0)
      k = keep_first(x, 'dp')     : f32[7, 2]  P
      p = place_shard(s, 0, 'dp') : f32[7, 2]  P
      r = relabel(x)              : f32[7, 2]  B
      return s, k, p, r
    """
    (s, k, p, r), executor = run(text, {"x": [x] * N})
    assert torch.cat(s).equal(x) and sum(k).equal(x) and sum(p).equal(x) and r[3].equal(x)
    assert executor.world.trace == []


def test_a_maximum_is_completed_by_a_maximum_also_when_it_is_scattered() -> None:
    given = [torch.randn(8) for _ in range(N)]
    text = """
    graph step(dp=4) local
      x = batch() : f32[8]  P(max)
    forward:
      s = reduce_scatter(x, 0, 'dp')     : f32[8]  S(0)
      m = all_reduce(x, 'dp', 'max')     : f32[8]  B
      return s, m
    """
    (s, m), _ = run(text, {"x": given})
    best = torch.stack(given).amax(0)
    assert torch.cat(s).equal(best) and m[2].equal(best)


def test_on_two_axes_a_nested_split_unnests_from_the_inside() -> None:
    x = torch.randn(10, 3)
    outer = shards(x, 2, 0)
    nested = [piece for half in outer for piece in shards(half, 2, 0)]
    text = """
    graph step(dp=2, tp=2) local
      x = batch() : f32[10, 3]  (S(0), S(0))
    forward:
      h = all_gather(x, 0, 'tp') : f32[10, 3]  (S(0), B)
      y = all_gather(h, 0, 'dp') : f32[10, 3]  (B, B)
      p = keep_first(h, 'tp')    : f32[10, 3]  (S(0), P)
      z = reduce_scatter(p, 0, 'tp') : f32[10, 3]  (S(0), S(0))
      return h, y, z
    """
    (h, y, z), _ = run(text, {"x": nested})
    assert all(found.equal(outer[rank // 2]) for rank, found in enumerate(h))
    assert all(found.equal(x) for found in y)
    assert all(found.equal(piece) for found, piece in zip(z, nested, strict=True))


def test_an_axis_of_one_rank_sends_nothing() -> None:
    x = torch.randn(3, 2)
    text = """
    graph step(dp=1) local
      x = batch() : f32[3, 2]  S(0)
      p = batch() : f32[3, 2]  P
    forward:
      g = all_gather(x, 0, 'dp')      : f32[3, 2]  B
      r = reduce_scatter(p, 1, 'dp')  : f32[3, 2]  S(1)
      s = all_reduce(p, 'dp', 'sum')  : f32[3, 2]  B
      t = all_to_all(x, 0, 1, 'dp')   : f32[3, 2]  S(1)
      return g, r, s, t
    """
    outputs, executor = run(text, {"x": [x], "p": [x]})
    assert all(out[0].equal(x) for out in outputs) and executor.world.trace == []


def test_values_without_elements_pass_through_every_collective() -> None:
    empty = [torch.empty(0, 3) for _ in range(N)]
    text = """
    graph step(dp=4) local
      x = batch() : f32[0, 3]  S(0)
      p = batch() : f32[0, 3]  P
    forward:
      g = all_gather(x, 0, 'dp')      : f32[0, 3]  B
      r = reduce_scatter(p, 0, 'dp')  : f32[0, 3]  S(0)
      s = all_reduce(p, 'dp', 'sum')  : f32[0, 3]  B
      t = all_to_all(x, 0, 1, 'dp')   : f32[0, 3]  S(1)
      return g, r, s, t
    """
    outputs, _ = run(text, {"x": empty, "p": empty})
    assert [out[0].shape for out in outputs] == [(0, 3), (0, 3), (0, 3), (0, 1)]


def test_operands_that_do_not_lie_densely_are_packed_right() -> None:
    x = torch.randn(6, 8)
    text = """
    graph step(dp=4) local
      x = batch() : f32[8, 6]  S(0)
      p = batch() : f32[8, 6]  P
    forward:
      xt = t(x)                         : f32[6, 8]  S(1)
      g  = all_gather(xt, 1, 'dp')      : f32[6, 8]  B
      pt = t(p)                         : f32[6, 8]  P
      r  = reduce_scatter(pt, 1, 'dp')  : f32[6, 8]  S(1)
      return g, r
    """
    (g, r), _ = run(text, {"x": shards(x.t(), N, 0), "p": [x.t() * i for i in range(N)]})
    assert g[3].equal(x)
    torch.testing.assert_close(torch.cat(r, 1), x * 6)
