"""gz.check of a step whose micro-batches have statistics of their own says so, and sees faults of later passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphzero as gz
from graphzero.ir.graph import StepGraph

aten = torch.ops.aten


class Normed(gz.Graph):
    """A batch norm in two micro-batches, on two ranks or on two stages."""

    def __init__(
        self, pass_: Callable[[StepGraph], StepGraph] | None = None, after: str = "bucket", stages: int = 1,
        optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        axes = {"names": ("pp",)} if stages > 1 else {}
        super().__init__(gz.placement("cpu", range(2), virtual=True, **axes))
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)
        parameters = [p for part in (self.first, self.norm, self.last) for p in part.parameters()]
        self.add_optimizer(optimizer(parameters, lr=0.1))  # type: ignore[call-arg]
        if dtype is not None:
            self.config.enable_amp(dtype=dtype)
        self.config.set_gradient_accumulation_steps(2)
        if stages > 1:
            self.config.set_stage(self.first, 0)
            self.config.set_stage(self.last, 1)
            self.config.set_pipeline("1f1b")
        if pass_ is not None:
            self.config.add_pass(pass_, after=after)

    def build(self, x: Tensor) -> Tensor:
        loss = self.last(torch.tanh(self.norm(self.first(x)))).square().mean()
        loss.backward()
        return loss


def squashes_otherwise(graph: StepGraph) -> StepGraph:
    for node in graph.graph.find_nodes(op="call_function", target=aten.tanh.default):
        node.target = aten.sigmoid.default
    return graph


pytestmark = pytest.mark.filterwarnings("ignore:.*statistics of a micro-batch")


def test_statistics_of_a_micro_batch_are_named_by_their_lines() -> None:
    report = gz.check(Normed(), torch.randn(8, 4))
    assert report.where == "micro_batches" and not report
    assert "These are statistics of a micro-batch, not of the batch" in str(report)
    assert "test_check_micro_batches.py" in str(report)
    assert [stage.name for stage in report.stages if stage.beyond] == ["micro_batches"]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_fault_behind_statistics_of_a_micro_batch_is_named(stages: int) -> None:
    report = gz.check(Normed(squashes_otherwise, stages=stages), torch.randn(8, 4))
    assert report.where == "squashes_otherwise"
    assert "After pass micro_batches these differ" in str(report) and "sigmoid(" in str(report)
    assert report.value == ("tanh_mb" if stages == 1 else "")  # of stages the part is named


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("pass_", [None, squashes_otherwise])
def test_rounding_that_an_optimizer_amplifies_does_not_hide_where_the_step_becomes_another_one(
    pass_: Callable[[StepGraph], StepGraph] | None, dtype: torch.dtype | None
) -> None:
    """The bias before a batch norm has no gradient, so Adam takes steps of lr with the sign of what rounding leaves."""
    torch.manual_seed(1)
    report = gz.check(Normed(pass_, optimizer=torch.optim.Adam, dtype=dtype), torch.randn(16, 4))
    assert report.numbers == "float64" and report.where == ("micro_batches" if pass_ is None else pass_.__name__)
    assert "In its own dtypes it differs" in report.notes[-1]
