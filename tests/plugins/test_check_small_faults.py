"""gz.check sees faults that are small beside the values that they are in: steps of a low rate, 16-bit programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphzero as gz
from graphzero.ir import value
from graphzero.ir.graph import StepGraph

aten = torch.ops.aten
BF16 = torch.bfloat16


class Small(gz.Graph):
    """Two layers on a pair of ranks, or a layer on each of two pairs, stepped by AdamW."""

    def __init__(
        self, pass_: Callable[[StepGraph], StepGraph] | None = None, after: str = "lower_boxing", *, lr: float = 1e-4,
        dtype: torch.dtype | None = None, schedule: str = "", offload: bool = False,
    ) -> None:  # fmt: skip
        axes: Any = {"names": ("pp", "dp")} if schedule else {}
        super().__init__(gz.placement("cpu", [[0, 1], [2, 3]] if schedule else range(2), virtual=True, **axes))
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.add_optimizer(
            torch.optim.AdamW([*self.first.parameters(), *self.last.parameters()], lr=lr), clip_grad_norm=1.0
        )
        self.config.enable_zero(stage=2)
        if offload:
            self.config.enable_offload()
        if schedule:
            self.config.set_stage(self.first, 0)
            self.config.set_stage(self.last, 1)
            self.config.set_pipeline(schedule)
            self.config.set_gradient_accumulation_steps(2)
        if dtype is not None:
            self.config.enable_amp(dtype=dtype)
        if pass_ is not None:
            self.config.add_pass(pass_, after=after)

    def build(self, x: Tensor, t: Tensor) -> Tensor:
        loss = self.loss(self.last(torch.tanh(self.first(x))), t)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def loss(self, y: Tensor, t: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y, t)


def check(graph: gz.Graph, **options: Any) -> gz.plugins.check.Report:
    torch.manual_seed(1)
    return gz.check(graph, torch.randn(8, 6), torch.randint(0, 3, (8,)), **options)


def rewrite_new(
    graph: StepGraph, kind: str, new_of: Callable[[Any, Any], tuple[Any, tuple[Any, ...]] | None]
) -> StepGraph:
    """Replace what ``graph`` writes to placeholders of a kind by ``new_of(old, new)``: an op with arguments, or old."""
    news = dict(graph.updates)
    for node in graph.placeholders(kind):
        if node.name in news and value.tensor_type(node).shape:
            new = news[node.name]
            call = new_of(node, new)
            news[node.name] = node
            if call is not None:
                with graph.graph.inserting_after(new):
                    news[node.name] = graph.call(*call, value.type_of(new), sbp=value.sbp_of(new), like=new)
    graph.set_output(graph.outputs, graph.aux, news)
    return graph


def loses_the_step(graph: StepGraph) -> StepGraph:
    return rewrite_new(graph, "param", lambda old, new: None)


def halves_the_step(graph: StepGraph) -> StepGraph:
    return rewrite_new(graph, "param", lambda old, new: (aten.lerp.Scalar, (old, new, 0.5)))


def scales_states(graph: StepGraph) -> StepGraph:
    return rewrite_new(graph, "state", lambda old, new: (aten.mul.Scalar, (new, 1.01)))


def scales_gradients(graph: StepGraph) -> StepGraph:
    for pin in graph.gradients().values():
        made: Any = pin.args[0]
        with graph.graph.inserting_before(pin):
            scaled = graph.call(aten.mul.Scalar, (made, 1.01), value.type_of(made), like=made)
        pin.args = (scaled, *pin.args[1:])
    return graph


@pytest.mark.parametrize("pass_", [loses_the_step, halves_the_step])
@pytest.mark.parametrize("settings", [{}, {"dtype": BF16, "offload": True}])
def test_a_step_that_is_small_beside_its_parameter_is_missed_all_the_same(pass_: Any, settings: Any) -> None:
    report = check(Small(pass_, **settings))
    assert report.where == pass_.__name__ and not report
    beyond = next(stage.beyond for stage in report.stages if stage.beyond)
    assert set(beyond) == {f"new {name}.{kind}" for name in ("first", "last") for kind in ("weight", "bias")}
    assert "but new first_weight is another one" in str(report)
    assert "it was assign" in str(report)


@pytest.mark.parametrize(("pass_", "after"), [(scales_gradients, "zero"), (scales_states, "lower_boxing")])
def test_a_hundredth_too_much_is_seen_in_16_bits(pass_: Any, after: str) -> None:
    report = check(Small(pass_, after, dtype=BF16))
    assert report.where == pass_.__name__ and report.value
    assert "In its own dtypes all agree, but these hide differences up to 8.8e-02" in str(report)


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_parts_of_stages_in_16_bits_that_lose_a_step_are_named(schedule: str) -> None:
    report = check(Small(loses_the_step, "bucket", schedule=schedule, dtype=BF16))
    assert report.where == "loses_the_step" and "epilogue" in str(report)


def drops_the_norm(graph: StepGraph) -> StepGraph:
    graph.set_output(graph.outputs, {}, graph.updates)
    return graph


def test_a_result_that_a_pass_leaves_out_is_a_difference() -> None:
    report = check(Small(drops_the_norm))
    assert report.where == "drops_the_norm" and "grad_norm.0: inf" in str(report)
    assert "does not return grad_norm.0 any more" in str(report)


def test_a_tolerance_of_zero_allows_nothing() -> None:
    report = check(Small(), rtol=0.0)
    assert report.is_rounding and report.rtol == 0


def test_small_gradients_are_not_taken_for_rounding_noise() -> None:
    class SmallLoss(Small):
        def loss(self, y: Tensor, t: Tensor) -> Tensor:
            return super().loss(y, t) * 1e-3

    report = check(SmallLoss(scales_states))
    assert report.where == "scales_states" and not report
    beyond = next(stage.beyond for stage in report.stages if stage.beyond)
    assert {name.rpartition("/")[2] for name in beyond} == {"exp_avg", "exp_avg_sq"}


def test_a_step_in_16_bits_that_is_right_says_that_float64_agrees() -> None:
    report = check(Small(dtype=BF16))
    assert report and "In float64 all agree too" in str(report) and report.numbers == "its own dtypes"


@torch.library.custom_op("checked::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        raise NotImplementedError("double has no kernel for float64")
    return x * 2


double.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, grad: grad * 2)


def test_an_op_without_a_kernel_for_float64_leaves_the_report_of_its_own_dtypes() -> None:
    class Doubled(Small):
        def loss(self, y: Tensor, t: Tensor) -> Tensor:
            return super().loss(double(y), t)

    gz.sbp.rule(double, "...->...")
    report = check(Doubled(dtype=BF16))
    assert report and "cannot be computed (NotImplementedError: double has no kernel for float64)" in str(report)
