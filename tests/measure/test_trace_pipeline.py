"""A traced step on pipeline stages: the actions of each member of pp, and within each the ops of its part."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _ranks import start_as_torchrun

import graphzero as gz
from graphzero.cli import main
from graphzero.plan.device import Device
from graphzero.plan.timeline import COMPUTE
from graphzero.plugins.page.timeline import read_measured
from graphzero.plugins.plan.pipeline_timeline import pipeline_timeline
from graphzero.plugins.profiler.recorder import AWAIT, LAUNCH

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "pipelines")]
from staged import Net, batches, placement, staged_graph, stages_of  # noqa: E402
from trace_form import problems  # noqa: E402

FACTORY = """
import sys
sys.path[:0] = [{pipelines!r}, {tests!r}]
from staged import Net, batches, staged_graph, stages_of

def make(placement, stage):
    graph = staged_graph(Net(), stages_of(4, 2), placement, micro_batches=4, stage=stage)
    return graph, [x[:8] for x in batches(1)[0]]
"""


@pytest.fixture(scope="module")
def found() -> Any:
    """A graph and its trace."""
    torch.manual_seed(0)
    loss: Any = lambda model, x, y: F.cross_entropy(model(x), y)  # noqa: E731
    graph = staged_graph(
        Net(), stages_of(4, 2), placement(2, 2), "zb1p", micro_batches=4, stage=2, clip=0.1, loss_fn=loss
    )
    return graph, gz.trace(graph, *batches(1)[0], steps=3, device="h100")


def actions_of(rank: Any) -> list[Any]:
    return [event for event in rank.events if event.stream == "actions"]


def test_each_rank_has_the_actions_of_its_stage_in_the_order_of_the_schedule(found: Any) -> None:
    graph, trace = found
    pipeline = graph.compiled_program("test").pipeline
    assert [(rank.rank, rank.member) for rank in trace.ranks] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    for rank in trace.ranks:
        actions = actions_of(rank)
        assert [action.name for action in actions] == [pipeline.label(call) for call in pipeline.calls_on(rank.member)]
        assert all(one.end <= other.begin for one, other in zip(actions, actions[1:], strict=False))
        assert rank.program[0] <= actions[0].begin and actions[-1].end <= rank.program[1]
    assert "1F3" in {action.name for action in actions_of(trace.ranks[2])}


def test_the_ops_of_each_part_run_within_its_action_for_each_micro_batch(found: Any) -> None:
    graph, trace = found
    programs = graph.stage_programs
    for rank in trace.ranks:
        ops = [event for event in rank.events if event.stream == COMPUTE]
        for action in actions_of(rank):
            within = [event for event in ops if action.begin <= event.begin and event.end <= action.end]
            names = {node.name for node in programs[action.kind].nodes}
            assert all(event.name in names for event in within), action
        assert all(any(a.begin <= event.begin and event.end <= a.end for a in actions_of(rank)) for event in ops)
    forward = [event for event in trace.ranks[0].events if event.kind == "addmm"]
    of_part = [node for node in programs["forward@0"].nodes if str(node.target) == "aten.addmm.default"]
    assert len(forward) == 4 * len(of_part)


def test_collectives_are_those_of_the_plan_of_the_fullest_member(found: Any) -> None:
    graph, trace = found
    assert trace.broken() == [] and trace.fullest == trace.first.member
    assert sum(one.nbytes for one in trace.sent) == pytest.approx(graph.plan.comm_bytes)
    sent = [event for event in trace.first.events if event.stream == "communication dp"]
    assert sum(event.nbytes for event in sent) == pytest.approx(graph.plan.comm_bytes)
    assert trace.peak is None and "peak not measured: that of a step on pipeline stages" in str(trace)


def test_the_plan_stands_beside_it_without_the_wait_for_other_stages(found: Any) -> None:
    graph, trace = found
    pipeline, device = graph.compiled_program("test").pipeline, Device.named("h100")
    assert trace.planned == pipeline_timeline(pipeline, device, trace.fullest)
    assert "without waiting for other stages" in trace.report()
    for member, actions in enumerate(trace.planned_actions):
        assert [event.name for event in actions] == [pipeline.label(call) for call in pipeline.calls_on(member)]


def test_perfetto_reads_the_file_and_finds_a_row_for_each_member(found: Any, tmp_path: Path) -> None:
    _, trace = found
    text = trace.write(tmp_path / "trace.json").read_text()
    assert not problems(text)
    events = json.loads(text)["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [processes[i] for i in range(4)] == [
        "rank 0, 0 along pp", "rank 1, 0 along pp", "rank 2, 1 along pp", "rank 3, 1 along pp"
    ]  # fmt: skip
    assert {"planned for rank 0 along pp (h100)", "planned for rank 1 along pp (h100)"} <= {*processes.values()}
    slices = {(event["pid"], event["name"]) for event in events if event["ph"] == "X"}
    assert {(0, "0F3"), (2, "1F3"), (3, "1W0")} <= slices and (0, "1F3") not in slices
    arrows = [event for event in events if event["ph"] == "s" and event["pid"] == 2]
    begun = [event for event in trace.ranks[2].events if event.kind == LAUNCH]
    awaited = [event for event in trace.ranks[2].events if event.kind == AWAIT]
    assert len(arrows) == len(begun) == len(awaited) > 0


def test_the_page_takes_the_measured_actions_of_all_members(found: Any, tmp_path: Path) -> None:
    _, trace = found
    (tmp_path / "measured.json").write_text(json.dumps(trace.to_timeline()))
    events = read_measured(str(tmp_path / "measured.json"))
    assert {event["stage"] for event in events} == {0, 1}
    assert {event["name"] for event in events if event["stream"] == "actions" and event["stage"] == 1} >= {"1F0", "1I2"}


def _trace_stages(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    where = gz.placement("cpu", [[0, 1], [2, 3]], names=("pp", "dp"))
    graph = staged_graph(Net(), stages_of(4, 2), where, micro_batches=4, stage=1, clip=0.1)
    trace = gz.trace(graph, *(x[:8] for x in batches(1)[0]), steps=1, device="h100")
    actions = {one.rank: [event.name for event in actions_of(one)] for one in trace.ranks}
    calls = graph.compiled_program("test").pipeline.calls_on  # type: ignore[union-attr]
    labels = graph.compiled_program("test").pipeline.label  # type: ignore[union-attr]
    expected = {rank: [labels(call) for call in calls(rank // 2)] for rank in range(4)}
    sent = sum(event.nbytes for event in trace.first.events if event.stream == "communication dp")
    outcome = (
        trace.broken(),
        actions == expected,
        abs(sent - graph.plan.comm_bytes) < 1,
        [r.member for r in trace.ranks],
    )
    Path(f"{folder}/{rank}.txt").write_text(str(outcome))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_process_records_its_own_stages(tmp_path: Path) -> None:
    start_as_torchrun(_trace_stages, (str(tmp_path),), 4)
    assert {file.read_text() for file in tmp_path.iterdir()} == {"([], True, True, [0, 0, 1, 1])"}


def test_the_command_traces_pipeline_stages_on_virtual_ranks(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "staged_step.py"
    file.write_text(FACTORY.format(pipelines=str(HERE.parent / "pipelines"), tests=str(HERE.parent)))
    command = ["trace", f"{file}:make", "--axes", "pp=2,dp=2", "--steps", "1", "--output", str(tmp_path / "out.json")]
    assert main(command) == 0
    assert "as planned: 1 collectives" in capsys.readouterr().out
    assert '"1F3"' in (tmp_path / "out.json").read_text()
