"""Of two hosts one is cut off: the rank on the other says so soon, and does not take a stopped process for one."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hosts.allowed(), reason="this user may not make network namespaces"),
]

SCRIPT = """
import json, os, sys, time
import torch
import torch.distributed as dist
import graphzero as gz
from graphzero.runtime.transport import process_monitor

process_monitor.KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 2}
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="tcp://%s:29517", rank=rank, world_size=2)

class Train(gz.Graph):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(8, 8)
        self.add_optimizer(torch.optim.Adam(self.model.parameters()))
        self.config.enable_zero(stage=3)

    def build(self, x):
        self.model(x).square().mean().backward()

graph = Train()
try:
    while True:
        graph(torch.randn(2, 8))
        print("step", flush=True)
        time.sleep(0.02)
except gz.RankError as error:
    print(json.dumps([error.ranks, str(error)]), flush=True)
os._exit(0)  # without the farewell of a process group of which a rank is gone
"""


def steps(output: Path) -> int:
    return output.read_text().count("step")


def until(true, *running):
    end = time.monotonic() + 60
    while not true():
        assert all(one.poll() is None for one in running) and time.monotonic() < end
        time.sleep(0.05)


def test_a_rank_whose_host_is_cut_off_is_named_and_one_that_is_stopped_is_waited_for(tmp_path):
    script, outputs = tmp_path / "train.py", [tmp_path / "first.txt", tmp_path / "second.txt"]
    script.write_text(SCRIPT % hosts.ADDRESSES[0])
    with hosts.hosts() as names:
        running = []
        try:
            for rank, (name, output) in enumerate(zip(names, outputs, strict=True)):
                command = [sys.executable, str(script), str(rank)]
                running.append(hosts.run(name, output, command, {"GLOO_SOCKET_IFNAME": f"c{name}"}))
            first, second = running
            until(lambda: min(map(steps, outputs)) > 3, *running)

            subprocess.run(["pkill", "-STOP", "-f", f"{script} 1"], check=True)
            before = steps(outputs[0])
            time.sleep(6)  # twice what a host is given to answer
            assert first.poll() is None and steps(outputs[0]) <= before + 1
            subprocess.run(["pkill", "-CONT", "-f", f"{script} 1"], check=True)
            until(lambda: steps(outputs[0]) > before + 5, *running)

            hosts.cut(names[1])
            began = time.monotonic()
            assert first.wait(30) == 0, outputs[0].read_text()
            assert time.monotonic() - began < 20
            ranks, said = json.loads(outputs[0].read_text().splitlines()[-1])
            assert ranks == [1] and "has ended" in said and "cut off with its host" in said, said
        finally:
            for one in running:
                one.kill()
                one.wait()
