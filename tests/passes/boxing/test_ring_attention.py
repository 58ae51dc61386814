"""RingAttention: where keys go round in blocks, and where they are gathered as before."""

from __future__ import annotations

import pytest
import torch

import graphzero as gz
from graphzero.ir import ops
from graphzero.ops import ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD
from graphzero.passes import InsertBoxing, LowerBoxing, Pipeline, Propagate, RingAttention, SplitAttention
from graphzero.testing import assert_same_step, strict_transfers

FORWARD_AND_BACKWARD = """graph layer({axes}) captured
  q = batch() : {x}  {sbp}
  k = batch() : {kv}  {sbp}
  v = batch() : {kv}  {sbp}
  g = batch() : {x}  {sbp}
  mask = batch() : f64[1, 1, {length}, {keys}]
  draws = batch() : i64[1, 4, {length}]
forward:
  k1 = unsqueeze(k, 2) : f64[1, 2, 1, {keys}, 3]
  k2 = expand(k1, [1, 2, 2, {keys}, 3]) : f64[1, 2, 2, {keys}, 3]
  k3 = reshape(k2, [1, 4, {keys}, 3]) : {whole}
  v1 = unsqueeze(v, 2) : f64[1, 2, 1, {keys}, 3]
  v2 = expand(v1, [1, 2, 2, {keys}, 3]) : f64[1, 2, 2, {keys}, 3]
  v3 = reshape(v2, [1, 4, {keys}, 3]) : {whole}
  pair = attention(q, k3, v3, {more}) : ({x}, {rows})
  y = pair[0] : {x}
  sums = pair[1] : {rows}
backward:
  grads = attention_backward(g, q, k3, v3, y, sums, {more}) : ({x}, {whole}, {whole})
  dq = grads[0] : {x}
  dk = grads[1] : {whole}
  dk1 = reshape(dk, [1, 2, 2, {keys}, 3]) : f64[1, 2, 2, {keys}, 3]
  dk2 = sum.dim_IntList(dk1, [2]) : {kv}
  dv = grads[2] : {whole}
  dv1 = reshape(dv, [1, 2, 2, {keys}, 3]) : f64[1, 2, 2, {keys}, 3]
  dv2 = sum.dim_IntList(dv1, [2]) : {kv}
  return y, dq, dk2, dv2
"""


def layer(axes: str = "cp=2", sbp: str = "S(2)!", more: str = "None, True, 0.5", length: int = 8, keys: int = 8) -> str:
    kv, whole = f"f64[1, 2, {keys}, 3]", f"f64[1, 4, {keys}, 3]"
    x, rows = f"f64[1, 4, {length}, 3]", f"f64[1, 4, {length}]"
    return FORWARD_AND_BACKWARD.format(**locals())


def with_rings(text: str, ways: str = "ring") -> gz.StepGraph:
    passes = [SplitAttention(ways), Propagate(), InsertBoxing(), LowerBoxing(), RingAttention(ways)]
    return Pipeline(passes)(gz.parse(text))


def block_count(graph: gz.StepGraph) -> int:
    return sum(node.target in (ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD) for node in graph.nodes)


@pytest.mark.parametrize(
    "more",
    ["None, True, 0.5", "None, False, 0.5", "mask, False, 0.5", "mask, True, 0.5", "None, True, 0.5, draws, 0.4",
     "mask, False, 0.5, draws, 0.4"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("axes", "sbp", "ranks"),
    [("cp=2", "S(2)!", 2), ("cp=4", "S(2,2)!", 4), ("cp=8", "S(2)!", 8), ("dp=2, cp=2", "(B!, S(2)!)", 2),
     ("cp=2, dp=2", "(S(2,4)!, B!)", 2), ("tp=2, cp=4", "(S(1)!, S(2)!)", 4)],
)  # fmt: skip
def test_blocks_that_go_round_are_the_same_step(axes: str, sbp: str, ranks: int, more: str) -> None:
    text = layer(axes, sbp, more)
    graph = with_rings(text)
    assert block_count(graph) == 2 * ranks
    with strict_transfers():
        assert_same_step(gz.parse(text), graph, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("more", ["None, True, 0.5", "mask, True, 0.5", "None, True, 0.5, draws, 0.4"])
def test_after_an_exchange_on_an_inner_axis_blocks_go_round_on_the_outer_one(more: str) -> None:
    text = layer("co=2, ci=2", "(S(2)!, S(2)!)", more)
    graph = with_rings(text, "ring exchange@ci")
    assert block_count(graph) == 2 * 2 and str(graph) == str(with_rings(text))
    with strict_transfers():
        assert_same_step(gz.parse(text), graph, rtol=1e-9, atol=1e-9)
    assert not block_count(with_rings(text, "ring gather@co exchange@ci"))  # on that axis keys are to be gathered


def test_no_keys_are_gathered_and_each_block_makes_as_many_steps_as_it_must() -> None:
    text = str(with_rings(layer("cp=4")))
    assert text.count("all_gather") == 4 and "reduce_scatter" not in text  # the results, which the step returns whole
    assert text.count("= shift(") == 2 * 3 + 2 * 3 + 2 * 4  # keys and values, these in backward, and their gradients


@pytest.mark.parametrize(
    "text",
    [
        layer("cp=3"),  # a rank has fewer queries than others
        layer(length=6),  # keys are not those of the queries' sequence
        layer("ca=2, cb=3", "(S(2)!, S(2)!)", length=12, keys=12),  # blocks of two axes, and few heads
        layer("cp=2", "S(2,2)!"),  # pieces are neither contiguous nor each second token
    ],
)
def test_where_pieces_are_not_equal_parts_of_one_sequence_keys_are_gathered(text: str) -> None:
    graph = with_rings(text)
    assert not block_count(graph)
    assert_same_step(gz.parse(text), graph, rtol=1e-9, atol=1e-9)


def test_without_backward_blocks_go_round_once() -> None:
    text = layer().split("backward:")[0] + "  return y\n"
    graph = with_rings(text)
    assert block_count(graph) == 2
    assert_same_step(gz.parse(text), graph, rtol=1e-9, atol=1e-9)


def test_blocks_of_16_bit_values_are_added_up_in_float32() -> None:
    text = layer().replace("f64[1, 4, 8]", "f32[1, 4, 8]").replace("f64", "bf16")
    graph = with_rings(text)
    moved = {node.meta["type"].dtype for node in graph.nodes if node.target is ops.shift}
    assert moved == {torch.bfloat16, torch.float32}  # keys and values, and their gradients
    assert {node.meta["type"].dtype for node in graph.outputs} == {torch.bfloat16}
    assert_same_step(gz.parse(text), graph, rtol=2e-2, atol=2e-2)
