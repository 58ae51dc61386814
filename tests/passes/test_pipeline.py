"""A pass changes a clone and returns it; the pipeline checks, times and remembers."""

from __future__ import annotations

import pytest
from toys import lower, step

from graphzero.errors import VerifyError
from graphzero.ir.graph import StepGraph
from graphzero.ir.parse import parse
from graphzero.passes import NAMES, Keep, Pass, Pin, Pipeline, Propagate, Zero, default_passes, pass_name
from graphzero.sbp.types import P
from graphzero.testing import assert_same_step

RELU = """
graph step(dp=2)
  x = batch()    : f32[8, 4]
  m = state(w)   : f32[4]
forward:
  y = relu(x)    : f32[8, 4]
update:
  n = mul(m, 2)  : f32[4]
  return y; update(m=n)
"""


def refused(pass_: Pass, problem: str, graph: str = RELU) -> None:
    with pytest.raises(VerifyError, match=problem):
        Pipeline([pass_])(parse(graph))


def test_the_graph_that_is_given_stays_as_it_is() -> None:
    graph = parse(step())
    before = str(graph)
    first = Pipeline(default_passes(zero=Zero(3)))(graph)
    assert str(graph) == before
    assert str(lower(graph, Zero(3))) == str(first)


def test_history_holds_each_pass_with_the_graphs_before_and_after() -> None:
    pipeline = Pipeline(default_passes(zero=Zero(2), keep=Keep()))
    graph = parse(step())
    last = pipeline(graph)
    records = pipeline.history
    assert tuple(record.name for record in records) == tuple(name for name in NAMES if name != "order")
    assert (str(records[0].before), str(records[-1].after)) == (str(graph), str(last))
    assert all(str(a.after) == str(b.before) for a, b in zip(records[:-1], records[1:], strict=True))
    assert all(record.seconds >= 0 for record in records)


def test_a_diff_shows_the_lines_that_a_pass_changed() -> None:
    pipeline = Pipeline([Pin(), Zero(1)])
    pipeline(parse(RELU))
    assert pipeline.history[1].diff().splitlines() == [
        "--- before zero", "+++ after zero", "@@ -2,3 +2,3 @@", "   x = batch() : f32[8, 4]  S(0)!",
        "-  m = state(w) : f32[4]  B!", "+  m = state(w) : f32[4]  S(0)!", " forward:",
    ]  # fmt: skip
    pipeline = Pipeline([Pin(), Pin()])
    pipeline(parse(RELU))
    assert pipeline.history[1].diff() == ""


def test_a_function_is_a_pass_and_carries_its_name() -> None:
    def double_relu(graph: StepGraph) -> StepGraph:
        node = graph.node("y")
        with graph.graph.inserting_after(node):
            again = graph.call(node.target, (node,), node.meta["type"], like=node, name="again")
        graph.set_output([again], {}, graph.updates)
        return graph

    pipeline = Pipeline([double_relu])
    after = pipeline(parse(RELU))
    assert [record.name for record in pipeline.history] == ["double_relu"]
    assert "+  again = relu(y) : f32[8, 4]" in pipeline.history[0].diff()
    assert_same_step(parse(RELU), after)


def test_names_are_snake_case_of_name_function_or_class() -> None:
    class FuseNorms:
        def __call__(self, graph: StepGraph) -> StepGraph:
            return graph

    class Named(FuseNorms):
        name = "something"

    assert pass_name(FuseNorms()) == "fuse_norms"
    assert pass_name(Named()) == "something"
    assert pass_name(Zero(1)) == "zero"


def test_what_a_pass_returns_is_a_graph() -> None:
    refused(lambda graph: None, "pass <lambda> returned NoneType, not a StepGraph")  # type: ignore[arg-type,return-value]
    refused(lambda graph: graph.fx, "returned .*, not a StepGraph")  # type: ignore[arg-type,return-value]


def test_a_pass_may_not_drop_an_update() -> None:
    def forget(graph: StepGraph) -> StepGraph:
        graph.set_output(graph.outputs, graph.aux, {})
        return graph

    refused(forget, "pass forget dropped the update of m")


def test_a_pass_may_not_change_the_number_of_outputs() -> None:
    def more(graph: StepGraph) -> StepGraph:
        graph.set_output([*graph.outputs, graph.node("y")], graph.aux, graph.updates)
        return graph

    refused(more, "pass more returned a graph with 2 outputs.* build returns 1")


def test_a_pass_may_not_drop_an_input() -> None:
    def drop(graph: StepGraph) -> StepGraph:
        graph.graph.erase_node(graph.node("x"))
        return graph

    unused = RELU.replace("relu(x)", "ones([8, 4])")
    refused(drop, "pass drop dropped the input x", unused)


def test_a_pass_may_not_go_back_to_an_earlier_level() -> None:
    def back(graph: StepGraph) -> StepGraph:
        graph.level = "captured"
        return graph

    with pytest.raises(VerifyError, match="pass back took the graph from level 'propagated' back to 'captured'"):
        Pipeline([Pin(), Propagate(), back])(parse(RELU))


def test_a_broken_law_names_the_pass_that_broke_it() -> None:
    def spoil(graph: StepGraph) -> StepGraph:
        graph.node("y").meta["sbp"] = (P,)
        return graph

    with pytest.raises(VerifyError, match="after pass spoil: 'y' cannot be P on axis dp"):
        Pipeline([Pin(), Propagate(), spoil])(parse(RELU))
