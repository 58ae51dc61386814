"""``graphzero calibrate``: times the runtime's own collectives along each axis and fits the alpha-beta model of links.

All ranks talk along the measured axis at once, as they do in a step: groups that share a network card share its
bandwidth.  ``sbp.link_costs`` says what the numbers mean, ``config.links`` reads the file that they are kept in.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphzero.cli import factory
from graphzero.cli.output import check_output, write_output
from graphzero.errors import ConfigError
from graphzero.plan.device import Device
from graphzero.plugins.calibrate.compute import measured_device
from graphzero.runtime.transport.primitives import Handle
from graphzero.runtime.world import launch
from graphzero.runtime.world.accelerators import synchronize
from graphzero.runtime.world.process import ProcessWorld
from graphzero.runtime.world.world import World
from graphzero.sbp.boxing import wire_bytes
from graphzero.sbp.collectives import COLLECTIVES, Lines
from graphzero.sbp.link_costs import Link, messages
from graphzero.sbp.placement import Placement

SUMMARY = "time the links of a placement"

SIZES = tuple(1 << bits for bits in range(10, 25, 2))  # 1 KiB to 16 MiB
ITEM = 4  # bytes of a float32


@dataclass(frozen=True)
class Sample:
    """One size of one collective along an axis.

    messages: one after the other; sent: bytes by each rank; seconds: median of the repeats on the slowest rank.
    """

    kind: str
    messages: int
    sent: float
    seconds: float


@dataclass(frozen=True)
class MeasuredLink:
    """An axis, how many ranks meet along it, what was timed, and what was fitted to it."""

    axis: str
    ranks: int
    link: Link
    samples: list[Sample]

    @property
    def error(self) -> float:
        """Average error of the fit, relative to the measured times."""
        latency, bandwidth = self.link.latency, self.link.bandwidth
        off = (abs(latency * s.messages + s.sent / bandwidth - s.seconds) / s.seconds for s in self.samples)
        return sum(off) / len(self.samples)

    def facts(self) -> dict[str, Any]:
        """The results as plain numbers."""
        return {"axis": self.axis, "ranks": self.ranks, "samples": [asdict(sample) for sample in self.samples]}


def add_arguments(one: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    one.description = (
        "Times collectives along each placement axis, under torchrun, and fits latency and bandwidth; times products, "
        "copies and the ops of the FACTORY's own step: "
        "torchrun --nproc-per-node=8 -m graphzero calibrate train.py:make --axes dp=4,tp=2"
    )
    factory.add_arguments(one)
    one.add_argument("--stage", type=int, default=0, choices=factory.STAGES, help="given to the FACTORY")
    one.add_argument("--output", metavar="PATH", default="device.json", help="what plan and config.set_links read")
    one.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    one.add_argument("--repeat", type=int, default=7, help="how often each size is timed")


def run(options: argparse.Namespace) -> None:
    """Do what the command line says, and print it."""
    if min(options.sizes) < 1 or len(set(options.sizes)) < 2 or options.repeat < 1:
        raise ConfigError("calibrate needs two sizes of at least a byte and one repeat: it fits two numbers")
    if launch.own_rank() == 0:  # which writes it
        check_output("--output", options.output)
    where = factory.placement_of(options, launch.resolve(None).device_type)
    graph, args = factory.make(options.factory, where, options.stage)
    measurements = calibrate(graph.placement, options.sizes, options.repeat)
    device = measured_device(graph, args, {one.axis: one.link for one in measurements}, options.repeat)
    fewer = in_groups(device, graph.placement, options.sizes, options.repeat)
    if dist.get_rank() != int(graph.placement.ranks.flat[0]):
        return
    device = replace(
        device, links=on_any_axes(measurements, device, graph.placement) | {one.axis: one.link for one in fewer}
    )
    measurements += fewer
    facts = {
        "placement": repr(graph.placement),
        "torch": torch.__version__,
        "measured": [one.facts() for one in measurements],
    }
    write_output("--output", options.output, json.dumps({**device.to_json(), **facts}, indent=2) + "\n")
    print(table(measurements))
    print(described(device))
    print(
        f'wrote {options.output}; graph.config.set_links("{options.output}") reads its links, '
        f"`graphzero plan --device {options.output}` all of it"
    )


def on_any_axes(links: Sequence[MeasuredLink], device: Device, placement: Placement) -> dict[str, Link]:
    """The links by axis, and "inside" and "between" hosts, for axes that other placements have: those along which most
    ranks meet there, and "inside 2" for axes of fewer.
    """
    ordered = sorted(links, key=lambda one: one.ranks)
    ways = {device.way(placement, one.axis): one for one in ordered}
    narrow = [(way, one) for one in ordered if one.ranks < ways[way := device.way(placement, one.axis)].ranks]
    sized = {f"{way} {one.ranks}": one.link for way, one in narrow}
    return {one.axis: one.link for one in links} | sized | {way: one.link for way, one in ways.items()}


def in_groups(
    device: Device, placement: Placement, sizes: Sequence[int] = SIZES, repeat: int = 7
) -> list[MeasuredLink]:
    """The links of axes along which fewer ranks meet than on ``placement``, which has one axis: ``inside 2``.

    Every rank calls it.  Fewer ranks wait for each other with less delay, and are often nearer to each other.
    """
    ranks = placement.size
    measurements = []
    for width in range(2, ranks) if len(placement.names) == 1 else ():
        if ranks % width == 0:
            there = Placement(placement.device_type, placement.ranks.reshape(-1, width), ("groups", "group"), False)
            axis = f"{device.way(there, 'group')} {width}"
            measurements.append(replace(_measure(ProcessWorld(there), "group", sizes, repeat), axis=axis))
    return measurements


def calibrate(placement: Placement, sizes: Sequence[int] = SIZES, repeat: int = 7) -> list[MeasuredLink]:
    """The links of every axis of several ranks; every rank calls it, and every rank gets the same numbers.

    sizes: bytes of the whole tensors that travel.  repeat: how often each is timed.
    Raises ConfigError where nothing travels: on virtual ranks, in a fake world, on axes of one rank; and where times
    do not grow with sizes.
    """
    axes = [name for name, ranks in zip(placement.names, placement.hierarchy, strict=True) if ranks > 1]
    why = "virtual: its ranks live in this process" if placement.virtual else "fake" if launch.has_fake_world() else ""
    if why or not axes:
        raise ConfigError(
            f"there is nothing to measure: {placement!r} is {why or 'one rank'}, so nothing travels between ranks; run "
            "it where the program will run: torchrun --nproc-per-node=N -m graphzero calibrate FILE:FACTORY"
        )
    world = ProcessWorld(placement)
    return [_measure(world, name, sizes, repeat) for name in axes]


def fit(samples: Sequence[Sample], axis: str = "the axis") -> Link:
    """The link whose predictions have the least squared relative errors, among those of latency 0 or more.

    Raises ConfigError where times do not grow with sizes.
    """
    rows = torch.tensor([[s.messages / s.seconds, s.sent / s.seconds] for s in samples], dtype=torch.float64)
    scale = rows.norm(dim=0)
    ones = torch.ones(len(samples), 1, dtype=torch.float64)
    solution = torch.linalg.lstsq(rows / scale, ones, driver="gelsd").solution[:, 0] / scale
    alpha, beta = float(solution[0]), float(solution[1])
    if alpha < 0:
        alpha, beta = 0.0, float(rows[:, 1].sum() / scale[1] ** 2)
    if beta <= 0:
        raise ConfigError(
            f"calibrate: along {axis} the time of a collective does not grow with its bytes, of which a rank sends "
            f"{max(s.sent for s in samples):,.0f} at most, so the bandwidth is unknown; measure larger ones (--sizes)"
        )
    return Link(alpha, 1 / beta)


def table(links: Sequence[MeasuredLink]) -> str:
    """A table as text, one axis a line."""
    lines = [f"{'axis':<14}{'ranks':>6}{'latency':>14}{'bandwidth':>16}{'fit off by':>12}"]
    for one in links:
        latency, bandwidth = f"{one.link.latency * 1e6:.1f} us", f"{one.link.bandwidth / 1e9:.3f} GB/s"
        lines.append(f"{one.axis:<14}{one.ranks:>6}{latency:>14}{bandwidth:>16}{one.error:>11.0%} ")
    return "\n".join(line.rstrip() for line in lines)


def described(device: Device) -> str:
    """Compute of a rank, as text."""
    flops = ", ".join(f"{dtype} {rate / 1e9:,.1f} GFLOP/s" for dtype, rate in device.flops.items())
    memory, call = f"memory {device.memory / 1e9:.2f} GB/s", f"an op {device.call * 1e6:.1f} us"
    return f"{flops}\n{memory}, {call}, shares of {len(device.reached)} ops"


def _measure(world: World, axis: str, sizes: Sequence[int], repeat: int) -> MeasuredLink:
    ranks = world.placement.hierarchy[world.placement.axis(axis)]
    counts = [max(nbytes // (ITEM * ranks * ranks), 1) * ranks * ranks for nbytes in sizes]
    cases = [(kind, count) for kind in COLLECTIVES for count in counts]
    times = torch.tensor([_seconds(world, kind, axis, count, repeat) for kind, count in cases], dtype=torch.float64)
    times = times.to(world.device)
    for name in world.placement.names:  # the slowest rank's
        world.begin("all_reduce", [times], [times], name, "max").wait()
    samples = [
        Sample(kind, messages(kind, ranks), wire_bytes(kind, count * ITEM, ranks), seconds)
        for (kind, count), seconds in zip(cases, times.tolist(), strict=True)
    ]
    return MeasuredLink(axis, ranks, fit(samples, axis), samples)


def _seconds(world: World, kind: str, axis: str, count: int, repeat: int) -> float:
    """Seconds of one collective over ``count`` numbers in all, all ranks beginning together."""
    start = _starter(world, kind, axis, count)
    start().wait()  # connections and buffers come to life
    calls = max(1, min(8, (1 << 18) // count))  # several of the short ones, one after the other
    seconds = []
    for _ in range(repeat):
        meet(world)
        began = time.perf_counter()
        for _ in range(calls):
            start().wait()
        synchronize(world.device)
        seconds.append((time.perf_counter() - began) / calls)
    return median(seconds)


def _starter(world: World, kind: str, axis: str, count: int) -> Callable[[], Handle]:
    """The function that begins a collective of ``count`` elements in all."""
    ranks, collective = world.placement.hierarchy[world.placement.axis(axis)], COLLECTIVES[kind]
    line = count // collective.whole(ranks)

    def new(lines: Lines) -> list[Tensor]:
        return [torch.zeros(line * (lines[1] - lines[0]), device=world.device)]

    received = new(collective.received(ranks))
    sent = received if collective.is_in_place else new(collective.sent(0, ranks))
    return lambda: world.begin(kind, received, sent, axis)


def meet(world: World) -> None:
    """Wait until every rank has come here."""
    token = torch.zeros(1, device=world.device)
    for name in world.placement.names:
        world.begin("all_reduce", [token], [token], name).wait()
    synchronize(world.device)
