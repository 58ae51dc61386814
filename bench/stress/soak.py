"""Growth of memory, threads and files over many steps, shapes and Graphs.

    python bench/stress/soak.py --steps 5000 --shapes 100 --graphs 300

One Graph is called with many shapes, over and over, and many Graphs are made one after another, on virtual ranks and on
two gloo processes, on placements of one and of two axes.  Memory, threads, open files and programs are read on the way;
the tables have them at each tenth of the way, the first of which warms up.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import graphzero as gz

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/
from _run import markdown, on_gloo, options_of

WIDTH = 16
PLACES: dict[str, tuple[list[int] | list[list[int]], tuple[str, ...]]] = {
    "1-d": ([0, 1], ("dp",)),
    "2-d": ([[0, 1]], ("dp", "tp")),
}


Reading = tuple[int, float, int, int, int, int]  # steps or Graphs so far, MB, threads, open files, programs, seconds


class Train(gz.Graph):
    def __init__(self, place: gz.Placement) -> None:
        super().__init__(place)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.config.enable_zero(stage=2)

    def build(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--shapes", type=int, default=100)
    parser.add_argument("--graphs", type=int, default=300)
    parser.add_argument("--max-programs", type=int, default=16)
    options = options_of(parser)
    work = options.steps, options.shapes, options.graphs, options.max_programs
    for kind in PLACES:
        report(f"virtual ranks, {kind}", soak(0, kind, True, *work))
        report(f"two gloo processes, {kind}, rank 0", on_gloo(2, soak, kind, False, *work))


def soak(
    rank: int, kind: str, virtual: bool, steps: int, shapes: int, graphs: int, most: int
) -> dict[str, list[Reading]]:
    """Readings of many steps and shapes of one Graph, and of many Graphs."""
    warnings.filterwarnings("ignore", ".*has compiled.*")
    ranks, names = PLACES[kind]

    def place() -> gz.Placement:
        return gz.placement("cpu", ranks, names, virtual=virtual)

    return {"steps": many_steps(Train(place()), virtual, steps, shapes, most), "graphs": many_graphs(place, graphs)}


def many_steps(graph: Train, virtual: bool, steps: int, shapes: int, most: int) -> list[Reading]:
    """Every other call has a shape of a few, the rest goes through all shapes."""
    graph.config.max_programs = most
    found, began = [], time.perf_counter()
    for step in range(steps):
        number = step * shapes // steps if step % 2 else step % max(most // 2, 1)
        rows = 2 * (1 + number % shapes)
        graph(torch.randn(rows if virtual or graph.placement.hierarchy[0] == 1 else rows // 2, WIDTH))
        if (step + 1) % max(steps // 10, 1) == 0:
            found.append(read(step + 1, graph, began))
    return found


def many_graphs(place: Callable[[], gz.Placement], count: int) -> list[Reading]:
    found, began = [], time.perf_counter()
    for number in range(count):
        graph = Train(place())
        for _ in range(2):
            graph(torch.randn(4, WIDTH))
        if (number + 1) % max(count // 10, 1) == 0:
            found.append(read(number + 1, graph, began))
    return found


def read(at: int, graph: Train, began: float) -> Reading:
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    threads, files = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    programs = {id(one) for one in graph._selection.programs.all}
    return at, round(resident / 2**20, 1), threads, files, len(programs), round(time.perf_counter() - began)


def report(what: str, found: dict[str, list[Reading]]) -> None:
    for name, readings in found.items():
        print(f"\n{what}: {name}\n")
        print(markdown([name, "resident, MB", "threads", "files", "programs", "seconds"], readings), flush=True)


if __name__ == "__main__":
    main()
