"""Queues of items that wait for items of other queues: run until nothing moves."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Queue = TypeVar("Queue", bound=Hashable)


@dataclass(frozen=True)
class Stop(Generic[Item]):
    """A queue that has stopped.  head: the first item that does not run; needed: the item that it waits for."""

    head: Item
    needed: Item


def run_queues(
    queues: Mapping[Queue, Sequence[Item]],
    needs: Callable[[Item], Iterable[Item]],
    peers_of: Mapping[Item, Sequence[Item]],
) -> dict[Queue, Stop[Item]]:
    """Run each queue from its head on; returns where those stand still that do not run to their ends.

    needs: the items that must have run before one.  peers_of: the items with which one runs, when all of them are
    heads.  What can run still can when others have run, so the result does not depend on the order in which they do.
    """
    left = {queue: deque(items) for queue, items in queues.items()}
    queue_of = {item: queue for queue, items in queues.items() for item in items}
    done: set[Item] = set()
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
            for item in (head, *peers_of.get(head, ())):
                done.add(item)
                behind = left[queue_of[item]]
                behind.popleft()
                work.extend((queue_of[item], *waiting.pop(item, ())))
                if behind:
                    work.extend(queue_of[peer] for peer in peers_of.get(behind[0], ()))
    heads = {queue: items[0] for queue, items in left.items() if items}
    return {queue: Stop(head, needed) for queue, head in heads.items() if (needed := find_needed(head)) is not None}
