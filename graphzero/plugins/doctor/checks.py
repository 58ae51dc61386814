"""Checks of the ranks of a placement, each next to the same on virtual ranks of this process.

Every rank runs all of them, in one order, and gets the findings of all.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphzero.errors import GraphZeroError
from graphzero.graph import Graph
from graphzero.ir.streams.launches import list_rank_launches
from graphzero.plugins.calibrate.command import meet
from graphzero.plugins.check.compare import difference
from graphzero.plugins.doctor.flight_recorder import compare_launches, last_record, list_recorded, read_recorder
from graphzero.runtime.tensors.shards import piece
from graphzero.runtime.world.accelerators import ACCELERATORS, synchronize
from graphzero.runtime.world.process import ProcessWorld
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.runtime.world.world import World
from graphzero.sbp.collectives import COLLECTIVES, Lines
from graphzero.sbp.link_costs import Link
from graphzero.sbp.placement import Placement, placement
from graphzero.sbp.types import B, S
from graphzero.testing import trace_step

LINE = 12_289  # numbers of a line of a collective: no power of two, more than a message
TOLERANCE = 1e-5  # where sums are in another order: through NCCL, and on one rank
ROWS, WIDTH = 8, 24  # of the batch of a rank, of the small model
SLOWER = 3.0  # times a link may be slower than it was calibrated
ROUNDS, LATE = 10, 2e-3  # of equal work; seconds by which a rank counts as late


@dataclass(frozen=True)
class Finding:
    """One check.  about: what was checked; holds: whether it is as it should be; facts: what was seen, in words."""

    about: str
    holds: bool
    facts: str


def check_ranks(place: Placement) -> Iterator[Finding]:
    """Every collective along each axis of several ranks, then steps of a small model at each ZeRO stage."""
    for name, ranks in zip(place.names, place.hierarchy, strict=True):
        for kind in COLLECTIVES if ranks > 1 and not place.virtual else ():
            yield _on_all_ranks(f"{kind} along {name}", partial(_check_collective, place, kind, name))
    for stage in range(4):
        yield _on_all_ranks(f"step at ZeRO stage {stage}", partial(_check_step, place, stage))


def check_versions(own: Mapping[str, str]) -> Finding:
    """Whether all ranks have the versions of this one; own: by what they are of."""
    everyone = _gather(own)
    apart = [
        f"rank {rank} has {what} {versions.get(what, 'missing')}, rank 0 {everyone[0].get(what, 'missing')}"
        for rank, versions in enumerate(everyone)
        for what in sorted({*versions, *everyone[0]})
        if versions.get(what) != everyone[0].get(what)
    ]
    return Finding("versions", not apart, "; ".join(apart) or f"equal on {len(everyone)} ranks")


def check_speed(axis: str, measured: Link, calibrated: Link) -> Finding:
    """Whether a link is about as fast as it was calibrated."""
    facts = f"{link_text(measured)}; calibrated were {link_text(calibrated)}"
    if measured.bandwidth * SLOWER >= calibrated.bandwidth:
        return Finding(f"speed along {axis}", True, facts)
    hint = "look for other work on these hosts, and at the network that the ranks use"
    return Finding(f"speed along {axis}", False, f"{facts}: {hint}")


def link_text(link: Link) -> str:
    return f"{link.bandwidth / 1e9:.2f} GB/s, {link.latency * 1e6:.0f} us"


def measure_pace(place: Placement) -> str:
    """Return a sentence on the rank that the others wait for when all do the same work."""
    world, waits = ProcessWorld(place), []
    meet(world)
    for _ in range(ROUNDS):
        do_work(world.device)
        began = time.perf_counter()
        meet(world)
        waits.append(time.perf_counter() - began)
    everyone = _gather(waits)  # the last one waits for no other
    late = min(range(len(everyone)), key=lambda rank: median(everyone[rank]))
    others = zip(*(one for rank, one in enumerate(everyone) if rank != late), strict=True)
    behind = sorted(median(round_) - own for round_, own in zip(others, everyone[late], strict=True))[1]
    if behind < LATE:
        return "ranks do equal work in about equal time"
    return f"rank {late} is {behind * 1e3:.0f} ms or more behind the others, which wait for it in each collective"


def do_work(device: torch.device) -> None:
    """A few milliseconds of work."""
    x = torch.ones(384, 384, device=device)
    for _ in range(4):
        x = x @ x / 384
    synchronize(device)


def _gather(own: Any) -> list[Any]:
    everyone = [own]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
    return everyone


def _on_all_ranks(about: str, examine: Callable[[], str]) -> Finding:
    """A check of all ranks.  examine: returns what it saw, and raises GraphZeroError where that is wrong."""
    try:
        seen = (True, examine())
    except (GraphZeroError, RuntimeError) as error:
        seen = (False, _first_sentence(str(error)) or type(error).__name__)
    failed = {rank: facts for rank, (holds, facts) in enumerate(_gather(seen)) if not holds}
    return Finding(about, not failed, "; ".join(f"rank {rank}: {facts}" for rank, facts in failed.items()) or seen[1])


def _first_sentence(text: str) -> str:
    """The first line of an error, and the next one where that only announces it."""
    lines = [*map(str.strip, text.strip().split("\n")), ""]
    return f"{lines[0]} {lines[1]}".strip() if lines[0].endswith(":") else lines[0]


def _check_collective(place: Placement, kind: str, axis: str) -> str:
    real, virtual = ProcessWorld(place), VirtualWorld(reference_of(place))
    (received,) = _run_collective(real, kind, axis)
    expected = _run_collective(virtual, kind, axis)[real.local_ranks[0]]
    return _compare("what arrives", received, expected, place)


def _run_collective(world: World, kind: str, axis: str) -> list[Tensor]:
    """Run a collective; return what ranks of this process receive.  What a rank sends depends on its number alone."""
    collective, ranks = COLLECTIVES[kind], world.placement.hierarchy[world.placement.axis(axis)]

    def numbers(rank: int, lines: Lines) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(LINE * (lines[1] - lines[0]), generator=generator).to(world.device)

    sent = [numbers(rank, collective.sent(0, ranks)) for rank in world.local_ranks]
    received = sent if collective.is_in_place else [numbers(0, collective.received(ranks)).zero_() for _ in sent]
    world.begin(kind, received, sent, axis).wait()
    return received


class SmallGraph(Graph):
    """A step of a small model, from the same weights on every placement."""

    def __init__(self, place: Placement, stage: int) -> None:
        super().__init__(place, name="doctor")
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 5))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.01), clip_grad_norm=1.0)
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


def _check_step(place: Placement, stage: int) -> str:
    """Two steps give the losses and parameters that they give elsewhere, by the collectives of the plan.

    Those of processes are compared with virtual ranks, those of virtual ranks with one rank.
    """
    graph, other = SmallGraph(place, stage), SmallGraph(reference_of(place), stage)
    generator, rows = torch.Generator().manual_seed(0), ROWS * place.size
    whole = torch.randn(rows, WIDTH, generator=generator), torch.randint(0, 5, (rows,), generator=generator)
    batch = [x.to(place.device_type) for x in whole]
    own = batch
    if not place.virtual:
        nd = tuple(S(0) if name in place.batch_axes else B for name in place.names)
        (position,) = ProcessWorld(place).local_ranks
        own = [piece(x, nd, place.hierarchy, position) for x in batch]
    losses = graph(*own), other(*batch)
    before = read_recorder()
    sent = Counter((one.kind, one.axis, one.nbytes) for one in trace_step(graph, *own))
    after = read_recorder()
    other(*batch)
    states = [one.full_state_dict()["modules"]["model"] for one in (graph, other)]
    # All ranks have done all that they do together by now, so one that raises keeps nobody waiting.
    planned = Counter((one.kind, one.axis, one.bytes) for one in graph.plan.collectives)
    if sent != planned:
        one = next(iter((sent - planned) + (planned - sent)))
        raise GraphZeroError(
            f"{one[0]} of {one[2]:,.0f} B along {one[1]} was sent {sent[one]} times, and planned {planned[one]} times"
        )
    launched = ""
    if before is not None and after is not None and last_record(after) >= 0:
        planned_launches = list_rank_launches(graph.program, dist.get_rank())
        launched = f"; {compare_launches(planned_launches, list_recorded(after, last_record(before)))}"
    _compare("the loss", *losses, place)
    seen, expected = (torch.cat([x.flatten() for x in state.values()]) for state in states)
    return f"{_compare('parameters', seen, expected, place)}; {sum(sent.values())} collectives as planned{launched}"


def _compare(what: str, seen: Tensor, expected: Tensor, place: Placement) -> str:
    reference = "one rank" if place.virtual else "virtual ranks"
    if torch.equal(seen, expected):
        return f"equal to {reference}, to the bit"
    apart = difference(seen, expected)
    rounds = place.virtual or place.device_type in ACCELERATORS
    if not rounds or not apart <= TOLERANCE:
        raise GraphZeroError(f"{what}: differs from {reference} by {apart:.1e}")
    return f"equal to {reference} within {apart:.0e}"


def reference_of(place: Placement) -> Placement:
    """The same ranks in this process; of virtual ranks, one."""
    if place.virtual:
        return placement(place.device_type, range(1), virtual=True)
    return placement(place.device_type, place.ranks, place.names, virtual=True)
