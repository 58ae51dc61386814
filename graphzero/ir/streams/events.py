"""Events of the streams of a device: kernels with the storages that they access, records, and waits.

What each instruction does to the streams of a GPU, whatever carries a transfer:

    CALL, PACK, UNPACK   a kernel of the stream that computes
    BEGIN                record the stream that computes; the transfer's stream waits for that, runs it, and records
    AWAIT                the stream that computes waits for that record
    EMPTY                where it empties the last place of a storage: the allocator may give the memory to what the
                         stream that computes runs next, so this is a write to it

A transfer's stream is that of its axis: along an axis ranks have one communicator, and of NCCL each has a stream.
``ProcessWorld`` begins a collective in this way, and ``wait`` of its handle makes the stream wait, not the process.
Copies between host memory and the device have a stream for each direction (``HostCopies``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import fx

from graphzero.ir import ops
from graphzero.ir.aliases import is_read_only_view
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.storage.roots import Storage, read_by, written_by
from graphzero.ir.streams.instructions import Instruction, InstructionKind, InstructionList, begun_by
from graphzero.ir.streams.places import Places

COMPUTE, TO_DEVICE, TO_HOST = "compute", "to device", "to host"
SLOT, BUFFER = "slot", "buffer"
Region = Storage | tuple[str, int | str]  # memory: a value's, that of a slot by its number, or of a transfer's buffer
_HOST_STREAMS: Mapping[Any, str] = {ops.to_device_launch: TO_DEVICE, ops.to_host_launch: TO_HOST}


class StreamKernel(NamedTuple):
    """Work of one stream.  node: what it is of; does: "begin", or what else an instruction does."""

    stream: str
    node: fx.Node
    does: str
    reads: frozenset[Region]
    writes: frozenset[Region]

    def __str__(self) -> str:
        return f"'{self.node.name}' ({self.does}, stream {self.stream})"


class EventRecord(NamedTuple):
    """An event takes note of all that a stream has been given so far."""

    event: int
    stream: str


class EventWait(NamedTuple):
    """A stream's wait for an event: work issued from here on runs after all that the event has recorded."""

    event: int
    stream: str


StreamEvent = StreamKernel | EventRecord | EventWait


def begun_events(kernel: StreamKernel, first: int) -> Iterator[StreamEvent]:
    """The events of a transfer: its stream waits for what has been computed, event ``first``, and records the next."""
    yield EventRecord(first, COMPUTE)
    yield EventWait(first, kernel.stream)
    yield kernel
    yield EventRecord(first + 1, kernel.stream)


class StreamEvents:
    """The events of a step, in the order in which a process issues them; of what no transfer touches there are none.

    Micro-batches run twice, however many there are: what one may do to the next shows there, and what it does to a
    later one is ordered by that.  At the end all memory that transfers touch is the next step's.
    """

    def __init__(self, graph: StepGraph) -> None:
        at = liveness(graph)
        self.graph, self.roots, self.transfers = graph, at.roots, at.transfers
        self.places = Places(graph)
        self.instructions = InstructionList(graph, self.places)
        begun = [one.node for one in self.instructions.all if one.kind is InstructionKind.BEGIN]
        self.touched = frozenset(region for node in begun for region in self._carried(node))
        self._freed = self._find_freed()
        self._ended: dict[fx.Node, int] = {}  # transfer -> the event recorded after it
        self._count = 0

    def all(self) -> list[StreamEvent]:
        """Every event."""
        issued, repeated = self.instructions.all, self.instructions.repeated
        events = list(self._events_of(range(repeated.start)))
        for _ in range(min(self.instructions.times, 2) if repeated else 0):
            events += self._events_of(repeated)
        events += self._events_of(range(repeated.stop, len(issued)))
        return [*events, StreamKernel(COMPUTE, self.graph.output, "end", frozenset(), self.touched)]

    def _events_of(self, numbers: Iterable[int]) -> Iterator[StreamEvent]:
        for number in numbers:
            one = self.instructions.all[number]
            if one.kind is InstructionKind.BEGIN:
                yield from self._begin(one.node)
            elif one.kind is InstructionKind.AWAIT:
                yield EventWait(self._ended[begun_by(one.node)], COMPUTE)
            elif one.kind is not InstructionKind.EMPTY:
                reads, writes = (frozenset(some) & self.touched for some in self._accesses(one))
                if reads or writes:
                    yield StreamKernel(COMPUTE, one.node, one.kind.value, reads, writes)
            elif number in self._freed:
                yield StreamKernel(COMPUTE, one.node, "free", frozenset(), self._freed[number])

    def _begin(self, node: fx.Node) -> Iterator[StreamEvent]:
        first = self._count
        self._count += 2
        self._ended[node] = first + 1
        stream = _HOST_STREAMS[node.target] if node.target in _HOST_STREAMS else self.transfers[node].axis
        read = self._results(node.args[-1]) if node.target in _HOST_STREAMS else ()  # type: ignore[arg-type]
        new = frozenset(storage for storage in self._results(node) if storage[0] is node)
        if node.target in _HOST_STREAMS and new:  # its memory may have been that of something computed before
            yield StreamKernel(COMPUTE, node, "allocate", frozenset(), new)
        written = frozenset(self._carried(node)) - frozenset(read)
        yield from begun_events(StreamKernel(stream, node, "begin", frozenset(read), written), first)

    # ---- what is accessed

    def _carried(self, node: fx.Node) -> Iterator[Region]:
        """The memory that a transfer or a copy sends from and receives in."""
        moves = self.transfers.get(node)
        if moves is None:
            yield from (*self._results(node), *self._results(node.args[-1]))  # type: ignore[arg-type]
        elif not moves.is_launch:
            yield BUFFER, node.name
        elif moves.slot is not None:
            yield SLOT, moves.slot
        else:
            yield from self._results(node)
            if moves.spends_operand:
                yield from self._results(moves.members[0])

    def _accesses(self, one: Instruction) -> tuple[Iterable[Region], Iterable[Region]]:
        """The reads and writes of an instruction of the compute stream."""
        node = one.node
        reads: set[Region] = {storage for _, storage in read_by(node, self.roots) if storage is not None}
        if one.kind is InstructionKind.CALL:
            is_shown = node.target is operator.getitem or is_read_only_view(node.target)
            return reads, {*(() if is_shown else self._results(node)), *written_by(node, self.roots)}
        moves = self.transfers[begun_by(node)]
        carried = {*self._carried(moves.node)}
        if one.kind is InstructionKind.PACK:
            return reads, carried - reads
        if moves.is_direct:
            return (), written_by(moves.node, self.roots)
        return carried, {*self._results(node)}

    def _results(self, node: fx.Node) -> list[Storage]:
        return [storage for storage in self.roots.get(node, ()) if storage is not None]

    # ---- what is given back

    def _find_freed(self) -> dict[int, frozenset[Region]]:
        """Number of an instruction -> the memory that transfers touch and of which it empties the last place."""
        emptied = {one.place: i for i, one in enumerate(self.instructions.all) if one.kind is InstructionKind.EMPTY}
        last: dict[Region, float] = {}
        for region, place in self._places_of_regions():
            if region in self.touched:
                last[region] = max(last.get(region, -1), emptied.get(place, float("inf")))
        freed: dict[int, set[Region]] = {}
        for region, number in last.items():
            if number != float("inf"):
                freed.setdefault(int(number), set()).add(region)
        return {number: frozenset(regions) for number, regions in freed.items()}

    def _places_of_regions(self) -> Iterator[tuple[Region, int]]:
        """Each memory with each place that keeps it; a transfer without a slot keeps what it sends from."""
        for node, place in self.places.of.items():
            for region, own in zip(self.roots[node], self.places.results.get(node, ()), strict=False):
                if region is not None:
                    yield region, own
            if node not in self.places.results:
                yield from ((region, place) for region in self._results(node))
            if (moves := self.transfers.get(node)) is not None and moves.is_direct:
                yield from ((region, place) for region in self._carried(node))
        yield from (((BUFFER, node.name), place) for node, place in self.places.buffers.items())
