"""Each value of a program knows the module of the user's that it belongs to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from graphs import TrainGraph, mean_square
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphzero as gz
from graphzero.ir import value


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.layers[0](x))
        return self.norm(checkpoint(self.layers[1], x, use_reentrant=False))


def net_graph() -> TrainGraph:
    model = Net()
    return TrainGraph(model, mean_square, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=3)


def paths(graph: gz.StepGraph, *ops: str) -> set[tuple[str, str, str]]:
    """(op, phase, module) of the values that these ops make."""
    named = ((str(node.target).split(".")[1], node) for node in graph.nodes if str(node.target).startswith("aten."))
    return {(op, value.phase_of(node), value.module_of(node)) for op, node in named if op in ops}


def test_a_value_belongs_to_the_innermost_module_that_ran_its_op_in_the_captured_and_in_the_final_program() -> None:
    graph = net_graph().compile(torch.ones(4, 8))
    wanted = {
        ("addmm", "forward", "model.layers.0"),
        ("addmm", "forward", "model.layers.1"),
        ("relu", "forward", "model"),
        ("native_layer_norm", "forward", "model.norm"),
        ("native_layer_norm_backward", "backward", "model.norm"),
        ("threshold_backward", "backward", "model"),
        ("mm", "backward", "model.layers.0"),
        ("mm", "backward", "model.layers.1"),
    }
    for program in (graph.history[0].before, graph.program):
        found = paths(program, *(op for op, _, _ in wanted))
        assert wanted <= found and all(module.startswith("model") for _, _, module in found)


def test_what_is_a_parameter_or_belongs_to_one_belongs_to_its_module_and_the_loss_to_none() -> None:
    program = net_graph().compile(torch.ones(4, 8)).program
    held = [node for node in program.nodes if (role := value.role_of(node)) and role.of == "model.norm.weight"]
    assert {value.role_of(node).kind for node in held} >= {"param", "state", "gradient"}
    assert {value.module_of(node) for node in held} == {"model.norm"}
    assert value.module_of(program.node("x")) == "" == value.module_of(program.outputs[0])


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = self.head(x)
        return F.cross_entropy(scores.flatten(0, -2), y.flatten())


class Classify(gz.Graph):
    def __init__(self) -> None:
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.model = Scores()
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-3))

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.model(x, y)
        loss.backward()
        return loss


def test_a_gradient_belongs_to_its_op_also_where_the_next_line_only_asks_for_a_device() -> None:
    captured = Classify().compile(torch.ones(4, 8), torch.zeros(4, dtype=torch.long)).history[0].before
    assert ("mm", "backward", "model.head") in paths(captured, "mm")
    (line,) = {value.source_of(node) for node in captured.nodes if str(node.target) == "aten.addmm.default"}
    (gradient,) = (node for node in captured.nodes if str(node.target) == "aten.mm.default")
    assert value.source_of(gradient) == line
