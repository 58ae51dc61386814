"""A model that fits no rank whole: initialised, trained, saved, loaded and read from pretrained files all the same.

The memory that each process may write to is limited to what it has after a small model has done the same, and what the
plan says, and the window that files are read through, and one stated slack.
"""

import ctypes
import gc
import os
import re
import resource
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from graphs import TrainGraph, mean_square
from torch import nn

sys.path[:0] = [str(Path(__file__).parent)]
from _ranks import start  # noqa: E402

import graphzero as gz  # noqa: E402
from graphzero.checkpoint.files.read_chunks import WINDOW  # noqa: E402

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux counts it"),
]

RANKS, WIDE, LAYERS = 4, 1440, 32  # 265 MB of parameters, in few layers: each is captured by every rank
LARGE, M_MMAP_THRESHOLD = 1 << 17, -3  # glibc's default, which does not rise once it is set; malloc.h
SLACK = 32 << 20  # Python objects, pages of the allocator that hold a little each


def bias_free_graph(wide) -> TrainGraph:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(wide, wide, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return TrainGraph(model, mean_square, optimizer, placement=gz.placement("cpu", range(RANKS)), stage=3)


def go_through(folder, wide):
    """Everything, twice; returns the losses and what the plan says."""
    x = torch.ones(1, wide)
    torch.manual_seed(0)
    graph = bias_free_graph(wide)
    gz.materialize(graph)
    found = [float(graph(x)) for _ in range(2)]
    gz.save(graph, folder / "run")
    if dist.get_rank() == 0 and not (folder / "out").exists():
        gz.save_pretrained(folder / "run", folder / "out", shard_bytes=1 << 26)
    dist.barrier()
    give_back()
    after = float(graph(x))
    peak = graph.plan.memory.peak
    graph = None
    for read in (lambda graph: gz.load(graph, folder / "run"), lambda graph: gz.load_pretrained(graph, folder / "out")):
        give_back()
        graph = bias_free_graph(wide)
        read(graph)
        assert float(graph(x)) == after
        graph = None
    return found, peak


def map_large_blocks():
    """Have malloc return each tensor to the system as it is freed, as a user may who sets the variable.

    By default it keeps a freed tensor's place wherever smaller blocks lie above it: how much differs from run to run.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(LARGE)  # malloc has read it by now; graphzero leaves what is set
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)


def give_back():
    """What was freed, to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def data_space():
    """What RLIMIT_DATA counts: private memory that may be written.

    RLIMIT_AS counts what malloc only reserves for its threads, too.
    """
    (size,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(size) << 10


def work(rank, folder):
    os.environ["GRAPHZERO_TRANSPORT"] = "gloo"  # memory that ranks of one host share would count once in each
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    map_large_blocks()
    go_through(folder / "small", 32)
    planned = bias_free_graph(WIDE).compile(torch.ones(1, WIDE)).plan.memory.peak
    whole = LAYERS * WIDE * WIDE * 4
    limit = planned + WINDOW + SLACK
    assert limit < whole, f"{planned} and the rest is no less than {whole}, so the limit says nothing"
    give_back()
    resource.setrlimit(resource.RLIMIT_DATA, (data_space() + limit,) * 2)
    try:
        torch.empty(whole, dtype=torch.uint8)
    except RuntimeError:
        pass
    else:
        raise AssertionError("the whole model fits")
    _, peak = go_through(folder / "large", WIDE)
    assert peak == planned
    dist.destroy_process_group()


def test_a_model_that_fits_no_rank_goes_through_all_of_a_training_run(tmp_path):
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    start(work, (tmp_path,), RANKS)
