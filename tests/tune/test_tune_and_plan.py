"""``graphzero tune`` and ``graphzero plan`` say the same of the same layout, on every device that has a file."""

from __future__ import annotations

import argparse
import json
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from tuned_steps import WILLING

import graphzero as gz
from graphzero.cli import factory
from graphzero.plan.device import Device, names
from graphzero.plugins.plan.command import planned
from graphzero.plugins.tune import command as tune
from graphzero.plugins.tune.layout import Layout
from graphzero.plugins.tune.price import Bound, price
from graphzero.plugins.tune.report import does_not_fit, lines_of, report
from graphzero.sbp.placement import placement

HERE = Path(__file__).parent
FACTORY = """
import sys
sys.path.insert(0, {here!r})
from tuned_steps import adamw_graph, example

def make(placement, stage):
    graph = adamw_graph(placement, {model!r})
    graph.model.float()
    graph.config.enable_amp()
    if stage:
        graph.config.enable_zero(stage=stage)
    return graph, example({model!r}, 2)
"""


@pytest.mark.parametrize(("name", "model"), list(zip(names(), chain(["gpt2"], repeat("three heads")), strict=False)))
def test_a_layout_has_one_peak_one_traffic_and_one_time(tmp_path, name, model):
    (tmp_path / "mixed_step.py").write_text(FACTORY.format(here=str(HERE), model=model))
    what, device = f"{tmp_path}/mixed_step.py:make", Device.named(name)
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    options = parser.parse_args([what, "--axes", "dp=4", "--device", name, "--quiet", "--top", "40"])
    found, _ = tune.search_layouts(options, device)
    plain = {one.layout.stage: one for one in found.fitting if one.layout == Layout((("dp", 4),), one.layout.stage)}
    plans = planned(what, placement(device.type, range(4)), (0, 1, 2, 3), device)
    assert found.room == plans.memory
    for stage in plans.stages:
        layout = plain[stage.stage]
        assert (layout.peak, layout.plan.comm_bytes) == (stage.peak, stage.plan.comm_bytes)
        assert layout.seconds == pytest.approx(stage.timeline.seconds, rel=1e-9)


STAGED = """
import sys
sys.path[:0] = [{pipelines!r}, {tests!r}]
from graphs import TrainGraph
from staged import Net, batches, cross_entropy, staged_graph, stages_of
from torch.optim import AdamW

def make(placement, stage):
    graph = staged_graph(Net(2), stages_of(2, 2), placement, "zb1p", micro_batches=2, stage=stage)
    return graph, [x[:8] for x in batches(1)[0]]

def unmarked(placement, stage):
    model = Net(2)
    return TrainGraph(model, cross_entropy, AdamW(model.parameters()), placement=placement), [
        x[:4] for x in batches(1)[0]
    ]
"""


@pytest.fixture
def staged_file(tmp_path):
    text = STAGED.format(pipelines=str(HERE.parent / "pipelines"), tests=str(HERE.parent))
    (tmp_path / "staged_step.py").write_text(text)
    return tmp_path / "staged_step.py"


def tuned(*command):
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    options = parser.parse_args([*command, "--quiet", "--top", "100"])
    return tune.search_layouts(options, Device.named(options.device))


def test_a_layout_of_pipeline_stages_has_one_peak_one_traffic_and_one_time(staged_file):
    axes, device = (("pp", 2), ("dp", 2)), Device.named("h100")
    found, step = tuned(f"{staged_file}:make", "--axes", "pp=2,dp=2", "--device", "h100")
    assert {one.layout.axes for one in found.fitting} == {axes}
    where = placement("cuda", [[0, 1], [2, 3]], ("pp", "dp"))
    plans = planned(f"{staged_file}:make", where, (0, 1, 2, 3), device)
    for stage in plans.stages:
        priced = price(step, Layout(axes, stage.stage, micro_batches=2), {}, device)
        assert priced.plan.pipeline.schedule == "zb1p"
        assert (priced.peak, priced.plan.comm_bytes) == (stage.peak, stage.plan.comm_bytes)
        assert priced.seconds == pytest.approx(stage.timeline.seconds, rel=1e-9)
        assert priced.time.idle > 0


def test_pipeline_layouts_are_ranked_among_others_and_their_lines_set_them(staged_file, tmp_path):
    device = tmp_path / "willing.json"
    device.write_text(json.dumps(WILLING.to_json()))
    found, step = tuned(
        f"{staged_file}:unmarked", "--ranks", "4", "--pipeline", "1,2,4", "--tensor", "1", "--device", str(device)
    )
    assert {one.layout.members for one in found.fitting} == {1, 2, 4}
    text = report(found, step, WILLING, "a step", 100)
    assert "waits for other pipeline stages" in text and "left out: pipeline stages" not in text
    plain = {one.layout.axes: one for one in found.fitting if one.layout == Layout(one.layout.axes)}
    for one in found.fitting:
        assert Bound(plain[one.layout.axes], WILLING).seconds(one.layout) <= one.seconds
    one = next(one for one in found.fitting if one.layout.members == 2 and one.layout.stage == 2)
    first, *rest = lines_of(one, step, "cpu")
    assert first == 'placement = gz.placement("cpu", torch.arange(4).reshape(2, 2).tolist(), names=("pp", "dp"))'
    assert rest[0] == f'self.config.set_stage("auto", device="{device}")'
    scope = {
        "gz": gz,
        "torch": torch,
        "placement": gz.placement("cpu", [[0, 1], [2, 3]], names=("pp", "dp"), virtual=True),
    }
    graph, _ = factory.load(f"{staged_file}:unmarked")(scope["placement"], 0)
    exec("\n".join(rest), scope | {"self": graph})  # noqa: S102
    rows = [torch.ones(16, 5), torch.zeros(16, dtype=torch.long)]
    graph.compile(*rows)
    assert (graph.plan.memory, graph.plan.collectives) == (one.plan.memory, one.plan.collectives)
    assert graph.plan.pipeline.members == one.plan.pipeline.members
    graph(*rows)


def test_a_wrong_question_about_pipelines_is_refused(staged_file):
    device = ("--device", "h100")
    with pytest.raises(gz.ConfigError, match="--axes says the pipeline axis too"):
        tuned(f"{staged_file}:make", "--axes", "dp=4", "--pipeline", "2", *device)
    with pytest.raises(gz.ConfigError, match="--pipeline two: write numbers of ranks"):
        tuned(f"{staged_file}:make", "--ranks", "4", "--pipeline", "two", *device)
    found, step = tuned(f"{staged_file}:make", "--axes", "pp=4,dp=1", *device)
    assert not found.fitting and "2 stages are not a multiple of 4" in does_not_fit(found, step, Device.named("h100"))
