"""The connections of the ranks of one placement; a failure of one rank reaches all through them.

The protocol, for all connections that some ranks have between them (as in MPI's User-Level Failure Mitigation, a
communicator is revoked as a whole, and renewed by all ranks that go on):

1.  Connections have a generation g.  They are made when all ranks have come to g, and used by one call at a time.
2.  A rank whose call raises an error that the others do not raise too *revokes* g: it adds a report under g to the
    job's store, then closes all its connections of g.  Then it raises its error.
3.  A rank that waits for it is woken by the closed connection, finds the report, closes its own connections, so that
    the ranks wake that wait for it, and raises the report as its error.
4.  A rank that has ended leaves no report.  A rank that is woken asks which connections are closed, adds a report of
    that, and goes on as in 3.  A rank that has waited for the job's timeout does the same with those that do not wait.
5.  A rank that does not wait goes on with its step: all that it reads was sent by ranks that had not stopped.  Its next
    wait, at the latest for the agreement of its next call, is on a closed connection: 3.
6.  A rank that has revoked g begins its next call in g + 1.  Every rank revokes g once, whatever happened.

Races.  *Two ranks fail at once*: both write; readers take the first report.  *A failure before anything is sent, or
after all is*: 5.  *Late messages of a former step*: they are on connections of a former generation, which are not read.
*A piece of memory is read while its owner stops*: it closes its connections before it touches the piece again, and the
reader looks afterwards whether they are open (``shared_memory``).  *A failure while ranks come to g + 1*: its report is
under g + 1, where they look while they wait.  *A rank ends after it has come and before it is connected*: it has said
where it runs as it came, so that ranks on its host see that it has ended; on other hosts connecting runs into the
job's timeout.  *The store is gone with the rank that holds it*: what each rank sees itself has to do.
"""

from __future__ import annotations

import logging
import pickle
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphzero import _compat
from graphzero.errors import GraphZeroError, RankError
from graphzero.logs import event
from graphzero.runtime.transport.failure_diagnosis import FailureDiagnosis, LostConnection, late_text, rank_list
from graphzero.runtime.transport.failure_report import DOING, LEFT, PAUSE, WAITING, FailureReport, ReportStore, attempt
from graphzero.runtime.transport.gloo_transport import GlooTransport
from graphzero.runtime.transport.p2p_collectives import PeerCollectives
from graphzero.runtime.transport.process_group_transport import ProcessGroupTransport
from graphzero.runtime.transport.process_monitor import (
    ALL_RANKS,
    LONG_WAIT,
    ProcessMonitor,
    WaitState,
    check_own_process,
    process_location,
    ranks_on_host,
    watch_connections,
)  # fmt: skip
from graphzero.runtime.transport.shared_memory_connect import GLOO, connect_shared_memory, requested_transport
from graphzero.runtime.transport.teardown import before_tear_down, tear_down_at_exit
from graphzero.runtime.transport.transport import Transport

_ENDING = 1.0  # seconds for other ranks to add a report
_MAX: Any = dist.AllreduceOptions()
_MAX.reduceOp = dist.ReduceOp.MAX


class Communicator:
    """The connections of some ranks of the world, all of which make it.

    ids: their global numbers, ascending.  limit: seconds to wait for another rank, the job's timeout.
    generation: how often it has been revoked.  label, number: of the call under way.
    has_own_gpus: whether it is known that NCCL may send between its ranks.
    device_type: of a Graph without a placement on these ranks, if that is known.
    """

    def __init__(self, ids: Sequence[int], index: int) -> None:
        """index: number of communicators of these ranks that this process has had before."""
        self.ids, self.rank = list(ids), dist.get_rank()
        self.own = self.ids.index(self.rank)
        self.limit = _compat.timeout_of(_world())
        self.generation, self.label, self.number = 0, "", 0
        self.has_own_gpus = False
        self.device_type: str | None = None
        self._store = _compat.job_store(f"graphzero {','.join(map(str, ids))} {index}")
        self.wait_state = WaitState()
        self._places: dict[int, tuple[str | None, int]] = {}  # ``process_location`` of all, when they have come
        self._monitor = self._watch({})
        self._watches_hosts = False
        self._missed: set[int] = set()
        self._group: Any = None  # gloo's, of all ranks
        self._collectives: dict[tuple[int, ...], PeerCollectives] = {}
        # by the ranks along pp; with the generation in which each was made
        self._stages: dict[tuple[int, ...], tuple[int, ProcessGroupTransport]] = {}

    def begin(self, label: str) -> None:
        """Begin a call."""
        self.label = label
        self.number += 1
        self.wait_state.end()  # of a former call that was interrupted

    @property
    def ended(self) -> frozenset[int]:
        """Ranks whose processes have ended, of those that it has ever had a connection with."""
        return frozenset(self._missed | self._monitor.ended)

    # ---- connections

    def connect(self) -> None:
        """Connect all ranks, if that has not been done in this generation."""
        if self._group is None:
            self._wait_for_all()
            self._group = self._connect_group("gloo", self.ids, _compat.gloo)
        if not self._watches_hosts:
            self._watches_hosts = True
            nearby = ranks_on_host(self._places)
            if len(nearby) < len(self._places):  # then every rank sees that
                remote = [q for q, rank in enumerate(self.ids) if rank not in nearby]
                sockets = watch_connections(
                    lambda: self._connect_group("watch", self.ids, _compat.gloo),
                    lambda x: self.gather_along(x, self.ids),
                    remote,
                )
                self._monitor = self._watch({self.ids[q]: connection for q, connection in sockets.items()})

    def collectives(self, ranks: Sequence[int]) -> PeerCollectives:
        """Collectives of CPU tensors between some ranks, in that order; all ranks call it, each for its own axis."""
        axis, own = tuple(ranks), ranks.index(self.rank)
        if axis not in self._collectives:
            transport: Transport | str = connect_shared_memory(lambda x: self.gather_along(x, axis), axis, self.limit)
            about, level = f"{rank_list(axis)} read each other's memory", logging.INFO
            if isinstance(transport, str):
                reason, transport = transport, self._gloo_transport(axis, own)
                about = f"{rank_list(axis)} send through gloo ({reason})"
                is_unexpected = (
                    own == 0 and requested_transport() != GLOO and ranks_on_host(self._places).issuperset(axis)
                )
                level = logging.WARNING if is_unexpected else logging.INFO
            event("connected", f"rank {self.rank}: {about}", level, ranks=list(axis))
            self._collectives[axis] = PeerCollectives(transport, own, about)
        return self._collectives[axis]

    def stage_transport(self, ranks: Sequence[int], device: torch.device) -> ProcessGroupTransport:
        """Messages through process groups between the ranks along ``pp``; all ranks call it, each for its own line.

        Raises GraphZeroError on GPUs after a call that has stopped.
        """
        line, current = tuple(ranks), self.generation
        if device.type != "cpu" and any(generation != current for generation, _ in self._stages.values()):
            raise GraphZeroError(
                f"rank {self.rank}: a call of these ranks has stopped, and what it has sent between GPUs may be under "
                "way still, which NCCL does not take back\n  Restart the processes and load a checkpoint; torchrun "
                "--max-restarts=1 does that when all of them end"
            )
        if line not in self._stages or self._stages[line][0] != current:
            connect = _compat.gloo if device.type == "cpu" else _compat.nccl
            name, own = f"{rank_list(ranks)}: ", ranks.index(self.rank)
            transport = ProcessGroupTransport(
                ranks, own, self.limit, device, lambda what, some: self._connect_group(name + what, some, connect)
            )
            self._stages[line] = current, transport
        return self._stages[line][1]

    def _gloo_transport(self, axis: Sequence[int], own: int) -> GlooTransport:
        members, index = [self.ids.index(rank) for rank in axis], len(self._collectives)
        return GlooTransport(self._group, members, axis, own, index, self.limit, self.wait_state)

    def _wait_for_all(self) -> None:
        """Wait until all ranks have come to this generation; the first time read where their processes are."""
        store, began, pause, purpose = self._generation_store(), time.monotonic(), 1e-3, "all ranks to come"
        try:
            store.set(f"here {self.rank}", pickle.dumps(process_location(), protocol=0).decode("ascii"))
            store.add("here", 1)
            while store.add("here", 0) < len(self.ids):
                if store.add("reports", 0) or self._monitor.ended:
                    raise LostConnection(self.rank, purpose)
                if time.monotonic() - began > self.limit:
                    raise LostConnection(self.rank, purpose, is_silent=True)
                time.sleep(pause)
                pause = min(2 * pause, PAUSE)
            if not self._places:
                self._places = {rank: pickle.loads(store.get(f"here {rank}")) for rank in self.ids}
                self._monitor = self._watch({})
        except RuntimeError as error:  # the store's
            raise LostConnection(self.rank, purpose, error) from error

    def _connect_group(self, name: str, ranks: Sequence[int], connect: Callable[..., Any]) -> Any:
        """Make a process group of some ranks, in a thread: a rank that has come may still stop, or end, on the way."""
        store = self._generation_store()
        own = _compat.own_connection(store)
        own_number = ranks.index(self.rank)
        group = attempt(lambda: connect(_compat.prefixed(name, own), own_number, len(ranks), self.limit))
        try:
            while not futures.wait([group], PAUSE).done:
                if self._monitor.ended or own is not store and store.add("reports", 0):
                    raise LostConnection(self.rank, "the connections of all ranks")
            return group.result()
        except RuntimeError as error:
            raise LostConnection(self.rank, "the connections of all ranks", error) from error

    def _generation_store(self) -> Any:
        return _compat.prefixed(f"generation {self.generation}", self._store)

    def store_of(self, name: str) -> Any:
        """The job's store, with keys of its own for threads of all ranks that know ``name``."""
        return _compat.own_connection(_compat.prefixed(name, self._store))

    # ---- small messages between all ranks, which all of them take part in

    def run_collective(self, begin: Callable[[Any], Any], purpose: str) -> None:
        """Call ``begin`` with gloo's process group of all ranks, and wait for the work that it returns.

        Raises RankError where a rank does not take part, which says what was waited for: ``purpose``.
        """
        self.connect()
        self.wait_state.begin(ALL_RANKS, purpose)
        try:
            begin(self._group).wait()
        except RuntimeError as error:
            raise LostConnection(self.rank, purpose, error) from error
        self.wait_state.end()

    def all_reduce(self, x: Tensor, purpose: str) -> None:
        """Replace ``x`` by its maximum over all ranks."""
        self.run_collective(lambda group: group.allreduce([x], _MAX), purpose)

    def broadcast(self, value: Any, first: int, purpose: str) -> Any:
        """Return the object of rank ``first``."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([payload.numel()])
        self.fill(size, first, purpose)
        if self.rank != first:
            payload = torch.empty(int(size), dtype=torch.uint8)
        self.fill(payload, first, purpose)
        return value if self.rank == first else pickle.loads(payload.numpy().tobytes())

    def fill(self, x: Tensor, first: int, purpose: str) -> None:
        """Fill ``x``, dense and of a dtype that gloo knows, with the values that it has on rank ``first``."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.ids.index(first), 0
        self.run_collective(lambda group: group.broadcast([x], options), purpose)

    def all_gather(self, value: Any, purpose: str) -> list[Any]:
        """Return every rank's object, in ascending order of ranks."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._all_gather_tensor(torch.tensor([payload.numel()]), purpose)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: payload.numel()] = payload
        payloads = self._all_gather_tensor(padded, purpose)
        return [pickle.loads(x[: int(size)].numpy().tobytes()) for x, size in zip(payloads, sizes, strict=True)]

    def _all_gather_tensor(self, x: Tensor, purpose: str) -> list[Tensor]:
        copies = [torch.empty_like(x) for _ in self.ids]
        self.run_collective(lambda group: group.allgather([copies], [x]), purpose)
        return copies

    def gather_along(self, value: Any, ranks: Sequence[int]) -> list[Any]:
        """Return the objects of ``ranks``, in that order; all ranks call it, each for ranks of its own."""
        values = self.all_gather(value, "all ranks to connect")
        return [values[self.ids.index(rank)] for rank in ranks]

    # ---- failures

    def revoke(self, error: BaseException) -> BaseException:
        """End this generation because of ``error``, on this rank now and on the others when they wait for it.

        Returns the error to raise: ``error``, or where it only says that another rank is lost, what that rank reports.
        """
        reports = ReportStore(self._generation_store())
        raised: BaseException = error
        try:
            if isinstance(error, RankError):
                raised = self._diagnosis(reports).explain(error)
            else:
                reports.add(FailureReport.of_error(self.rank, self.label, self.number, error))
        finally:  # also where that is interrupted
            self._close()
            self.release()
            self.generation += 1
            self.number = 0
        return raised

    def _diagnosis(self, reports: ReportStore) -> FailureDiagnosis:
        return FailureDiagnosis(
            self.rank, self.ids, self.label, self.number, self.limit, reports, self._find_ended, self._monitor.remote,
            self._close,
        )  # fmt: skip

    def _find_ended(self, seconds: float) -> list[int]:
        """The ranks that have ended, so many seconds after a connection was found closed.

        Of a rank that is not monitored its closed connection is all one can see; it counts after a while without a
        report.
        """
        ended, monitored = self._monitor.ended, self._monitor.monitored
        ended = ended or set(ReportStore(self._generation_store()).marks(LEFT, self.ids) or ())
        if ended or seconds < _ENDING or len(monitored) == len(self.ids) - 1:
            return sorted(ended)
        closed = set() if self._group is None else {self.ids[i] for i in _compat.lost_by_gloo(self._group)}
        self._missed |= closed - monitored
        return sorted(closed - monitored)

    def release(self) -> None:
        """Release the connections of this generation: this rank needs no other any more."""
        for axis in self._collectives.values():
            axis.transport.close()
        self._collectives.clear()
        self._group = None

    def shut_down(self) -> None:
        """Release all connections before the default process group ends."""
        if self._group is not None:
            ReportStore(self._generation_store()).mark(LEFT, self.rank)
        self.release()
        for generation, transport in self._stages.values():
            if generation == self.generation:
                transport.shut_down()
        self._stages.clear()

    def _close(self) -> None:
        for axis in self._collectives.values():
            axis.transport.close()
        self._break_groups()

    def _break_groups(self) -> None:
        if self._group is not None:
            _compat.break_gloo(self._group)
        for _, transport in list(self._stages.values()):
            transport.close()

    # ---- called by the monitor, in its thread

    def _watch(self, remote: Mapping[int, socket.socket]) -> ProcessMonitor:
        return ProcessMonitor(
            self._places, remote, self.wait_state, self._disconnect_rank, self._break_groups, self._report_long_wait,
            lambda doing: self._monitor_store(lambda reports: reports.mark(DOING, self.rank, doing)),
        )  # fmt: skip

    def _disconnect_rank(self, rank: int) -> None:
        for axis in list(self._collectives.values()):
            axis.transport.disconnect_rank(rank)

    def _monitor_store(self, use: Callable[[ReportStore], Any]) -> None:
        with suppress(Exception):  # any error of a store whose host has ended
            use(ReportStore(_compat.own_connection(self._generation_store())))

    def _report_long_wait(self, purpose: str, is_again: bool) -> None:
        """Log that this rank has waited for one other for a while, with what that one does; or record in the store that
        it has waited for all, and the second time log which ranks do not."""
        ranks = self.wait_state.ranks
        if ranks is not ALL_RANKS:
            late = [rank for rank in self.ids if rank in ranks]
            self._monitor_store(lambda reports: self._log_wait_for(late, purpose, reports))
            return

        def report(reports: ReportStore) -> None:
            others = set(self.ids) - {self.rank}
            reports.mark(WAITING, self.rank)
            waiting = reports.marks(WAITING, others, 3 * LONG_WAIT) if is_again else None
            late = [] if waiting is None else sorted(others.difference(waiting))
            if late:
                text = late_text(self.rank, self.label, purpose, late, 2 * LONG_WAIT, self.limit)
                event("waits", text, logging.WARNING, rank=self.rank, late=late)

        self._monitor_store(report)

    def _log_wait_for(self, late: list[int], purpose: str, reports: ReportStore) -> None:
        known = reports.marks(DOING, late) or {}
        doing = "; ".join(f"rank {rank} is in {known.get(rank) or 'nothing of this call'}" for rank in late)
        text = f"rank {self.rank} has waited {LONG_WAIT:.0f} s or more in its {self.label} for {purpose}; {doing}"
        event("waits", text, logging.WARNING, rank=self.rank, late=late)


_communicators: dict[tuple[int, ...], tuple[Any, Communicator]] = {}  # ranks -> (the world it was made in, it)
_count: dict[tuple[int, ...], int] = {}


def communicator(ids: Sequence[int]) -> Communicator:
    """The communicator of these ranks."""
    check_own_process()
    key = tuple(sorted(ids))
    known = _communicators.get(key)
    if known is None or known[0] is not dist.group.WORLD:
        tear_down_at_exit()
        _count[key] = index = _count.get(key, 0) + 1
        known = _communicators[key] = (dist.group.WORLD, Communicator(key, index))
    return known[1]


def _release() -> None:
    for _, known in _communicators.values():
        known.shut_down()
    _communicators.clear()


before_tear_down(_release)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
