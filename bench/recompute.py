"""Time and memory of activations that are recomputed in backward, by ``config.set_activation_memory``.

    python bench/recompute.py                       # GPT-2 and Llama, small

Each model trains on one rank, step by step in turn with itself under other settings; a time is the median over rounds
of a step's seconds by those of the plain one in the same round.  Bytes are the plan's and, in brackets where they
differ, those that the dispatcher sees.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from _run import markdown, options_of, take_turns
from models import gpt2, llama, tokens
from parity import TrainGraph
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphzero.testing import measure_step

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT, BATCH = 6, 192, 6, 512, 128, 4
MODELS = {"gpt2": (gpt2, "body.transformer.h"), "llama": (llama, "body.model.layers")}
PARTS = (0.75, 0.5, 0.35)
HEAD = ["model", "setting", "activations, MB", "peak, MB", "equal", "values", "time", "fastest, ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--rounds", type=int, default=12)
    options = options_of(parser)
    size = f"{LAYERS} layers of width {WIDTH}, {BATCH} sequences of {CONTEXT}"
    print(f"{size}; activations: the most bytes of them at a time; time: 1 is without\n")
    rows = [row for name in options.models for row in table(name, options.rounds)]
    print(markdown(HEAD, rows))


def model_of(name: str, blocks: bool = False) -> nn.Module:
    """blocks: torch.utils.checkpoint around each."""
    torch.manual_seed(0)
    make, path = MODELS[name]
    model = make(LAYERS, width=WIDTH, heads=HEADS, vocabulary=VOCABULARY, context=CONTEXT)
    for block in model.get_submodule(path).children() if blocks else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def graph_of(name: str, memory: Any = None, blocks: bool = False) -> TrainGraph:
    model = model_of(name, blocks)
    graph = TrainGraph(model, torch.optim.AdamW(model.parameters()))
    graph.config.set_activation_memory(memory)
    return graph


def table(name: str, rounds: int) -> list[list[str]]:
    batch = tokens(0, BATCH, torch.float32, VOCABULARY, CONTEXT)
    plain = graph_of(name)
    plain(*batch)
    most = plain.plan.memory.activations
    graphs = {"plain": plain, "torch.utils.checkpoint, by block": graph_of(name, blocks=True)}
    graphs['"checkpoint"'] = graph_of(name, "checkpoint")
    graphs |= {f"{part:.0%} of the bytes": graph_of(name, int(part * most)) for part in PARTS}
    losses = {key: [float(graph(*batch)) for _ in range(2)] for key, graph in graphs.items() if graph is not plain}
    assert len({tuple(x) for x in losses.values()}) == 1, f"the bits differ: {losses}"
    times = take_turns({key: partial(graph, *batch) for key, graph in graphs.items()}, rounds)
    return [row(name, key, graph, batch, times) for key, graph in graphs.items()]


def row(name: str, key: str, graph: TrainGraph, batch: Any, times: dict[str, list[float]]) -> list[str]:
    memory, peak = graph.plan.memory, measure_step(graph, *batch).peak
    ratio = statistics.median(a / b for a, b in zip(times[key], times["plain"], strict=True))
    equal = "yes" if peak == memory.peak else f"NO ({peak:,})"
    cells = [name, key, f"{memory.activations / 1e6:.2f}", f"{memory.peak / 1e6:.2f}", equal]
    return [*cells, str(len(graph.plan.recomputed)), f"{ratio:.2f}", f"{min(times[key]) * 1e3:.0f}"]


if __name__ == "__main__":
    main()
