"""Ablation of passes that trade memory for time or order: what they save, and what they cost.

    python bench/ablation.py           # recomputation beside torch.utils.checkpoint
    python bench/ablation.py tiles     # logits of a GPT-2 in tiles of rows
    python bench/ablation.py order     # gradients of weights that are computed later

recompute, tiles: models train on one rank, in turn with themselves under other settings; bench/results/recompute.md
says what the columns are.  order: the planned peak of two ranks, with backward as it is written and with what may wait
made later.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from _run import command_parser, format_table, parse_options
from models import draw_tokens, gpt2, llama
from parity import TrainGraph
from systems import build_graph
from torch import nn
from torch.utils.checkpoint import checkpoint
from workloads import GPT, WORKLOADS, Shape

import graphzero as gz
from graphzero.passes import Options, Pipeline, default_passes
from graphzero.plan.program_costs import memory_of
from graphzero.testing import fake_world, measure_step

HEAD = ["model", "setting", "activations, MB", "peak, MB", "equal", "values", "time", "fastest, ms"]


def print_turns(
    builders: Mapping[str, Callable[[], dict[str, gz.Graph]]], batch: Any, rounds: int, limit: float = 0.0
) -> None:
    """A table of models under settings, whose losses must be the same, to the bit or to a relative limit."""
    rows = []
    for name, build_graphs in builders.items():
        graphs = build_graphs()
        losses = {setting: [float(graph(*batch)) for _ in range(2)] for setting, graph in graphs.items()}
        first = next(iter(losses.values()))
        assert all(abs(a / b - 1) <= limit for x in losses.values() for a, b in zip(x, first, strict=True)), losses
        times = time_in_turn({setting: partial(graph, *batch) for setting, graph in graphs.items()}, rounds)
        base = next(iter(times.values()))
        for setting, graph in graphs.items():
            rows.append([name, setting, *describe_run(graph, batch, times[setting], base)])
    print(format_table(HEAD, rows))


def time_in_turn(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of the processor of each call round by round, after a round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + rounds):
        for name, call in calls.items():
            began = time.process_time()
            call()
            seconds[name].append(time.process_time() - began)
    return {name: each[1:] for name, each in seconds.items()}


def describe_run(graph: gz.Graph, batch: Any, times: list[float], base: list[float]) -> list[str]:
    """Cells of a table from the third on."""
    memory, peak = graph.plan.memory, measure_step(graph, *batch).peak
    ratio = statistics.median(a / b for a, b in zip(times, base, strict=True))
    equal = "yes" if peak == memory.peak else f"NO ({peak:,})"
    sizes = [f"{memory.activations / 1e6:.2f}", f"{memory.peak / 1e6:.2f}", equal]
    return [*sizes, str(len(graph.plan.recomputed)), f"{ratio:.2f}", f"{min(times) * 1e3:.0f}"]


# ---- recomputation

SIZE = {"layers": 6, "width": 192, "heads": 6, "vocabulary": 512, "context": 128}
RECOMPUTED = {"gpt2": (gpt2, "body.transformer.h"), "llama": (llama, "body.model.layers")}
PARTS = (0.75, 0.5, 0.35)


def print_recompute(rounds: int) -> None:
    what = f"{SIZE['layers']} layers of width {SIZE['width']}, 4 sequences of {SIZE['context']}"
    print(f"{what}; activations: the most bytes of them at a time; time: 1 is without\n")
    batch = draw_tokens(0, 4, torch.float32, SIZE["vocabulary"], SIZE["context"])
    print_turns({name: partial(build_recomputing_graphs, name, batch) for name in RECOMPUTED}, batch, rounds)


def build_recomputing_graphs(name: str, batch: Any) -> dict[str, gz.Graph]:
    plain = build_recomputing_graph(name)
    most = plain.compile(*batch).plan.memory.activations
    graphs = {"plain": plain, "torch.utils.checkpoint, by block": build_recomputing_graph(name, blocks=True)}
    graphs['"checkpoint"'] = build_recomputing_graph(name, "checkpoint")
    return graphs | {f"{part:.0%} of the bytes": build_recomputing_graph(name, int(part * most)) for part in PARTS}


def build_recomputing_graph(name: str, memory: Any = None, blocks: bool = False) -> TrainGraph:
    """blocks: torch.utils.checkpoint around each."""
    torch.manual_seed(0)
    build_model, path = RECOMPUTED[name]
    model: nn.Module = build_model(**SIZE)
    for block in model.get_submodule(path).children() if blocks else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    graph = TrainGraph(model, torch.optim.AdamW(model.parameters()))
    graph.config.set_activation_memory(memory)
    return graph


# ---- tiles of rows

TILED = Shape(vocabulary=50257, width=768, layers=2, heads=12, batch=8, context=256, tied=True)


def print_tiles(rounds: int) -> None:
    print(f"GPT of {TILED.layers} layers, {TILED.vocabulary} classes, {TILED.batch} sequences of {TILED.context}\n")
    batch = draw_tokens(0, TILED.batch, torch.float32, TILED.vocabulary, TILED.context)
    print_turns(
        {"gpt2": lambda: {f"{count} tiles": build_tiled_graph(count) for count in (1, 2, 4, 8)}}, batch, rounds, 1e-6
    )


def build_tiled_graph(count: int) -> TrainGraph:
    torch.manual_seed(0)
    model = GPT(TILED)
    graph = TrainGraph(model, torch.optim.AdamW(model.parameters()))
    graph.config.set_arena(False)
    graph.config.set_row_tiles(count)
    return graph


# ---- the order of backward


def print_order(rounds: int) -> None:
    del rounds
    rows = [row for name in ("A", "B", "conv") for row in compare_planned_peaks(name)]
    print(format_table(["model", "stage", "MB as written", "MB with order", "ratio"], rows))


def compare_planned_peaks(name: str) -> list[list[Any]]:
    rows = []
    with fake_world(2, rank=0):
        graph = build_graph(0, WORKLOADS[name])
        graph.compile(*WORKLOADS[name].part(0, 0, 2))
        captured = graph.history[0].before
        for stage in range(4):
            options = Options(stage=stage), Options(stage=stage, delay_gradients=True)
            plain, moved = (memory_of(Pipeline(default_passes(one))(captured.clone())).peak / 1e6 for one in options)
            rows.append([name, stage, f"{plain:.1f}", f"{moved:.1f}", f"{moved / plain:.3f}"])
    return rows


SUBJECTS = {"recompute": print_recompute, "tiles": print_tiles, "order": print_order}


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("subject", nargs="?", default="recompute", choices=SUBJECTS)
    parser.add_argument("--rounds", type=int, default=12)
    options = parse_options(parser)
    SUBJECTS[options.subject](options.rounds)


if __name__ == "__main__":
    main()
