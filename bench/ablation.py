"""Ablation of parts that a program also runs without: bytes or time with each and without it.

    python bench/ablation.py

The figures stand in the docstrings of the modules.

* ``order``: the planned peak of two ranks, with backward as it is written and with what may wait made later.
* ``join_updates``: the time of a step of many small parameters, stepped by one call and each by its own.
* the arena: the processor's time of a step of rank 0 of two, its page faults, and the kernel's high-water mark of
  resident memory, less what the process held before, with the arena and without it, each in fresh processes.  The same
  where the C library keeps what is freed: with MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_MMAP_THRESHOLD_=33554432 in
  the environment.

Times are medians, where they are of one process in alternating rounds.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from _run import markdown, on_gloo, options_of
from peak_memory import CLEAR, high_water, reset
from systems import graph as graph_of
from torch import Tensor, nn
from workloads import WORKLOADS

import graphzero as gz
from graphzero.passes import JoinUpdates, Options, Pipeline, default_passes, pass_list
from graphzero.plan.plan import memory_of
from graphzero.testing import fake_world

MODELS = ("A", "B", "conv")
Key = TypeVar("Key")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = options_of(parser).rounds
    peaks = [row for name in MODELS for row in order(name)]
    print(markdown(["model", "stage", "MB as written", "MB with order", "ratio"], peaks), flush=True)
    steps = [join_updates(width, layers, 5 * rounds) for width, layers in ((16, 100), (64, 50), (256, 12))]
    print("\n" + markdown(["layers", "width", "us joined", "us apart", "ratio"], steps), flush=True)
    rows = [
        [name, stage, "yes" if used else "no", *on_gloo(2, arena, name, stage, used, rounds)]
        for name in MODELS[:2]
        for stage in (0, 3)
        for used in (True, False)
    ]
    print("\n" + markdown(["model", "stage", "arena", "CPU ms", "faults", "peak MB"], rows))


def order(name: str) -> list[list[Any]]:
    rows = []
    with fake_world(2, rank=0):
        graph = graph_of(0, WORKLOADS[name])
        graph.compile(*WORKLOADS[name].part(0, 0, 2))
        captured = graph.history[0].before
        for stage in range(4):
            options = Options(stage=stage), Options(stage=stage, delay_gradients=True)
            plain, moved = (memory_of(Pipeline(default_passes(one))(captured.clone())).peak / 1e6 for one in options)
            rows.append([name, stage, f"{plain:.1f}", f"{moved:.1f}", f"{moved / plain:.3f}"])
    return rows


class Small(gz.Graph):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__(gz.placement("cpu", range(1), virtual=True))
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), fused=True))

    def build(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        return loss


def join_updates(width: int, layers: int, rounds: int) -> list[Any]:
    graphs, x = {joined: Small(width, layers) for joined in (True, False)}, torch.randn(8, width)
    apart = tuple(entry for entry in pass_list.pass_entries() if entry.kind is not JoinUpdates)
    graphs[True](x)
    with patch.object(pass_list, "pass_entries", lambda: apart):
        graphs[False](x)
    found = timed({joined: lambda graph=graph: graph(x) for joined, graph in graphs.items()}, rounds)
    joined, alone = found[True] * 1e6, found[False] * 1e6
    return [layers, width, f"{joined:.0f}", f"{alone:.0f}", f"{joined / alone:.2f}"]


def arena(rank: int, name: str, stage: int, used: bool, steps: int) -> list[str]:
    batches = [WORKLOADS[name].part(step, rank, 2) for step in range(3)]
    for workload in ("toy", name):  # the first has what a process needs for any
        before = reset()
        graph = graph_of(stage, WORKLOADS[workload], arena=used)
        for step in range(3):
            graph(*WORKLOADS[workload].part(step, rank, 2))
    CLEAR.write_text("5")
    faults, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, []
    for step in range(steps):
        started = time.process_time()
        graph(*batches[step % 3])
        seconds.append(time.process_time() - started)
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // steps
    return [f"{statistics.median(seconds) * 1e3:.1f}", str(faults), f"{(high_water() - before) / 1e6:.1f}"]


def timed(calls: Mapping[Key, Callable[[], Any]], rounds: int) -> dict[Key, float]:
    """Seconds of the median call of each, two in a row."""
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            for _ in range(2):
                started = time.perf_counter()
                call()
                seconds[key].append(time.perf_counter() - started)
    return {key: statistics.median(found) for key, found in seconds.items()}


if __name__ == "__main__":
    main()
