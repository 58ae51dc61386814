"""A packed graph is the same graph again, and hardly anything in between."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch
from torch import nn
from toys import STAGES, options, step

import graphzero as gz
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.packed_graph import PackedGraph, PackedHistory
from graphzero.ir.text.parser import parse
from graphzero.passes import Pipeline, default_passes
from graphzero.sbp.types import B

aten = torch.ops.aten
NUMBERS = """
graph numbers(dp=2)
  x = batch()                : f32[4, 4]  S(0)!
forward:
  a = mul(x, 1)              : f32[4, 4]
  b = mul(a, 1.0)            : f32[4, 4]
  c = mul(b, -0.0)           : f32[4, 4]
  d = mul(c, inf)            : f32[4, 4]
  e = sum(d, [0], True)      : f32[1, 4]
  f = cat([e, e, x])         : f32[6, 4]
  g = full([2, 4], False, dtype=torch.bool, device=device(type='cpu'))  : bool[2, 4]
  return f, g, 3, None; norm=e
"""


def facts(graph: StepGraph) -> list[tuple[object, ...]]:
    return [(node.name, node.op, node.target, repr(node.args), repr(node.kwargs), node.meta) for node in graph.nodes]


@pytest.mark.parametrize("zero", STAGES)
def test_every_graph_of_a_history_comes_back_with_all_that_is_known_of_its_values(zero: gz.passes.Zero | None) -> None:
    graph = parse(step())
    for pass_ in default_passes(options(zero)):
        graph = Pipeline([pass_])(graph)
        again = PackedGraph.from_graph(graph).graph()
        assert facts(again) == facts(graph)
        assert (again.name, again.placement, again.level) == (graph.name, graph.placement, graph.level)
        assert [list(map(str, a.users)) for a in again.nodes] == [list(map(str, a.users)) for a in graph.nodes]


def test_numbers_keep_their_kinds_and_lists_their_values() -> None:
    graph = PackedGraph.from_graph(parse(NUMBERS)).graph()
    assert str(graph) == str(parse(NUMBERS))
    one, real = (graph.node(name).args[1] for name in "ab")
    assert (type(one), type(real)) == (int, float)
    assert graph.node("f").args[0] == [graph.node("e"), graph.node("e"), graph.node("x")]


def test_source_lines_come_back_though_no_text_has_them() -> None:
    graph = linear()
    assert any(value.source_of(node).endswith("in build") for node in graph.history[0].before.nodes)
    assert [value.source_of(a) for a in graph.history[-1].after.nodes] == [
        value.source_of(a) for a in graph.program.nodes
    ]


def test_what_text_cannot_say_comes_back_too() -> None:
    def own(x: torch.Tensor) -> torch.Tensor:
        return x

    graph = parse(NUMBERS)
    with graph.graph.inserting_before(graph.output):
        graph.call(own, (graph.node("x"),), value.tensor_type(graph.node("x")), sbp=(B,), name="mine")
    graph.node("a").meta["mine"] = held = object()
    graph.node("b").meta["among"] = {graph.node("x"), 1j}, [slice(1, None), frozenset("ab")]
    again = PackedGraph.from_graph(graph).graph()
    assert again.node("mine").target is own
    assert again.node("a").meta["mine"] is held
    assert again.node("b").meta["among"] == ({again.node("x"), 1j}, [slice(1, None), frozenset("ab")])


def test_a_change_of_what_came_back_changes_nothing_else() -> None:
    graph = linear()
    record = graph.history[0]
    text = str(record.after)
    changed = record.after
    changed.set_output([], {}, {})
    changed.node("model_weight").meta["sbp"] = None
    assert str(record.after) == text != str(changed)


def test_a_change_of_the_graph_does_not_reach_the_packed_one() -> None:
    graph = parse(step())
    packed, text = PackedGraph.from_graph(graph), str(graph)
    for node in graph.nodes:
        node.meta["sbp"] = None
    graph.set_output([], {}, {})
    assert str(packed.graph()) == text


@pytest.mark.parametrize("zero", STAGES)
def test_every_graph_of_one_run_comes_back_as_it_was_then(zero: gz.passes.Zero | None) -> None:
    stood = list[list[tuple[object, ...]]]()

    def look(graph: StepGraph) -> StepGraph:
        stood.append([(*row[:-1], dict(row[-1])) for row in facts(graph)])  # type: ignore[call-overload]
        return graph

    passes = [look, *(each for pass_ in default_passes(options(zero)) for each in (pass_, look))]
    pipeline = Pipeline(passes)
    pipeline(parse(step()))
    for _ in range(2):  # in any order, and again
        for record in reversed(pipeline.history):
            if record.pass_ is look:
                assert facts(record.after) == facts(record.before) == stood.pop()
        stood = [facts(record.after) for record in pipeline.history if record.pass_ is look]


def test_what_is_put_back_is_as_it_was_and_what_is_erased_is_gone() -> None:
    graph, history = parse(NUMBERS), PackedHistory()
    texts, packed = [str(graph)], [history.add_copy(graph)]

    def take() -> None:
        texts.append(str(graph))
        packed.append(history.add_copy(graph))

    d, f = graph.node("d"), graph.node("f")
    kept = d.args
    d.args = (graph.node("b"), 2.0)
    take()
    d.args = kept
    take()
    graph.output.prepend(graph.node("e"))
    graph.output.prepend(f)
    take()
    for i in range(8):  # where an erased node was, another may come to lie
        with graph.graph.inserting_before(graph.output):
            new = graph.call(aten.mul.Tensor, (f, float(i)), value.tensor_type(f), name=f"n{i}")
        take()
        graph.graph.erase_node(new)
        take()
    assert [str(each.graph()) for each in packed] == texts


def test_a_graph_that_did_not_change_is_the_same_object_and_one_that_did_is_not() -> None:
    graph, history = parse(NUMBERS), PackedHistory()
    first = history.add_copy(graph)
    assert history.add_copy(graph) is first
    changes = (
        lambda: graph.output.prepend(graph.node("f")),
        lambda: graph.node("a").meta.update(source="elsewhere"),
        lambda: setattr(graph.node("a"), "args", (graph.node("x"), 2)),
        lambda: setattr(graph, "level", "propagated"),
        lambda: setattr(graph.node("a"), "target", aten.add.Tensor),
    )
    for change in changes:
        change()
        again = history.add_copy(graph)
        assert again is not first and str(again.graph()) == str(graph)
        assert history.add_copy(graph) is again
        first = again


def test_a_list_that_a_pass_has_noted_and_fills_later_is_packed_as_it_is_each_time() -> None:
    graph, history, noted = parse(NUMBERS), PackedHistory(), list[int]()
    graph.node("a").meta["mine"] = noted
    graph.node("b").meta["among"] = (1, noted)
    packed = [history.add_copy(graph)]
    for i in range(3):
        noted.append(i)
        graph.node("c").meta["source"] = f"line {i}"
        packed.append(history.add_copy(graph))
    for count, each in enumerate(packed):
        assert each.graph().node("a").meta["mine"] == list(range(count))
        assert each.graph().node("b").meta["among"] == (1, list(range(count)))


def test_a_history_takes_a_fraction_of_its_graphs() -> None:
    history = linear(layers=8).history
    gc.collect()
    tracemalloc.start()
    graphs = [record.after for record in history]
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    packed = [PackedGraph.from_graph(graph) for graph in graphs]
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0] - held
    tracemalloc.stop()
    assert len(packed) == len(graphs) and kept < held / 15


def linear(layers: int = 1) -> gz.Graph:
    """A compiled Graph."""

    class Step(gz.Graph):
        def __init__(self) -> None:
            super().__init__(gz.placement("cpu", range(2), virtual=True))
            self.model = nn.Linear(4, 4) if layers == 1 else nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

    return Step().compile(torch.ones(4, 4))
