"""The times at which ops of a step run, by a device's numbers.

The program is walked in its order, as the executor does.  Ops queue up on one compute stream, transfers on one stream
for each placement axis, copies between a GPU and host memory on one for each direction; a CPU makes these itself.  What
is launched runs in parallel with compute until it is awaited; what is not launched is awaited at once.  A micro-batch's
body is walked as often as it runs.  All ranks are taken to be alike and to come to a transfer together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import Liveness, liveness
from graphzero.plan.device import Device
from graphzero.plan.seconds import OpWork, op_name, packing, work_of

COMPUTE = "compute"
TO_DEVICE, TO_HOST = "copies to device", "copies to host"  # streams


class Event(NamedTuple):
    """One op while it runs.

    name: of the value that it makes, of the launch for a transfer.  stream: "compute", "communication AXIS",
    "copies to device" or "copies to host".
    kind: the op (mm), or the collective (all_gather).  phase: forward, backward or update.
    begin, end: seconds from the beginning of the step.  nbytes: read and written, or sent.  flops: operations.
    """

    name: str
    stream: str
    kind: str
    phase: str
    begin: float
    end: float
    nbytes: float
    flops: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """Of one step on one rank.

    events: in the order in which they begin on each stream.  seconds: of the whole step.
    compute: seconds of ops.  communication: seconds of transfers, one after the other.
    exposed: seconds in which no op runs because it waits for a transfer.  host: because it has not been started yet,
    or all is about what is around the ops.  idle: because other ranks of a pipeline are not yet done.
    host_copies: seconds of copies between device and host memory, one after the other; host_copies_exposed: seconds of
    ``exposed`` in which no op runs because it waits for one of them.
    The step is compute, exposed, host and idle.
    """

    events: tuple[Event, ...]
    seconds: float
    compute: float
    communication: float
    exposed: float
    host: float = 0.0
    idle: float = 0.0
    host_copies: float = 0.0
    host_copies_exposed: float = 0.0

    def by_phase(self) -> dict[str, float]:
        """Seconds of ops in each phase."""
        seconds: dict[str, float] = {}
        for event in self.events:
            if event.stream == COMPUTE:
                seconds[event.phase] = seconds.get(event.phase, 0.0) + event.seconds
        return seconds


class _Step(NamedTuple):
    """The work at one node: ops, then a transfer that begins, then one that is awaited, then ops again."""

    node: fx.Node
    work: tuple[tuple[OpWork, float], ...] = ()
    begins: tuple[str, str, float, float] | None = None  # stream, kind, seconds, bytes sent
    awaits: fx.Node | None = None  # the node that began it
    after: tuple[tuple[OpWork, float], ...] = ()


def timeline(graph: StepGraph, device: Device) -> Timeline:
    """The timeline of a final program.  Raises ConfigError where the device says nothing of a link that is needed."""
    at, clock = liveness(graph), _Clock(device)
    steps = [_step(at, node, device) for node in at.nodes]
    for step in (steps[i] for i in at.turns):
        if step is not None:
            clock.advance(step)
    return clock.timeline()


def _step(at: Liveness, node: fx.Node, device: Device) -> _Step | None:
    """The work at a node; None if there is none."""
    layout = at.layouts.get(node)
    if layout is not None:
        moves = layout.moves
        seconds = device.link(at.graph.placement, moves.axis).seconds(moves.kind, layout.wire_bytes, layout.ranks)
        into, out = packing(layout) or (None, None)
        begins = f"communication {moves.axis}", moves.kind, seconds, layout.wire_bytes
        later = None if moves.is_launch else node
        return _Step(node, _timed(into, device), begins, later, () if moves.is_launch else _timed(out, device))
    if node.target is ops.wait:
        begun = node.all_input_nodes[0]
        _, out = packing(at.layouts[begun]) or (None, None)
        return _Step(node, awaits=begun, after=_timed(out, device))
    if device.type != "cpu" and node.target in ops.HOST_COPIES:
        return _host_copy(at, node, device)
    work = work_of(at, node)
    return _Step(node, _timed(work, device)) if work is not None else None


def _host_copy(at: Liveness, node: fx.Node, device: Device) -> _Step:
    """A copy between device and host memory begins, or is awaited."""
    if node.target in ops.HOST_WAITS:
        return _Step(node, awaits=value.operand(node))
    nbytes, stream = at.nbytes_of(node), TO_HOST if node.target is ops.to_host_launch else TO_DEVICE
    return _Step(node, begins=(stream, op_name(node.target), device.host_copy_seconds(nbytes), nbytes))


def _timed(work: OpWork | None, device: Device) -> tuple[tuple[OpWork, float], ...]:
    return ((work, device.seconds(*work)),) if work is not None else ()


class _Clock:
    """Seconds at which the host, the compute stream and the streams of axes are done with what they have been given."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = self._compute = 0.0
        self._streams: dict[str, float] = {}  # besides that of compute
        self._begun: dict[fx.Node, tuple[str, str, float, float] | float] = {}  # not made yet, or when it is over
        self._events: list[Event] = []
        self._exposed = self._copies_exposed = self._waited = 0.0

    def advance(self, step: _Step) -> None:
        for work, seconds in step.work:
            self._op(step.node, work, seconds)
        if step.begins is not None:
            self._begin(step.node, step.begins)
        if step.awaits is not None:
            self._await(step.awaits)
        for work, seconds in step.after:
            self._op(step.node, work, seconds)

    def timeline(self) -> Timeline:
        """Of what has run."""
        compute = sum(event.seconds for event in self._events if event.stream == COMPUTE)
        copies = sum(event.seconds for event in self._events if event.stream in (TO_DEVICE, TO_HOST))
        communication = sum(event.seconds for event in self._events) - compute - copies
        rest = max([self._compute, *self._streams.values()]) - self._compute  # under way when the last op is done
        around = self._device.step
        return Timeline(
            tuple(self._events),
            self._compute + rest + around,
            compute,
            communication,
            self._exposed + rest,
            self._waited + around,
            host_copies=copies,
            host_copies_exposed=self._copies_exposed,
        )

    def _op(self, node: fx.Node, work: OpWork, seconds: float) -> None:
        begin = self._started()
        if not self._device.runs_ahead:
            seconds += self._device.call
        self._compute = begin + seconds
        phase = value.phase_of(node)
        self._events.append(Event(node.name, COMPUTE, work.op, phase, begin, self._compute, work.nbytes, work.flops))

    def _started(self) -> float:
        """The time at which the next op may run: the host has started it, and the one before it is done."""
        if self._device.runs_ahead:
            self._host += self._device.call
            self._waited += max(self._host - self._compute, 0.0)
            self._compute = max(self._compute, self._host)
        return self._compute

    def _begin(self, node: fx.Node, what: tuple[str, str, float, float]) -> None:
        if self._device.overlaps:
            self._begun[node] = self._moved(node, what, max(self._started(), self._streams.get(what[0], 0.0)))
        else:
            self._begun[node] = what

    def _moved(self, node: fx.Node, what: tuple[str, str, float, float], begin: float) -> float:
        stream, kind, seconds, sent = what
        self._streams[stream] = end = begin + seconds
        self._events.append(Event(node.name, stream, kind, value.phase_of(node), begin, end, sent, 0.0))
        return end

    def _await(self, node: fx.Node) -> None:
        begun = self._begun.pop(node)
        end = begun if isinstance(begun, float) else self._moved(node, begun, self._compute)
        waited = max(end - self._compute, 0.0)
        self._exposed += waited
        self._copies_exposed += waited if node.target in ops.HOST_LAUNCHES else 0.0
        self._compute = max(self._compute, end)
