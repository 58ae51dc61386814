"""Ablation of parts that a program also runs without: what recomputation and others cost, and what they save.

    python bench/ablation.py                    # recomputation beside torch.utils.checkpoint
    python bench/ablation.py parts              # delayed gradients, joined updates, the arena
    python bench/ablation.py tiles --rounds 3   # logits of a GPT-2 in tiles of rows

Figures of recomputation are in bench/results/, the others in the docstrings of what is measured.

* Recomputation: a small GPT-2 and Llama train on one rank, in turn with themselves under other settings of
  ``set_activation_memory``; a time is the median over rounds of a step's seconds by those of the plain one in the same
  round.  Bytes are the plan's and, in brackets where they differ, those that the dispatcher sees.
* Delayed gradients: the planned peak of two ranks, with backward as it is written and with what may wait made later.
* Joined updates: the time of a step of many small parameters, stepped by one call and each by its own.
* The arena: the processor's time of a step of rank 0 of two, its page faults, and the kernel's high-water mark of
  resident memory, less what the process held before, with the arena and without it, each in fresh processes.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from _run import markdown, on_gloo, options_of
from models import WithLoss, gpt2, llama, tokens
from parity import TrainGraph
from peak_memory import CLEAR, high_water, reset
from systems import graph as graph_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from workloads import GPT, WORKLOADS, Shape, gpt

import graphzero as gz
from graphzero.passes import JoinUpdates, Options, Pipeline, default_passes, pass_list
from graphzero.plan.program_costs import memory_of
from graphzero.testing import fake_world, measure_step

Key = TypeVar("Key")

SIZE = {"layers": 6, "width": 192, "heads": 6, "vocabulary": 512, "context": 128}
RECOMPUTED = {"gpt2": (gpt2, "body.transformer.h"), "llama": (llama, "body.model.layers")}
PARTS = (0.75, 0.5, 0.35)
RECOMPUTE_HEAD = ["model", "setting", "activations, MB", "peak, MB", "equal", "values", "time", "fastest, ms"]


def show_recompute(options: argparse.Namespace) -> None:
    what = f"{SIZE['layers']} layers of width {SIZE['width']}, 4 sequences of {SIZE['context']}"
    print(f"{what}; activations: the most bytes of them at a time; time: 1 is without\n")
    rows = [row for name in RECOMPUTED for row in recompute_rows(name, options.rounds)]
    print(markdown(RECOMPUTE_HEAD, rows))


def model_of(name: str, blocks: bool = False) -> nn.Module:
    """blocks: torch.utils.checkpoint around each."""
    torch.manual_seed(0)
    make, path = RECOMPUTED[name]
    model = make(**SIZE)
    for block in model.get_submodule(path).children() if blocks else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def recomputed_graph(name: str, memory: Any = None, blocks: bool = False) -> TrainGraph:
    model = model_of(name, blocks)
    graph = TrainGraph(model, torch.optim.AdamW(model.parameters()))
    graph.config.set_activation_memory(memory)
    return graph


def recompute_rows(name: str, rounds: int) -> list[list[str]]:
    batch = tokens(0, 4, torch.float32, SIZE["vocabulary"], SIZE["context"])
    plain = recomputed_graph(name)
    plain(*batch)
    most = plain.plan.memory.activations
    graphs = {"plain": plain, "torch.utils.checkpoint, by block": recomputed_graph(name, blocks=True)}
    graphs['"checkpoint"'] = recomputed_graph(name, "checkpoint")
    graphs |= {f"{part:.0%} of the bytes": recomputed_graph(name, int(part * most)) for part in PARTS}
    losses = {key: [float(graph(*batch)) for _ in range(2)] for key, graph in graphs.items() if graph is not plain}
    assert len({tuple(x) for x in losses.values()}) == 1, f"the bits differ: {losses}"
    times = take_turns({key: partial(graph, *batch) for key, graph in graphs.items()}, rounds)
    return [recompute_row(name, key, graph, batch, times) for key, graph in graphs.items()]


def recompute_row(name: str, key: str, graph: TrainGraph, batch: Any, times: dict[str, list[float]]) -> list[str]:
    memory, peak = graph.plan.memory, measure_step(graph, *batch).peak
    ratio = statistics.median(a / b for a, b in zip(times[key], times["plain"], strict=True))
    equal = "yes" if peak == memory.peak else f"NO ({peak:,})"
    cells = [name, key, f"{memory.activations / 1e6:.2f}", f"{memory.peak / 1e6:.2f}", equal]
    return [*cells, str(len(graph.plan.recomputed)), f"{ratio:.2f}", f"{min(times[key]) * 1e3:.0f}"]


# ---- parts

MODELS = ("A", "B", "conv")


def show_parts(options: argparse.Namespace) -> None:
    rounds = options.rounds
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


def small_graph(width: int, layers: int) -> TrainGraph:
    torch.manual_seed(0)
    model = WithLoss(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return TrainGraph(model, optimizer, placement=gz.placement("cpu", range(1), virtual=True))


def join_updates(width: int, layers: int, rounds: int) -> list[Any]:
    graphs = {joined: small_graph(width, layers) for joined in (True, False)}
    batch = torch.randn(8, width), torch.arange(8)
    apart = tuple(entry for entry in pass_list.pass_entries() if entry.kind is not JoinUpdates)
    graphs[True](*batch)
    with patch.object(pass_list, "pass_entries", lambda: apart):
        graphs[False](*batch)
    seconds = take_turns({joined: partial(graph, *batch) for joined, graph in graphs.items()}, rounds)
    joined, alone = (statistics.median(seconds[key]) * 1e6 for key in (True, False))
    return [layers, width, f"{joined:.0f}", f"{alone:.0f}", f"{joined / alone:.2f}"]


def arena(rank: int, name: str, stage: int, used: bool, steps: int) -> list[str]:
    batches = [WORKLOADS[name].part(step, rank, 2) for step in range(3)]
    for workload in ("toy", name):  # the first has what a process needs for any
        before = reset()
        graph = graph_of(stage, WORKLOADS[workload], arena=used)
        for step in range(3):
            graph(*WORKLOADS[workload].part(step, rank, 2))
    CLEAR.write_text("5")
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    seconds = take_turns({"": lambda: [graph(*batch) for batch in batches]}, steps // 3)[""]
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // (3 * (steps // 3 + 2))
    return [f"{statistics.median(seconds) / 3 * 1e3:.1f}", str(faults), f"{(high_water() - before) / 1e6:.1f}"]


# ---- tiles of rows

COUNTS = (1, 2, 4, 8)
TILED_STAGE = 2
TILES_HEAD = ["tiles", "peak, MB", "measured, MB", "largest held of the logits, MB", "time", "fastest, s"]


def tiled_graph(shape: Shape, placement: gz.Placement) -> TrainGraph:
    torch.manual_seed(0)
    model = GPT(shape)
    graph = TrainGraph(model, torch.optim.AdamW(model.parameters()), None, TILED_STAGE, placement)
    graph.config.set_arena(False)
    return graph


def show_tiles(options: argparse.Namespace) -> None:
    width, context = options.width, options.context
    shape = Shape(options.vocabulary, width, options.layers, width // 64, options.batch, context, True)
    print(
        f"{shape.layers} layers of width {shape.width}, {shape.vocabulary} classes, tied; two ranks at stage "
        f"{TILED_STAGE}, AdamW, {shape.batch} sequences of {shape.context} tokens each\n"
    )
    held, seconds = peaks(shape), times(shape, options.rounds)
    logits = shape.batch * shape.context * shape.vocabulary * 4
    rows = []
    for count in COUNTS:
        ratio = statistics.median(one / whole for one, whole in zip(seconds[count], seconds[1], strict=True))
        megabytes = (f"{nbytes / 1e6:.1f}" for nbytes in (*held[count], logits // count))
        rows.append([str(count), *megabytes, f"{ratio:.2f}", f"{min(seconds[count]):.2f}"])
    print(markdown(TILES_HEAD, rows))


def peaks(shape: Shape) -> dict[int, tuple[int, int]]:
    """By number of tiles, the bytes of a rank's peak: the plan's, and those that the dispatcher sees."""
    found = {}
    with fake_world(2):
        graph, batch = tiled_graph(shape, gz.placement("cpu", range(2))), gpt(shape).part(0, 0, 2)
        for count in COUNTS:
            graph.config.set_row_tiles(count)
            graph(*batch)
            found[count] = graph.plan.memory.peak, measure_step(graph, *batch).peak
    return found


def times(shape: Shape, rounds: int) -> dict[int, list[float]]:
    """By number of tiles, the processor's seconds of steps of both ranks."""
    graph = tiled_graph(shape, gz.placement("cpu", range(2), virtual=True))
    batch = gpt(shape).batch(0, 2 * shape.batch)

    def step(count: int) -> None:
        graph.config.set_row_tiles(count)
        graph(*batch)

    return take_turns({count: partial(step, count) for count in COUNTS}, rounds)


def take_turns(calls: Mapping[Key, Callable[[], Any]], rounds: int) -> dict[Key, list[float]]:
    """Seconds of the processor of each call round by round, after two rounds that do not count."""
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(2 + rounds):
        for key, call in calls.items():
            began = time.process_time()
            call()
            seconds[key].append(time.process_time() - began)
    return {key: each[2:] for key, each in seconds.items()}


# ---- the command

SUBJECTS = {"recompute": show_recompute, "parts": show_parts, "tiles": show_tiles}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", nargs="?", default="recompute", choices=SUBJECTS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, default=2, help="tiles")
    parser.add_argument("--width", type=int, default=768, help="tiles")
    parser.add_argument("--context", type=int, default=256, help="tiles")
    parser.add_argument("--batch", type=int, default=2, help="tiles: sequences a rank")
    parser.add_argument("--vocabulary", type=int, default=50257, help="tiles")
    options = options_of(parser)
    SUBJECTS[options.subject](options)


if __name__ == "__main__":
    main()
