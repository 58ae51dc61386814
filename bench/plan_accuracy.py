"""Plans beside runs: what a plan says of a step and what that step does on gloo ranks.

    python bench/plan_accuracy.py stages                        # GPT-2, Llama, a conv net; stages 0 to 3; 2 and 4 ranks
    python bench/plan_accuracy.py stages --models conv --ranks 2 --rounds 5
    python bench/plan_accuracy.py layouts                       # what `graphzero tune` ranks first, a GPT of 7.4 M
    python bench/plan_accuracy.py layouts --device device.json  # numbers that `graphzero calibrate` has measured

The figures stand in bench/results/plan.md.

stages: for each model and number of ranks ``calibrate`` measures links and ops in that world, at stage 0 only; plans of
all stages are then made by the command's own way in a process without ranks.  Stages alternate step by step while they
are timed, medians count; a step takes as long as on its slowest rank.  Calls and bytes are those that rank 0 saw: equal
or not.  Exit status 1 where any are not.

layouts: ten layouts on four ranks, measured, beside the model of ``tune``: the fastest ones of its ranking, and others
spread over the rest of it.  Without a device, its numbers are measured first, on as many ranks.  Rounds alternate, in
another order each; a round's first step does not count.  Seconds are the slowest rank's of each step, shown is their
median.  Run it on a machine that does nothing else and has a core for each rank.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
from statistics import mean, median
from typing import Any

import models
import torch
import torch.distributed as dist
from _run import markdown, on_gloo, options_of, slowest_seconds
from parity import TrainGraph
from workloads import WORKLOADS, Batch

import graphzero as gz
from graphzero.cli.plan import plan_at
from graphzero.cli.plan_report import StagePlan
from graphzero.config import Settings
from graphzero.plan import mega
from graphzero.plan.device import INSIDE, Device
from graphzero.plugins.calibrate.command import SIZES, calibrate, in_groups
from graphzero.plugins.calibrate.compute import measured_device
from graphzero.plugins.tune.captured_step import captured_step
from graphzero.plugins.tune.layout import Layout, axes_of
from graphzero.plugins.tune.patterns import patterns
from graphzero.plugins.tune.price import Price
from graphzero.plugins.tune.search import Search, SearchResult
from graphzero.sbp.placement import placement
from graphzero.sbp.types import Sbp
from graphzero.testing import fake_world

# ---- stages

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
    """A measured step of one stage.  sent: (kind, axis, bytes) of each call.  seconds: of each step."""

    sent: list[tuple[str, str, float]]
    peak: int
    seconds: list[float]


def steps_of(rank: int, model: str, rounds: int) -> tuple[Device, dict[int, Truth]]:
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
            seconds[stage].append(slowest_seconds(lambda graph=graph, args=args: graph(*args)))
    truths = {}
    for stage, (graph, args) in graphs.items():
        sent = [(one.kind, one.axis, one.nbytes) for one in gz.testing.trace_step(graph, *args)]
        truths[stage] = Truth(sent, gz.testing.measure_step(graph, *args).peak, seconds[stage])
    return device, truths


def stage_cells(name: str, planned: StagePlan, truth: Truth) -> tuple[list[str], bool, float]:
    """Cells; whether calls and bytes are equal; how far the seconds are off."""
    calls = [(c.kind, c.axis, c.bytes) for c in planned.plan.collectives]
    same = [call[:2] for call in calls] == [call[:2] for call in truth.sent]
    same_bytes = [call[2] for call in calls] == [call[2] for call in truth.sent]
    peaks = planned.peak == truth.peak
    measured, step = median(truth.seconds), planned.timeline
    off = step.seconds / measured - 1
    cells = [
        name,
        f"{len(calls)}" if same else f"{len(calls)}, but {len(truth.sent)}",
        f"{planned.plan.comm_bytes:,.0f}" if same_bytes else f"{planned.plan.comm_bytes:,.0f}, but not",
        f"{planned.peak:,}" if peaks else f"{planned.peak:,}, but {truth.peak:,}",
        *(f"{seconds * 1e3:.1f}" for seconds in (measured, step.seconds)), f"{off:+.0%}",
        *(f"{seconds * 1e3:.1f}" for seconds in (step.compute, step.exposed)),
    ]  # fmt: skip
    return cells, same and same_bytes and peaks, off


def clear_order(seconds: dict[int, list[float]], tolerance: float) -> list[tuple[int, int]]:
    """Pairs of stages of which the first is faster: its median by more than the tolerance, and it itself in so many of
    the rounds that chance does so in one of a hundred cases at most."""
    pairs = [(a, b) for a in seconds for b in seconds if a != b]
    apart = [(a, b) for a, b in pairs if median(seconds[a]) * (1 + tolerance) < median(seconds[b])]
    return [pair for pair in apart if _chance(*(seconds[stage] for stage in pair)) <= 0.01]


def _chance(some: list[float], others: list[float]) -> float:
    """The chance that of two equals one is below the other in so many rounds: the sign test."""
    rounds, below = len(some), sum(a < b for a, b in zip(some, others, strict=True))
    return sum(comb(rounds, i) for i in range(below, rounds + 1)) / 2**rounds


def measure_stages(options: argparse.Namespace) -> int:
    rows, equal, offs, inverted = [], True, [], []
    for model in options.models:
        for ranks in options.ranks or [2, 4]:
            device, truths = on_gloo(ranks, steps_of, model, options.rounds or 15)
            modelled = {}
            for stage, truth in truths.items():
                planned = plan_at(f"{Path(__file__)}:{model}", gz.placement("cpu", range(ranks)), stage, device)
                cells, same, off = stage_cells(f"{model}, {ranks} ranks, stage {stage}", planned, truth)
                rows.append(cells)
                equal, offs = equal and same, [*offs, off]
                modelled[stage] = planned.timeline.seconds
            faster = clear_order({stage: truth.seconds for stage, truth in truths.items()}, options.clear)
            wrong = [pair for pair in faster if modelled[pair[0]] > modelled[pair[1]]]
            inverted += [f"{model}, {ranks} ranks: stage {a} is faster than {b}" for a, b in wrong]
    print(markdown(HEAD, rows))
    worst = max(offs, key=abs)
    print(f"\nCalls, bytes and peaks are {'equal' if equal else 'NOT equal'} in all {len(rows)} rows.")
    print(f"Modelled seconds are off by {worst:+.0%} at most, {mean(map(abs, offs)):.0%} on average.")
    apart = f"Of stages that are clearly apart when measured ({options.clear:.0%}, sign test at 1 %), the model has"
    print(f"{apart} {'all in order' if not inverted else 'not in order: ' + '; '.join(inverted)}.")
    return int(not equal)


# ---- layouts

WITHIN = 0.05  # of the best one measured, in which the first choice should be
STEPS = 4  # of a round, the first of which does not count


def train(name: str, where: Any, splits: dict[str, dict[str, Sbp]] | None = None) -> TrainGraph:
    """A workload on ranks."""
    model = WORKLOADS[name].model()
    for pattern_of in (splits or {}).values():
        model = gz.to_global(model, where, {p: (gz.sbp.B, sbp) for p, sbp in pattern_of.items()})
    return TrainGraph(model, torch.optim.AdamW(model.parameters(), lr=1e-4), None, 0, where)


@dataclass(frozen=True)
class Case:
    """A layout to measure: with the patterns of its splits, by attribute."""

    layout: Layout
    splits: dict[str, dict[str, Sbp]]


def measure_layouts(options: argparse.Namespace) -> int:
    ranks = options.ranks[0] if options.ranks else 4
    device = Device.named(options.device) if options.device else on_gloo(ranks, measured_on_rank, options.model)
    print(about(device, options.model, ranks))
    ranking, names = ranked_layouts(options.model, ranks, device)
    chosen = spread(ranking.fitting, options.layouts)
    cases = [Case(one.layout, patterns(one.splits, names)) for one in chosen]
    seconds = on_gloo(ranks, time_layouts, options.model, cases, options.rounds or 8)
    print(layout_table(chosen, seconds))
    return 0


def about(device: Device, model: str, ranks: int) -> str:
    links = ", ".join(
        f"{name} {link.latency * 1e6:.0f} us, {mega(link.bandwidth)}/s" for name, link in device.links.items()
    )
    rates = (
        f"{device.flops_of('f32') / 1e9:.1f} GFLOP/s, memory {mega(device.memory)}/s, a call {device.call * 1e6:.1f} us"
    )
    return f"{WORKLOADS[model].describe(ranks)}\n{device.name}: {rates}; links {links}\n"


def ranked_layouts(name: str, ranks: int, device: Device) -> tuple[SearchResult, Any]:
    """All layouts by the model, and the names of parameters."""
    workload = WORKLOADS[name]
    with fake_world(ranks), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = captured_step(train(name, placement("cpu", range(ranks))), workload.part(0, 0, ranks))
        tensor = tuple(n for n in (1, 2, 4, 8) if ranks % n == 0)
        search = Search(step, device, int(device.capacity), top=10**6, seconds=10**6)
        return search.rank_layouts(axes_of(ranks, step.rows, tensor)), step.names


def spread(prices: list[Price], count: int) -> list[Price]:
    """Half of them the fastest, the others at even distances after."""
    first = min(-(-count // 2), len(prices))
    rest, more = prices[first:], min(count - first, len(prices) - first)
    return prices[:first] + [rest[(i + 1) * len(rest) // more - 1] for i in range(more)]


def layout_table(chosen: list[Price], seconds: list[list[float]]) -> str:
    medians = [median(each) for each in seconds]
    best = min(medians)
    places = {i: place for place, i in enumerate(sorted(range(len(medians)), key=medians.__getitem__), 1)}
    rows = []
    for i, (one, real) in enumerate(zip(chosen, medians, strict=True)):
        modelled, ratio = f"{one.seconds * 1e3:.1f}", f"{one.seconds / real:.2f}"
        rows.append([str(one.layout), i + 1, modelled, places[i], f"{real * 1e3:.1f}", ratio])
    after = medians[0] / best - 1
    verdict = "within" if after <= WITHIN else "NOT within"
    return (
        markdown(["layout", "modelled place", "ms", "measured place", "ms", "modelled / measured"], rows)
        + f"\n\nthe first choice takes {after:.1%} longer than the best measured: {verdict} {WITHIN:.0%}"
    )


# ---- on the ranks


def measured_on_rank(rank: int, name: str) -> Device:
    """The device with all ranks at work: links as among all ranks, and the ops of a step at stage 0."""
    where = placement("cpu", range(dist.get_world_size()))
    graph, batch = train(name, where), share(name, rank, where.size, where.size)
    for _ in range(3):
        graph(*batch)
    device = measured_device(graph, batch, {INSIDE: calibrate(where, repeat=5)[0].link}, 9)
    fewer = in_groups(device, where, repeat=5)
    return replace(device, links={**device.links, **{one.axis: one.link for one in fewer}})


def time_layouts(rank: int, name: str, cases: list[Case], rounds: int) -> list[list[float]]:
    """Seconds of counted steps of each case, those of the slowest rank."""
    runs = [runner(name, case) for case in cases]
    seconds: list[list[float]] = [[] for _ in cases]
    order = random.Random(0)
    for _ in range(rounds):
        for i in order.sample(range(len(cases)), len(cases)):
            seconds[i] += [slowest_seconds(runs[i]) for _ in range(STEPS)][1:]
    return seconds


def runner(name: str, case: Case) -> Callable[[], Any]:
    """A function that takes a step of a case, compiled and run once."""
    axes = case.layout.axes
    shape = [n for _, n in axes]
    ranks = dist.get_world_size()
    where = placement("cpu", torch.arange(ranks).reshape(shape).tolist(), [axis for axis, _ in axes])
    graph = train(name, where, case.splits)
    for line in case.layout.lines(Settings()):
        eval(f"config.{line}", {"config": graph.config})
    place = where.coordinate(dist.get_rank())[0]
    batch = share(name, place, case.layout.data_ranks, ranks)
    graph(*batch)
    return lambda: graph(*batch)


def share(name: str, place: int, parts: int, ranks: int) -> Batch:
    """One of ``parts`` of the batch that all ``ranks`` have together."""
    workload = WORKLOADS[name]
    return tuple(x.chunk(parts)[place] for x in workload.batch(0, workload.share * ranks))


SUBJECTS = {"stages": measure_stages, "layouts": measure_layouts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--ranks", nargs="+", type=int, help="stages: 2 and 4 by default; layouts: one number, 4")
    parser.add_argument("--rounds", type=int, help="stages: timed steps of each, 15 by default; layouts: 8")
    parser.add_argument("--models", nargs="+", choices=FACTORIES, default=list(FACTORIES), help="stages")
    parser.add_argument("--clear", type=float, default=0.03, help="stages: how far apart they have an order at least")
    parser.add_argument("--model", choices=WORKLOADS, default="A", help="layouts")
    parser.add_argument("--layouts", type=int, default=10, help="layouts: how many")
    parser.add_argument("--device", metavar="FILE", help="layouts: what `graphzero calibrate` wrote")
    options = options_of(parser)
    return SUBJECTS[options.subject](options)


if __name__ == "__main__":
    raise SystemExit(main())
