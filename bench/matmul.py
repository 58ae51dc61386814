"""Matrix products of a training step by torch's own kernels and by oneDNN's: ``python bench/matmul.py``.

    python bench/matmul.py                                  # products of the GPTs A and B, one thread
    python bench/matmul.py --threads 2
    MKL_ENABLE_INSTRUCTIONS=AVX2 python bench/matmul.py     # what oneDNN gains where MKL keeps to AVX2

Every distinct product of a step is tried as ``config.set_matmul`` tries it: the best of alternating calls, and the
error of some rows against float64.  Below, the seconds of all of a step's products; then whole steps of one rank, the
three settings in turn, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections import Counter

import torch
from _run import markdown, options_of
from gpt import SHAPES
from jobs import JOBS
from torch import Tensor

import graphzero as gz
from graphzero.config import MATMULS
from graphzero.runtime.execute.products import Product, products_of, try_out

HEAD = ("product", "in a step", "torch, GFLOP/s", "oneDNN, GFLOP/s", "oneDNN faster", "torch, error", "oneDNN, error")


class Train(gz.Graph):
    """A job on one rank."""

    def __init__(self, job: str, matmul: str) -> None:
        super().__init__(gz.placement("cpu", range(1), virtual=True))
        self.job, self.model = JOBS[job], JOBS[job].model()
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.config.set_matmul(matmul)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.model(x, y)
        loss.backward()
        return loss

    def batch(self, step: int) -> tuple[Tensor, ...]:
        return self.job.batch(step, self.job.share)


def products(job: str) -> Counter[Product]:
    """How often a step has each product."""
    graph = Train(job, "default")
    return Counter(products_of(graph.compile(*graph.batch(0)).program).values())


def table(found: Counter[Product]) -> str:
    rows, total = [], [0.0, 0.0]
    for product, count in sorted(found.items()):
        figures = try_out(product)
        work = count * product.flops / 1e9
        total = [sum_ + work / speed for sum_, speed in zip(total, figures.speeds, strict=True)]
        speeds = [f"{speed:.0f}" for speed in figures.speeds]
        errors = [f"{error:.1e}" for error in figures.errors]
        rows.append([product, count, *speeds, _ratio(*figures.seconds), *errors])
    work = sum(count * product.flops for product, count in found.items()) / 1e9
    rows.append(
        ["all of a step", found.total(), *(f"{work / seconds:.0f}" for seconds in total), _ratio(*total), "", ""]
    )
    return markdown(HEAD, rows)


def steps(job: str, rounds: int) -> str:
    """Times of a step with each setting."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        graphs = {name: Train(job, name) for name in MATMULS}
        losses = {name: [float(graph(*graph.batch(0)))] for name, graph in graphs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in MATMULS}
    for turn in range(1, rounds + 1):
        for name, graph in graphs.items():
            batch, started = graph.batch(turn), time.perf_counter()
            losses[name].append(float(graph(*batch)))
            seconds[name].append(time.perf_counter() - started)
    usual = statistics.median(seconds["default"])
    rows = []
    for name, taken in seconds.items():
        median = statistics.median(taken)
        rows.append(
            [name, f"{min(taken) * 1e3:.0f}", f"{median * 1e3:.0f}", f"{median / usual:.2f}", f"{losses[name][-1]:.6f}"]
        )
    head = ["set_matmul", "fastest step, ms", "median, ms", "to default", "last loss"]
    return "\n\n".join([markdown(head, rows), *dict.fromkeys(str(one.message) for one in told)])


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["A", "B"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    options = options_of(parser)
    torch.set_num_threads(options.threads)
    for job in options.models:
        print(f"{JOBS[job].what}, one rank of {options.threads} threads\n\n{table(products(job))}\n")
        print(steps(job, options.rounds), "\n", flush=True)


if __name__ == "__main__":
    main()
