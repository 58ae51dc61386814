"""A rank that ends while the others go on: they raise, and do not wait for it."""

import logging.handlers
import os
import queue
import time

import failure_toys
import pytest
import torch
from graphs import TrainGraph, mean_square
from torch import nn

import graphzero as gz
from graphzero.runtime.transport import communicator, failure_diagnosis, peer_memory, process_monitor
from graphzero.runtime.world.process import ProcessWorld


def linear_graph() -> TrainGraph:
    model = nn.Linear(4, 3)
    return TrainGraph(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), placement=None)


def fewer_calls(rank):
    graph = linear_graph()
    try:
        for _ in range(1 + (rank == 0)):  # rank 1 makes fewer calls
            graph(torch.ones(2, 4))
    except gz.GraphZeroError as error:
        return str(error)


@pytest.mark.slow
def test_a_rank_that_makes_fewer_calls_and_ends_is_an_error_on_the_others(tmp_path):
    found = failure_toys.run(fewer_calls, 2, tmp_path, "memory")
    assert found[1] is None and "rank 0 waited" in found[0] and "fewer calls" in found[0]


def ends_slowly(rank):
    """Rank 1 has released its connections, and its process goes on for longer than others look for the reason."""
    graph = linear_graph()
    graph(torch.ones(2, 4))
    if rank == 1:
        communicator._release()
        time.sleep(failure_diagnosis._UNSURE + 3.0)
        return None
    try:
        graph(torch.ones(2, 4))
    except gz.GraphZeroError as error:
        return str(error)


@pytest.mark.slow
def test_a_rank_whose_script_ends_slowly_is_named_while_its_process_lives(tmp_path):
    found = failure_toys.run(ends_slowly, 2, tmp_path, "memory")
    assert "and rank 1 has ended in or before this step" in found[0] and "gz.until_all_end" in found[0]


def calls_late(rank):
    """Rank 1 does something else for a while between two calls."""
    process_monitor.LONG_WAIT = communicator.LONG_WAIT = 0.5
    said = logging.handlers.QueueHandler(queue.SimpleQueue())
    logging.getLogger("graphzero").addHandler(said)
    graph = linear_graph()
    graph(torch.ones(2, 4))
    if rank == 1:
        time.sleep(4.0)
    graph(torch.ones(2, 4))
    texts = []
    while not said.queue.empty():
        texts.append(said.queue.get().getMessage())
    return texts


@pytest.mark.slow
def test_who_waits_long_for_a_rank_that_does_not_call_says_so_once_and_for_what(tmp_path):
    found = failure_toys.run(calls_late, 2, tmp_path, "memory")
    (text,) = [text for text in found[0] if "has waited" in text]
    assert (
        "rank 0 has waited 1 s in its step of Train for all ranks to agree on" in text and "rank 1 is not there" in text
    )
    assert "after 60 s" in text and not any("has waited" in text for text in found[1])


def die_in_a_step(rank):
    graph = linear_graph()
    graph(torch.ones(2, 4))
    if rank == 1:
        ProcessWorld.begin_transfer = lambda *args: os._exit(1)
    try:
        graph(torch.ones(2, 4))
    except gz.GraphZeroError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.skipif(bool(peer_memory.obstacle()), reason="this system has no process_vm_readv")
def test_a_rank_that_ends_within_a_step_is_an_error_on_the_others_at_once(tmp_path):
    found = failure_toys.run(die_in_a_step, 2, tmp_path, "memory")
    assert list(found) == [0] and "rank 0 waits for rank 1, which has ended" in found[0]
