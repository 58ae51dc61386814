"""Begin and end of each line of a program, on every rank that lives in this process.

A ``EventRecorder`` notes the time at every line and makes events of that after the run.  On a device that works
asynchronously it notes events in the device's queue, which are as late as the kernels before them.

Besides the ops, a rank's stream of compute has what the executor does around collectives: "pack" and "unpack" (copies
into and out of buffers), "launch" and "await" (beginning a collective, and waiting for it), "write back" (new states).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.transfer import Transfer, awaited, transfer_of
from graphzero.plan.seconds import op_name
from graphzero.plan.timeline import COMPUTE, Event
from graphzero.runtime.execute.steps import Meter
from graphzero.runtime.world.accelerators import ACCELERATORS, synchronize
from graphzero.runtime.world.world import World
from graphzero.sbp.placement import PIPELINE

PACK, UNPACK, LAUNCH, AWAIT, WRITE_BACK = "pack", "unpack", "launch", "await", "write back"
ALL = -1  # in place of a local rank: they meet


class HostClock:
    """Seconds of ``time.perf_counter``."""

    read_time = staticmethod(time.perf_counter)

    def seconds(self, noted: Sequence[Any]) -> list[float]:
        return list(noted)


class DeviceClock:
    """Times at which a device's queue reaches each mark."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self._make: Callable[[], Any] = lambda: module.Event(enable_timing=True)
        self._wait = module.synchronize
        self._wait(device)
        self._device, self._began, self._first = device, time.perf_counter(), self.read_time()

    def read_time(self) -> Any:
        event = self._make()
        event.record()
        return event

    def seconds(self, noted: Sequence[Any]) -> list[float]:
        self._wait(self._device)
        return [self._began + self._first.elapsed_time(event) / 1e3 for event in noted]


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """The clock that tells when work on a device begins."""
    kind = ACCELERATORS.get(device.type)
    return HostClock() if kind is None else DeviceClock(device, kind.module)


class EventRecorder(Meter):
    """Given to an executor as its ``meter``; ``events`` has what it has seen, one list per local rank."""

    def __init__(self, graph: StepGraph, world: World, clock: HostClock | DeviceClock | None = None) -> None:
        """clock: that of other recorders of the same run."""
        if clock is None:
            synchronize(world.device)
        self._world, self._clock = world, clock or clock_of(world.device)
        self._sent_until: int | None = None  # of the world's trace; None for its end
        self._nodes = {node.name: node for node in graph.nodes}
        self._local, self._node = 0, ""
        self._marks: list[tuple[int, str, Any]] = []  # local rank, what begins there, when
        self._met: list[tuple[int, int]] = []  # number of a mark where ranks meet, collectives begun before it

    # ---- what the executor calls

    def watches(self, local: int) -> bool:
        """Return True: every local rank is recorded."""
        self._local, self._node = local, ""
        return True

    def enter(self, node: str, kind: str) -> None:
        """Attribute the time since the last call to the node entered then; several lines of a node are one event."""
        if node != self._node or not node:
            self._node = node
            self._marks.append((self._local, node, self._clock.read_time()))

    def meet(self, node: fx.Node) -> None:
        """The ranks meet at ``node``."""
        self._node = ""
        self._met.append((len(self._marks), len(self._world.trace or ())))
        self._marks.append((ALL, node.name, self._clock.read_time()))

    def end(self) -> None:
        """Take what others send from now on for theirs."""
        self._sent_until = len(self._world.trace or ())

    # ---- what came of it

    @property
    def has_run(self) -> bool:
        """Whether an event has been recorded."""
        return bool(self._marks)

    def events(self) -> tuple[tuple[float, float], list[list[Event]]]:
        """Begin and end of the program; and the events of each local rank, in order of their beginning."""
        times = self._clock.seconds([noted for _, _, noted in self._marks])
        sent = self._sent()
        tracks = [_Track() for _ in self._world.local_ranks]
        for i, (local, name, _) in enumerate(self._marks[:-1]):
            node = self._nodes.get(name)
            if node is None:
                continue
            for track in tracks if local == ALL else tracks[local : local + 1]:
                track.add(node, times[i], times[i + 1], sent.get(i))
        return (times[0], times[-1]), [sorted(track.events, key=lambda event: event.begin) for track in tracks]

    def _sent(self) -> dict[int, float]:
        """Number of a mark where ranks meet -> the bytes that a rank began to send there."""
        sent = (self._world.trace or [])[: self._sent_until]
        begun = [*(count for _, count in self._met), len(sent)]
        return {
            mark: sum(one.nbytes for one in sent[first:after] if one.axis != PIPELINE)  # sent between parts
            for (mark, first), after in zip(self._met, begun[1:], strict=True)
        }


class _Track:
    """Events of one rank. A mark where ranks synchronize has a number of bytes, others have None."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._under_way: dict[str, tuple[float, float]] = {}  # launch -> when it began, bytes

    def add(self, node: fx.Node, begin: float, end: float, nbytes: float | None) -> None:
        moves, over = transfer_of(node), awaited(node)
        if moves is None and over is None:
            kind = WRITE_BACK if node.target is ops.assign or node.op == "output" else op_name(node.target)
            self._note(node, COMPUTE, kind, begin, end)
        elif nbytes is None:
            self._note(node, COMPUTE, UNPACK if moves is None or self._is_over(node, moves) else PACK, begin, end)
        elif moves is not None and moves.is_launch:
            self._under_way[node.name] = begin, nbytes  # ranks may meet there before: the last time counts
            self._note(node, COMPUTE, LAUNCH, begin, end)
        else:
            transfer = over or moves
            assert transfer is not None
            began, sent = self._under_way.pop(transfer.node.name, (begin, nbytes))
            self._note(node, COMPUTE, AWAIT, begin, end)
            self._note(transfer.node, f"communication {transfer.axis}", transfer.kind, began, end, sent)

    def _is_over(self, node: fx.Node, moves: Transfer) -> bool:
        """Return whether the lines of a transfer that is not launched are those after it."""
        last = self.events[-1] if self.events else None
        return not moves.is_launch and last is not None and last.name == node.name and last.stream != COMPUTE

    def _note(self, node: fx.Node, stream: str, kind: str, begin: float, end: float, nbytes: float = 0.0) -> None:
        self.events.append(Event(node.name, stream, kind, value.phase_of(node), begin, end, nbytes, flops=0.0))
