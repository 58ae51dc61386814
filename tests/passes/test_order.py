"""Order: gradients that nobody needs yet wait where that lowers the peak, and nothing else changes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from toys import STAGES, history, random_step, run, step

import graphzero as gz
from graphzero import ordered
from graphzero.ir.graph import StepGraph
from graphzero.ir.parse import parse
from graphzero.passes import Bucket, DeadCode, Order, Pass, Pipeline, Reuse, Schedule, Zero, default_passes
from graphzero.plan import bytes_over_time
from graphzero.testing import assert_graph


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


BEHIND: list[Pass] = [Bucket(), Schedule(), DeadCode(), Reuse()]
EVEN = step(("linear 16", "relu", "linear 16"), width=16, batch=64, ranks=2, optimizer="momentum")


def before_bucket(text: str) -> StepGraph:
    return history(text)["bucket"].before


def peak(graph: StepGraph) -> int:
    return max(bytes_over_time(graph))


WEIGHT_GRADIENTS = """
graph step(dp=1) local
  x  = batch()                              : f32[16, 8]   B
  w  = param()                              : f32[8, 8]    B
  h  = param()                              : f32[8, 64]   B
forward:
  a  = mm(x, w)                             : f32[16, 8]   B
  b  = tanh(a)                              : f32[16, 8]   B
  c  = mul(b, b)                            : f32[16, 8]   B
  d  = mul(c, c)                            : f32[16, 8]   B
  y  = mm(d, h)                             : f32[16, 64]  B
backward:
  e  = tanh(y)                              : f32[16, 64]  B
  dt = t(d)                                 : f32[8, 16]   B
  gh = mm(dt, e)                            : f32[8, 64]   B  ; gradient(h)
  ht = t(h)                                 : f32[64, 8]   B
  p  = mm(e, ht)                            : f32[16, 8]   B
  q  = mul(p, c)                            : f32[16, 8]   B
  r  = mul(q, b)                            : f32[16, 8]   B
  s  = mul(r, a)                            : f32[16, 8]   B
  xt = t(x)                                 : f32[8, 16]   B
  gw = mm(xt, s)                            : f32[8, 8]    B  ; gradient(w)
  return gh, gw
"""


def test_a_gradient_that_nobody_needs_yet_waits_until_others_have_freed_activations() -> None:
    assert_graph(
        Pipeline([Order()])(parse(WEIGHT_GRADIENTS)),
        """
            graph step(dp=1) local
              x  = batch()   : f32[16, 8]   B
              w  = param()   : f32[8, 8]    B
              h  = param()   : f32[8, 64]   B
            forward:
              a  = mm(x, w)  : f32[16, 8]   B
              b  = tanh(a)   : f32[16, 8]   B
              c  = mul(b, b) : f32[16, 8]   B
              d  = mul(c, c) : f32[16, 8]   B
              y  = mm(d, h)  : f32[16, 64]  B
            backward:
              e  = tanh(y)   : f32[16, 64]  B
              dt = t(d)      : f32[8, 16]   B
              ht = t(h)      : f32[64, 8]   B
              p  = mm(e, ht) : f32[16, 8]   B
              q  = mul(p, c) : f32[16, 8]   B
              r  = mul(q, b) : f32[16, 8]   B
              s  = mul(r, a) : f32[16, 8]   B
              xt = t(x)      : f32[8, 16]   B
              gw = mm(xt, s) : f32[8, 8]    B  ; gradient(w)
              gh = mm(dt, e) : f32[8, 64]   B  ; gradient(h)
              return gh, gw
            """,
    )


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_program_that_a_graph_takes_peaks_lower(stage: int) -> None:
    graph = head(stage)
    names = [record.name for record in graph.history]
    assert names.index("order") + 1 == names.index("bucket")
    as_written = Pipeline(BEHIND)(graph.history[names.index("order")].before)
    assert peak(graph.program) < (1 - ordered.LEAST) * peak(as_written)
    assert str(as_written) != str(graph.program)


def test_where_it_saves_nothing_the_program_reads_as_the_user_wrote_it() -> None:
    graph, records = ordered.run(parse(EVEN), default_passes())
    assert all(record.name != "order" for record in records)
    assert str(graph) == str(Pipeline(default_passes())(parse(EVEN)))
    assert Order().saves(before_bucket(EVEN)) == 0
    assert str(Order()(before_bucket(EVEN).clone())) == str(before_bucket(EVEN))


def test_an_order_that_saves_too_little_by_the_plan_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    before = next(record.before for record in head(0).history if record.name == "order")
    assert ordered.run(before, BEHIND)[1][0].name == "order"
    monkeypatch.setattr(Order, "saves", lambda self, graph: 1.0)
    monkeypatch.setattr(ordered, "LEAST", 0.9)
    graph, records = ordered.run(before, BEHIND)
    assert records[0].name == "bucket" and str(graph) == str(Pipeline(BEHIND)(before))


def test_a_users_pass_runs_in_the_program_that_is_taken() -> None:
    seen: list[StepGraph] = []

    def look(graph: StepGraph) -> StepGraph:
        seen.append(graph)
        return graph

    before = next(record.before for record in head(0).history if record.name == "order")
    graph, records = ordered.run(before, [*BEHIND, look])
    assert [record.name for record in records] == ["order", "bucket", "schedule", "dead_code", "reuse", "look"]
    assert any(graph is one for one in seen)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("seed", range(3))
def test_any_order_computes_the_same_to_the_bit(zero: Zero | None, seed: int) -> None:
    passes = default_passes(zero=zero)
    at = next(i for i, built in enumerate(passes) if isinstance(built, Bucket))
    one = run(Pipeline(passes)(parse(random_step(seed))))
    other = run(Pipeline([*passes[:at], Order(), *passes[at:]])(parse(random_step(seed))))
    for name, ranks in one.items():
        assert all(torch.equal(a, b) for a, b in zip(ranks, other[name], strict=True)), name


def test_a_training_in_another_order_is_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, x, y = head(2), torch.randn(256, 32), torch.randint(1024, (256,))
    losses = [graph(x, y) for _ in range(3)]
    monkeypatch.setattr(ordered, "LEAST", 1.0)
    twin = head.__wrapped__(2)
    assert [record.name for record in twin.history].count("order") == 0
    assert [twin(x, y) for _ in range(3)] == losses


def test_ranks_that_order_apart_order_alike() -> None:
    before = next(record.before for record in head(0).history if record.name == "order")
    assert len({str(Order()(parse(str(before)))) for _ in range(3)}) == 1


def test_an_evaluation_stays_as_it_is() -> None:
    text = "graph step(dp=1) local\n  x = batch() : f32[2]  B\nforward:\n  y = tanh(x) : f32[2]  B\n  return y\n"
    assert str(Order()(parse(text))) == str(parse(text)) and Order().saves(parse(text)) == 0
