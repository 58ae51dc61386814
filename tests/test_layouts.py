"""Eleven models in every layout of four ranks: the losses of plain PyTorch, and batches that stay split.

The whole table is ``bench/grid.py layouts --full``.
"""

import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import fx

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "bench")]
pytest.importorskip("transformers")
import layouts  # noqa: E402
from layouts import (  # noqa: E402
    CASES,
    LAYOUTS,
    MODELS,
    PLANS,
    build_graph,
    parallelise,
    train_eagerly,
    train_graph,
)
from parity import compare_trainings  # noqa: E402

import graphzero as gz  # noqa: E402
from graphzero.ir import value  # noqa: E402
from graphzero.plan import Collective  # noqa: E402
from graphzero.sbp.registry import NoRuleWarning  # noqa: E402

GRID = "dp2 x tp2"
TRANSFORMERS = ("encoder", "gpt2, 4 heads", "llama", "bert, 4 heads", "vit, 4 heads", "t5, 4 heads")
ROUTING = ("modeling_qwen3_moe.py", "moe.py")  # where tokens are sent to experts

pytestmark = pytest.mark.strict


@pytest.fixture(autouse=True)
def every_op_has_a_rule():
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoRuleWarning)
        warnings.filterwarnings("ignore", "no axis of")  # tp4 has no data axis
        yield


def batch_gathers(graph: gz.Graph) -> list[Collective]:
    """Activations that are moved whole or across along a data axis, in forward and backward; ZeRO's are not meant."""
    data = graph.placement.data_axes
    return [
        c
        for c in graph.plan.collectives
        if c.axis in data and c.what_for == "other" and c.phase != "update" and c.kind in ("all_gather", "all_to_all")
    ]


def whole_batches(graph: gz.Graph, other: gz.Graph) -> list[str]:
    """Values of forward and backward that are made from the batch, have a dim of it, and are whole on a data axis.

    other: the same step for a batch of another size, which tells what has such a dim: what has grown.
    """
    axes = [graph.placement.names.index(name) for name in graph.placement.data_axes]
    grown = {node.name: value.type_of(node) for node in _made_from_batch(other)}
    return [
        node.name
        for node in _made_from_batch(graph)
        if grown.get(node.name, value.type_of(node)) != value.type_of(node)
        and any(value.nd_of(node)[axis].is_broadcast for axis in axes)
    ]


def _made_from_batch(graph: gz.Graph) -> list[fx.Node]:
    """Tensors of forward and backward that depend on an input."""
    made = set(graph.program.placeholders("batch"))
    for node in graph.program.nodes:
        if node.op == "call_function" and made.intersection(node.all_input_nodes):
            made.add(node)
    return [
        n
        for n in graph.program.nodes
        if n in made and value.is_tensor(n) and value.phase_of(n) in ("forward", "backward")
    ]


def check(model, layout, stage):
    graph = build_graph(model, LAYOUTS[layout], stage)
    found = compare_trainings(train_graph(graph, model), train_eagerly(model))
    assert found.loss <= layouts.LIMIT, f"{model} on {layout}, stage {stage}: {found}"
    return graph


@pytest.mark.parametrize(
    ("model", "layout", "stage"),
    [
        ("mlp", GRID, 3),
        ("mlp", "tp4", 0),
        ("mlp", "dp2 x dp2, inner", 2),
        ("convnet", GRID, 0),
        ("gpt2, 4 heads", GRID, 3),
        pytest.param("gpt2", "tp4", 0, marks=pytest.mark.slow),  # two heads, which four ranks do not divide
    ],
)
def test_a_model_trains_as_plain_pytorch_does(model, layout, stage):
    check(model, layout, stage)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_on_data_and_tensor_ranks_at_all_stages(model):
    layout = LAYOUTS[GRID]
    found = compare_trainings(train_graph(build_graph(model, layout, 0), model, through=layout), train_eagerly(model))
    assert found.loss <= layouts.LIMIT, f"{model}, a step at each of {layout.stages}: {found}"


INNER = ("lstm", "t5, 4 heads", "qwen3moe")  # recurrent, an encoder beside a decoder, experts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"), [*((model, "tp4") for model in MODELS), *((model, "dp2 x dp2, inner") for model in INNER)]
)
def test_models_train_in_other_layouts(model, layout):
    check(model, layout, LAYOUTS[layout].stages[-1])


@cache
def compiled(model, layout, rows):
    return build_graph(model, LAYOUTS[layout], 0).compile(*CASES[model].batch(0, rows, torch.float64))


@pytest.mark.parametrize(
    "model", [m if m == "llama" else pytest.param(m, marks=pytest.mark.slow) for m in TRANSFORMERS]
)
def test_activations_stay_split_along_the_batch(model):
    graph = compiled(model, GRID, 8)
    assert batch_gathers(graph) == []
    assert whole_batches(graph, compiled(model, GRID, 12)) == []


@pytest.mark.slow
def test_a_mixture_of_experts_gathers_tokens_for_their_routing_and_nothing_else():
    graph = compiled("qwen3moe", GRID, 8)
    gathered = [graph.program.node(name) for c in batch_gathers(graph) for name in c.names]
    assert gathered
    assert all(any(f"{file}:" in value.source_of(node) for file in ROUTING) for node in gathered)


def test_an_activation_that_is_whole_is_found():
    class Whole(layouts.TrainGraph):
        def build(self, x, y):
            loss = self.model(gz.to_global(x, sbp=(gz.sbp.B, None)), y)
            loss.backward()
            return loss

    def made(rows):
        network = CASES["mlp"].model(torch.float64)
        graph = Whole(network, torch.optim.SGD(network.parameters()), placement=LAYOUTS[GRID].placement())
        return graph.compile(*CASES["mlp"].batch(0, rows, torch.float64))

    graph = made(8)
    assert [c.kind for c in batch_gathers(graph)] == ["all_gather"]
    assert whole_batches(graph, made(12))


@pytest.mark.parametrize("model", MODELS)
def test_a_plan_splits_weights_of_every_model_in_even_pieces(model):
    network = CASES[model].model()
    split = parallelise(network, PLANS[model], LAYOUTS["dp2 x tp2"].placement())
    assert split
    named = dict(network.named_parameters()) | dict(network.named_buffers())
    for name in split:
        dim = gz.sbp.of(named[name])[1].dim
        assert named[name].shape[dim] % 2 == 0, f"{name} is cut unevenly"


def test_heads_that_ranks_do_not_divide_stay_whole():
    network = CASES["gpt2"].model()
    split = parallelise(network, PLANS["gpt2"], LAYOUTS["tp4"].placement())
    assert split and all(".mlp." in name for name in split)
