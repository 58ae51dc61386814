"""Another order of backward is taken where the plan of the program that comes out peaks lower by enough."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from toys import step

import graphzero as gz
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.text.parser import parse
from graphzero.passes import DelayGradients, Options, Pass, Pipeline, default_passes
from graphzero.plan import Candidate, gradient_order
from graphzero.plan.gradient_order import in_best_order
from graphzero.plan.variants import Variants

EVEN = step(("linear 16", "relu", "linear 16"), width=16, batch=64, ranks=2, optimizer="momentum")


@cache
def head(stage: int) -> gz.Graph:
    """The head makes the largest value, and its gradient is larger than what a block saves for backward."""

    class Train(gz.Graph):
        def __init__(self) -> None:
            super().__init__(gz.placement("cpu", range(2), virtual=True))
            torch.manual_seed(0)
            blocks = (layer for _ in range(4) for layer in (nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)))
            self.model = nn.Sequential(*blocks, nn.Linear(32, 1024, bias=False))
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))
            if stage:
                self.config.enable_zero(stage=stage)

        def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            return loss

    return Train().compile(torch.zeros(256, 32), torch.zeros(256, dtype=torch.long))


def captured(stage: int = 0) -> StepGraph:
    return head(stage).history[0].before


def taken(*own: tuple[Pass, str]) -> Candidate:
    return in_best_order(Variants(captured(), own), Options())


def names(found: gz.Graph | Candidate) -> list[str]:
    return [record.name for record in found.history]


def peak(graph: StepGraph) -> int:
    return int(liveness(graph).total().max())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_program_that_a_graph_takes_peaks_lower(stage: int) -> None:
    graph = head(stage)
    assert names(graph).index("delay_gradients") + 1 == names(graph).index("bucket")
    as_written = Pipeline(default_passes(Options(stage=stage)))(captured(stage))
    assert peak(graph.program) < (1 - gradient_order.LEAST) * peak(as_written)
    assert str(as_written) != str(graph.program)


def test_where_it_saves_nothing_the_program_reads_as_the_user_wrote_it() -> None:
    found = in_best_order(Variants(parse(EVEN)), Options())
    assert "delay_gradients" not in names(found)
    assert str(found.graph) == str(Pipeline(default_passes())(parse(EVEN)))


def test_an_order_that_saves_too_little_by_the_plan_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "delay_gradients" in names(taken())
    monkeypatch.setattr(DelayGradients, "saved_share", lambda self, graph: 1.0)
    monkeypatch.setattr(gradient_order, "LEAST", 0.9)
    assert "delay_gradients" not in names(taken())
    assert str(taken().graph) == str(Pipeline(default_passes())(captured()))


def test_a_users_pass_runs_once_and_in_the_program_that_is_taken() -> None:
    seen: list[tuple[str, StepGraph]] = []

    def early(graph: StepGraph) -> StepGraph:
        seen.append(("early", graph))
        return graph

    def late(graph: StepGraph) -> StepGraph:
        seen.append(("late", graph))
        return graph

    found = taken((early, "zero"), (late, "in_place"))
    assert names(found)[-6:] == ["assign", "slots", "dead_code", "in_place", "late", "join_updates"]
    assert [name for name, _ in seen] == ["early", "late"]
    assert seen[1][1] is found.graph


def test_a_training_in_another_order_is_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, x, y = head(2), torch.randn(256, 32), torch.randint(1024, (256,))
    losses = [graph(x, y) for _ in range(3)]
    monkeypatch.setattr(gradient_order, "LEAST", 1.0)
    twin = head.__wrapped__(2)
    assert "delay_gradients" not in names(twin)
    assert [twin(x, y) for _ in range(3)] == losses


def test_ranks_that_order_apart_order_alike() -> None:
    before = next(record.before for record in head(0).history if record.name == "delay_gradients")
    assert len({str(DelayGradients()(parse(str(before)))) for _ in range(3)}) == 1
