"""How good is what ``graphzero tune`` ranks first: ten layouts on four gloo ranks, measured, beside the model.

    python bench/tune_truth.py                        # a GPT of 7.4 M parameters
    python bench/tune_truth.py --model toy --rounds 2 # to see that it runs
    python bench/tune_truth.py --device device.json   # numbers that `graphzero calibrate` has measured

Without a device, its numbers are measured first, on as many ranks, as `graphzero calibrate` does.  The layouts are the
fastest ones of the model's ranking, and others spread over the rest of it.  Rounds alternate, in another order each; a
round's first step does not count.  Seconds are the slowest rank's of each step, shown is their median.  Run it on a
machine that does nothing else and has a core for each rank.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from _run import markdown, on_gloo, options_of
from workloads import JOBS, Batch

import graphzero as gz
from graphzero.cli.calibrate import calibrate, in_groups
from graphzero.cli.calibrate_compute import measured_device
from graphzero.config import Settings
from graphzero.plan import mega
from graphzero.plan.device import INSIDE, Device
from graphzero.plugins.tune.captured_step import captured_step
from graphzero.plugins.tune.layout import Layout, axes_of
from graphzero.plugins.tune.patterns import patterns
from graphzero.plugins.tune.price import Price
from graphzero.plugins.tune.search import Found, Search
from graphzero.sbp.placement import placement
from graphzero.sbp.types import Sbp
from graphzero.testing import fake_world

WITHIN = 0.05  # of the best one measured, in which the first choice should be
STEPS = 4  # of a round, the first of which does not count


class Train(gz.Graph):
    """A job of ``jobs`` on ranks."""

    def __init__(self, name: str, where: Any, splits: dict[str, dict[str, Sbp]] | None = None):
        super().__init__(where)
        self.model = JOBS[name].model()
        for pattern_of in (splits or {}).values():
            self.model = gz.to_global(self.model, where, {p: (gz.sbp.B, sbp) for p, sbp in pattern_of.items()})
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-4))

    def build(self, x: Any, y: Any) -> Any:
        loss = self.model(x, y)
        loss.backward()
        return loss


@dataclass(frozen=True)
class Case:
    """A layout to measure: with the patterns of its splits, by attribute."""

    layout: Layout
    splits: dict[str, dict[str, Sbp]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=JOBS, default="A")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layouts", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", metavar="FILE", help="what `graphzero calibrate` wrote; by default it is measured")
    options = options_of(parser)
    device = Device.named(options.device) if options.device else on_gloo(options.ranks, measured, options.model)
    print(about(device, options))
    found, names = ranked(options.model, options.ranks, device)
    chosen = spread(found.fitting, options.layouts)
    cases = [Case(one.layout, patterns(one.splits, names)) for one in chosen]
    seconds = on_gloo(options.ranks, work, options.model, cases, options.rounds)
    print(table(chosen, seconds))


def about(device: Device, options: argparse.Namespace) -> str:
    links = ", ".join(
        f"{name} {link.latency * 1e6:.0f} us, {mega(link.bandwidth)}/s" for name, link in device.links.items()
    )
    rates = (
        f"{device.flops_of('f32') / 1e9:.1f} GFLOP/s, memory {mega(device.memory)}/s, a call {device.call * 1e6:.1f} us"
    )
    return f"{JOBS[options.model].describe(options.ranks)}\n{device.name}: {rates}; links {links}\n"


def ranked(name: str, ranks: int, device: Device) -> tuple[Found, Any]:
    """All layouts by the model, and the names of parameters."""
    job = JOBS[name]
    with fake_world(ranks), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = captured_step(Train(name, placement("cpu", range(ranks))), job.part(0, 0, ranks))
        tensor = tuple(n for n in (1, 2, 4, 8) if ranks % n == 0)
        search = Search(step, device, int(device.capacity), top=10**6, seconds=10**6)
        return search.run(axes_of(ranks, step.rows, tensor)), step.names


def spread(found: list[Price], count: int) -> list[Price]:
    """Half of them the fastest, the others at even distances behind."""
    first = min(-(-count // 2), len(found))
    rest, more = found[first:], min(count - first, len(found) - first)
    return found[:first] + [rest[(i + 1) * len(rest) // more - 1] for i in range(more)]


def table(chosen: list[Price], seconds: list[list[float]]) -> str:
    medians = [statistics.median(each) for each in seconds]
    best = min(medians)
    places = {i: place for place, i in enumerate(sorted(range(len(medians)), key=medians.__getitem__), 1)}
    rows = [
        [
            str(one.layout),
            i + 1,
            f"{one.seconds * 1e3:.1f}",
            places[i],
            f"{real * 1e3:.1f}",
            f"{one.seconds / real:.2f}",
        ]
        for i, (one, real) in enumerate(zip(chosen, medians, strict=True))
    ]
    behind = medians[0] / best - 1
    verdict = "within" if behind <= WITHIN else "NOT within"
    return (
        markdown(["layout", "modelled place", "ms", "measured place", "ms", "modelled / measured"], rows)
        + f"\n\nthe first choice takes {behind:.1%} longer than the best measured: {verdict} {WITHIN:.0%}"
    )


# ---- on the ranks


def measured(rank: int, name: str) -> Device:
    """What this machine can do with all ranks at work: links as among all ranks, and the ops of a step at stage 0."""
    where = placement("cpu", range(dist.get_world_size()))
    graph, batch = Train(name, where), share(name, rank, where.size, where.size)
    for _ in range(3):
        graph(*batch)
    device = measured_device(graph, batch, {INSIDE: calibrate(where, repeat=5)[0].link}, 9)
    fewer = in_groups(device, where, repeat=5)
    return replace(device, links={**device.links, **{one.axis: one.link for one in fewer}})


def work(rank: int, name: str, cases: list[Case], rounds: int) -> list[list[float]]:
    """Seconds of counted steps of each case, those of the slowest rank."""
    runs = [runner(name, case) for case in cases]
    found: list[list[float]] = [[] for _ in cases]
    order = random.Random(0)
    for _ in range(rounds):
        for i in order.sample(range(len(cases)), len(cases)):
            found[i] += [one_step(runs[i]) for _ in range(STEPS)][1:]
    return found


def runner(name: str, case: Case) -> Callable[[], Any]:
    """What makes a step of a case, compiled and run once."""
    axes = case.layout.axes
    shape = [n for _, n in axes]
    ranks = dist.get_world_size()
    where = placement("cpu", torch.arange(ranks).reshape(shape).tolist(), [axis for axis, _ in axes])
    graph = Train(name, where, case.splits)
    for line in case.layout.lines(Settings()):
        eval(f"config.{line}", {"config": graph.config})
    place = where.coordinate(dist.get_rank())[0]
    batch = share(name, place, case.layout.data_ranks, ranks)
    graph(*batch)
    return lambda: graph(*batch)


def share(name: str, place: int, parts: int, ranks: int) -> Batch:
    """One of ``parts`` of the batch that all ``ranks`` have together."""
    job = JOBS[name]
    return tuple(x.chunk(parts)[place] for x in job.batch(0, job.share * ranks))


def one_step(run: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


if __name__ == "__main__":
    main()
