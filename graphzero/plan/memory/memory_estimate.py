"""Bytes that a program holds over time if some values of forward are computed again, or wait on the host: counted,
with no program made.

The estimate says where the copies that ``Recompute`` makes would be, how long each storage then lives, and the bytes
of it, in some milliseconds a try.  It counts by ``StorageSpans``, which leaves out what later passes add (buckets,
slots, transfers under way), so the plan of the program itself has the last word: see ``memory_fit``.

In a pipeline it is of one micro-batch on the stages of one rank, besides which others are in flight: what forward
leaves for backward is there for each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_stages import stages_of
from graphzero.ir.storage.liveness import Bytes, Liveness, bytes_held, liveness
from graphzero.ir.storage.storage_spans import Positions, StorageSpans, int_array
from graphzero.passes.memory.recompute import ForwardOps
from graphzero.passes.schedule.offload_activations import RoundTrip
from graphzero.plan.device import Device
from graphzero.plan.seconds import plain, seconds_of

Ops = frozenset[int]  # positions of ops of forward that run again, and numbers in ``waits`` of what goes to the host
Insertions = list[tuple[int, list[int]]]  # (op of backward, ops of forward that run again right before it), in order


@dataclass(frozen=True)
class EstimatedMemory:
    """Bytes over the positions of the program with its copies.

    total, activations: up to the end of backward, all, and of them what forward leaves for backward to read, or what is
    computed again for it.
    position: of each op, where it then is.  begins, ends: of each storage of the program as it was.
    first_late_read: of each storage, the first position at which backward or a copy reads it.
    recomputed: ops that run again, and what waits on the host.
    """

    total: Bytes
    activations: Bytes
    position: Positions
    begins: Positions
    ends: Positions
    first_late_read: Positions
    recomputed: Ops

    @property
    def most(self) -> tuple[int, int]:
        """The most bytes of all, and of activations, at any moment."""
        return int(self.total.max()), int(self.activations.max())


@dataclass(frozen=True)
class HostLink:
    """The link to the host: copies cost a step what of them takes longer than the compute of a phase.

    bandwidth: bytes a second in each direction.  begin: seconds that it takes to begin a copy.  forward, backward:
    seconds of these phases that hide copies.
    """

    bandwidth: float
    begin: float
    forward: float
    backward: float

    @classmethod
    def from_program(cls, at: Liveness, device: Device) -> HostLink:
        """The link of a device for a local program; a CPU copies itself, and hides nothing."""
        if device.type == "cpu":
            return cls(device.memory / 2, device.call, 0.0, 0.0)
        seconds = {"forward": 0.0, "backward": 0.0}
        for node in at.nodes:
            if (phase := value.phase_of(node)) in seconds and node.op == "call_function":
                seconds[phase] += seconds_of(at, node, device)
        return cls(device.host_link().bandwidth, device.call, **seconds)

    def seconds(self, sizes: Sequence[int]) -> float:
        """Seconds that a step takes longer if values of these bytes go and come back."""
        copying = sum(sizes) / self.bandwidth
        exposed = max(copying - self.forward, 0.0) + max(copying - self.backward, 0.0)
        return exposed + 2 * self.begin * len(sizes)


class MemoryEstimate:
    """Memory of a local graph whose backward reads what forward gathers, see ``merge_gathers``.

    in_flight: of each pipeline stage, the micro-batches that it keeps values of at a time; 1 where absent.
    names: of ops that may run again, by position.  seconds: what each costs.  maker: of each value of forward that may
    be made again, the op that makes it; else -1.  storages: numbers, by the value that lives in them.
    others: of each storage, the other micro-batches of which the same is held, if backward reads it.
    round_trips: of values that may wait on the host.  waits: storage and round trip of each, by a number that is no
    position.
    """

    def __init__(
        self, graph: StepGraph, in_flight: Mapping[int, int] | None = None, round_trips: Sequence[RoundTrip] = ()
    ):
        at, forward = liveness(graph), ForwardOps(graph)
        position = at.position
        self.spans = StorageSpans(graph)
        self.names = {position[maker]: maker.name for maker in forward.free}
        self.gathers: Ops = frozenset(position[maker] for maker in forward.gathers)
        device = plain(graph.placement.device_type)
        self.seconds = {i: seconds_of(at, at.nodes[i], device) for i in (*self.names, *self.gathers)}
        self.maker = [-1] * len(at.nodes)
        for node, maker in forward.maker.items():
            if position[maker] in self.seconds:
                self.maker[position[node]] = position[maker]
        self.reads = [[position[x] for x in node.all_input_nodes] for node in at.nodes]
        self._copied_together = [  # what is copied with a value: what it reads, and all results where there are several
            [*operands, *(position[user] for user in node.users if value.is_multi(node))]
            for node, operands in zip(at.nodes, self.reads, strict=True)
        ]
        self.is_activation = np.array([span.category == "activations" for span in self.spans.storages], dtype=bool)
        self.is_parameter = np.array([int(i) in self.gathers for i in self.spans.begin], dtype=bool)
        index = self.spans.index
        roots = [[s for s in at.roots.get(node, ()) if s is not None] for node in at.nodes]
        self.storages = [[index[s] for s in storages if s in index] for storages in roots]
        self.storages_by_op: dict[int, list[int]] = {}
        for k, i in enumerate(self.spans.begin.tolist()):
            self.storages_by_op.setdefault(i, []).append(k)
        self.waits = {len(at.nodes) + k: (k, trip) for trip in round_trips for k in self.storages[position[trip.x]][:1]}
        self._link = HostLink.from_program(at, device) if round_trips else None
        stages, counts = stages_of(at.nodes), {None: 1} | dict(in_flight or {})
        self.others = int_array(counts.get(stages[span.storage[0]], 1) - 1 for span in self.spans.storages)
        self._read_phases(at)

    def _read_phases(self, at: Liveness) -> None:
        """The readers of each storage in forward, and in backward."""
        phases = [value.phase_of(node) if node.op == "call_function" else "" for node in at.nodes]
        self.is_forward = np.array([phases[i] == "forward" for i in self.spans.begin], dtype=bool)
        readers = [at.readers[span.storage] for span in self.spans.storages]
        self.end_forward = int_array(
            max([span.begin, *(i for i in positions if phases[i] == "forward")])
            for span, positions in zip(self.spans.storages, readers, strict=True)
        )
        late_readers = [[i for i in positions if phases[i] != "forward"] for positions in readers]
        self.first_late = int_array(min(positions, default=len(at.nodes)) for positions in late_readers)
        self.backward = [
            (i, operands) for i, phase in enumerate(phases)
            if phase == "backward" and (operands := [x for x in self.reads[i] if self.maker[x] >= 0])
        ]  # fmt: skip
        self.until = 1 + max((i for i, phase in enumerate(phases) if phase == "backward"), default=len(phases) - 1)

    @cached_property
    def needs(self) -> dict[int, list[tuple[int, int]]]:
        """Of each op that may run again, what it reads: (the op that made it, storage)."""
        return {
            i: sorted({(int(self.spans.begin[k]), k) for x in self.reads[i] for k in self.storages[x]})
            for i in self.seconds
        }

    @cached_property
    def without_recompute(self) -> EstimatedMemory:
        """With no value computed again."""
        return self.recomputing(frozenset())

    def names_of(self, ops: Iterable[int]) -> tuple[str, ...]:
        """The names of those that may be computed again, in order."""
        return tuple(self.names[i] for i in sorted(ops) if i in self.names)

    def cost(self, recomputed: Iterable[int]) -> float:
        """Seconds of ops that run again, and of copies to and from the host that nothing hides."""
        recomputed = list(recomputed)
        sizes = [self.waits[i][1].nbytes for i in recomputed if i in self.waits]
        copying = self._link.seconds(sizes) if self._link is not None else 0.0
        return sum(self.seconds[i] for i in recomputed if i in self.seconds) + copying

    @cached_property
    def dearest_waits(self) -> list[int]:
        """Numbers of what may wait on the host, first what takes longest for a byte to compute again, or never is."""

        def seconds_per_byte(wait: int) -> float:
            k, trip = self.waits[wait]
            op = int(self.spans.begin[k])
            return self.seconds[op] / trip.nbytes if op in self.names else float("inf")

        return sorted(self.waits, key=seconds_per_byte, reverse=True)

    def away(self, wait: int, memory: EstimatedMemory) -> tuple[int, int]:
        """The positions between which what waits on the host is not on the device."""
        k, trip = self.waits[wait]
        return int(memory.position[trip.out_wait]), self._return(wait, memory.position, memory.first_late_read)

    def _return(self, wait: int, position: Positions, first_late: Positions) -> int:
        k, trip = self.waits[wait]
        return min(int(position[trip.back_launch]), int(first_late[k]))

    # ---- where copies are

    def recomputing(self, dropped: Collection[int]) -> EstimatedMemory:
        """With ops of forward dropped: what they make does not stay, backward reads what they make again."""
        count, spans = len(self.maker), self.spans
        gone = {*dropped, *self.gathers}
        insertions, copies = self._copies(gone)
        shift = np.zeros(count, dtype=np.int64)
        for before, ops in insertions:
            shift[before] = len(ops)
        position = np.arange(count, dtype=np.int64) + np.cumsum(shift)
        length = count + sum(len(ops) for _, ops in insertions)
        until = self.until + length - count

        is_gone = np.array([int(i) in gone for i in spans.begin], dtype=bool)
        begins, ends = position[spans.begin], position[np.where(is_gone, self.end_forward, spans.end)]
        first_late = np.where(is_gone, length, np.append(position, length)[self.first_late])
        activations = self.is_activation & ~is_gone
        copied = self._copied_spans(insertions, copies, position, ends, first_late, activations)

        total = spans.resident + spans.bytes_over_time(begins, ends, position, length) + copied.bytes_over_time(length)
        self._subtract_overwritten(total, position, ends, insertions, copies, copied)
        is_counted = np.array([k in copied.read and not self.is_parameter[k] for k in copied.begin], dtype=bool)
        own = bytes_held(begins[activations], ends[activations], spans.nbytes[activations], length)
        waiting = [i for i in dropped if i in self.waits and not is_gone[self.waits[i][0]]]
        for i in waiting:
            k, trip = self.waits[i]
            away = slice(int(position[trip.out_wait]), self._return(i, position, first_late))
            total[away] -= spans.nbytes[k]
            own[away] -= spans.nbytes[k]
        made_again = frozenset(i for i in copies if i in self.seconds).union(waiting)
        left = activations & self.is_forward  # of other micro-batches too
        in_flight = int((self.others[left] * spans.nbytes[left]).sum())
        return EstimatedMemory(
            total[:until] + in_flight, (own + copied.bytes_over_time(length, is_counted))[:until] + in_flight,
            position, begins, ends, first_late, made_again,
        )  # fmt: skip

    def _copies(self, gone: set[int]) -> tuple[Insertions, set[int]]:
        """The places where ops run again, and all values that are recomputed."""
        insertions, copies = Insertions(), set[int]()
        for i, operands in self.backward:
            unvisited = [x for x in operands if x not in copies and self.maker[x] in gone]
            new = set[int]()
            while unvisited:
                node = unvisited.pop()
                if node not in new:
                    new.add(node)
                    together = self._copied_together[node]
                    unvisited += [x for x in together if x not in copies and self.maker[x] in gone]
            if new:
                copies |= new
                insertions.append((i, sorted(new)))
        return insertions, copies

    def _copied_spans(
        self, insertions: Insertions, copies: set[int], position: Positions, ends: Positions, first_late: Positions,
        activations: NDArray[np.bool_],
    ) -> CopiedSpans:  # fmt: skip
        """Spans of the storages of copies.

        What copies read of forward lives until then: ``ends``, ``first_late`` and ``activations`` change.
        """
        begin: dict[int, int] = {}
        end: dict[int, int] = {}
        for before, ops in insertions:
            for at, op in enumerate(ops, int(position[before]) - len(ops)):
                for k in self.storages[op]:
                    begin.setdefault(k, at)
                    end[k] = at
                for x in self.reads[op]:
                    for k in self.storages[x]:
                        if x in copies:
                            end[k] = at
                        else:
                            ends[k] = max(ends[k], at)
                            first_late[k] = min(first_late[k], at)
                            activations[k] |= self.is_forward[k] and not self.is_parameter[k]
        read = set[int]()
        for i, operands in self.backward:
            for k in (k for x in operands if x in copies for k in self.storages[x]):
                end[k] = max(end[k], int(position[i]))
                read.add(k)
        nbytes = self.spans.nbytes[list(begin)] if begin else np.zeros(0, dtype=np.int64)
        return CopiedSpans(begin, end, read, nbytes)

    def _subtract_overwritten(
        self, total: Bytes, position: Positions, ends: Positions, insertions: Insertions, copies: set[int],
        copied: CopiedSpans,
    ) -> None:  # fmt: skip
        """Take off where the result of a copy is put into the storage of an operand that nothing reads again."""
        for before, ops in insertions:
            for at, op in enumerate(ops, int(position[before]) - len(ops)):
                k = self.spans.overwritten_by_op.get(op)
                if k is None:
                    continue
                is_copy = int(self.spans.begin[k]) in copies
                if (copied.end.get(k) if is_copy else ends[k]) == at:
                    total[at] -= self.spans.nbytes[k]


@dataclass(frozen=True)
class CopiedSpans:
    """Spans of storages that copies make, by the number of the storage that forward makes.

    read: those that backward itself reads.  nbytes: in the order of ``begin``.
    """

    begin: dict[int, int]
    end: dict[int, int]
    read: set[int]
    nbytes: Bytes

    def bytes_over_time(self, count: int, chosen: NDArray[np.bool_] | None = None) -> Bytes:
        """Bytes of all, or of the chosen ones, at each of ``count`` positions."""
        begins, ends = int_array(self.begin.values()), int_array(self.end[k] for k in self.begin)
        chosen = np.ones(len(begins), dtype=bool) if chosen is None else chosen
        return bytes_held(begins[chosen], ends[chosen], self.nbytes[chosen], count)
