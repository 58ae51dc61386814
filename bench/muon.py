"""A GPT under torch's Muon on gloo ranks, with updates in stacks and without: ``python bench/muon.py``.

* stacked: as a Graph runs it: matrices of one shape are exchanged, and each rank multiplies its share of whole ones.
* gathered: without the pass ``stack_updates``, each matrix made whole once on every rank, which multiplies it too.
* in pieces: without that pass, as propagation has it: products of pieces, with a gather in front of each.

Matrices of blocks are Muon's, the rest is AdamW's.  Steps of the three alternate in one set of processes; times are
medians over steps of the slowest rank's.  Bytes are counted by the ranks as they send them, per rank and step; Psi is
what moves for the update alone, beside gradients and parameters, in elements per parameter of a matrix.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from _run import markdown, on_gloo, options_of
from torch import Tensor
from workloads import GPT, Shape

import graphzero as gz
from graphzero.ir.graph import StepGraph
from graphzero.passes import StackUpdates, pass_list
from graphzero.passes.place.forward_sweep import swept
from graphzero.plugins.stacked_updates.whole_chains import is_split, whole_chains
from graphzero.sbp.types import B

WAYS = ("stacked", "gathered", "in pieces")


class Train(gz.Graph):
    def __init__(self, shape: Shape, way: str, stage: int) -> None:
        super().__init__(name=way.replace(" ", "_"))
        torch.manual_seed(0)
        self.model, self.way = GPT(shape), way
        matrices = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        rest = [p for p in self.model.parameters() if all(p is not m for m in matrices)]
        self.add_optimizer(torch.optim.Muon(matrices, lr=0.01))
        self.add_optimizer(torch.optim.AdamW(rest, lr=1e-3))
        self.config.enable_zero(stage=stage)
        if way == "gathered":
            self.config.add_pass(gather_whole, after="zero")

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.model(x, y)
        loss.backward()
        return loss


def gather_whole(graph: StepGraph) -> StepGraph:
    """Each matrix of the update whole on every rank, once."""
    axes = swept(graph, ())
    for entry in [entry for chain in whole_chains(graph, axes) for entry in chain.entries]:
        for axis in graph.placement.names if is_split(axes, entry) else ():
            entry = graph.pin(entry, axis, B)
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    options = options_of(parser)
    shape = Shape(vocabulary=1024, width=options.width, layers=options.layers, heads=4, batch=2, context=64)
    found = on_gloo(options.ranks, measured, shape, options.stage, options.rounds)
    of_matrices = sum(p.numel() for p in GPT(shape).blocks.parameters() if p.ndim == 2)
    rows = []
    for way in WAYS:
        seconds, sent, update, elements, peak, planned = found[way]
        rows.append(
            [
                way, f"{statistics.median(seconds) * 1e3:.0f}",
                f"{statistics.median(s / t for s, t in zip(seconds, found[WAYS[0]][0], strict=True)):.2f}",
                f"{sent / 1e6:.2f}", f"{planned / 1e6:.2f}", f"{update / 1e6:.2f}", f"{elements / of_matrices:.3f}",
                f"{peak / 1e6:.1f}",
            ]
        )  # fmt: skip
    head = ["updates", "ms a step", "of stacked", "MB sent", "planned", "for updates", "Psi", "planned peak, MB"]
    print(f"{of_matrices / 1e6:.1f} M parameters in {4 * options.layers} matrices, stage {options.stage}, "
          f"{options.ranks} gloo ranks, {options.rounds} rounds\n\n{markdown(head, rows)}")  # fmt: skip


def measured(rank: int, shape: Shape, stage: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    x, y = (torch.randint(shape.vocabulary, (shape.batch, shape.context)) for _ in range(2))
    graphs = {}
    for way in WAYS:
        apart = tuple(entry for entry in pass_list.pass_entries() if entry.kind is not StackUpdates or way == "stacked")
        with patch.object(pass_list, "pass_entries", lambda apart=apart: apart):
            graphs[way] = Train(shape, way, stage)
            graphs[way](x, y)  # the first step is a program of its own
            graphs[way](x, y)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            dist.barrier()
            started = time.perf_counter()
            graphs[way](x, y)
            took = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[way].append(float(took))
    return {way: (seconds[way], *_traffic(graph, x, y)) for way, graph in graphs.items()}


def _traffic(graph: Train, *batch: Tensor) -> tuple[float, float, float, float, float]:
    """Bytes sent, those for the update alone and its elements, the planned peak, planned bytes."""
    sent = sum(one.nbytes for one in gz.testing.trace_step(graph, *batch))
    own = [c for c in graph.plan.collectives if c.phase == "update" and c.what_for == "other"]
    update = sum(c.bytes for c in own)
    return sent, update, update / torch.bfloat16.itemsize, graph.plan.memory.peak, graph.plan.comm_bytes


if __name__ == "__main__":
    main()
