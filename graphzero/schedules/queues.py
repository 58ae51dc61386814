"""Queues of items that wait for items of other queues: run until nothing moves, and the circle if some stand still."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Queue = TypeVar("Queue", bound=Hashable)


@dataclass(frozen=True)
class Stop(Generic[Item]):
    """A queue that has stopped.  head: the first item that does not run; needed: the item that it waits for."""

    head: Item
    needed: Item


@dataclass(frozen=True)
class QueueRun(Generic[Queue, Item]):
    """Queues that have run.  order: of the items.  stops: where those stand still that do not run to their ends."""

    order: list[Item]
    stops: dict[Queue, Stop[Item]]


def run_queues(
    queues: Mapping[Queue, Sequence[Item]],
    needs: Callable[[Item], Iterable[Item]],
    peers_of: Mapping[Item, Sequence[Item]] = MappingProxyType({}),
) -> QueueRun[Queue, Item]:
    """Run each queue from its head on.

    needs: the items that must have run before one.  peers_of: the items with which one runs, when all of them are
    heads.  What can run still can when others have run, so where queues stop does not depend on the order of items.
    """
    left = {queue: deque(items) for queue, items in queues.items()}
    queue_of = {item: queue for queue, items in queues.items() for item in items}
    done: dict[Item, None] = {}
    waiting: dict[Item, list[Queue]] = defaultdict(list)

    def absent(item: Item) -> Item | None:
        return next((needed for needed in needs(item) if needed not in done), None)

    def find_needed(head: Item) -> Item | None:
        needed = absent(head)
        if needed is not None:
            return needed
        ready = (left[queue_of[peer]][0] == peer and absent(peer) is None for peer in peers_of.get(head, ()))
        return next((peer for peer, is_ready in zip(peers_of.get(head, ()), ready, strict=True) if not is_ready), None)

    work = deque(left)
    while work:
        queue = work.popleft()
        while left[queue]:
            head = left[queue][0]
            needed = find_needed(head)
            if needed is not None:
                waiting[needed].append(queue)
                break
            peers = peers_of.get(head, ())
            work.extend(map(queue_of.__getitem__, peers))
            for item in (head, *peers):
                done[item] = None
                after = left[queue_of[item]]
                after.popleft()
                work.extend(waiting.pop(item, ()))
                if after:
                    work.extend(queue_of[peer] for peer in peers_of.get(after[0], ()))
    heads = {queue: items[0] for queue, items in left.items() if items}
    stops = {queue: Stop(head, needed) for queue, head in heads.items() if (needed := find_needed(head)) is not None}
    return QueueRun(list(done), stops)


def describe_circle(
    stops: Mapping[Queue, Stop[Item]], queue_of: Callable[[Item], Queue], format_item: Callable[[Item], str]
) -> tuple[Item, str]:
    """One circle of queues that stand still, each head waiting for what is after the next head: the first head, and
    for what it waits, and that for what, back to it."""
    queue, path = next(iter(stops)), []
    while queue not in path:
        path.append(queue)
        queue = queue_of(stops[queue].needed)
    circle = path[path.index(queue) :]
    links = []
    for stop in map(stops.__getitem__, circle):
        head = stops[queue_of(stop.needed)].head
        link = f"needs {format_item(stop.needed)}"
        if stop.needed == stop.head:
            link += ", which is this cell itself"
        elif head == stop.head:
            link += ", which comes after it"
        elif head != stop.needed:
            link += f", which comes after {format_item(head)}"
        links.append(link)
    return stops[circle[0]].head, ", which ".join(links)
