"""What four processes check of messages between stages through process groups, as between GPUs: here of gloo."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import slow
from stage_process_checks import (
    ADAM,
    assert_same,
    graph_on,
    layer_on_each,
    model_of,
    real,
    share,
    stage_path,
    train,
    whole,
)
from staged import adamw, batches, staged_graph, stages_of, tensors_of
from torch import Tensor, nn

import graphzero as gz
from graphzero.errors import CheckError, PlacementError
from graphzero.runtime.state import modules
from graphzero.runtime.transport.process_group_transport import ProcessGroupTransport
from graphzero.runtime.world import process, shared_gpus
from graphzero.schedules import GENERATORS


@contextmanager
def process_groups() -> Iterator[None]:
    """Messages of Graphs whose first step is taken here go as they do between GPUs."""
    process.GROUPED_DEVICES.add("cpu")
    try:
        yield
    finally:
        process.GROUPED_DEVICES.discard("cpu")


def connect_by_process_groups(graph: Any) -> None:
    """Let the next step of a Graph that has run send its messages as between GPUs."""
    world = graph._source.world
    assert world._stage_transport is None
    world._made_in = -1


def assert_same_by_both_ways(where: gz.Placement, model: nn.Module, marks: dict[str, int], **options: Any) -> None:
    """Train a Graph as virtual ranks do, to the bit; after two steps its messages go through process groups."""
    with ExitStack() as stack:

        def change(graph: Any) -> None:
            stack.enter_context(process_groups())
            connect_by_process_groups(graph)

        graph = assert_same(where, model, marks, between=change, **options)
    assert isinstance(graph._source.world._stage_transport, ProcessGroupTransport)


def check_several_placements_of_the_same_ranks_meet_both_ways_of_messages() -> None:
    assert_same_on_placements(((2, 2), ("pp", "dp"), "zb1p", 2, 1), ((2, 2), ("dp", "pp"), "1f1b", 2, 3))


@slow
def check_other_placements_meet_both_ways_of_messages() -> None:
    assert_same_on_placements(((2, 2), ("pp", "dp"), "zbv", 4, 2), ((4,), ("pp",), "1f1b", 4, 0))


def assert_same_on_placements(*cases: tuple[tuple[int, ...], tuple[str, ...], str, int, int]) -> None:
    for shape, names, schedule, stages, zero in cases:
        model, marks = layer_on_each(stages, tied=schedule != "zb1p")
        where = real(shape, names)
        assert_same_by_both_ways(where, model, marks, schedule=schedule, stage=zero, micro_batches=4, **ADAM)


@slow
def check_all_other_schedules_meet_both_ways_of_messages() -> None:
    for number, schedule in enumerate(name for name in GENERATORS if name not in ("1f1b", "zb1p", "zbv")):
        model, marks = layer_on_each(2 if schedule == "gpipe" else 4, tied=number % 2 == 0)
        count = 1 if number == 2 else 4
        options: dict[str, Any] = {"schedule": schedule, "stage": number % 4, "micro_batches": count, **ADAM}
        assert_same_by_both_ways(real(), model, marks, **options)


def assert_calls_that_fail_change_nothing(
    graph: Any, where: gz.Placement, failing_call: Callable[[], None], refused: type[Exception], text: str
) -> None:  # fmt: skip
    """A call that fails by either way of messages leaves the state as it was, and steps from it are those of before."""
    train(graph, where)
    with ExitStack() as stack:
        for by_groups in (False, True):
            if by_groups:
                stack.enter_context(process_groups())
                connect_by_process_groups(graph)
            start = graph.full_state_dict()
            results = train(graph, where)
            graph.load_state_dict(start)
            try:
                failing_call()
            except refused as error:
                assert text in str(error), error
            else:
                raise AssertionError("the call went on")
            if refused is not CheckError and graph._source.state().partial_update_reason():
                graph.load_state_dict(start)
            assert all(map(torch.equal, tensors_of(graph.full_state_dict()), tensors_of(start)))
            assert all(map(torch.equal, train(graph, where), results))
    assert isinstance(graph._source.world._stage_transport, ProcessGroupTransport)


def check_an_error_of_one_stage_stops_all_and_the_next_call_works() -> None:
    where = real()
    graph = staged_graph(model_of(), stages_of(2, 2), where, stage=2, micro_batches=4)
    batch = [share(x, where) for x in batches(1)[0]]

    def call() -> None:
        executor = graph._selection.last._executor
        part, calls = executor.executors[max(executor.executors) - 2], []
        plain = part.run_step

        def failing(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 3:
                raise RuntimeError("a kernel of this stage fails")
            return plain(*args)

        with patch.object(part, "run_step", failing) if dist.get_rank() == 3 else nullcontext():
            graph(*batch)

    assert_calls_that_fail_change_nothing(graph, where, call, Exception, "a kernel of this stage fails")


def small_loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    scores = model(x)
    loss = F.cross_entropy(scores, y)
    assert loss < 1e3
    return loss, scores


def check_a_condition_that_fails_on_one_stage_stops_all_before_they_write() -> None:
    where, (x, y) = real(), batches(1)[0]
    for schedule, stages in [("1f1b", 2), ("zbv", 4)]:
        model, marks = layer_on_each(stages)
        graph = graph_on(where, model, marks, schedule=schedule, loss_fn=small_loss, micro_batches=4, stage=2)

        def call(graph: Any = graph) -> None:
            graph(share(x * 1e7, where), share(y, where))

        assert_calls_that_fail_change_nothing(graph, where, call, CheckError, "as they were before")


def check_ranks_on_one_gpu_are_refused_before_they_send() -> None:
    line = gz.placement("cpu", range(4), names=("tp",))
    gpu = SimpleNamespace(name_of=lambda device: f"GPU {dist.get_rank() % 3}")
    x = torch.zeros(1)
    with (
        patch.object(shared_gpus, "ACCELERATORS", {"cpu": gpu}),
        patch.object(dist, "get_backend_config", lambda group: "cpu:nccl"),
    ):
        world = process.ProcessWorld(line)
        ways = (lambda: world.begin("all_reduce", [x], [x], "tp"), lambda: modules._broadcast(x, line))
        for way in ways:
            try:
                way()
            except PlacementError as error:
                assert "ranks 0, 3 are on one GPU" in str(error), error
            else:
                raise AssertionError("NCCL would have refused it")


def check_gloo_itself_moves_tensors_of_a_gpu() -> None:
    """Ranks of one host read each other's memory, but not that of a GPU."""
    line = gz.placement("cpu", range(4))
    for device, read in (("cpu", True), ("cuda:0", False)):
        world = process.ProcessWorld(line, torch.device(device))
        assert (world._collectives_of("dp") is not None) == read


class Skipping(nn.Module):
    """Layers whose first result the last one reads too, and two that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(5, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 5)
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x + first)


ODD_ROWS = [row.split() for row in (
    "0F0 3F0 3B0 0F1 0B0 3F1 3B1 0B1",
    "1F0 2F0 2B0 1F1 1B0 2F1 2B1 1B1",
    "0F0 0F1 2F0 2F1 2I0 0I0 2W0 2I1 0W0 2W1 0I1 0W1",
    "1F0 1F1 3F0 3I0 3F1 1I0 3W0 3I1 3W1 1W0 1I1 1W1",
)]  # fmt: skip


@slow
def check_process_groups_on_rows_of_a_user_with_values_that_skip_stages() -> None:
    torch.manual_seed(4)
    model, marks = Skipping(), {"model.first": 0, "model.layers.0": 1, "model.layers.1": 2, "model.head": 3}
    with process_groups():
        assert_same(real(), model, marks, schedule=ODD_ROWS[:2], micro_batches=2, **ADAM)
        assert_same(real(), model, marks, schedule=ODD_ROWS[2:], stage=2, micro_batches=2, **ADAM)
        step, other = (
            graph_on(real(), net, marks, schedule=ODD_ROWS[:2], stage=3, micro_batches=2) for net in (model, Skipping())
        )
        train(step, real())
        folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        gz.save(step, folder[0])
        gz.load(other, folder[0])
        for full in (step.full_state_dict(), other.full_state_dict()):
            weights = full["modules"]["model"]
            assert weights["layers.0.weight"].data_ptr() == weights["layers.1.weight"].data_ptr()
        assert all(map(torch.equal, train(step, real()), train(other, real())))


@slow
def check_process_groups_evaluate_save_and_load() -> None:
    where, model = real(), model_of(layers=4)
    x, y = batches(1)[0]
    with process_groups():
        step = staged_graph(model, stages_of(4, 2), where, stage=3, micro_batches=4, **ADAM)
        train(step, where)
        rows = [["0F0", "0F1"], ["1F0", "1F1"]]  # of evaluation alone
        evaluation = staged_graph(
            model, stages_of(4, 2), where, rows, optimizer=lambda params: None, micro_batches=2
        )  # fmt: skip
        _, scores = evaluation(share(x, where), share(y, where))
        copy_of = model_of(9, layers=4)
        copy_of.load_state_dict(step.full_state_dict()["modules"]["model"])
        assert torch.allclose(whole(scores, where), copy_of(x), atol=1e-6)
        folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        gz.save(step, folder[0])
        other = graph_on(
            where, model_of(5, layers=4), stages_of(4, 4), schedule="zbv", stage=1, micro_batches=4, **ADAM
        )
        gz.load(other, folder[0])
        assert all(map(torch.equal, tensors_of(other.full_state_dict()), tensors_of(step.full_state_dict())))
        assert isinstance(step._source.world._stage_transport, ProcessGroupTransport)


def check_ranks_that_only_receive_scalars_are_marked_when_that_fails() -> None:
    where = real()
    model = model_of()
    for name, p in model.named_parameters():
        p.requires_grad_(stages_of(2, 2)[stage_path(name)] == 1)  # stage 0 writes nothing
    step = staged_graph(model, stages_of(2, 2), where, micro_batches=2, optimizer=adamw)  # counts its steps
    batch = [share(x, where) for x in batches(1)[0]]
    step(*batch)
    saved, state, world = step.full_state_dict(), step._source.state(), step._source.world
    executor, is_last = step._selection.last._executor, where.pipeline_member(dist.get_rank()) == 1
    assert executor.messages.writers and set(executor.messages.writers.values()) == {1}
    assert any(part.writes_state for part in executor.executors.values()) is is_last
    plain = world.wait_for_members

    def fail(handle: Any, members: Any, purpose: str) -> None:
        if purpose == "to end the step":
            raise RuntimeError("stopped while scalars are shared")
        plain(handle, members, purpose)

    world.wait_for_members = fail
    try:
        step(*batch)
    except Exception as error:  # noqa: BLE001
        assert "stopped while scalars are shared" in str(error), error
    world.wait_for_members = plain
    assert "ended in the middle of its update" in state.partial_update_reason()
    step.load_state_dict(saved)
    assert not state.partial_update_reason()
    step(*batch)
