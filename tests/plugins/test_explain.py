"""gz.explain says why a value has its SBP."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import graphzero as gz
from graphzero.ir.source_location import line_of
from graphzero.sbp import B, P, S


class Megatron(gz.Graph):
    """A column-split layer, then a row-split one, on a tensor axis."""

    def __init__(self) -> None:
        place = gz.placement("cpu", [[0, 1], [2, 3]], names=("dp", "tp"), virtual=True)
        super().__init__(place)
        self.model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.GELU(), nn.Linear(32, 8, bias=False))
        for layer, dim in ((self.model[0], 0), (self.model[2], 1)):
            gz.to_global(layer.weight, placement=place, sbp=(B, S(dim)))
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x: Tensor) -> Tensor:
        h = self.model(x)
        loss = h.square().mean()
        loss.backward()
        return loss


@pytest.fixture(scope="module")
def graph() -> gz.Graph:
    return Megatron().compile(torch.randn(16, 8))


def named(graph: gz.Graph, op: str, number: int = 0) -> str:
    before = next(record for record in graph.history if record.name == "propagate").before
    return [node.name for node in before.nodes if str(node.target) == op][number]


def test_what_was_taken_is_what_the_program_has_and_costs_least(graph: gz.Graph) -> None:
    after = next(record for record in graph.history if record.name == "propagate").after
    checked = 0
    for node in after.nodes:
        if node.op != "call_function" or node.meta["sbp"] is None or isinstance(node.meta["type"], tuple):
            continue
        found = gz.explain(graph, node)
        assert tuple(choice.sbp for choice in found.choices) == node.meta["sbp"]
        for choice in found.choices:
            considered = [option for option in choice.options if not option.barred]
            if considered:
                taken = next(option for option in considered if option.signature == choice.first)
                assert taken.order == min(option.order for option in considered)
                checked += 1
    assert checked > 10


def test_a_row_split_product_is_partial_and_says_who_completes_it(graph: gz.Graph) -> None:
    found = gz.explain(graph, named(graph, "aten.mm.default", 1))
    data, tensor = found.choices
    assert (data.sbp, tensor.sbp) == (S(0), P)
    assert tensor.producer is not None and tensor.producer.inputs == (S(1), S(0))
    assert {(kind, size) for _, _, kind, size in tensor.boxes} == {("all_reduce", 16 * 8 * 4.0)}
    assert "S(1), S(0) -> P" in str(found) and "all_reduce" in str(found)


def test_a_signature_that_is_not_considered_says_why(graph: gz.Graph) -> None:
    found = gz.explain(graph, named(graph, "aten.gelu.default"))
    barred = {str(option.signature): option.barred for option in found.choices[1].options}
    assert "no operand is split so yet" in barred["S(0) -> S(0)"]
    assert barred["S(1) -> S(1)"] == ""


def test_inputs_and_pins_are_told_from_choices(graph: gz.Graph) -> None:
    pinned = gz.explain(graph, "model_0_weight")
    assert [choice.why for choice in pinned.choices] == ["pinned", "pinned"]
    assert all(not choice.options for choice in pinned.choices)
    assert gz.explain(graph, "model.0.weight") == pinned
    assert graph.program.node("model.0.weight") is graph.program.node("model_0_weight")


def test_a_value_that_a_later_pass_made_is_explained_by_what_it_is_made_of(graph: gz.Graph) -> None:
    product = named(graph, "aten.mm.default", 1)
    later = [node.name for node in graph.program.nodes if node.name.startswith(f"{product}_")]
    assert later
    assert gz.explain(graph, later[0]).line == gz.explain(graph, product).line


def test_a_sum_that_is_completed_early_says_so() -> None:
    text = """
    graph g(tp=2)
      x = batch()   : f32[4, 64]  S(1)!
      w = param()   : f32[64, 4]  S(0)!
      v = param()   : f32[4, 64]  B!
    forward:
      u = use(w)    : f32[64, 4]
      q = use(v)    : f32[4, 64]
      y = mm(x, u)  : f32[4, 4]
      z = mm(y, q)  : f32[4, 64]
      e = relu(z)   : f32[4, 64]
      return e
    """
    found = gz.explain(gz.Pipeline([gz.passes.Pin()])(gz.parse(text)), "z")
    (choice,) = found.choices
    assert choice.sbp is B and choice.first is not None and choice.first.outputs == (P,)
    # y is 4 x 4 floats, z 4 x 64: an all-reduce over two ranks sends as many bytes as a value has
    assert (
        "completed where that moves the fewest bytes in all, and that is above this value: y, 64 B (here 1,024 B)"
        in (str(found))
    )


@pytest.mark.parametrize(
    ("shape", "view", "words"),
    [
        ("[4, 24]", "[4, 6, 4]", "x is moved to S(1, 6) for it: S(1) would not survive, cannot cut 6 into 4"),
        ("[6, 6]", "[6, 2, 3]", "x is gathered for it: S(1) would not survive, cannot cut 2 into 4"),
        ("[4, 24]", "[4, 8, 3]", ""),
    ],
)
def test_a_split_that_ends_at_a_view_says_why(shape: str, view: str, words: str) -> None:
    text = f"""
    graph g(tp=4)
      x = batch() : f32{shape}  S(1)!
    forward:
      y = view(x, {view}) : f32{view}
      return y
    """
    found = str(gz.explain(gz.Pipeline([gz.passes.Pin()])(gz.parse(text)), "y"))
    assert words in found and ("would not survive" in found) == bool(words), found


def test_an_op_that_works_along_the_split_dim_says_that_it_cannot_keep_it() -> None:
    text = """
    graph g(tp=2)
      x = batch() : f32[4, 8]  S(1)!
    forward:
      y = cumsum(x, 1) : f32[4, 8]
      return y
    """
    found = str(gz.explain(gz.Pipeline([gz.passes.Pin()])(gz.parse(text)), "y"))
    assert "x is gathered for it: S(1) would not survive, no signature of the op reads it so" in found


def test_the_ends_of_a_local_region_are_as_it_says() -> None:
    class Forward(gz.Graph):
        def build(self, x: Tensor) -> Tensor:
            return gz.local_region(torch.sin, S(0), S(0))(x)  # type: ignore[no-any-return]

    graph = Forward(gz.placement("cpu", range(2), virtual=True)).compile(torch.randn(4, 3))
    assert "axis dp, 2 ranks: S(0), as local_region says" in str(gz.explain(graph, "as_global"))


def test_what_cannot_be_explained_says_what_to_give(graph: gz.Graph) -> None:
    with pytest.raises(gz.ConfigError, match="no tensor called 'gelo'; did you mean gelu"):
        gz.explain(graph, "gelo")
    with pytest.raises(gz.ConfigError, match="SBPs are chosen already; give the Graph itself"):
        gz.explain(graph.program, "gelu")
    with pytest.raises(gz.ConfigError, match="compile"):
        gz.explain(Megatron(), "gelu")


def test_explaining_changes_nothing(graph: gz.Graph) -> None:
    before = str(graph.program)
    gz.explain(graph, named(graph, "aten.gelu.default"))
    assert str(graph.program) == before


def test_a_line_of_a_notebook_is_told_by_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def format_code_name(file: str) -> tuple[str, str] | None:  # IPython's
        return ("Cell", "In[3]") if file.startswith("/tmp/ipykernel_1/") else None

    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=format_code_name))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert line_of(compile("pass", "/tmp/ipykernel_1/2345.py", "exec"), 5) == "Cell In[3]:5 in <module>"
    assert line_of(compile("pass", "/tmp/train.py", "exec"), 5) == "/tmp/train.py:5 in <module>"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert line_of(compile("pass", "/tmp/ipykernel_1/9.py", "exec"), 5) == "/tmp/ipykernel_1/9.py:5 in <module>"
