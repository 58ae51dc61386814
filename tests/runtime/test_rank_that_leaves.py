"""A rank that ends while the others go on: they raise, and do not wait for it."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import start
from torch import nn

import graphzero as gz
from graphzero.runtime import peer_memory
from graphzero.runtime.process import ProcessWorld


class Train(gz.Graph):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(4, 3)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x):
        self.model(x).square().mean().backward()


def work(rank, path, found):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    graph = Train()
    try:
        for _ in range(1 + (rank == 0)):  # rank 1 makes fewer calls
            graph(torch.ones(2, 4))
    except gz.GraphZeroError as error:
        found[rank] = str(error)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_makes_fewer_calls_and_ends_is_an_error_on_the_others(tmp_path):
    with mp.Manager() as manager:
        found = manager.dict()
        start(work, (str(tmp_path / "store"), found), 2)
        assert list(found) == [0]
        assert "rank 0 waited" in found[0] and "fewer calls" in found[0]


def die_in_a_step(rank, path, found):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    graph = Train()
    graph(torch.ones(2, 4))
    if rank == 1:
        ProcessWorld._all_reduce = lambda *args: os._exit(1)
    try:
        graph(torch.ones(2, 4))
    except gz.GraphZeroError as error:
        found[rank] = str(error)
    os._exit(0)  # without the farewell of a process group of which one is gone


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(peer_memory.host() is None, reason="ranks send through gloo, which reports this its own way")
def test_a_rank_that_ends_within_a_step_is_an_error_on_the_others_at_once(tmp_path):
    context = mp.get_context("forkserver")
    with mp.Manager() as manager:
        found = manager.dict()
        ranks = [context.Process(target=die_in_a_step, args=(rank, str(tmp_path / "store"), found)) for rank in (0, 1)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(60)
        assert [one.exitcode for one in ranks] == [0, 1]
        assert "rank 0 waits for rank 1, which has ended" in found[0]
