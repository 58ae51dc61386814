"""A step on pipeline stages computes what the same step computes without them, to the bit."""

from __future__ import annotations

import copy
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from staged import (
    Net,
    Residual,
    adamw,
    batches,
    compare,
    cross_entropy,
    largest_difference,
    placement,
    staged_graph,
    stages_of,
    tensors_of,
    trained,
    trained_whole,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import graphzero as gz
from graphzero.errors import ScheduleError
from graphzero.schedules import GENERATORS

sys.path.insert(0, str(Path(__file__).parents[1] / "schedules"))
from random_schedules import random_rows  # noqa: E402

pytestmark = pytest.mark.strict  # members that send each other messages, as processes do

STAGES_A_RANK = {"interleaved": 2, "looped_bfs": 2, "interleaved_zero_bubble": 2, "zbv": 2}


# Each schedule at each stage of ZeRO, at one of them in the first stage of tests, the numbers of micro-batches in turn:
# all pairs of two of the three.
FAST = dict(zip(GENERATORS, (0, 1, 2, 3, 1, 2, 3), strict=True))
SLOW = [
    (schedule, stage, (1, 2, 8)[(i + 2 * j) % 3])
    for i, schedule in enumerate(GENERATORS)
    for j, stage in enumerate({*range(4)} - {FAST[schedule]})
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@cache
def without_stages(stage: int, micro_batches: int) -> list[Tensor]:
    """Outputs and states of the step that every schedule has to compute."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"micro_batches": micro_batches, "clip": 0.1, "stage": stage, "optimizer": adamw}
    return trained_whole(Net(), placement(2, 2), **options)


def assert_same_bits(schedule: str, stage: int, micro_batches: int) -> None:
    marks = stages_of(4, 2 * STAGES_A_RANK.get(schedule, 1))
    options: dict[str, Any] = {"micro_batches": micro_batches, "clip": 0.1, "stage": stage, "optimizer": adamw}
    graph = staged_graph(Net(), marks, placement(2, 2), schedule, **options)
    assert largest_difference(trained(graph), without_stages(stage, micro_batches)) == 0
    assert graph.stage_programs


@pytest.mark.parametrize(("schedule", "stage"), FAST.items())
def test_each_schedule_at_a_stage_of_zero(schedule: str, stage: int) -> None:
    assert_same_bits(schedule, stage, micro_batches=4)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "stage", "micro_batches"), SLOW)
def test_all_schedules_at_all_stages_of_zero(schedule: str, stage: int, micro_batches: int) -> None:
    assert_same_bits(schedule, stage, micro_batches)


@pytest.mark.parametrize(("shape", "names"), [((4,), ("pp",)), ((2, 2), ("dp", "pp")), ((2, 2, 2), ("pp", "dp", "tp"))])
def test_any_place_of_the_axis(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    stages = shape[names.index("pp")]
    model, marks = Net(stages), stages_of(stages, stages)
    assert compare(model, marks, placement(*shape, names=names), micro_batches=4, clip=0.1) == 0


def test_tensor_splits_within_stages() -> None:
    """Three dimensions: a linear layer of each stage split over tp, states over dp."""
    results = []
    for marks in (stages_of(2, 2), None):
        torch.manual_seed(0)
        where, model = placement(2, 2, 2, names=("pp", "dp", "tp")), Net(2)
        graph = staged_graph(model, marks, where, micro_batches=4, clip=0.1, stage=2)
        split = {"up.weight": gz.sbp.S(0), "up.bias": gz.sbp.S(0), "down.weight": gz.sbp.S(1)}
        for layer in model.layers:
            for name, sbp in split.items():
                whole = (gz.sbp.B, gz.sbp.B, sbp) if marks else (gz.sbp.B, sbp)
                gz.to_global(layer.get_parameter(name), placement=graph.placement, sbp=whole)
        results.append(tensors_of(([graph(*batch) for batch in batches()], graph.full_state_dict())))
        assert "'tp'" in str(graph.program)
    assert all(map(torch.equal, *results))


def test_random_draws_are_those_without_stages() -> None:
    assert (
        compare(Net(2, dropout=0.3), stages_of(2, 2), placement(2, 2), schedule="zb1p", micro_batches=4, stage=3) == 0
    )


class Scaled(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 + self.down(torch.relu(self.up(self.norm(x))))


def test_a_cut_within_a_residual_block() -> None:
    """What the block adds its result to is read on both stages: its gradients are added on the earlier one."""
    model = Net()
    model.layers[2] = Scaled()
    marks = stages_of(4, 2) | {"model.layers.2.norm": 0, "model.layers.2.up": 0}
    assert compare(model, marks, placement(2, 1), micro_batches=2, schedule="zb1p", clip=0.1) == 0


def test_mixed_precision() -> None:
    options: dict[str, Any] = {"micro_batches": 4, "clip": 0.1, "stage": 2, "dtype": torch.bfloat16}
    assert compare(Net(2), stages_of(2, 2), placement(2, 2), **options) == 0


def test_a_scaled_loss_differs_by_rounding() -> None:
    """Adam of an earlier stage is not one kernel where its count waits for the check of all gradients."""
    options: dict[str, Any] = {"micro_batches": 4, "stage": 1, "dtype": torch.float16, "optimizer": adamw}
    assert compare(Net(2), stages_of(2, 2), placement(2, 2), **options) < 1e-6


def test_a_tied_weight_is_moved_once_a_step_and_its_gradients_are_added_after_the_loop() -> None:
    model, where = Net(2, tied=True).double(), placement(2, 2)
    for stage in (0, 3):
        options: dict[str, Any] = {"micro_batches": 4, "stage": stage, "schedule": "zb1p", "steps": 1}
        torch.set_default_dtype(torch.float64)
        try:
            assert compare(copy.deepcopy(model), stages_of(2, 2), where, **options) < 1e-14
        finally:
            torch.set_default_dtype(torch.float32)
    graph = staged_graph(Net(2, tied=True), stages_of(2, 2), where, micro_batches=4, stage=3)
    graph.compile(*batches(1)[0])
    assert graph.plan.pipeline is not None
    assert all(edge.bytes <= 4 * 2 * 8 for edge in graph.plan.pipeline.edges)  # rows of activations alone


def test_buffers_of_batch_norm_go_from_one_micro_batch_to_the_next() -> None:
    with pytest.warns(UserWarning, match="micro-batch"):
        assert compare(Net(2, batch_norm=True), stages_of(2, 2), placement(2, 2), micro_batches=4, stage=1) == 0


def test_schedulers_averages_and_other_optimizers() -> None:
    def averaging(graph: Any) -> Any:
        graph.average = AveragedModel(graph.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        graph.add_average(graph.average, graph.model)
        return graph

    torch.manual_seed(0)
    model, states = Net(2), []
    for marks in (stages_of(2, 2), None):
        graph = staged_graph(
            copy.deepcopy(model), marks, placement(2, 2), stage=2, micro_batches=4,
            optimizer=lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        )  # fmt: skip
        averaging(graph)
        for batch in batches(3):
            graph(*batch)
        states.append(tensors_of(graph.full_state_dict()))
    assert all(map(torch.equal, *states))


def test_frozen_layers_have_no_backward() -> None:
    model = Net()
    for path in ("first", "layers.0", "layers.1"):
        model.get_submodule(path).requires_grad_(False)
    trained: dict[str, Any] = {"optimizer": lambda ps: torch.optim.SGD([p for p in ps if p.requires_grad], lr=0.1)}
    assert compare(model, stages_of(4, 2), placement(2, 2), micro_batches=4, **trained) == 0


def test_evaluation_runs_the_forward_rows() -> None:
    model = Net()
    results = []
    for marks in (stages_of(4, 4), None):
        graph = staged_graph(model, None, placement(4, 2), micro_batches=4)
        evaluation = type(graph)(model, cross_entropy, placement=placement(4, 2) if marks else 2, micro_batches=4)
        for path, stage in (marks or {}).items():
            evaluation.config.set_stage(path, stage)
        results.append(tensors_of(evaluation(*batches(1)[0])))
        assert all("backward" not in name for name in evaluation.stage_programs)
    assert all(map(torch.equal, *results))


def test_rows_of_forward_alone_are_for_evaluation(tmp_path: Path) -> None:
    model, where, rows = Net(2), placement(2, 2), [[f"{stage}F{i}" for i in range(4)] for stage in range(2)]
    file = tmp_path / "forward.csv"
    file.write_text("\n".join(",".join(row) for row in rows) + "\n")
    plain = type(staged_graph(model, None, where))(model, cross_entropy, placement=2, micro_batches=4)
    expected = tensors_of(plain(*batches(1)[0]))
    for schedule in (rows, str(file), "gpipe"):
        evaluation = type(plain)(model, cross_entropy, placement=where, micro_batches=4)
        for path, stage in stages_of(2, 2).items():
            evaluation.config.set_stage(path, stage)
        evaluation.config.set_pipeline(schedule)
        assert all(map(torch.equal, tensors_of(evaluation(*batches(1)[0])), expected))
        assert "B" not in "".join(line for line in evaluation.plan.pipeline.lines if line.startswith("rank"))  # type: ignore[union-attr]
    training = staged_graph(model, stages_of(2, 2), where, rows, micro_batches=4)
    with pytest.raises(ScheduleError, match="those of evaluation, F alone, and this step has a backward"):
        training.compile(*batches(1)[0])


class Checkpointed(Net):
    """A net whose layers are computed again in runs of ``count``."""

    def __init__(self, count: int) -> None:
        super().__init__(dropout=0.3)
        self.count = count

    def run_layers(self, x: Tensor, start: int) -> Tensor:
        for layer in self.layers[start : start + self.count]:
            x = layer(x + torch.arange(8) / 8)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i in range(0, len(self.layers), self.count):
            x = checkpoint(self.run_layers, x, i, use_reentrant=False)
        return self.head(x)


WITHIN_A_LAYER = {"model.layers.1": 1, "model.layers.1.norm": 0, "model.layers.1.up": 0}


@pytest.mark.parametrize(
    ("schedule", "count", "marks"),
    [("1f1b", 2, stages_of(4, 4)), ("zb1p", 4, stages_of(4, 2) | WITHIN_A_LAYER)],
)
def test_a_cut_within_layers_that_are_computed_again(schedule: str, count: int, marks: dict[str, int]) -> None:
    """What crosses the cut is sent in forward alone, so messages are those of the same cut without checkpoints."""
    where = placement(1 + max(marks.values()), 2)
    assert compare(Checkpointed(count), marks, where, schedule=schedule, micro_batches=4, stage=3) == 0
    again, plain = (
        staged_graph(model, marks, where, schedule, micro_batches=4).compile(*batches(1)[0]).plan.pipeline
        for model in (Checkpointed(count), Net(dropout=0.3))
    )
    assert again is not None and plain is not None
    assert again.edges == plain.edges
    assert again.members[0].memory.activations < plain.members[0].memory.activations


def test_a_checkpoint_has_nothing_of_stages(tmp_path: Path) -> None:
    """Saved with two stages, loaded with four, and without any."""
    torch.manual_seed(0)
    first = staged_graph(Net(), stages_of(4, 2), placement(2, 2), micro_batches=4, stage=2)
    first(*batches(1)[0])
    gz.save(first, tmp_path / "checkpoint")
    expected = tensors_of([first(*batch) for batch in batches()])
    for marks, where in ((stages_of(4, 4), placement(4, 2)), (None, placement(1, 2))):
        other = staged_graph(Net(), marks, where, micro_batches=4, stage=2)
        other.compile(*batches(1)[0])
        gz.load(other, tmp_path / "checkpoint")
        assert all(map(torch.equal, expected, tensors_of([other(*batch) for batch in batches()])))


def test_the_step_agrees_with_plain_pytorch() -> None:
    graph = staged_graph(Net(2), stages_of(2, 2), placement(2, 2), micro_batches=4, stage=2, clip=0.1)
    assert gz.check(graph, *batches(1)[0]).agrees


class Two(nn.Module):
    """Layers a and b, on stages 0 and 1, and a buffer of a's stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
        self.a.register_buffer("running", torch.ones(5))


def returned_weights(m: Two, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return F.cross_entropy(m.b(m.a(x)), y), m.a.weight.t() - m.b.weight


def buffer_read_later(m: Two, x: Tensor, y: Tensor) -> Tensor:
    h = m.a(x)
    loss = F.cross_entropy(m.b(h + m.a.running), y)
    m.a.running.lerp_(h.detach().mean(0), 0.1)
    return loss


def statistic_of_later(m: Two, x: Tensor, y: Tensor) -> Tensor:
    scores = m.b(m.a(x))
    m.a.running.lerp_(scores.detach().mean(0), 0.1)
    return F.cross_entropy(scores, y)


def gated(m: Two, x: Tensor, y: Tensor) -> Tensor:
    h = m.a(x)
    return F.cross_entropy(m.b((m.b(h) * h).masked_fill(h > 1, 0.0)), y)


def returned_mask(m: Two, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    mask = (x > 0).float()
    return F.cross_entropy(m.b(m.a(x * mask)), y), mask


def gradient_of_no_batch(m: Two, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of b's bias is a number of rows: the update computes it of the loss's shape."""
    return F.cross_entropy(m.a(x), y) + m.b(x).sum()


@pytest.mark.parametrize(
    ("loss_fn", "micro_batches"),
    [(returned_weights, 4), (buffer_read_later, 1), (statistic_of_later, 1), (gated, 2), (returned_mask, 1),
     (gradient_of_no_batch, 2)],
)  # fmt: skip
def test_values_that_several_stages_share(loss_fn: Any, micro_batches: int) -> None:
    """A stage sees states of another as they were before the step, whatever that has written."""
    marks = {"model.a": 0, "model.b": 1}
    assert compare(Two(), marks, placement(2, 2), loss_fn=loss_fn, micro_batches=micro_batches) == 0


def test_a_buffer_that_other_parts_would_read_as_another_micro_batch_left_it_is_refused() -> None:
    def normalised(m: Two, x: Tensor, y: Tensor) -> Tensor:
        h = m.a(x)
        mean, old = h.mean(0), m.a.running.clone()
        m.a.running.mul_(0.9).add_(mean.detach(), alpha=0.1)
        return F.cross_entropy(m.b((h - mean) * old), y)

    graph = staged_graph(Two(), {"model.a": 0, "model.b": 1}, placement(2, 2), loss_fn=normalised, micro_batches=4)
    with pytest.raises(
        gz.ConfigError, match="a buffer that each micro-batch changes in forward@0, is read in backward@0"
    ):
        graph.compile(*batches(1)[0])


def test_averages_of_a_model_with_batch_norm_live_with_what_they_average() -> None:
    def averaging(graph: Any) -> list[Tensor]:
        graph.average = AveragedModel(graph.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        graph.add_average(graph.average, graph.model)
        return tensors_of(([graph(*batch) for batch in batches(3)], graph.full_state_dict()))

    model, where = Net(batch_norm=True), placement(2, 2)
    staged = staged_graph(copy.deepcopy(model), stages_of(4, 2), where, micro_batches=4)
    whole = staged_graph(copy.deepcopy(model), None, where, micro_batches=4)
    assert all(map(torch.equal, averaging(staged), averaging(whole)))
    on_stages = [member.memory.resident["parameters"] for member in staged.plan.pipeline.members]  # type: ignore[union-attr]
    assert max(on_stages) < 1.5 * min(on_stages)


def _check_random(seed: int) -> None:
    """Random layers per stage, a random legal schedule, a random stage of ZeRO."""
    generator = random.Random(seed)
    rows, stages, micro_batches = random_rows(generator)
    layers = stages + generator.randrange(3)
    cuts = sorted(generator.sample(range(1, layers), stages - 1)) if stages > 1 else []
    marks = {f"model.layers.{i}": sum(i >= cut for cut in cuts) for i in range(layers)}
    torch.manual_seed(seed)
    rows = [[*map(str, row)] for row in rows]  # type: ignore[misc]
    batch_rows = 2 * micro_batches
    model, where = Net(layers), placement(len(rows), 2)
    options: dict[str, Any] = {"micro_batches": micro_batches, "stage": generator.randrange(4)}
    results = []
    for given in (marks, None):
        graph = staged_graph(copy.deepcopy(model), given, where, rows, **options)
        results.append(tensors_of(([graph(*batch) for batch in batches(2, batch_rows)], graph.full_state_dict())))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("seed", range(3))
def test_random_cuts_and_schedules(seed: int) -> None:
    _check_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 16))
def test_more_random_cuts_and_schedules(seed: int) -> None:
    _check_random(seed)
