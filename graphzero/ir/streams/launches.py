"""The transfers that each rank launches on its communicators in a step, in order, and the law of that order.

NCCL does not promise that two communicators of a rank go on independently.  So what a rank launches is taken as one
queue, in which a collective waits until it is at the head of the queues of all its ranks.  Ranks may differ in what
they compute, and not in what they send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product, zip_longest
from math import prod
from typing import NamedTuple

from torch import fx

from graphzero.errors import VerifyError
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.text.printer import print_line
from graphzero.ir.transfer_layout import TransferLayout, count_runs, local_shape
from graphzero.schedules.queues import run_queues


class RankLaunch(NamedTuple):
    """One collective on one rank.

    kind: of ``sbp.collectives``.  ranks: of its communicator.  sent, received: elements.  node: what begins it.
    """

    kind: str
    ranks: tuple[int, ...]
    sent: int
    received: int
    node: fx.Node

    def __str__(self) -> str:
        return f"{self.kind} among ranks {[*self.ranks]}, {self.sent:,} to {self.received:,} elements"


def list_rank_launches(graph: StepGraph, rank: int) -> list[RankLaunch]:
    """List a rank's launches in a step of a final program; a transfer of several runs of elements is one for each."""
    at = liveness(graph)
    begun = (at.layouts[at.nodes[i]] for i in at.turns if at.nodes[i] in at.transfers)
    return [launch for layout in begun for launch in _launches_of(graph, layout, rank)]


def _launches_of(graph: StepGraph, layout: TransferLayout, rank: int) -> Iterator[RankLaunch]:
    moves, place = layout.moves, graph.placement
    ranks = place.line(rank, place.axis(moves.axis))
    if len(ranks) == 1:
        return
    received, times = layout.received.stop - layout.received.start, 1
    own = layout.sent(ranks.index(rank))
    sent = own.stop - own.start
    if moves.is_direct:
        shape = local_shape(graph, moves.members[0], rank)
        if moves.is_in_place:
            sent = received = prod(shape)
        else:
            times = count_runs(shape, moves.dims[0], layout.sections[0]) or 1
            received = layout.arrived_elements // times
            sent = received // len(ranks) if moves.collective.gathers else prod(shape) // times
    if sent or received:
        yield from [RankLaunch(moves.kind, ranks, sent, received, moves.node)] * times


def check_program_launches(graph: StepGraph, where: str) -> None:
    """``check_rank_launches`` of the ranks at the corners of the placement, whose pieces differ most."""
    corners = product(*({0, size - 1} for size in graph.placement.hierarchy))
    ranks = sorted({int(graph.placement.ranks[corner]) for corner in corners})
    lists = {rank: list_rank_launches(graph, rank) for rank in ranks}
    first, *others = ([launch._replace(ranks=()) for launch in launches] for launches in lists.values())
    if any(other != first for other in others):
        check_rank_launches(lists, where)


def check_rank_launches(lists: Mapping[int, Sequence[RankLaunch]], where: str = "") -> None:
    """Raise VerifyError unless what ranks launch comes to its end, each list one queue, and fits on both sides.

    lists: by rank; ranks of a communicator that have none are taken to launch as the others do.
    """
    by_communicator: defaultdict[tuple[int, ...], dict[int, list[int]]] = defaultdict(dict)
    for rank, launches in lists.items():
        for number, launch in enumerate(launches):
            by_communicator[launch.ranks].setdefault(rank, []).append(number)
    peers: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
    for ranks, numbers in by_communicator.items():
        members = [rank for rank in ranks if rank in lists]
        for i, row in enumerate(zip_longest(*(numbers.get(rank, ()) for rank in members))):
            group = [(rank, number) for rank, number in zip(members, row, strict=True) if number is not None]
            _check_group(lists, members, group, i, where)
            peers.update({item: tuple(other for other in group if other != item) for item in group})
    queues = {rank: [(rank, number) for number in range(len(launches))] for rank, launches in lists.items()}
    for rank, stop in run_queues(queues, lambda item: (), peers).stops.items():
        head, needed = lists[rank][stop.head[1]], stop.needed
        raise VerifyError(
            f"{where}the step does not end: rank {rank} waits in {head} for rank {needed[0]}, which has launched "
            f"something else before it\n\n{_line(head)}\n\n  Launch collectives in one order on all ranks"
        )


def _check_group(
    lists: Mapping[int, Sequence[RankLaunch]], members: Sequence[int], group: Sequence[tuple[int, int]], i: int,
    where: str,
) -> None:  # fmt: skip
    """Check that all ranks of a communicator launch the same as its number ``i``."""
    first = lists[group[0][0]][group[0][1]]
    missing = [rank for rank in members if rank not in dict(group)]
    if missing:
        problem = f"rank {group[0][0]} launches {first}, which rank {missing[0]} does not"
        raise VerifyError(f"{where}{problem}\n\n{_line(first)}\n\n  Launch it on all ranks of the axis, or on none")
    for rank, number in group[1:]:
        other = lists[rank][number]
        if other[:4] != first[:4]:
            problem = f"number {i} of rank {group[0][0]} is {first}, and of rank {rank} {other}"
            raise VerifyError(f"{where}{problem}\n\n{_line(first)}\n{_line(other)}\n\n  Send the same on all ranks")


def _line(launch: RankLaunch) -> str:
    return f"  > {print_line(launch.node)[:150]}"
