"""The plan of a pipeline: memory of each member, messages between stages, the schedule's bubble."""

from __future__ import annotations

import cProfile
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import TrainGraph
from staged import Net, batches, compare, cross_entropy, placement, staged_graph, stages_of
from storages import Storages
from torch import nn
from torch.utils._pytree import tree_leaves

import graphzero as gz
from graphzero.plan.device import Device
from graphzero.plan.plan import PipelinePlan
from graphzero.schedules import ActionKind, ScheduleCosts, generate_schedule, simulate_schedule


def planned(schedule: Any, members: int = 2, micro_batches: int = 8, **options: Any) -> tuple[Any, PipelinePlan]:
    torch.manual_seed(0)
    marks = stages_of(4, options.pop("stages", members))
    options.setdefault("loss_fn", lambda model, x, y: F.cross_entropy(model(x), y))
    graph = staged_graph(Net(), marks, placement(members, 2), schedule, micro_batches=micro_batches, **options)
    graph.compile(*batches(1, 2 * micro_batches)[0])
    assert graph.plan.pipeline is not None
    return graph, graph.plan.pipeline


def test_messages_are_the_activations_of_a_micro_batch_and_their_gradients() -> None:
    _, plan = planned("1f1b", 4)
    rows, features, nbytes = 2 // 2, 8, 4
    expected = [(i, i + 1) for i in range(3)] + [(i + 1, i) for i in range(3)]
    assert sorted((edge.source, edge.target) for edge in plan.edges) == sorted(expected)
    assert {(edge.bytes, edge.messages) for edge in plan.edges} == {(rows * features * nbytes, 8)}


class Skipping(nn.Module):
    """A value of stage 0, one feature of which stage 2 reads too; gradients are added on stage 1.

    chunks: whether that is one of several pieces.
    """

    def __init__(self, chunks: bool) -> None:
        super().__init__()
        self.a, self.b, self.c, self.chunks = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 5), chunks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.c(self.b(h)) * (h.chunk(8, -1)[2] if self.chunks else h[:, :1])


@pytest.mark.parametrize("chunks", [False, True])
def test_a_value_that_skips_a_stage_has_an_edge_of_its_own_for_the_elements_that_are_read(chunks: bool) -> None:
    marks = {"model.a": 0, "model.b": 1, "model.c": 2}
    options: dict[str, Any] = {"loss_fn": lambda m, x, y: F.cross_entropy(m(x), y), "micro_batches": 4}
    assert compare(Skipping(chunks), marks, placement(3, 2), stage=2, clip=0.1, **options) == 0
    graph = staged_graph(Skipping(chunks), marks, placement(3, 2), **options)
    graph.compile(*batches(1)[0])
    plan = graph.plan.pipeline
    assert plan is not None
    edges = {(edge.source, edge.target): edge.bytes for edge in plan.edges}
    assert len(plan.edges) == 5 and edges.keys() == {(0, 1), (0, 2), (1, 2), (2, 1), (1, 0)}
    assert edges[0, 1] == edges[1, 2] == 2 * 8 * 4 and edges[0, 2] == 2 * 1 * 4  # rows, features
    assert edges[2, 1] == 2 * (8 + 1) * 4  # its gradient is spread over all features where it is added
    assert "stage 0 -> 2: 4 messages of 8 B" in str(graph.plan)


def test_1f1b_keeps_fewer_micro_batches_than_gpipe_and_the_last_stage_one() -> None:
    in_flight = {name: [m.in_flight for m in planned(name, 4)[1].members] for name in ("gpipe", "1f1b")}
    of_one = in_flight["1f1b"][3]
    assert in_flight["gpipe"][3] > 1.5 * of_one  # beside the sums of gradients, which both have
    assert in_flight["1f1b"][0] > in_flight["1f1b"][1] > in_flight["1f1b"][2]
    assert all(few < many for few, many in zip(in_flight["1f1b"], in_flight["gpipe"], strict=True))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_what_clipping_keeps_until_the_norm_is_known_is_not_an_activation(micro_batches: int) -> None:
    """Where the norm of all gradients ends a part, gradients and scaled momenta wait for the next one."""
    plain, clipped = (planned("1f1b", stage=1, micro_batches=micro_batches, **one)[1] for one in ({}, {"clip": 0.1}))
    for one, other in zip(plain.members, clipped.members, strict=True):
        assert one.memory.activations == other.memory.activations


def test_states_are_shared_by_stages_and_split_over_their_data_ranks() -> None:
    graph, plan = planned("1f1b", stage=3)
    params = sum(p.numel() for p in graph.model.parameters()) * 4
    resident = [member.memory.resident for member in plan.members]
    held = sum(memory["parameters"] for memory in resident)
    assert params / 2 <= held <= params / 2 * 1.1  # padding of uneven pieces
    assert [member.stages for member in plan.members] == [(0,), (1,)]
    assert graph.plan.memory.peak == max(member.memory.peak for member in plan.members)


def test_the_bubble_is_that_of_the_schedule() -> None:
    assert planned("1f1b", 4)[1].bubble == pytest.approx(0.375)
    assert planned("zb1p", 4)[1].bubble == pytest.approx(0.125)


def test_the_planned_bubble_is_that_of_what_stages_and_messages_take() -> None:
    """Arithmetic alone takes time on this device, and messages their latency."""
    links = {"pp": gz.Link(3e-5, 1e18), "inside": gz.Link(0.0, 1e18)}
    device = Device("slow", "cpu", {"f32": 1e6}, memory=1e18, capacity=1 << 34, call=0.0, links=links)
    for schedule in ("1f1b", "zb1p"):
        model = Net()
        graph = TrainGraph(
            model, cross_entropy, torch.optim.SGD(model.parameters()), placement=placement(2, 2), micro_batches=4
        )
        graph.config.set_stage("auto", device=device)
        graph.config.set_pipeline(schedule)
        graph.compile(*batches(1)[0])
        plan = graph.plan.pipeline
        assert plan is not None and plan.seconds is not None
        rows, first, layer, head = 2, 5 * 8, 2 * 8 * 12, 8 * 5
        flops = [first + 2 * layer, 2 * layer + head]
        forward = [2 * rows * x / 1e6 for x in flops]
        of_inputs = [2 * rows * x / 1e6 for x in (2 * layer, 2 * layer + head)]  # batches need no gradients
        assert [each for each, _ in plan.seconds.stages] == pytest.approx(forward)
        assert [each for _, each in plan.seconds.stages] == pytest.approx(
            [a + b for a, b in zip(forward, of_inputs, strict=True)]
        )
        assert plan.seconds.transfers == ((0, 1, pytest.approx(3e-5)), (1, 0, pytest.approx(3e-5)))
        kinds = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
        each = {0: (forward[0], 0.0, forward[0] + of_inputs[0]), 1: (forward[1], of_inputs[1], forward[1])}
        actions = {
            (stage, kind): cost for stage, costs in each.items() for kind, cost in zip(kinds, costs, strict=True)
        }
        costs = ScheduleCosts(actions, {(0, 1): 3e-5, (1, 0): 3e-5})
        simulated = simulate_schedule(generate_schedule(schedule, 2, 4), costs)
        assert plan.seconds.bubble == pytest.approx(simulated.bubble, abs=1e-3)
        assert "by planned seconds on slow" in plan.lines[0] and "messages of 64 B, 30.0 us each" in "\n".join(
            plan.lines
        )


def test_without_a_device_seconds_are_those_of_a_plain_machine() -> None:
    _, plan = planned("1f1b")
    assert plan.seconds is not None and plan.seconds.device == "plain cpu"
    assert plan.bubble == pytest.approx(1 / 8) and plan.seconds.bubble > 0


def test_fewer_micro_batches_than_stages_are_told_of() -> None:
    graph, plan = planned("1f1b", 4, micro_batches=2)
    assert "2 micro-batches for 4 pipeline ranks" in "\n".join(graph.plan.decisions)
    assert plan.bubble == pytest.approx(1.5)


def test_the_plan_is_text_and_plain_data() -> None:
    graph, plan = planned("zb1p")
    text = str(graph.plan)
    assert "pipeline zb1p, bubble" in text and "stage 0 -> 1: 8 messages of 32 B" in text and "rank 1 |" in text
    assert graph.plan.to_dict()["pipeline"]["members"][1]["stages"] == (1,)
    assert len(plan.members) == 2


ROWS = {
    "in turn": [f"{action}{i}" for i in range(4) for action in ("0F", "1F", "1B", "0B")],
    "all forward first": [f"{s}F{i}" for s in (0, 1) for i in range(4)]
    + [f"{s}B{i}" for s in (1, 0) for i in range(4)],
    "weights last": [f"{s}F{i}" for s in (0, 1) for i in range(4)]
    + [f"{s}{kind}{i}" for kind in "IW" for s in (1, 0) for i in range(4)],
}  # fmt: skip


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_peak_of_stages_on_one_rank_is_the_plans_to_the_byte(rows: str, clip: float | None) -> None:
    torch.manual_seed(0)
    graph = staged_graph(Net(), stages_of(4, 2), placement(1, 1), [ROWS[rows]], micro_batches=4, clip=clip)
    batch = batches(1)[0]
    graph(*batch)
    gc.collect()
    executor = graph._selection.last._executor  # type: ignore[union-attr]
    slots = {slot for one in executor.executors.values() for (slot,) in one.slots.values()}  # type: ignore[union-attr]
    assert sum(slot.nbytes for slot in slots) == graph.plan.memory["communication"]
    known = [x for x in tree_leaves(graph.state_dict()) if isinstance(x, torch.Tensor)]
    with Storages([*batch, *slots, *known]) as mode:
        graph(*batch)
    before = sum(graph.plan.memory.resident.values())
    # beside the program: what the call hands out as new tensors, the loss and the norm, and the scores' pieces
    assert 0 <= mode.peak + before - graph.plan.memory.peak <= 16


@pytest.mark.slow
def test_compiling_takes_calls_in_proportion_to_the_layers_and_none_to_the_micro_batches() -> None:
    def calls(layers: int, micro_batches: int) -> int:
        torch.manual_seed(0)
        graph = staged_graph(
            Net(layers), stages_of(layers, 4), placement(4, 2), micro_batches=micro_batches, stage=3, clip=0.1
        )
        profile = cProfile.Profile()
        profile.enable()
        graph.compile(*batches(1, 64)[0])
        profile.disable()
        return sum(entry.callcount for entry in profile.getstats())

    calls(8, 4)  # what is learnt once
    few, many = calls(8, 4), calls(32, 4)
    assert many < 4 * few
    assert calls(8, 16) < 1.25 * few
