"""graphzero calibrate: the fit on made-up times, two real processes, and what it says where nothing travels."""

import json
import os
import runpy
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _ranks import start_as_torchrun
from graphs import TrainGraph, mean_square

import graphzero as gz
from graphzero.cli import main
from graphzero.config import GraphConfig
from graphzero.plan.device import Device
from graphzero.plan.timeline import timeline
from graphzero.plugins.calibrate.command import MeasuredLink, Sample, calibrate, fit, on_any_axes, table
from graphzero.plugins.calibrate.compute import measured_device, shares
from graphzero.sbp.boxing import COLLECTIVES, wire_bytes
from graphzero.sbp.link_costs import messages
from graphzero.testing.timer import StepTimes

FACTORY = """
import torch
import graphzero as gz

class Twice(gz.Graph):
    def build(self, x):
        return x * 2

def make(placement, stage):
    return Twice(placement), torch.ones(4)

def other(placement, stage):
    return "no graph"
"""


def samples(link, ranks=4, noise=0.0, sizes=(1 << 10, 1 << 14, 1 << 18, 1 << 22)):
    generator = torch.Generator().manual_seed(0)
    found = []
    for kind in COLLECTIVES:
        for size in sizes:
            sent = wire_bytes(kind, size, ranks)
            off = 1 + noise * (2 * float(torch.rand((), generator=generator)) - 1)
            found.append(Sample(kind, messages(kind, ranks), sent, link.seconds(kind, sent, ranks) * off))
    return found


@pytest.mark.parametrize("link", [gz.Link(5e-6, 5e10), gz.Link(3e-4, 1e9), gz.Link(0.0, 2e8)])
def test_the_fit_finds_the_numbers_that_times_were_made_of(link):
    found = fit(samples(link))
    assert found.latency == pytest.approx(link.latency, rel=1e-6, abs=1e-12)
    assert found.bandwidth == pytest.approx(link.bandwidth, rel=1e-6)


def test_the_fit_weighs_short_and_long_messages_alike_under_noise():
    link = gz.Link(5e-6, 1e10)
    found = fit(samples(link, noise=0.2))
    assert found.latency == pytest.approx(link.latency, rel=0.1)
    assert found.bandwidth == pytest.approx(link.bandwidth, rel=0.1)
    assert 0.05 < MeasuredLink("dp", 4, found, samples(link, noise=0.2)).error < 0.2


def test_times_below_the_line_through_zero_give_no_negative_latency():
    seconds = {1000: 0.5e-6, 10_000: 9e-6, 100_000: 100e-6}
    found = fit([Sample("all_gather", 3, sent, t) for sent, t in seconds.items()])
    assert found.latency == 0 and found.bandwidth > 0


def test_times_that_do_not_grow_are_refused():
    with pytest.raises(gz.ConfigError, match="along tp .* larger ones"):
        fit([Sample("all_gather", 1, sent, 1e-3 - sent * 1e-9) for sent in (10, 1000, 100_000)], "tp")


def test_the_table_has_a_line_for_each_axis():
    link = gz.Link(5e-6, 5e10)
    lines = table([MeasuredLink("dp", 4, link, samples(link))]).splitlines()
    assert lines[1].split() == ["dp", "4", "5.0", "us", "50.000", "GB/s", "0%"]


def test_what_was_measured_along_an_axis_serves_axes_that_other_placements_have(tmp_path):
    fast, slow, few = gz.Link(1e-6, 1e11), gz.Link(1e-5, 1e10), gz.Link(1e-7, 1e12)
    place = gz.placement("cpu", torch.arange(16).reshape(2, 4, 2).tolist(), ("dp", "tp", "cp"), virtual=True)
    device = Device("two hosts", "cpu", {"f32": 1e12}, 1e11, 1 << 34, 1e-6, host=8)
    measured = [MeasuredLink("dp", 2, slow, []), MeasuredLink("tp", 4, fast, []), MeasuredLink("cp", 2, few, [])]
    links = on_any_axes(measured, device, place)
    assert links == {"dp": slow, "tp": fast, "cp": few, "inside 2": few, "inside": fast, "between": slow}
    both = replace(device, links=links)
    flat = gz.placement("cpu", torch.arange(16).reshape(4, 4).tolist(), ("dp_replicate", "dp_shard"), virtual=True)
    assert (both.link(flat, "dp_replicate"), both.link(flat, "dp_shard")) == (slow, fast)
    pairs = gz.placement("cpu", torch.arange(16).reshape(8, 2).tolist(), ("dp_replicate", "dp_shard"), virtual=True)
    assert (both.link(pairs, "dp_replicate"), both.link(pairs, "dp_shard")) == (slow, few)
    (tmp_path / "device.json").write_text(json.dumps(both.to_json()))
    config = GraphConfig(place)
    config.set_links(str(tmp_path / "device.json"))
    assert config.links == (slow, fast, few)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "steps.py").write_text(FACTORY)
    return str(tmp_path / "steps.py")


def test_virtual_ranks_have_nothing_to_measure(file, capsys):
    with pytest.raises(gz.ConfigError, match="nothing to measure.*virtual.*torchrun"):
        calibrate(gz.placement("cpu", range(4), virtual=True))
    assert main(["calibrate", f"{file}:make"]) == 2
    assert "nothing to measure" in capsys.readouterr().err


def test_a_fake_world_has_nothing_to_measure():
    with gz.testing.fake_world(4), pytest.raises(gz.ConfigError, match="is fake"):
        calibrate(gz.placement("cpu", range(4)))


@pytest.mark.parametrize(
    ("what", "more", "word"),
    [
        ("{file}:nothing", [], "no callable 'nothing'"),
        ("{file}:other", [], "returned str; return (graph, example_args)"),
        ("nowhere.py:make", [], "no file 'nowhere.py'"),
        ("make", [], "FILE:FACTORY"),
        ("{file}:make", ["--axes", "dp4"], "dp=4,tp=2"),
        ("{file}:make", ["--axes", "dp=2,tp=2"], "torchrun"),
        ("{file}:make", ["--sizes", "8"], "two sizes"),
        ("{file}:make", ["--output", "no/folder/device.json"], "there is no folder"),
    ],
)
def test_a_wrong_command_says_what_to_write(file, capsys, what, more, word):
    assert main(["calibrate", what.format(file=file), *more]) == 2
    assert word in capsys.readouterr().err


def _run(rank: int, output: Path, options: list[str]) -> None:
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    sys.argv = ["graphzero", *options]
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("graphzero", run_name="__main__")
    assert not ended.value.code
    dist.destroy_process_group()


def gelu_graph() -> TrainGraph:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    return TrainGraph(model, mean_square, optimizer, placement=gz.placement("cpu", [0], virtual=True))


def test_with_the_shares_of_a_step_its_ops_take_as_long_as_they_took():
    graph, x = gelu_graph(), torch.randn(512, 64)
    device = measured_device(graph, (x,), {}, repeat=3)
    base = replace(device, reached={}, call=1e-7, step=0.0)
    ops = defaultdict(float)  # what a quiet machine measures: ops at a third of their peak, after their start
    for event in timeline(graph.program, replace(base, call=0.0)).events:
        ops[event.phase, event.kind] += 3 * event.seconds + base.call
    around = {("compute", "names"): 2e-6, ("overhead", "around the program"): 5e-5}
    one = StepTimes(1, {("compute", "ops"): sum(ops.values()), **around}, {**ops, ("forward", "getitem"): 2e-6})
    times = [scaled(one, by) for by in (1.1, 1.0, 0.9)]
    device_of_step = shares(base, graph.program, times)
    reached = device_of_step.reached
    assert {"addmm", "gelu", "mm"} <= set(reached) and set(device.reached) == set(reached)
    assert all(reached[op] == pytest.approx(1 / 3) for _, op in ops)
    step = timeline(graph.program, device_of_step)
    assert step.seconds == pytest.approx(one.total)
    events = [event.seconds - device_of_step.call + base.call for event in step.events if event.kind == "mm"]
    assert sum(events) == pytest.approx(sum(seconds for (_, op), seconds in ops.items() if op == "mm"))


def scaled(times, by):
    return replace(times, seconds={k: by * v for k, v in times.seconds.items()},
                   ops={k: by * v for k, v in times.ops.items()})  # fmt: skip


@pytest.mark.slow
def test_two_processes_measure_their_links_into_a_file_that_the_configuration_reads(file, tmp_path):
    out, printed = tmp_path / "links.json", tmp_path / "printed.txt"
    options = ["calibrate", f"{file}:make", "--axes", "dp=1,tp=2", "--output", str(out)]
    options += ["--sizes", "1024", "1048576", "4194304", "--repeat", "3"]
    start_as_torchrun(_run, (printed, options), 2)
    said = printed.read_text()
    assert said.count("bandwidth") == 1 and str(out) in said  # rank 0 alone speaks
    config = GraphConfig(gz.placement("cpu", [[0, 1]], virtual=True))
    config.set_links(out)
    assert 0 <= config.links[1].latency < 1 and 1e6 < config.links[1].bandwidth < 1e13
    device = Device.named(str(out))
    assert (
        device.links == {"tp": config.links[1], "inside": config.links[1]}
        and device.type == "cpu"
        and not device.overlaps
    )
    assert min(device.flops["f32"], device.memory) > 1e6 and "mul" in device.reached and device.step > 0
    (measured,) = json.loads(out.read_text())["measured"]
    assert measured["axis"] == "tp" and {s["kind"] for s in measured["samples"]} == set(COLLECTIVES)


@pytest.mark.slow
def test_four_processes_measure_what_two_of_them_pay_too(file, tmp_path):
    out, printed = tmp_path / "links.json", tmp_path / "printed.txt"
    options = ["calibrate", f"{file}:make", "--axes", "dp=4", "--output", str(out)]
    start_as_torchrun(_run, (printed, [*options, "--sizes", "1024", "4194304", "--repeat", "3"]), 4)
    assert [line.split()[0] for line in printed.read_text().splitlines()[1:3]] == ["dp", "inside"]
    device = Device.named(str(out))
    assert set(device.links) == {"dp", "inside", "inside 2"} and device.links["inside"] == device.links["dp"]
    pairs = gz.placement("cpu", [[0, 1], [2, 3]], names=("dp_replicate", "tp"), virtual=True)
    assert device.link(pairs, "tp") == device.links["inside 2"]
    config = GraphConfig(gz.placement("cpu", range(4), names=("dp",), virtual=True))
    config.set_links(out)
    assert config.links == (device.links["dp"],)
