"""What is left of process groups when the interpreter ends: a thread of gloo that needs it then aborts the process."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import atexit, os
import torch, torch.distributed as dist

def count_threads():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    print("threads of gloo:", sum("gloo" in name for name in names), flush=True)

atexit.register(count_threads)  # before graphzero: it runs after what graphzero releases
dist.init_process_group("gloo")
import graphzero as gz
from graphs import TrainGraph, mean_square
model = torch.nn.Linear(4, 4)
graph = TrainGraph(model, mean_square, torch.optim.AdamW(model.parameters()), stage=3, placement=None)
graph(torch.ones(2, 4))
state, mesh = graph.state_dict(), graph.placement.mesh()
count_threads()
dist.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names of threads are read in /proc")
def test_no_thread_of_gloo_outlives_the_interpreter_where_the_user_made_the_group():
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    path = os.pathsep.join(path for path in sys.path if path)
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **environment, "PYTHONPATH": path}, capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    running, at_exit = (int(line.split()[-1]) for line in out.stdout.splitlines())
    assert running > 0 and at_exit == 0
