"""Copies between a GPU and host memory run beside compute, one stream for each direction, by the device's link."""

from pathlib import Path

import pytest

import graphzero as gz
from graphzero.cli import main
from graphzero.ir.storage.liveness import liveness
from graphzero.plan.device import Device
from graphzero.plan.seconds import work_of
from graphzero.plan.timeline import timeline

PROGRAM = gz.parse("""
graph toy(dp=1) local
  w = param()             : f32[64, 64]  B
  m = state(w, m)         : f32[64, 64]  B
  x = batch()             : f32[64, 64]  B
update:
  l = to_device_launch(m) : f32[64, 64]  B
  a = mm(x, x)            : f32[64, 64]  B
  k = to_device_wait(l, m) : f32[64, 64]  B
  n = add(k, a)           : f32[64, 64]  B
  h = to_host_launch(m, n) : f32[64, 64]  B
  b = mm(a, x)            : f32[64, 64]  B
  s = to_host_wait(h, n)  : f32[64, 64]  B
  return b; update(m=s)
""")
NBYTES = 64 * 64 * 4


def device(seconds, **more):
    """A product takes 2 s, a pass over memory none, a copy of ``m`` so many seconds."""
    links = {} if seconds is None else {"host memory": gz.Link(0.0, NBYTES / seconds)}
    return Device("toy", **{"type": "cuda", "flops": {"f32": 64**3}, "memory": 1e30, "capacity": 1, "call": 0.0,
                            "links": links, **more})  # fmt: skip


def test_a_short_copy_hides_and_of_a_long_one_the_rest_is_waited_for():
    short, long = timeline(PROGRAM, device(1.5)), timeline(PROGRAM, device(3.0))
    assert (short.seconds, short.compute, short.host_copies, short.host_copies_exposed) == (4, 4, 3, 0)
    assert (long.seconds, long.host_copies, long.host_copies_exposed, long.exposed) == (6, 6, 2, 2)
    assert short.communication == long.communication == 0
    assert [(x.name, x.stream, x.begin, x.end) for x in long.events if x.stream != "compute"] == [
        ("l", "copies to device", 0, 3), ("h", "copies to host", 3, 6)
    ]  # fmt: skip


def test_a_device_that_does_not_say_what_its_link_costs_is_named():
    with pytest.raises(
        gz.ConfigError, match=r'device toy says nothing of the link to host memory.*\n?.*add "host memory"'
    ):
        timeline(PROGRAM, device(None))


def test_a_cpu_copies_in_its_own_memory_where_the_copy_begins():
    moved = timeline(PROGRAM, device(None, type="cpu", memory=2.0 * NBYTES))  # one second for each copy
    assert (moved.host_copies, moved.exposed) == (0, 0)
    assert [(x.name, x.kind, x.seconds) for x in moved.events if x.name in ("l", "k", "h", "s")] == [
        ("l", "copy_", 1.0), ("h", "copy_", 1.0)
    ]  # fmt: skip
    at = liveness(PROGRAM)
    assert [work_of(at, node) for node in at.nodes if "wait" in str(node.target)] == [None, None]


FACTORY = """
import torch
from offload_toys import OffloadGraph

def make(placement, stage):
    graph = OffloadGraph(stage=stage, where=placement)
    graph.config.enable_offload()
    return graph, (torch.zeros(4, 12), torch.zeros(4, 5))
"""


def test_the_command_plan_counts_what_is_on_the_host_and_what_the_step_waits_for(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    file = tmp_path / "factory.py"
    file.write_text(FACTORY)
    assert main(["plan", f"{file}:make", "--ranks", "4", "--stage", "1", "--device", "h100", "--jobs", "1"]) == 0
    rows = {
        line[: line.rindex("  ")].strip(): line.split("  ")[-1].strip()
        for line in capsys.readouterr().out.splitlines()
        if "  " in line.strip()
    }
    nbytes = rows["besides it, in host memory"]
    assert rows["from host memory to the device"] == rows["and back"] == nbytes and nbytes.endswith(" B")
    assert "of them not hidden behind compute" in rows and rows["copies to and from host memory"].endswith("us")
