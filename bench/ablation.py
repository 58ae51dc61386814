"""What recomputing values of forward in backward costs, and what it saves, beside ``torch.utils.checkpoint``.

    python bench/ablation.py --rounds 12

A small GPT-2 and Llama train on one rank, in turn with themselves under other settings of ``set_activation_memory``; a
time is the median over rounds of a step's seconds by those of the plain one in the same round.  Bytes are the plan's
and, in brackets where they differ, those that the dispatcher sees.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from _run import markdown, options_of
from models import gpt2, llama, tokens
from parity import TrainGraph
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphzero.testing import measure_step

SIZE = {"layers": 6, "width": 192, "heads": 6, "vocabulary": 512, "context": 128}
RECOMPUTED = {"gpt2": (gpt2, "body.transformer.h"), "llama": (llama, "body.model.layers")}
PARTS = (0.75, 0.5, 0.35)
HEAD = ["model", "setting", "activations, MB", "peak, MB", "equal", "values", "time", "fastest, ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    options = options_of(parser)
    what = f"{SIZE['layers']} layers of width {SIZE['width']}, 4 sequences of {SIZE['context']}"
    print(f"{what}; activations: the most bytes of them at a time; time: 1 is without\n")
    rows = [row for name in RECOMPUTED for row in rows_of(name, options.rounds)]
    print(markdown(HEAD, rows))


def model_of(name: str, blocks: bool = False) -> nn.Module:
    """blocks: torch.utils.checkpoint around each."""
    torch.manual_seed(0)
    make, path = RECOMPUTED[name]
    model = make(**SIZE)
    for block in model.get_submodule(path).children() if blocks else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def graph_of(name: str, memory: Any = None, blocks: bool = False) -> TrainGraph:
    model = model_of(name, blocks)
    graph = TrainGraph(model, torch.optim.AdamW(model.parameters()))
    graph.config.set_activation_memory(memory)
    return graph


def rows_of(name: str, rounds: int) -> list[list[str]]:
    batch = tokens(0, 4, torch.float32, SIZE["vocabulary"], SIZE["context"])
    plain = graph_of(name)
    plain(*batch)
    most = plain.plan.memory.activations
    graphs = {"plain": plain, "torch.utils.checkpoint, by block": graph_of(name, blocks=True)}
    graphs['"checkpoint"'] = graph_of(name, "checkpoint")
    graphs |= {f"{part:.0%} of the bytes": graph_of(name, int(part * most)) for part in PARTS}
    losses = {key: [float(graph(*batch)) for _ in range(2)] for key, graph in graphs.items() if graph is not plain}
    assert len({tuple(x) for x in losses.values()}) == 1, f"the bits differ: {losses}"
    times = take_turns({key: partial(graph, *batch) for key, graph in graphs.items()}, rounds)
    return [row_of(name, key, graph, batch, times) for key, graph in graphs.items()]


def row_of(name: str, key: str, graph: TrainGraph, batch: Any, times: dict[str, list[float]]) -> list[str]:
    memory, peak = graph.plan.memory, measure_step(graph, *batch).peak
    ratio = statistics.median(a / b for a, b in zip(times[key], times["plain"], strict=True))
    equal = "yes" if peak == memory.peak else f"NO ({peak:,})"
    cells = [name, key, f"{memory.activations / 1e6:.2f}", f"{memory.peak / 1e6:.2f}", equal]
    return [*cells, str(len(graph.plan.recomputed)), f"{ratio:.2f}", f"{min(times[key]) * 1e3:.0f}"]


def take_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of the processor of each call round by round, after two rounds that do not count."""
    seconds: dict[str, list[float]] = {key: [] for key in calls}
    for _ in range(2 + rounds):
        for key, call in calls.items():
            began = time.process_time()
            call()
            seconds[key].append(time.process_time() - began)
    return {key: each[2:] for key, each in seconds.items()}


if __name__ == "__main__":
    main()
