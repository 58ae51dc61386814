"""What the ranks of one placement talk and send through; a failure of one rank travels through it to all.

The protocol, for all connections that some ranks have between them (as in MPI's User-Level Failure Mitigation, a
communicator is revoked as a whole, and renewed by all who go on):

1.  Connections have a generation g.  They are made when all ranks have come to g, and used by one call at a time.
2.  A rank whose call raises what the others do not raise too *revokes* g: it writes a notice under g into the job's
    store, then closes all its connections of g.  Then it raises its error.
3.  Whoever waits for it is woken by the closed connection, finds the notice, closes its own connections, so that
    those wake up who wait for it, and raises the notice as its error.
4.  A rank that has ended leaves no notice.  Whoever is woken asks which connections are closed, writes a notice of
    that, and goes on as in 3.  A rank that has waited for the job's timeout does the same with those that do not wait.
5.  Whoever has not waited goes on with its step: all that it reads was sent by ranks that had not stopped.  Its next
    wait, at the latest for the agreement of its next call, is on a closed connection: 3.
6.  Who has revoked g begins its next call in g + 1.  Every rank revokes g once, whatever happened.

Races.  *Two ranks fail at once*: both write; readers take the first notice.  *A failure before anything is sent, or
after all is*: 5.  *Late messages of a former step*: they are on connections of a former generation, which nobody reads.
*A piece of memory is read while its owner stops*: it closes its connections before it touches the piece again, and who
reads looks afterwards whether they are open (``shared_memory``).  *A failure while ranks come to g + 1*: its notice is
under g + 1, where they look while they wait.  *A rank ends between its coming and its connecting*: it has
told where it runs as it came, so that ranks on its host see that it has ended; on other hosts connecting runs into the
job's timeout.  *The store is gone with the rank that holds it*: what each rank sees itself must do.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphzero import _compat
from graphzero.errors import RankError
from graphzero.logs import event
from graphzero.runtime.transport import dialing, peer_memory, shared_memory_connect
from graphzero.runtime.transport.failure_report import Attempt, FailureReport, ReportStore, describe
from graphzero.runtime.transport.p2p_collectives import Link, PeerCollectives
from graphzero.runtime.transport.process_monitor import (
    EVERYBODY,
    LONG,
    ProcessMonitor,
    Waiting,
    check_own_process,
    near,
    whereabouts,
)
from graphzero.runtime.transport.reactor import Reactor
from graphzero.runtime.transport.teardown import before_tear_down
from graphzero.runtime.transport.wires import Wires

_LONGEST_PAUSE = 0.05  # seconds between two looks at the store
_ENDING = 1.0  # seconds for others to write a notice
_FILES = 16  # that connecting needs, about
_UNSURE = 3.0  # seconds for others to find out why a connection is closed


class Communicator:
    """The connections of some ranks of the world, all of which make it.

    ids: their global numbers, ascending.  limit: seconds to wait for another rank, the job's timeout.
    generation: how often it has been revoked.  label, number: of the call under way.
    """

    def __init__(self, ids: Sequence[int], nth: int) -> None:
        """``nth``: how many of these ranks this process has had before."""
        self.ids, self.rank = list(ids), dist.get_rank()
        self.own = self.ids.index(self.rank)
        self.limit = _compat.timeout_of(_world())
        self.generation, self.label, self.number = 0, "", 0
        self._store = _compat.job_store(f"graphzero {','.join(map(str, ids))} {nth}")
        self._waiting = Waiting()
        # nobody is known yet
        self._lives = ProcessMonitor({}, {}, self._waiting, self._hang_up, self._give_up, self._tell)
        self._places: dict[int, tuple[str | None, int]] | None = None  # ``whereabouts`` of all
        self._is_acquainted = False
        self._missed: set[int] = set()
        self._group: Any = None  # of gloo, and of all ranks
        self._reactor = Reactor()
        self._pairs: dict[tuple[int, ...], PeerCollectives] = {}

    def begin(self, label: str) -> None:
        """A call begins."""
        self.label = label
        self.number += 1
        self._waiting.end()  # whatever a former call was interrupted in

    @property
    def ended(self) -> frozenset[int]:
        """Ranks whose processes have ended, of those that it has ever had a connection with."""
        return frozenset(self._missed | self._lives.ended)

    # ---- connections

    def connect(self) -> None:
        """Come together with all ranks, if that has not been done in this generation."""
        if self._group is None:
            self._come()
            if self._places is None:
                self._places = self._read_places()
                self._lives = self._watched({})
            self._group = self._connected()
        if not self._is_acquainted:
            self._is_acquainted = True
            assert self._places is not None
            far = self._far(self._places)
            if far:
                self._lives = self._watched(far)

    def _read_places(self) -> dict[int, tuple[str | None, int]]:
        """Every rank's ``whereabouts``, when all have come."""
        store = self._generation_store()
        try:
            return {rank: pickle.loads(store.get(f"here {rank}")) for rank in self.ids}
        except RuntimeError as error:
            raise self._lost("all ranks to come", error) from error

    def _watched(self, far: Mapping[int, socket.socket]) -> ProcessMonitor:
        assert self._places is not None
        return ProcessMonitor(self._places, far, self._waiting, self._hang_up, self._give_up, self._tell)

    def _far(self, places: Mapping[int, tuple[str | None, int]]) -> dict[int, socket.socket]:
        """A connection with every rank that does not share a host with this one."""
        watched = near(places)
        if len(watched) == len(places):  # then every rank sees that
            return {}
        far = [i for i, rank in enumerate(self.ids) if rank not in watched]
        found = dialing.dial(lambda mine: self._gather(mine, self.ids), self.ids, self.own, self.limit, far)
        return {self.ids[i]: one for i, one in found.items()}

    def _hang_up(self, rank: int) -> None:
        for pairs in list(self._pairs.values()):
            pairs.link.hang_up(rank)

    def _tell(self, what: str, is_again: bool) -> None:
        """This rank waits for ``what``, and has done so for a while; called in another thread.

        It writes so into the store, and the second time, a while later, says which ranks have written nothing.
        """
        with suppress(Exception):  # whatever a store does whose host has ended
            board, others = ReportStore(_compat.own_connection(self._generation_store())), set(self.ids) - {self.rank}
            board.wait(self.rank)
            late = sorted(others.difference(board.waiting(others, 3 * LONG))) if is_again else []
            if late:
                text = (
                    f"rank {self.rank} has waited {2 * LONG:.0f} s in its {self.label} for {what}; {_ranks(late)} "
                    f"{'is' if len(late) == 1 else 'are'} not there. Every rank must call a Graph equally often; after "
                    f"{self.limit:.0f} s, the process group's timeout, this is an error"
                )
                event("waits", text, logging.WARNING, rank=self.rank, late=late)

    def _give_up(self) -> None:
        for pairs in list(self._pairs.values()):
            pairs.link.give_up()
        self._break_group()

    def pairs(self, ids: Sequence[int]) -> PeerCollectives:
        """What moves CPU tensors between some ranks, in that order; all ranks ask, each for its own line of them."""
        wanted, own = tuple(ids), ids.index(self.rank)
        if wanted not in self._pairs:

            def gather(mine: Any) -> list[Any]:
                return self._gather(mine, wanted)

            obstacles = gather(peer_memory.obstacle())
            link: Link | None = shared_memory_connect.meet(gather, wanted, self.limit)
            about = f"{_ranks(wanted)} read each other's memory"
            if link is None:
                sockets = dialing.dial(gather, wanted, own, self.limit)
                link = Wires(wanted, own, sockets, self.limit, self._waiting, self._reactor)
                why = next((f"rank {q}: {text}" for q, text in zip(wanted, obstacles, strict=True) if text), _APART)
                about = f"{_ranks(wanted)} send through sockets ({why})"
            else:
                dialing.stand_by(gather)
            event("connected", f"rank {self.rank}: {about}", ranks=list(wanted))
            self._pairs[wanted] = PeerCollectives(link, own, about)
        return self._pairs[wanted]

    def _gather(self, mine: Any, ids: Sequence[int]) -> list[Any]:
        found = self.all_gather(mine, "all ranks to connect")
        return [found[self.ids.index(one)] for one in ids]

    def _come(self) -> None:
        """Wait until all ranks have come to this generation."""
        store, began, pause = self._generation_store(), time.monotonic(), 1e-3
        try:
            store.set(f"here {self.rank}", pickle.dumps(whereabouts(), protocol=0).decode("ascii"))
            store.add("here", 1)
            while store.add("here", 0) < len(self.ids):
                if store.add("notices", 0) or self._lives.ended:
                    raise self._lost("all ranks to come")
                if time.monotonic() - began > self.limit:
                    raise self._lost("all ranks to come", is_silent=True)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        except RuntimeError as error:  # the store's
            raise self._lost("all ranks to come", error) from error

    def _connected(self) -> Any:
        """gloo's connections.  It waits for others in a thread: who has come may still stop, or end, on the way."""
        store = self._generation_store()
        own = _compat.own_connection(store)
        made = Attempt(lambda: _compat.gloo(_compat.prefixed("gloo", own), self.own, len(self.ids), self.limit))
        try:
            while not made.wait(_LONGEST_PAUSE):
                if self._lives.ended or own is not store and store.add("notices", 0):
                    raise self._lost("the connections of all ranks")
            return made.result()
        except RuntimeError as error:
            raise self._lost("the connections of all ranks", error) from error

    def _generation_store(self) -> Any:
        return _compat.prefixed(f"generation {self.generation}", self._store)

    def store_of(self, name: str) -> Any:
        """The job's store for threads of all ranks that have ``name`` in common, and keys of their own."""
        return _compat.own_connection(_compat.prefixed(name, self._store))

    # ---- what ranks tell each other

    def all_reduce(self, x: Tensor, what: str) -> None:
        """``x`` becomes its maximum over all ranks.  Raises RankError; ``what`` says in it what was waited for."""
        self._wait(lambda group: group.allreduce([x], _MAX), what)

    def broadcast(self, made: Any, first: int, what: str) -> Any:
        """An object of rank ``first``, on every rank."""
        payload = torch.frombuffer(bytearray(pickle.dumps(made)), dtype=torch.uint8)
        size = torch.tensor([payload.numel()])
        self.fill(size, first, what)
        if self.rank != first:
            payload = torch.empty(int(size), dtype=torch.uint8)
        self.fill(payload, first, what)
        return made if self.rank == first else pickle.loads(payload.numpy().tobytes())

    def fill(self, x: Tensor, first: int, what: str) -> None:
        """``x``, dense and of a dtype that gloo knows, takes the values that rank ``first`` has in it."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.ids.index(first), 0
        self._wait(lambda group: group.broadcast([x], options), what)

    def all_gather(self, mine: Any, what: str) -> list[Any]:
        """Every rank's object, in ascending order of ranks."""
        payload = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        sizes = self._all_gather(torch.tensor([payload.numel()]), what)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: payload.numel()] = payload
        found = self._all_gather(padded, what)
        return [pickle.loads(x[: int(size)].numpy().tobytes()) for x, size in zip(found, sizes, strict=True)]

    def _all_gather(self, x: Tensor, what: str) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in self.ids]
        self._wait(lambda group: group.allgather([found], [x]), what)
        return found

    def _wait(self, begin: Callable[[Any], Any], what: str) -> None:
        self.connect()
        self._waiting.begin(EVERYBODY, what)
        try:
            begin(self._group).wait()
        except RuntimeError as error:
            raise self._lost(what, error) from error
        self._waiting.end()

    def _lost(self, what: str, error: RuntimeError | None = None, is_silent: bool = False) -> RankError:
        """A wait for all has failed."""
        if error is not None:
            is_silent = "timed out" in str(error).lower() or "timeout after" in str(error).lower()
        reason = f": {_last_line(error)}{_files_left()}" if error is not None else ""
        return _Lost(f"rank {self.rank} waited for {what}, and the connection is gone{reason}", what, is_silent)

    # ---- failures

    def revoke(self, error: BaseException) -> BaseException:
        """End this generation because of ``error``, on this rank now and on the others when they wait for it.

        Returns what to raise: ``error``, or where it only says that another rank is lost, what that rank says.
        """
        board = ReportStore(self._generation_store())
        raised: BaseException = error
        try:
            if isinstance(error, RankError):
                raised = self._explain(error, board)
            else:
                board.write(FailureReport("stopped", [self.rank], self.label, self.number, describe(error)))
        finally:  # also where that is interrupted
            self._break()
            self.let_go()
            self.generation += 1
            self.number = 0
        return raised

    def let_go(self) -> None:
        """Of all connections: this rank needs nobody any more."""
        for pairs in self._pairs.values():
            pairs.link.close()
        self._pairs.clear()
        self._group = None

    def _break(self) -> None:
        for pairs in self._pairs.values():
            pairs.link.close()
        self._break_group()

    def _break_group(self) -> None:
        if self._group is not None:
            _compat.break_gloo(self._group)

    def _explain(self, error: RankError, board: ReportStore) -> RankError:
        """What the rank says that stopped; where none has said anything, who has ended, or is silent."""
        board.mark(self.rank)
        found = board.first()
        if found is not None:
            return RankError(found.told(self.number), found.ranks, found.kind == "silent")
        if error.is_silent:
            return self._silent(error, board)
        gone, began = self._gone(0.0), time.monotonic()
        while (found := board.first()) is None and not gone:  # who is gone is looked at before each look at the board
            if time.monotonic() - began > _UNSURE:  # nobody else says anything: it is this rank's own
                board.write(FailureReport("stopped", [self.rank], self.label, self.number, describe(error)))
                return error
            time.sleep(_LONGEST_PAUSE)
            gone = self._gone(time.monotonic() - began)
        if found is not None:
            return RankError(found.told(self.number), found.ranks, found.kind == "silent")
        what = f"waited for {error.what}, and" if isinstance(error, _Lost) else f"waits for {_ranks(gone)}, which"
        whose = f"{_ranks(gone)} " if isinstance(error, _Lost) else ""
        cut_off = "cut off with its host, " if self._lives.far.intersection(gone) else ""
        text = (
            f"rank {self.rank} {what} {whose}{_have(gone)} ended in or before this {self.label}: by an exception (the "
            f"output there says which), killed, {cut_off}or because of fewer calls; every rank must call a Graph "
            "equally often"
        )
        board.write(FailureReport("ended", gone, self.label, self.number, text))
        self._missed.update(gone)
        return RankError(text, gone)

    def _silent(self, error: RankError, board: ReportStore) -> RankError:
        """The job's timeout is over: whoever waits is woken and says so, the others are what it waits for."""
        self._break()
        others = [rank for rank in self.ids if rank != self.rank]
        deadline, waiting = time.monotonic() + 1.0, board.marked(others)
        while waiting is not None and len(waiting) < len(others) and time.monotonic() < deadline:
            time.sleep(0.05)
            waiting = board.marked(others)
        late = list(error.ranks) if waiting is None else [rank for rank in others if rank not in waiting]
        text = (
            f"rank {self.rank} has waited {self.limit:.0f} s in this {self.label} for {_ranks(late)}, which "
            f"{'has' if len(late) == 1 else 'have'} not ended: slow, stopped, or in another program. The limit is the "
            "process group's timeout: init_process_group(timeout=...)"
        )
        board.write(FailureReport("silent", late, self.label, self.number, text))
        return RankError(text, late, is_silent=True)

    def _gone(self, seconds: float) -> list[int]:
        """Ranks that have ended.  seconds: since a connection was found closed.  Of a rank that can't be watched it is
        all one can see; it counts when nobody has said why for a while."""
        ended, known = self._lives.ended, self._lives.known
        if ended or seconds < _ENDING or len(known) == len(self.ids) - 1:
            return sorted(ended)
        closed = set() if self._group is None else {self.ids[i] for i in _compat.lost_by_gloo(self._group)}
        return sorted(closed - known)


class _Lost(RankError):
    """A wait for all ranks that has failed; what: what was waited for."""

    def __init__(self, message: str, what: str, is_silent: bool) -> None:
        super().__init__(message, (), is_silent)
        self.what = what


_APART = "they are on different hosts, in different containers, or the kernel lets no process read another"
_MAX: Any = dist.AllreduceOptions()
_MAX.reduceOp = dist.ReduceOp.MAX

_known: dict[tuple[int, ...], tuple[Any, Communicator]] = {}  # ranks -> (the world it was made in, it)
_count: dict[tuple[int, ...], int] = {}


def communicator(ids: Sequence[int]) -> Communicator:
    """The one of these ranks."""
    check_own_process()
    key = tuple(sorted(ids))
    found = _known.get(key)
    if found is None or found[0] is not dist.group.WORLD:
        nth = _count[key] = _count.get(key, 0) + 1
        found = _known[key] = (dist.group.WORLD, Communicator(key, nth))
    return found[1]


def _let_go() -> None:
    for _, one in _known.values():
        one.let_go()
    _known.clear()


before_tear_down(_let_go)


def _world() -> dist.ProcessGroup:
    found = dist.group.WORLD
    assert found is not None
    return found


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1][:200] if str(error).strip() else type(error).__name__


def _files_left() -> str:
    """Whether this process has run out of files to open, of which gloo says something else."""
    try:
        import resource

        most, is_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/proc/self/fd"))
    except ImportError:
        return ""
    except OSError as error:
        return f". {error.strerror}: see ulimit -n" if error.errno == errno.EMFILE else ""
    return f". It has {is_open} files open and may have {most}: see ulimit -n" if is_open + _FILES > most else ""


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "the other ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
