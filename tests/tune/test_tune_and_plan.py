"""``graphzero tune`` and ``graphzero plan`` say the same of the same layout, on every device that has a file."""

from __future__ import annotations

import argparse
from itertools import chain, repeat
from pathlib import Path

import pytest

from graphzero.cli import plan
from graphzero.plan.device import Device, names
from graphzero.plugins.tune import command as tune
from graphzero.plugins.tune.layout import Layout
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


@pytest.mark.parametrize(("name", "model"), zip(names(), chain(["gpt2"], repeat("three heads")), strict=False))
def test_a_layout_has_one_peak_one_traffic_and_one_time(tmp_path, name, model):
    (tmp_path / "mixed_step.py").write_text(FACTORY.format(here=str(HERE), model=model))
    what, device = f"{tmp_path}/mixed_step.py:make", Device.named(name)
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    options = parser.parse_args([what, "--axes", "dp=4", "--device", name, "--quiet", "--top", "40"])
    found, _ = tune.search_layouts(options, device)
    plain = {one.layout.stage: one for one in found.fitting if one.layout == Layout((("dp", 4),), one.layout.stage)}
    report = plan.planned(what, placement(device.type, range(4)), (0, 1, 2, 3), device)
    assert found.room == report.memory
    for stage in report.stages:
        tuned = plain[stage.stage]
        assert (tuned.peak, tuned.plan.comm_bytes) == (stage.peak, stage.plan.comm_bytes)
        assert tuned.seconds == pytest.approx(stage.timeline.seconds, rel=1e-9)
