"""``graphzero plan`` of a step on pipeline stages: the plan that the Graph itself has, the seconds of its timeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from staged import Net, batches, placement, staged_graph, stages_of

import graphzero as gz
from graphzero.cli import main
from graphzero.plan.device import Device
from graphzero.plugins.plan.command import planned
from graphzero.plugins.plan.peak import largest_in_pipeline
from graphzero.plugins.plan.pipeline_timeline import pipeline_timeline

HERE = Path(__file__).parent
FACTORY = """
import sys
sys.path[:0] = [{here!r}, {tests!r}]
from staged import Net, batches, staged_graph, stages_of

def make(placement, stage):
    graph = staged_graph(Net(2), stages_of(2, 2), placement, micro_batches=4, stage=stage, clip=0.1)
    return graph, [x[:8] for x in batches(1)[0]]
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "staged_step.py"
    path.write_text(FACTORY.format(here=str(HERE), tests=str(HERE.parent)))
    return f"{path}:make"


def test_the_command_plans_what_the_graph_compiles_to(file: str) -> None:
    device, where = Device.named("h100"), gz.placement("cpu", [[0, 1], [2, 3]], names=("pp", "dp"))
    report = planned(file, where, (1, 3), device)
    for one in report.stages:
        torch.manual_seed(0)
        graph = staged_graph(Net(2), stages_of(2, 2), placement(2, 2), micro_batches=4, stage=one.stage, clip=0.1)
        graph.compile(*batches(1)[0])
        program = graph.compiled_program("test")
        plan, pipeline = graph.plan, program.pipeline
        assert plan.pipeline is not None and pipeline is not None and one.plan.pipeline is not None
        assert (one.plan.memory, one.plan.comm_bytes) == (plan.memory, plan.comm_bytes)
        assert (one.plan.pipeline.members, one.plan.pipeline.edges) == (plan.pipeline.members, plan.pipeline.edges)
        assert one.timeline.seconds == pytest.approx(pipeline_timeline(pipeline, device).seconds)
        assert one.plan.pipeline.seconds is not None and one.plan.pipeline.seconds.device == "h100"
        largest = largest_in_pipeline(pipeline, plan.pipeline, 1000)
        categories = {value.category for value in largest}
        for category in categories & {"activations", "gradients", "temporaries"}:
            nbytes = sum(value.nbytes for value in largest if value.category == category)
            assert nbytes == plan.memory.at_peak[category], category


def test_the_table_has_messages_and_the_wait_for_other_stages(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", file, "--axes", "pp=2,dp=2", "--stage", "2", "--jobs", "1"]
    assert main([*command, "--memory", "1MB"]) == 0
    text = capsys.readouterr().out
    assert "pp send activations" in text and "waiting for other stages" in text and "on 4 ranks (pp=2, dp=2)" in text
    assert "stage 2: pipeline 1f1b, bubble" in text and "nothing travels along" not in text
    assert "least ranks that fit                            2" in text  # pp stays
    assert main([*command, "--json"]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    assert stage["pipeline"]["members"][1]["stages"] == [1]
    seconds = stage["seconds"]
    parts = sum(seconds[name] for name in ("compute", "exposed", "host", "idle"))
    assert parts == pytest.approx(seconds["step"]) and seconds["idle"] > 0
    (messages,) = [group for group in stage["traffic"] if group["axis"] == "pp"]
    assert (messages["calls"], messages["nbytes"]) == (4, 4 * 2 * 8 * 4)


def test_marks_that_do_not_fit_the_axes_are_said_by_the_command(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", file, "--axes", "pp=4,dp=2", "--stage", "1", "--jobs", "1"]) == 2
    assert "2 stages are not a multiple of 4" in capsys.readouterr().err
