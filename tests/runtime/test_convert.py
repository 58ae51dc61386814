"""to_global, to_local and sbp.of in one process: virtual placements, build, and what they refuse."""

import re

import pytest
import torch
from torch import nn

import graphzero as gz
from graphzero.runtime.tensors.shards import join, piece
from graphzero.sbp import B, P, S


@pytest.fixture
def place():
    return gz.placement("cpu", range(4), virtual=True)


def test_on_a_virtual_placement_a_whole_tensor_is_annotated(place):
    x = torch.ones(8, 2)
    assert gz.to_global(x, place, S(0)) is x
    assert gz.sbp.of(x) == (S(0),) and gz.to_local(x) is x
    assert gz.to_global(x, place, sbp=(B,)) is x and gz.sbp.of(x) == (B,)
    with pytest.raises(gz.SbpError, match="gz.to_global"):
        gz.sbp.of(torch.ones(2))


def test_a_module_is_annotated_in_place_and_a_graph_takes_it_so(place):
    model = nn.Linear(4, 8, bias=False)
    assert gz.to_global(model, place, S(0)) is model
    assert gz.sbp.of(model.weight) == (S(0),)

    class Forward(gz.Graph):
        def __init__(self):
            super().__init__(place)
            self.model = model

        def build(self, x):
            return self.model(x)

    graph = Forward()
    x = torch.randn(8, 4)
    torch.testing.assert_close(graph(x), model(x).detach())
    assert gz.sbp.of(graph.program.node("model_weight")) == (S(0),)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.up, self.down = nn.Embedding(6, 4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight


def test_a_module_is_placed_by_the_names_of_its_tensors():
    where = gz.placement("cpu", [[0, 1], [2, 3]], virtual=True)
    model = Tied()
    split = {"up.*": (B, S(0)), "down.weight": (B, S(1)), "head.*": (B, S(0)), "*": (B, B)}
    assert gz.to_global(model, where, split) is model
    assert {name: gz.sbp.of(x) for name, x in model.named_parameters()} == {
        "tokens.weight": (B, S(0)),  # by one of its two names
        "up.weight": (B, S(0)), "up.bias": (B, S(0)), "down.weight": (B, S(1)), "down.bias": (B, B),
    }  # fmt: skip
    gz.to_global(model, where, {"up.*": (B, S(0))})
    assert gz.sbp.of(model.down.weight) == (B, B)
    for wrong, message in (
        ({"upp.*": (B, S(0))}, "'upp.*' fits no parameter or buffer"),
        ({"up.*": S(0)}, "one SBP per axis"),
        ({"up.*": (B, S(1))}, "has no dim 1"),
        ({"up.*": (B, gz.sbp.P)}, "up.weight"),
    ):
        with pytest.raises(gz.SbpError, match=re.escape(message)):
            gz.to_global(model, where, wrong)


def test_an_annotated_input_is_taken_as_placed(place):
    class Double(gz.Graph):
        def build(self, x):
            return x * 2

    graph = Double(place)
    x = gz.to_global(torch.randn(3, 8), place, S(1))
    out = graph(x)
    torch.testing.assert_close(out, x * 2)
    assert gz.sbp.of(graph.program.node("x")) == (S(1),) and gz.sbp.of(out) == (B,)


def test_inside_build_it_pins_and_outside_it_is_the_identity(place):
    class Net(nn.Module):
        def forward(self, x):
            return gz.to_global(x * 2, sbp=gz.sbp.B) + 1

    class Forward(gz.Graph):
        def __init__(self):
            super().__init__(place)
            self.net = Net()

        def build(self, x):
            return self.net(x)

    x = torch.randn(8, 4)
    graph = Forward()
    torch.testing.assert_close(graph(x), Net()(x))
    assert "all_gather" in str(graph.program)
    assert gz.to_global(x, sbp=S(0)) is x


def test_what_has_no_meaning_is_refused(place):
    x = torch.ones(8)
    with pytest.raises(gz.SbpError, match="no dim 1"):
        gz.to_global(x, place, S(1))
    with pytest.raises(gz.SbpError, match="one SBP per axis"):
        gz.to_global(x, place, (B, B))
    with pytest.raises(gz.SbpError, match="where"):
        gz.to_global(x)
    with pytest.raises(gz.PlacementError, match="placement="):
        gz.to_global(nn.Linear(2, 2), sbp=B)
    with pytest.raises(gz.SbpError, match="list"):
        gz.to_global([x], place, B)


@pytest.mark.parametrize("nd", [(B, B), (S(0), B), (S(0), S(0)), (S(1), S(0)), (P, S(1)), (S(0), P)])
def test_pieces_join_to_the_whole(nd):
    whole = torch.randn(7, 5)
    pieces = [piece(whole, nd, (2, 3), position) for position in range(6)]
    torch.testing.assert_close(join(pieces, nd, (2, 3)), whole)
