"""Plan against truth: what ``graphzero plan`` says of a step, and what that step takes and sends on gloo ranks here.

    python bench/plan_truth.py                              # GPT-2, Llama and a conv net, stages 0 to 3, 2 and 4 ranks
    python bench/plan_truth.py --models conv --ranks 2 --rounds 5

For each model and number of ranks ``calibrate`` measures links and ops in that world, at stage 0 only; plans of all
stages are then made by the command's own way in a process without ranks.  Stages alternate step by step while they are
timed, medians count; a step takes as long as on its slowest rank.  Calls and bytes are those that rank 0 saw: equal or
not.  Exit status 1 where any are not.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import mean, median
from typing import Any

import models
import torch
import torch.distributed as dist
from _run import markdown, on_gloo, options_of
from parity import TrainGraph

import graphzero as gz
from graphzero.cli.calibrate import SIZES, calibrate
from graphzero.cli.calibrate_compute import measured_device
from graphzero.cli.plan import plan_at
from graphzero.cli.plan_report import StagePlan
from graphzero.plan.device import Device

STAGES = (0, 1, 2, 3)
SIZE = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 4096, "context": 128}
HEAD = ["", "calls", "bytes sent", "peak, bytes", "measured, ms", "modelled, ms", "off by", "compute", "waiting"]


def gpt2(placement: Any, stage: int) -> tuple[gz.Graph, Any]:
    return _train(models.gpt2(**SIZE), placement, stage), _tokens()


def llama(placement: Any, stage: int) -> tuple[gz.Graph, Any]:
    return _train(models.llama(**SIZE), placement, stage), _tokens()


def conv(placement: Any, stage: int) -> tuple[gz.Graph, Any]:
    x, y = torch.rand(16, 3, 32, 32), torch.arange(16) % 10
    return _train(models.convnet(channels=64), placement, stage), (x, y)


FACTORIES = {"gpt2": gpt2, "llama": llama, "conv": conv}


def _train(model: torch.nn.Module, placement: Any, stage: int) -> gz.Graph:
    return TrainGraph(model, torch.optim.AdamW(model.parameters()), None, stage, placement)


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    ids = (torch.arange(4 * SIZE["context"]) * 7919 % SIZE["vocabulary"]).reshape(4, -1)
    return ids, ids


@dataclass(frozen=True)
class Truth:
    """What a step of one stage did.  sent: (kind, axis, bytes) of each call.  seconds: of each step."""

    sent: list[tuple[str, str, float]]
    peak: int
    seconds: list[float]


def on_rank(rank: int, model: str, rounds: int) -> tuple[Device, dict[int, Truth]]:
    place = gz.placement("cpu", range(dist.get_world_size()))
    graphs = {stage: FACTORIES[model](place, stage) for stage in STAGES}
    for graph, args in graphs.values():
        for _ in range(3):
            graph(*args)
    links = {one.axis: one.link for one in calibrate(place, SIZES, 5)}
    device = measured_device(*graphs[0], links, max(rounds, 5))
    seconds: dict[int, list[float]] = {stage: [] for stage in STAGES}
    for turn in range(rounds):
        for i in range(len(STAGES)):
            stage = STAGES[(turn * 3 + (-i if turn % 2 else i)) % len(STAGES)]  # none always has the same one before it
            graph, args = graphs[stage]
            dist.barrier()
            began = time.perf_counter()
            graph(*args)
            took = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[stage].append(took.item())
    found = {}
    for stage, (graph, args) in graphs.items():
        sent = [(one.kind, one.axis, one.nbytes) for one in gz.testing.trace_step(graph, *args)]
        found[stage] = Truth(sent, gz.testing.measure_step(graph, *args).peak, seconds[stage])
    return device, found


def row(name: str, planned: StagePlan, truth: Truth) -> tuple[list[str], bool, float]:
    """Cells; whether calls and bytes are equal; how far the seconds are off."""
    calls = [(c.kind, c.axis, c.bytes) for c in planned.plan.collectives]
    same = [call[:2] for call in calls] == [call[:2] for call in truth.sent]
    same_bytes = [call[2] for call in calls] == [call[2] for call in truth.sent]
    peaks = planned.peak == truth.peak
    measured, step = median(truth.seconds), planned.timeline
    off = step.seconds / measured - 1
    return (
        [
            name,
            f"{len(calls)}" if same else f"{len(calls)}, but {len(truth.sent)}",
            f"{planned.plan.comm_bytes:,.0f}" if same_bytes else f"{planned.plan.comm_bytes:,.0f}, but not",
            f"{planned.peak:,}" if peaks else f"{planned.peak:,}, but {truth.peak:,}",
            f"{measured * 1e3:.1f}",
            f"{step.seconds * 1e3:.1f}",
            f"{off:+.0%}",
            f"{step.compute * 1e3:.1f}",
            f"{step.exposed * 1e3:.1f}",
        ],
        same and same_bytes and peaks,
        off,
    )


def order(seconds: dict[int, list[float]], tolerance: float) -> list[tuple[int, int]]:
    """Pairs of stages of which the first is faster: its median by more than the tolerance, and it itself in so many of
    the rounds that chance does so in one of a hundred cases at most."""
    pairs = [(a, b) for a in seconds for b in seconds if a != b]
    apart = [(a, b) for a, b in pairs if median(seconds[a]) * (1 + tolerance) < median(seconds[b])]
    return [pair for pair in apart if _chance(*(seconds[stage] for stage in pair)) <= 0.01]


def _chance(some: list[float], others: list[float]) -> float:
    """How likely it is that of two equals one is below the other in so many rounds: the sign test."""
    rounds, below = len(some), sum(a < b for a, b in zip(some, others, strict=True))
    return sum(comb(rounds, i) for i in range(below, rounds + 1)) / 2**rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=FACTORIES, default=list(FACTORIES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each stage")
    parser.add_argument(
        "--clear", type=float, default=0.03, help="how far stages must be apart at least to have an order"
    )
    options = options_of(parser)
    rows, equal, offs, inverted = [], True, [], []
    for model in options.models:
        for ranks in options.ranks:
            device, truths = on_gloo(ranks, on_rank, model, options.rounds)
            modelled = {}
            for stage, truth in truths.items():
                planned = plan_at(f"{Path(__file__)}:{model}", gz.placement("cpu", range(ranks)), stage, device)
                cells, same, off = row(f"{model}, {ranks} ranks, stage {stage}", planned, truth)
                rows.append(cells)
                equal, offs = equal and same, [*offs, off]
                modelled[stage] = planned.timeline.seconds
            faster = order({stage: truth.seconds for stage, truth in truths.items()}, options.clear)
            wrong = [pair for pair in faster if modelled[pair[0]] > modelled[pair[1]]]
            inverted += [f"{model}, {ranks} ranks: stage {a} is faster than {b}" for a, b in wrong]
    print(markdown(HEAD, rows))
    worst = max(offs, key=abs)
    print(f"\nCalls, bytes and peaks are {'equal' if equal else 'NOT equal'} in all {len(rows)} rows.")
    print(f"Modelled seconds are off by {worst:+.0%} at most, {mean(map(abs, offs)):.0%} on average.")
    apart = f"Of stages that are clearly apart when measured ({options.clear:.0%}, sign test at 1 %), the model has"
    print(f"{apart} {'all in order' if not inverted else 'not in order: ' + '; '.join(inverted)}.")
    return int(not equal)


if __name__ == "__main__":
    raise SystemExit(main())
