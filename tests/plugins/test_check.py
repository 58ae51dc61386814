"""gz.check names the first pass, and the first value, at which a step stops computing what plain PyTorch computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphzero as gz
from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.plugins.check.report import Report, Stage
from graphzero.sbp import registry
from graphzero.testing.simulate import lower_program

FOUR = gz.placement("cpu", range(4), virtual=True)
aten = torch.ops.aten


@torch.library.custom_op("checked::center", mutates_args=())
def center(x: Tensor) -> Tensor:
    return x - x.mean(0)


center.register_fake(torch.empty_like)
center.register_autograd(lambda ctx, grad: center(grad))


class TwoLayerGraph(gz.Graph):
    """Two layers with something between them, and passes after ``after``."""

    def __init__(
        self,
        between: Callable[[Tensor], Tensor] = torch.relu,
        *passes: Any,
        after: str = "zero",
        stage: int = 2,
        placement: Any = FOUR,
        optimizer: Any = torch.optim.SGD,
    ):
        super().__init__(placement)
        torch.manual_seed(0)
        self.first, self.last, self.between = nn.Linear(6, 8), nn.Linear(8, 3), between
        if isinstance(between, nn.Module):
            self.middle = between
        parameters = [p for m in vars(self).values() if isinstance(m, nn.Module) for p in m.parameters()]
        self.optimizer = optimizer(dict.fromkeys(parameters), lr=0.1)
        self.add_optimizer(self.optimizer, clip_grad_norm=1.0)
        if stage:
            self.config.enable_zero(stage=stage)
        for pass_ in passes:
            self.config.add_pass(pass_, after=after)

    def build(self, x: Tensor, t: Tensor) -> Tensor:
        loss: Tensor = nn.functional.cross_entropy(self.last(self.between(self.first(x))), t)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randint(0, 3, (8,))


@pytest.fixture
def wrong_rule() -> Iterator[None]:
    known = dict(registry._entries)
    gz.sbp.rule(center, "...->...")  # the mean over dim 0 is not the mean over a piece of it
    yield
    registry._entries.clear()
    registry._entries.update(known)
    registry._cache.clear()


# ---- agreement


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_right_step_agrees_after_every_pass_to_the_last_digits_of_float64(stage: int, batch: Any) -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.GELU())
    graph = TwoLayerGraph(model, stage=stage, optimizer=torch.optim.AdamW)
    for _ in range(2):  # before the first call, and in the middle of training
        report = gz.check(graph, *batch, dtype=torch.float64)
        assert report and report.agrees and not report.where
        assert max(gap for stage in report.stages for gap in stage.differences.values()) < 1e-8
        assert {"captured", "pin", "propagate", "slots"} <= {stage.name for stage in report.stages}
        graph(*batch)


def test_the_programs_own_dtypes_are_checked_if_none_is_asked_for(batch: Any) -> None:
    report = gz.check(TwoLayerGraph(), *batch)
    assert report
    assert report.rtol == pytest.approx(3.45e-4, rel=0.01)
    assert "check of TwoLayerGraph in its own dtypes: agrees" in str(report)


@pytest.mark.parametrize("epsilon", [None, 1e-3])
def test_a_norm_with_the_epsilon_of_its_dtype_has_the_same_in_float64(epsilon: float | None, batch: Any) -> None:
    graph = TwoLayerGraph(nn.RMSNorm(8, eps=epsilon))
    assert gz.check(graph, *batch, dtype=torch.float64, rtol=1e-10)


def test_evaluation_and_a_world_of_one_are_checked_too(batch: Any) -> None:
    class Evaluate(gz.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(6, 3)

        def build(self, batch: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
            return {"scaled": self.model(batch["x"]) * scale, "raw": batch["x"]}

    report = gz.check(Evaluate(), {"x": batch[0]}, scale=0.3, dtype=torch.float64)
    assert report
    assert set(report.stages[0].differences) == {"outputs", "parameters"}


def _everything(graph: TwoLayerGraph) -> Any:
    state = {id(p): {k: v.clone() for k, v in held.items()} for p, held in graph.optimizer.state.items()}
    modules = {name: held for name, held in vars(graph).items() if isinstance(held, nn.Module)}
    tensors = {
        f"{n}.{k}": (id(x), x.detach().clone())
        for n, m in modules.items()
        for k, x in m.state_dict(keep_vars=True).items()
    }
    return (
        state,
        tensors,
        torch.get_rng_state(),
        graph.state_dict()["random"],
        dict(vars(graph)),
        torch.get_default_dtype(),
    )


def test_a_check_takes_no_step_and_changes_nothing(batch: Any) -> None:
    graph = TwoLayerGraph(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)), optimizer=torch.optim.AdamW)
    twin = TwoLayerGraph(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)), optimizer=torch.optim.AdamW)
    for held in (graph, twin):
        torch.manual_seed(5)
        held(*batch)
    inputs = [x.clone() for x in batch]
    before = _everything(graph)
    gz.check(graph, *batch, dtype=torch.float64)
    after = _everything(graph)
    for old, new in zip(before[1].values(), after[1].values(), strict=True):
        assert old[0] == new[0] and torch.equal(old[1], new[1])
    assert all(torch.equal(x, after[0][i][k]) for i, held in before[0].items() for k, x in held.items())
    assert torch.equal(before[2], after[2]) and before[3] == after[3] and before[5] == after[5]
    assert before[4].keys() == after[4].keys()
    assert all(torch.equal(old, new) for old, new in zip(inputs, batch, strict=True))
    assert all(p.grad is None for p in graph.first.parameters())
    assert torch.equal(graph(*batch), twin(*batch))
    assert torch.equal(graph.first.weight, twin.first.weight)


# ---- what is wrong is found


@pytest.mark.usefixtures("wrong_rule")
def test_a_wrong_rule_is_found_at_its_op_with_the_users_line(batch: Any) -> None:
    report = gz.check(TwoLayerGraph(center), *batch, dtype=torch.float64)
    assert not report
    assert (report.where, report.value) == ("propagate", "center")
    text = str(report)
    assert "> center = checked.center.default(" in text
    assert "test_check.py:" in text and "in build" in text
    assert "rule says: S(0) -> S(0)" in text
    assert "gz.testing.check_rule(torch.ops.checked.center.default" in text
    assert [stage.name for stage in report.stages if stage.beyond][0] == "propagate"


def scales_gradients(graph: StepGraph) -> StepGraph:
    """Divides by the number of ranks, as one does by hand; the graph's gradients are global ones already."""
    for pin in graph.gradients().values():
        made: Any = pin.args[0]
        with graph.graph.inserting_before(pin):
            scaled = graph.call(aten.mul.Tensor, (made, 0.25), value.type_of(made), like=made, name=f"{made.name}_mean")
        pin.args = (scaled, -1)
    return graph


def scales_reductions(graph: StepGraph) -> StepGraph:
    for node in graph.graph.find_nodes(op="call_function", target=ops.reduce_scatter):
        made: Any = node.args[0]
        type_, name = value.type_of(made), f"{made.name}_mean"
        with graph.graph.inserting_before(node):
            scaled = graph.call(aten.mul.Tensor, (made, 0.25), type_, sbp=value.nd_of(made), like=made, name=name)
        node.args = (scaled, *node.args[1:])
    return graph


def returns_another_value(graph: StepGraph) -> StepGraph:
    graph.set_output([graph.node("sum_1")], graph.aux, graph.updates)
    return graph


def forgets_a_sign(graph: StepGraph) -> StepGraph:
    for relu in graph.graph.find_nodes(op="call_function", target=aten.relu.default):
        relu.target = aten.abs.default
    return graph


@pytest.mark.parametrize(
    ("pass_", "after", "said"),
    [
        (scales_gradients, "zero", ["new in this pass", "The pass put mm_", "it was mm_", "gradient last.weight"]),
        (scales_reductions, "lower_boxing", ["> mm_", "new in this pass", "The pass put mm_"]),
        (forgets_a_sign, "lower_boxing", ["> relu = abs(", "it was relu = relu(", "output 0: ", "changed the op"]),
    ],
)
def test_a_wrong_pass_is_found_with_what_it_changed(pass_: Any, after: str, said: list[str], batch: Any) -> None:
    report = gz.check(TwoLayerGraph(torch.relu, pass_, after=after), *batch, dtype=torch.float64)
    assert report.where == pass_.__name__
    assert report.value
    for words in said:
        assert words in str(report)


def test_a_result_that_is_made_of_another_value_is_shown_with_the_one_it_was(batch: Any) -> None:
    report = gz.check(TwoLayerGraph(torch.relu, returns_another_value), *batch)
    assert (report.where, report.value) == ("returns_another_value", "sum_1")
    assert "Every value that both programs have is the same, but output 0 is another one" in str(report)
    assert "this is not rounding" in str(report)


def test_a_build_that_is_no_function_of_its_inputs_is_told_from_a_wrong_capture(batch: Any) -> None:
    def noisy(x: Tensor) -> Tensor:
        return x * random.SystemRandom().random()

    def treacherous(x: Tensor) -> Tensor:
        return x * (2 if type(x) is Tensor else 3)

    unsteady, steady = (gz.check(TwoLayerGraph(f), *batch) for f in (noisy, treacherous))
    assert unsteady.where == steady.where == "captured"
    assert "differs from itself: build is not a function of its inputs" in str(unsteady)
    assert "Capture runs build once" in str(steady)
    assert all(not stage.beyond for stage in steady.stages[1:])


def test_rounding_that_an_optimizer_amplifies_is_told_from_a_mistake(batch: Any) -> None:
    graph = TwoLayerGraph(
        nn.BatchNorm1d(8), optimizer=torch.optim.AdamW
    )  # the bias before it has gradient zero, and noise
    report = gz.check(graph, *batch, rtol=1e-7)
    assert report.is_rounding
    assert report
    assert "In float64 all agree" in str(report)
    assert not gz.check(TwoLayerGraph(torch.relu, scales_gradients), *batch, rtol=1e-7).is_rounding


def test_the_first_value_that_is_not_finite_is_named_with_its_operands(batch: Any) -> None:
    report = gz.check(TwoLayerGraph(torch.log), *batch)
    assert report.agrees  # everybody computes the same nan
    assert report.nonfinite == "log"
    assert "agrees, but results are not finite" in str(report)
    assert "The first value with nan is 'log'" in str(report)
    assert "from -" in str(report)
    with_mask = gz.check(TwoLayerGraph(lambda x: x.masked_fill(x < 0, -torch.inf).softmax(-1)), *batch)
    assert with_mask.nonfinite == ""  # inf on the way that no result sees is no news


def test_an_infinite_input_is_named_as_such(batch: Any) -> None:
    x, t = batch
    assert gz.check(TwoLayerGraph(), x.clone().fill_(torch.inf), t).nonfinite in ("x", "addmm")


class EvaluationGraph(TwoLayerGraph):
    def add_optimizer(self, *args: Any, **kwargs: Any) -> None:
        """It trains nothing."""

    def build(self, x: Tensor, t: Tensor) -> Tensor:
        return torch.relu(self.last(self.first(x)))


@pytest.mark.parametrize("kind", [TwoLayerGraph, EvaluationGraph])
def test_the_last_program_that_is_compared_is_the_one_that_runs(kind: type[TwoLayerGraph], batch: Any) -> None:
    program = kind(stage=3).compile(*batch).program
    assert str(lower_program(program)) == str(program)


# ---- pipeline stages


class StagedGraph(gz.Graph):
    """Four layers on pairs of ranks, and passes after ``after``."""

    def __init__(self, schedule: str, *passes: Any, after: str = "bucket", micro_batches: int = 4) -> None:
        super().__init__(gz.placement("cpu", [[0, 1], [2, 3]], names=("pp", "dp"), virtual=True))
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.add_optimizer(torch.optim.AdamW(self.layers.parameters(), lr=0.1), clip_grad_norm=1.0)
        self.config.enable_zero(stage=2)
        self.config.set_gradient_accumulation_steps(micro_batches)
        stages = 4 if "interleaved" in schedule or schedule == "zbv" else 2
        for i in range(4):
            self.config.set_stage(f"layers.{i}", i * stages // 4)
        self.config.set_pipeline(schedule)
        for pass_ in passes:
            self.config.add_pass(pass_, after=after)

    def build(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        loss = x.square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


def forgets_a_sign_of_the_last_stage(graph: StepGraph) -> StepGraph:
    return forgets_a_sign(graph) if graph.name.endswith("forward@1") else graph


def scales_the_update(graph: StepGraph) -> StepGraph:
    """Of what an epilogue writes, the parameters."""
    for name, new in graph.updates.items():
        if "/" not in name and "epilogue" in graph.name and value.role_of(_placeholder(graph, name)).kind == "param":
            with graph.graph.inserting_after(new):
                scaled = graph.call(aten.mul.Scalar, (new, 1.01), value.type_of(new), sbp=value.sbp_of(new), like=new)
            graph.set_output(graph.outputs, graph.aux, {**graph.updates, name: scaled})
    return graph


def _placeholder(graph: StepGraph, name: str) -> Any:
    return next(node for node in graph.placeholders() if node.name == name)


def changes_nothing(graph: StepGraph) -> StepGraph:
    return graph


SCHEDULES = ("1f1b", "interleaved", "zb1p")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pass_on_parts_of_stages_that_changes_a_number_is_named_with_the_parts(schedule: str) -> None:
    x = torch.randn(16, 4)
    report = gz.check(StagedGraph(schedule, forgets_a_sign_of_the_last_stage), x)
    assert report.where == "forgets_a_sign_of_the_last_stage"
    assert "What it did to forward@1 is wrong. In forward@1:" in str(report)


def test_a_pass_on_parts_that_changes_a_new_state_is_named_with_the_part() -> None:
    report = gz.check(StagedGraph("zb1p", scales_the_update), torch.randn(16, 4))
    assert report.where == "scales_the_update"
    assert set(report.stages[-1].beyond) == {f"new layers.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")}
    assert "is wrong. In epilogue" in str(report)


@pytest.mark.parametrize("after", ["overlap", "in_place"])
def test_a_pass_that_changes_a_number_late_in_the_list_is_found_on_stages(after: str) -> None:
    report = gz.check(StagedGraph("1f1b", forgets_a_sign, after=after), torch.randn(16, 4))
    assert report.where == "forgets_a_sign"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parts_of_stages_agree_after_each_of_their_passes(schedule: str) -> None:
    report = gz.check(StagedGraph(schedule, changes_nothing), torch.randn(16, 4))
    assert report
    names = [stage.name for stage in report.stages]
    assert names.index("localize") < names.index("cut into parts") < names.index("bucket") < names.index("in_place")
    assert {stage.ranks for stage in report.stages[names.index("cut into parts") :] if not stage.same} == {4}


def test_a_pass_before_stages_are_cut_into_parts_is_named_as_anywhere() -> None:
    report = gz.check(StagedGraph("1f1b", forgets_a_sign, after="localize"), torch.randn(16, 4))
    assert report.where == "forgets_a_sign" and report.value


# ---- refusals


def test_what_cannot_be_checked_says_so(batch: Any) -> None:
    with pytest.raises(gz.ConfigError, match="float64 leaves no rounding"):
        gz.check(TwoLayerGraph(), *batch, dtype=torch.float32)
    with torch.device("meta"):
        graph = TwoLayerGraph()
    with pytest.raises(gz.ConfigError, match="meta"):
        gz.check(graph, *batch)
    with pytest.raises(gz.CaptureError, match="test_check.py"):
        gz.check(TwoLayerGraph(lambda x: x if x.sum() > 0 else -x), *batch)


def test_the_report_of_a_large_difference_stays_short(batch: Any) -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    report = gz.check(TwoLayerGraph(layers, scales_gradients), *batch, dtype=torch.float64)
    assert not report
    assert len(str(report).splitlines()) < len(report.stages) + 25  # each pass has a line


def test_the_columns_of_a_report_stand_below_each_other_however_long_a_name_is() -> None:
    found = {"outputs": 1e-7, "gradients": 2e-7, "parameters": 3e-7, "states": 4e-7}
    long = Stage("my_package.gathers_in_eight_bits_between_hosts", ranks=16, differences=found)
    lines = str(Report("Net", "its own dtypes", 1e-3, (Stage("captured", differences=found), long))).splitlines()
    head, first, last = (next(x for x in lines if word in x) for word in ("plain PyTorch", "captured  ", "in_eight"))
    assert len(head) == len(first) == len(last)
    assert last.split()[-4:] == ["1.0e-07", "2.0e-07", "3.0e-07", "4.0e-07"]
