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
    """Where a queue stands still.  head: the first item that does not run; needed: the item that it waits for."""

    head: Item
    needed: Item


def run_queues(
    queues: Mapping[Queue, Sequence[Item]], needs: Callable[[Item], Iterable[Item]], peer_of: Mapping[Item, Item]
) -> dict[Queue, Stop[Item]]:
    """Run each queue from its head on; returns where those stand still that do not run to their ends.

    needs: the items that must have run before one.  peer_of: the item with which one runs, when both are heads.  What
    can run still can when others have run, so the result does not depend on the order in which they do.
    """
    left = {queue: deque(items) for queue, items in queues.items()}
    queue_of = {item: queue for queue, items in queues.items() for item in items}
    done: set[Item] = set()
    waiting: dict[Item, list[Queue]] = defaultdict(list)

    def absent(item: Item) -> Item | None:
        return next((needed for needed in needs(item) if needed not in done), None)

    def find_needed(head: Item) -> Item | None:
        needed, peer = absent(head), peer_of.get(head)
        if needed is not None or peer is None:
            return needed
        return None if left[queue_of[peer]][0] == peer and absent(peer) is None else peer

    work = deque(left)
    while work:
        queue = work.popleft()
        while left[queue]:
            head = left[queue][0]
            needed = find_needed(head)
            if needed is not None:
                waiting[needed].append(queue)
                break
            for item in (head, peer_of[head]) if head in peer_of else (head,):
                done.add(item)
                behind = left[queue_of[item]]
                behind.popleft()
                work.extend((queue_of[item], *waiting.pop(item, ())))
                if behind and behind[0] in peer_of:
                    work.append(queue_of[peer_of[behind[0]]])
    heads = {queue: items[0] for queue, items in left.items() if items}
    return {queue: Stop(head, needed) for queue, head in heads.items() if (needed := find_needed(head)) is not None}
