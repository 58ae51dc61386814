"""A rank of a pipeline that is late, or ends: the others say for what they wait, and do not wait for it."""

import logging.handlers
import os
import queue
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from staged import Net, batches, staged_graph, stages_of

import graphzero as gz
from graphzero.runtime.transport import communicator, process_monitor
from graphzero.runtime.world import process

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))
import failure_toys  # noqa: E402

GROUPS = "gloo through process groups"  # as messages go between GPUs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def through_groups(work, rank):
    process.GROUPED_DEVICES.add("cpu")
    return work(rank)


def run(work, folder, way):
    if way == GROUPS:
        return failure_toys.run(partial(through_groups, work), 2, folder, "gloo")
    return failure_toys.run(work, 2, folder, way)


def pipeline_graph():
    torch.manual_seed(0)
    where = gz.placement("cpu", [[0], [1]], names=("pp", "dp"))
    return staged_graph(Net(2), stages_of(2, 2), where, micro_batches=4, clip=0.1)


def in_backward(graph, rank, do):
    """Calls ``do`` on a rank before the backward of its second micro-batch."""
    executor = graph._selection.last._executor
    for i, part in executor.executors.items():
        if str(graph._selection.last.pipeline.parts.parts[i].key) == f"backward@{rank}":
            plain, calls = part.run_step, []

            def run(*args, plain=plain, calls=calls):
                calls.append(args)
                if len(calls) == 2:
                    do()
                return plain(*args)

            part.run_step = run


def is_late(rank):
    process_monitor.LONG_WAIT = communicator.LONG_WAIT = 0.5
    said = logging.handlers.QueueHandler(queue.SimpleQueue())
    logging.getLogger("graphzero").addHandler(said)
    graph = pipeline_graph()
    graph(*batches(1)[0])
    if rank == 1:
        in_backward(graph, rank, lambda: time.sleep(3.0))
    graph(*batches(1)[0])
    texts = []
    while not said.queue.empty():
        texts.append(said.queue.get().getMessage())
    return texts


@pytest.mark.parametrize("way", [*failure_toys.WAYS, GROUPS])
def test_a_rank_says_for_what_it_waits_long_and_what_the_other_does(way, tmp_path):
    told = run(is_late, tmp_path, way)
    texts = [text for text in told[0] if "has waited" in text and "backward" in text]
    assert texts and not any("has waited" in text for text in told[1] if "backward" in text), told
    assert any(
        "in its step of Train for rank 1 to end backward@1 of micro-batch 1; "
        "rank 1 is in backward@1 of micro-batch 1" in text for text in texts
    ), texts  # fmt: skip


def is_killed(rank):
    graph = pipeline_graph()
    graph(*batches(1)[0])
    if rank == 1:
        in_backward(graph, rank, lambda: os._exit(1))
    began = time.monotonic()
    try:
        graph(*batches(1)[0])
    except gz.GraphZeroError as error:
        return str(error), time.monotonic() - began
    return "it went on", 0.0


@pytest.mark.parametrize("way", [*failure_toys.WAYS, GROUPS, failure_toys.FAR])
def test_a_rank_that_ends_in_the_middle_of_a_schedule_ends_the_others_with_its_name(way, tmp_path):
    told = run(is_killed, tmp_path, way)
    assert list(told) == [0]
    text, seconds = told[0]
    assert "rank 1" in text and ("has ended" in text or "ended in" in text), text
    assert seconds < 30, seconds


def raises(rank):
    graph = pipeline_graph()
    graph(*batches(1)[0])

    def fail():
        raise RuntimeError("a kernel of stage 1 fails")

    if rank == 1:
        in_backward(graph, rank, fail)
    try:
        graph(*batches(1)[0])
    except Exception as error:  # noqa: BLE001
        return str(error)
    return "it went on"


@pytest.mark.parametrize("way", [*failure_toys.WAYS, GROUPS])
def test_an_error_of_one_stage_is_told_on_the_others(way, tmp_path):
    told = run(raises, tmp_path, way)
    assert "a kernel of stage 1 fails" in told[0] and "rank 1" in told[0]
    assert "a kernel of stage 1 fails" in told[1]
