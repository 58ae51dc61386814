"""One view of a collective, however it is written, and nobody else who knows which argument stands where."""

from __future__ import annotations

import pathlib
import re

import pytest
from toys import STAGES, lower, step

import graphzero
from graphzero.ir import ops, transfer
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.parser import parse
from graphzero.ir.transfer import awaited, delivered, transfer_of
from graphzero.ir.transfer_layout import lay_out, layout_of
from graphzero.ir.verifier.verify import verify

LAYERS = ("linear 8", "bias", "relu", "linear 8", "bias", "relu", "linear 4")
ROOT = pathlib.Path(graphzero.__file__).parent
TEXT = """
graph toy(dp=2) local
  x = batch() : f32[8, 4]  S(0)
  y = batch() : f32[6]     S(0)
  p = batch() : f32[8, 4]  P
  m = batch() : f32[8]     P(max)
forward:
  g = all_gather(x, 0, 'dp')         : f32[8, 4]  B
  r = reduce_scatter(p, 1, 'dp')     : f32[8, 4]  S(1)
  s = reduce_scatter(m, 0, 'dp')     : f32[8]     S(0)
  a = all_reduce(m, 'dp', 'max')     : f32[8]     B
  t = all_to_all(x, 0, 1, 'dp')      : f32[8, 4]  S(1)
  return g, r, s, a, t
"""


def toy() -> StepGraph:
    return verify(parse(TEXT))


def test_the_facts_of_a_transfer_are_the_same_bucketed_and_launched() -> None:
    for name in ("g", "r", "s", "a"):
        graph = toy()
        single = graph.node(name)
        alone = transfer_of(single)
        assert alone is not None
        with graph.graph.inserting_before(single):
            bucket = transfer.bucket(graph, [single], like=single)
        joined = transfer_of(bucket)
        wait = transfer.launch(graph, bucket)
        begun = awaited(wait)
        assert joined is not None and begun is not None and begun.is_launch
        for other in (joined, begun):
            assert (other.kind, other.axis, other.members, other.dims) == (
                alone.kind, alone.axis, alone.members, alone.dims,
            )  # fmt: skip
            assert other.completes(graph) == alone.completes(graph)
            assert lay_out(graph, other).slot_bytes == lay_out(graph, alone).slot_bytes


def test_how_partial_values_are_completed_is_an_argument_or_their_own() -> None:
    graph = toy()
    found = {name: transfer_of(graph.node(name)) for name in "grsat"}
    assert {name: one.completes(graph) for name, one in found.items() if one} == {
        "g": "", "r": "sum", "s": "max", "a": "max", "t": "",
    }  # fmt: skip


def test_a_value_knows_what_delivered_it() -> None:
    graph = toy()
    single = graph.node("g")
    assert delivered(single) == (transfer_of(single), 0)
    assert delivered(graph.node("x")) is None and transfer_of(graph.node("x")) is None


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_results_are_the_values_of_the_members_in_order(stage: object) -> None:
    graph = lower(step(LAYERS), stage)
    found = [transfer_of(node) for node in graph.graph.find_nodes(op="call_function", target=ops.launch)]
    assert found
    for moves in found:
        assert moves is not None and moves.end.target is ops.wait
        for i, result in enumerate(moves.results):
            assert result is moves.end or delivered(result) == (moves, i)


def test_lines_of_a_slot_that_are_sent_and_received_lie_within_it() -> None:
    graph = toy()
    for name in "grsat":
        layout = layout_of(graph, graph.node(name))
        assert layout is not None
        for own in range(layout.ranks):
            assert 0 <= layout.sent(own).start <= layout.sent(own).stop <= layout.slot_elements
        assert layout.received.stop <= layout.slot_elements


def test_only_one_file_knows_where_the_arguments_of_a_transfer_stand() -> None:
    """Others may name its ops, and ask; the text's own laws read the arguments of what is still to be checked."""
    decoding = re.compile(r"bucket_\w+\.__name__|\"bucket_|removeprefix\(.bucket_|ops\.launch, \(|args\[2\]\[0\]")
    allowed = {"ir/transfer.py", "ir/ops.py", "ir/verifier/pass_op_types.py"}
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if decoding.search(path.read_text("utf-8"))}
    assert found <= allowed
