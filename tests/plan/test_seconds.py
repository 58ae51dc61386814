"""What is counted beside the ops: laying values into buffers and out of them."""

from __future__ import annotations

import pytest

import graphzero as gz
from graphzero.ir.storage.liveness import liveness
from graphzero.plan.seconds import packing

GATHER = """
graph toy(dp=4) local
  v = param()    : f32[8, 4]  S(0)!
  w = param()    : f32[4, 4]  S(0)!
forward:
  l = launch('bucket_all_gather', {slot}, [v, w], [0, 0], 'dp'{told}) : ({dtype}[8, 4]  B, {dtype}[4, 4]  B)
  h = wait(l) : ({dtype}[8, 4]  B, {dtype}[4, 4]  B)
  a = h[0] : {dtype}[8, 4]  B
  b = h[1] : {dtype}[4, 4]  B
  return a, b
"""
ALONE = """
graph toy(dp=4) local
  v = param()    : f32[8, 4]  S(0)!
forward:
  a = all_gather(v, 0, 'dp'{told}) : {dtype}[8, 4]  B
  l = launch('bucket_all_gather', None, [v], [0], 'dp'{told}) : ({dtype}[8, 4]  B)
  h = wait(l) : ({dtype}[8, 4]  B)
  b = h[0] : {dtype}[8, 4]  B
  return a, b
"""
PIECE, WHOLE = 12, 48  # elements of both values


@pytest.mark.parametrize(("told", "dtype", "itemsize"), [("", "f32", 4), (", dtype=torch.bfloat16", "bf16", 2)])
def test_a_piece_is_read_as_it_is_and_written_as_it_travels(told: str, dtype: str, itemsize: int) -> None:
    graph = gz.parse(GATHER.format(slot=0, told=told, dtype=dtype))
    at = liveness(graph)
    (found,) = [packing(layout) for layout in at.layouts.values()]
    assert found is not None
    into, out = found
    assert (into.nbytes, out.nbytes) == (PIECE * (4 + itemsize), 2 * WHOLE * itemsize)


def test_a_transfer_without_a_buffer_lays_down_only_what_it_casts() -> None:
    for told, dtype, wanted in (("", "f32", None), (", dtype=torch.bfloat16", "bf16", (8 * (4 + 2), 0.0))):
        at = liveness(gz.parse(ALONE.format(told=told, dtype=dtype)))
        direct = [packing(layout) for layout in at.layouts.values() if layout.moves.is_direct]
        assert direct and all(
            found is None if wanted is None else found is not None and tuple(x.nbytes for x in found) == wanted
            for found in direct
        )
