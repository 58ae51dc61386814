"""Threads take turns with Graphs, and nothing is done within a call of the same thread."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import graphzero as gz


class Doubles(gz.Graph):
    def __init__(self) -> None:
        super().__init__(gz.placement("cpu", range(1)))
        self.layer = nn.Linear(64, 64)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu() @ self.layer.weight


def test_each_of_many_threads_gets_the_result_of_its_own_call() -> None:
    graph = Doubles()
    inputs = [torch.randn(32, 64) for _ in range(100)]
    with torch.no_grad():
        wanted = [Doubles.build(graph, x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(graph, inputs))
    for mine, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.same_kernels
def test_threads_may_train_and_evaluate_the_same_modules_with_two_graphs() -> None:
    class Trains(Doubles):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer
            self.add_optimizer(torch.optim.SGD(self.layer.parameters(), lr=0.0))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = super().build(x).square().mean()
            loss.backward()
            return loss

    evaluates, x = Doubles(), torch.randn(8, 64)
    trains = Trains(evaluates.layer)
    wanted = [graph(x) for graph in (evaluates, trains)]
    with ThreadPoolExecutor(2) as pool:
        found = [[*pool.map(lambda graph: graph(x), [evaluates, trains])] for _ in range(50)]
    assert all(mine.equal(its) for pair in found for mine, its in zip(pair, wanted, strict=True))


def test_a_signal_handler_may_not_save_in_the_middle_of_a_step() -> None:
    graph, raised = Doubles(), []

    def save(*_: Any) -> None:
        try:
            graph.full_state_dict()
        except gz.ConfigError as error:
            raised.append(str(error))

    before = signal.signal(signal.SIGUSR1, save)
    try:
        graph.layer.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
        graph(torch.ones(2, 64))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert raised and "full_state_dict() of Doubles within step of Doubles, which is not over" in raised[0]
    graph(torch.ones(2, 64))


def test_a_scheduler_that_calls_another_graph_is_refused_and_the_next_call_works() -> None:
    other = Doubles()

    class Evaluates(torch.optim.lr_scheduler.LambdaLR):
        def step(self, epoch: Any = None) -> None:
            if hasattr(self, "armed"):
                del self.armed
                other(torch.ones(2, 64))
            super().step(epoch)

    class Trains(Doubles):
        def __init__(self) -> None:
            super().__init__()
            optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
            self.schedule = Evaluates(optimizer, lambda step: 1.0)
            self.add_optimizer(optimizer, lr_sch=self.schedule)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = super().build(x).square().mean()
            loss.backward()
            return loss

    graph = Trains()
    graph.schedule.armed = True
    with pytest.raises(gz.ConfigError, match="step of Doubles within step of Trains"):
        graph(torch.ones(2, 64))
    graph(torch.ones(2, 64))


def test_a_fork_during_a_call_of_another_thread_leaves_the_child_free_to_call() -> None:
    graph, other, forked = Doubles(), Doubles(), threading.Event()
    graph(torch.ones(2, 64)), other(torch.ones(2, 64))
    status: list[int] = []

    def fork() -> None:
        if (child := os.fork()) == 0:
            signal.alarm(20)  # ends it where it waits for ever
            other(torch.ones(2, 64))
            os._exit(7)
        status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        forked.set()

    started = threading.Thread(target=fork)
    graph.layer.register_forward_hook(lambda *_: (started.start(), forked.wait(30), None)[-1])
    graph(torch.ones(2, 64))
    started.join()
    assert status == [7]
