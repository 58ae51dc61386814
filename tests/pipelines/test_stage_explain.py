"""gz.explain says where on a pipeline a value is, and knows the names that only parts have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from staged import Net, batches, placement, staged_graph, stages_of

import graphzero as gz
from graphzero.ir import value
from graphzero.ops import MOVE


@pytest.fixture(scope="module")
def graph() -> Any:
    torch.manual_seed(0)
    loss: Any = lambda model, x, y: F.cross_entropy(model(x), y)  # noqa: E731
    graph = staged_graph(Net(2), stages_of(2, 2), placement(2, 2), micro_batches=4, stage=2, clip=0.1, loss_fn=loss)
    return graph.compile(*batches(1)[0])


def test_tensors_of_every_part_are_explained_and_have_their_places(graph: Any) -> None:
    for name, program in graph.stage_programs.items():
        tensors = [node for node in program.nodes if node.op != "output" and not value.is_scalar(node)]
        for node in tensors[-1::-13]:
            places = gz.explain(graph, node).places
            assert places, (name, node.name)
            assert node.op == "placeholder" or any(name in line for line in places), (name, node.name, places)


def test_a_value_that_is_sent_says_from_where_to_where(graph: Any) -> None:
    moved = next(node for node in graph.program.nodes if node.target is MOVE and "repeat" in node.meta)
    sent = value.operand(moved)
    found = gz.explain(graph, sent)
    first, second = found.places
    assert first == "computed in forward@0, on stage 0 (rank 0 along pp)"
    assert second.startswith("forward@0 hands it over to forward@1, backward@1, for each micro-batch; sent from rank 0")
    assert str(found).splitlines()[1] == f"  {first}"
    assert gz.explain(graph, moved.name).places[0] == f"moved to stage 1: there it is what '{sent.name}' is"
    assert gz.explain(graph, sent.name).line.startswith(f"{sent.name.removesuffix('_mb')} = ")


def test_parameters_accumulators_and_what_goes_once_a_step(graph: Any) -> None:
    assert gz.explain(graph, "model.head.weight").places == [
        "on stage 1 (rank 1 along pp), read in forward@1, backward@1, epilogue1@1"
    ]
    (factor,) = [node.name for node in graph.program.nodes if str(node.target) == "aten.clamp.default"]
    assert gz.explain(graph, factor).places == [
        "computed in epilogue1@1, on stage 1 (rank 1 along pp)",
        "epilogue1@1 hands it over to epilogue2@0, once a step; sent from rank 1 to 0 along pp",
    ]
    total = next(name for name in graph.stage_programs["backward@0"].placeholders("accumulator"))
    assert gz.explain(graph, total).places[0].startswith("an accumulator of stage 0, which backward@0, epilogue@0")
    assert "gradient(model." in gz.explain(graph, total.name).line


def test_a_name_of_several_parts_asks_which(graph: Any) -> None:
    with pytest.raises(gz.ConfigError, match="each of prologue@1, backward@0.*\n  Say which: 'prologue@1.launch'"):
        gz.explain(graph, "launch")
    found = gz.explain(graph, "epilogue1@1.launch")
    assert found.places == ["computed in epilogue1@1, on stage 1 (rank 1 along pp)"]
    assert gz.explain(graph, "launch_1").places == found.places  # which one part alone has
    with pytest.raises(gz.ConfigError, match="there is no part 'forward@7'; parts are prologue@1"):
        gz.explain(graph, "forward@7.launch")
    with pytest.raises(gz.ConfigError, match="no tensor called 'nothing'"):
        gz.explain(graph, "nothing")
    with pytest.raises(gz.ConfigError, match="no tensor called 'model.head.wait'; did you mean model.head.weight"):
        gz.explain(graph, "model.head.wait")


def test_without_stages_nothing_is_said_of_them() -> None:
    graph = staged_graph(Net(), None, placement(2, 2), micro_batches=4).compile(*batches(1)[0])
    share = next(node for node in graph.program.nodes if node.name.startswith("addmm") and node.name.endswith("_mb"))
    found = gz.explain(graph, share)
    assert not found.places and found.line.startswith(f"{share.name.removesuffix('_mb')} = ")
