"""An optimizer's chain of elementwise ops becomes one kernel, which steps alike wherever an element lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import TrainGraph, mean_square
from torch import nn

import graphzero as gz
from graphzero.ops import ADAM
from graphzero.passes import Fuse, Pipeline
from graphzero.testing import assert_same_step


def tanh_graph(make: Any, stage: int = 0, ranks: int = 2) -> TrainGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3))
    return TrainGraph(model, mean_square, make(model.parameters()), placement=ranks, stage=stage)


class Own(torch.optim.Optimizer):
    """Adam as torch's, but for one thing."""

    def __init__(self, params: Any, root: Any = torch.sqrt):
        super().__init__(params, {"lr": 1e-2})
        self.root = root

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                p.data.addcdiv_(state["m"], self.root(state["v"]) + 1e-6, value=-group["lr"])


def fuses(graph: gz.Graph) -> int:
    """How many parameters are stepped by the kernel."""
    return sum(len(node.args[0]) for node in graph.program.nodes if node.target is ADAM)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.Adam,
        lambda p: torch.optim.Adam(p, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, maximize=True),
        lambda p: torch.optim.AdamW(p, weight_decay=0.0, betas=(0.5, 0.6), eps=1e-3),
    ],
)
def test_each_parameter_of_adam_steps_in_one_op(make: Any, stage: int) -> None:
    graph = tanh_graph(make, stage)
    graph.compile(torch.randn(4, 6))
    assert fuses(graph) == 4
    assert all(node.target is not torch.ops.aten.addcdiv.default for node in graph.program.nodes)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
        lambda p: torch.optim.NAdam(p),
        Own,
    ],
)
def test_what_steps_otherwise_stays_as_it_is(make: Any) -> None:
    graph = tanh_graph(make)
    graph.compile(torch.randn(4, 6))
    assert fuses(graph) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stages_and_ranks_agree_to_the_bit_for_pieces_of_any_size(dtype: torch.dtype) -> None:
    """11 rows on 2 and 4 ranks: pieces that fill no vector, and some that are empty."""
    states = {}
    for ranks in (2, 4):
        for stage in range(4):
            graph = tanh_graph(torch.optim.AdamW, stage, ranks)
            graph.model.to(dtype)
            generator = torch.Generator().manual_seed(1)
            for _ in range(3):
                graph(torch.randn(12, 6, generator=generator, dtype=dtype))
            states[ranks, stage] = graph.full_state_dict()["modules"]["model"]
    for (ranks, stage), found in states.items():
        for name, wanted in states[ranks, 0].items():
            assert torch.equal(found[name], wanted), (ranks, stage, name)


def test_the_pass_keeps_the_step() -> None:
    graph = tanh_graph(torch.optim.AdamW, 2)
    graph.compile(torch.randn(4, 6))
    record = next(record for record in graph.history if record.name == "fuse_adam")
    assert_same_step(record.before, record.after)
    assert str(gz.parse(str(record.after))) == str(record.after)


def test_a_moment_that_is_needed_before_the_parameter_is_made_keeps_the_chain() -> None:
    graph = tanh_graph(torch.optim.AdamW)
    graph.compile(torch.randn(4, 6))
    before = next(record for record in graph.history if record.name == "fuse_adam").before.clone()
    lerp = next(node for node in before.nodes if str(node.target) == "aten.lerp.Scalar")
    with before.graph.inserting_after(lerp):
        early = before.call(torch.ops.aten.neg.default, (lerp,), lerp.meta["type"], sbp=lerp.meta["sbp"], like=lerp)
    before.set_output([*before.outputs, early], before.aux, before.updates)
    after = Pipeline([Fuse()])(before)
    assert sum(node.target is ADAM for node in after.nodes) == 3
