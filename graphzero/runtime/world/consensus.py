"""Consensus of ranks before they do anything together: which Graph calls, for what, and that all do the same.

Everything that needs all ranks (a call, a binding, a full or loaded state) begins with one small message in which each
rank says which Graph asks for what, a hash of what must be equal, and whether it can.  Another request, a difference,
or a failure on one rank raises on every rank; no rank takes part in what it was not asked for.

Messages have connections of their own (``communicator``), so that they neither wait for nor disturb a user's
collectives.  An error on one rank alone closes them: the others raise the reason, and no rank waits.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from graphzero import _compat, errors
from graphzero.errors import CaptureError, CheckError, GraphZeroError
from graphzero.runtime.transport.communicator import Communicator, communicator
from graphzero.runtime.transport.teardown import before_tear_down
from graphzero.runtime.world.call_lock import CALL_LOCK
from graphzero.runtime.world.launch import has_fake_world
from graphzero.sbp.placement import Placement

T = TypeVar("T")
_worlds: dict[tuple[str, str], tuple[Any, int]] = {}  # (name, placement) -> (the world, how many have been made in it)
before_tear_down(_worlds.clear)
_SHOWN = 8
_NO_NEEDS = (False, False)


@dataclass(frozen=True)
class Topic:
    """An operation of all ranks.

    request: what a user asks for, with {} in place of the Graph.  about: what must be equal.  hint: how to make it so.
    """

    request: str
    about: str
    hint: str


_ALIKE = (
    "Every rank must call the graph with inputs of the same structure, shapes and dtypes and modules in the same "
    "state; pad or drop uneven batches (drop_last=True), or let the Graph pad them: config.set_shapes(...)"
)
_SAME = "Every rank must hold the same modules, optimizers and states"
CALL = Topic("a call of {}", "the program of this call", _ALIKE)
COMPILE = Topic("compile() of {}", "the program of compile()", _ALIKE)
SIZES = Topic("a call of {} that pads its inputs", "what set_shapes pads", _ALIKE)
INPUTS = Topic("a call of {} with inputs that ranks share", "the inputs that ranks share", _ALIKE)
PROGRAM = Topic("compiling {}", "the compiled program", _ALIKE)
BIND = Topic(
    "a call of {} that binds tensors",
    "the tensors of this call",
    "Replace parameters, buffers and optimizer states on every rank alike; their values are then taken from rank 0. "
    "What ranks compute for themselves they must compute alike, or replicas drift apart in the last bits: "
    "torch.set_num_threads(n) before the call, ATEN_CPU_CAPABILITY on unlike processors, or split more: enable_zero()",
)
SAVE = Topic("state_dict() of {}", "what is saved", _SAME)
FULL = Topic("full_state_dict() of {}", "what is made whole", _SAME)
LOAD = Topic(
    "load_state_dict() of {}", "what is loaded", "Every rank must load the same checkpoint; give all of them one file"
)
CHECK = Topic("gz.check of {}", "what is checked", _ALIKE)
PLACE = Topic("to_global of {}", "what is given to to_global", _SAME)


@dataclass(frozen=True)
class Agreement:
    """Answers of a consensus.  wish: the first rank's; needs: for each need, whether any rank has it."""

    wish: bool
    needs: tuple[bool, ...]


def identity(name: str, placement: Placement) -> str:
    """Return the name of a new Graph that all ranks know: its name, and its number among those of name and placement.

    Programs must make their Graphs in the same order on all ranks of a placement.
    """
    world = None if placement.virtual or not dist.is_initialized() else dist.group.WORLD
    key = name, repr(placement)
    made_in, count = _worlds.get(key, (world, 0))
    count = count + 1 if made_in is world else 1
    _worlds[key] = world, count
    return name if count == 1 else f"{name} (number {count} of that name)"


def digest(*texts: str) -> int:
    """Return 62 bits of a hash that is the same in every process."""
    joined = "\0".join(texts).encode()
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "big") >> 2


class Ranks:
    """The ranks of one placement, which reach consensus.  On virtual and fake worlds and worlds of one: no messages.

    who: name of the Graph that asks the others, see ``identity``.  ids: of the ranks, ascending.
    waited: seconds that this rank has waited for others in ``agree``.
    """

    def __init__(self, placement: Placement, who: str = ""):
        self.placement, self.who = placement, who
        self.waited = 0.0
        self._agreed_in = 0  # generation of the communicator
        self.is_needed = False  # see ``agree_on``
        self.raised_by_all = 0  # id of the last error that all raised
        self.ids: list[int] = sorted(placement.ranks.ravel().tolist())  # in the order of their group

    @property
    def active(self) -> bool:
        return not self.placement.virtual and self.placement.size > 1 and not has_fake_world()

    def agree(
        self, topic: Topic, value: int = 0, parts: Callable[[], Mapping[str, str]] = dict,
        failure: Exception | None = None, wish: bool = False, needs: tuple[bool, ...] = (),
    ) -> Agreement:  # fmt: skip
        """Check that all ranks are asked for ``topic`` by the same, that ``value`` is the same on every rank, and that
        none has failed; raises on all of them if not.

        Returns the first one's ``wish``, and of each of ``needs``, whether any has it.

        parts: the facts behind ``value`` by name; called only for an error message.
        failure: this rank's own exception, which it raises after telling the others.
        """
        if self.active:
            ask = digest(self.who, topic.request, topic.about)
            wish = wish and dist.get_rank() == int(self.placement.ranks.flat[0])
            message = [ask, -ask, value, -value, failure is not None, wish, *needs, *_NO_NEEDS[len(needs) :]]
            most_ask, least_ask, highest, lowest, failed, wished, *needed = self._all_reduce_max(topic, message)
            if most_ask != -least_ask:
                raise self.by_all(self._different_asks(topic, failure), self.ids[0])
            if failed:
                raise self.by_all(*self._first_failure(topic, failure))
            if highest != -lowest:
                raise self.by_all(self._difference(topic, parts()), self.ids[0])
            self._agreed_in = self.communicator.generation
            return Agreement(bool(wished), tuple(map(bool, needed)))
        if failure is not None:
            raise failure
        return Agreement(wish, needs)

    def _all_reduce_max(self, topic: Topic, message: list[Any]) -> list[int]:
        """Return the maximum over all ranks of each number of a message."""
        numbers = torch.tensor(message, dtype=torch.int64)
        began = time.perf_counter()
        try:
            self.communicator.all_reduce(numbers, f"all ranks to agree on {topic.about}")
        finally:
            self.waited += time.perf_counter() - began
        highest: list[int] = numbers.tolist()
        return highest

    def by_all(self, error: Exception, rank: int | None = None) -> Exception:
        """Return ``error``, which every rank raises.  rank: prints it in full; None if each has its own."""
        self.raised_by_all = id(error)
        if rank not in (None, dist.get_rank()):
            errors.reported_by(error, rank)
        return error

    def agree_on(
        self, topic: Topic, make: Callable[[], T], facts: Callable[[T], Mapping[str, str]],
        needs: Callable[[T], bool] = lambda result: False,
    ) -> T:  # fmt: skip
        """Return the result of ``make``, a call on each rank alone, if it fails on none and its facts are equal on all.

        facts: of the result, by name; called only where there are other ranks.
        needs: whether a result needs more of all ranks; ``is_needed`` is then whether any rank's does.
        """
        result: T | None = None
        named_facts: Mapping[str, str] = {}
        failure = None
        try:
            result = make()
            named_facts = facts(result) if self.active else named_facts
        except Exception as error:  # noqa: BLE001 - every rank must hear of it; agree raises it
            failure = error
        need = failure is None and needs(cast(T, result))
        agreed = self.agree(
            topic, digest(*named_facts, *named_facts.values()), lambda: named_facts, failure, False, (need,)
        )
        self.is_needed = agreed.needs[0]
        return cast(T, result)

    def share(self, make: Callable[[], Any]) -> Any:
        """Return the first rank's value of ``make()`` on every rank."""
        if not self.active:
            return make()
        first = int(self.placement.ranks.flat[0])
        value = make() if dist.get_rank() == first else None
        return self.communicator.broadcast(value, first, f"what rank {first} decides")

    def _different_asks(self, topic: Topic, failure: Exception | None) -> Exception:
        request = topic.request.format(self.who) + ("" if failure is None else f", which fails there: {failure}")
        lines = by_value(self.ids, self.collect(request))
        return GraphZeroError(
            "the ranks were called for different things, so all of them stop:"
            + "".join(f"\n  {line}" for line in lines[:_SHOWN])
            + "\n  Every rank must make the same Graphs in the same order, and do the same with them in the same order "
            "(a set of Graphs has another order in each process; what one rank does alone must not need the others; "
            "where the data of one rank ends before that of others: gz.until_all_end)"
        )

    def _first_failure(self, topic: Topic, failure: Exception | None) -> tuple[Exception, int]:
        """Return the error that this rank raises, and the first rank that has failed."""
        own_failure = None if failure is None else (type(failure).__name__, str(failure))
        everyone = self.collect(own_failure)
        for rank, other in zip(self.ids, everyone, strict=True):
            if other is not None and failure is None:
                kind = getattr(errors, other[0], None)
                known = kind if isinstance(kind, type) and issubclass(kind, GraphZeroError) else GraphZeroError
                name = "" if known is not GraphZeroError else f"{other[0]}: "
                text = f"rank {rank} could not prepare {topic.about}, so no rank runs it: {name}{other[1]}"
                return known(text), rank
        assert failure is not None
        return failure, self.ids[everyone.index(own_failure)]

    def _difference(self, topic: Topic, parts: Mapping[str, str]) -> Exception:
        everyone = self.collect(dict(parts))
        names = dict.fromkeys(name for named_facts in everyone for name in named_facts)
        lines = []
        for name in names:
            values = [named_facts.get(name, "absent") for named_facts in everyone]
            if len(set(values)) > 1:
                lines.append(f"  {name}: " + "; ".join(by_value(self.ids, values)))
        more = [f"  ... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        shown = "\n".join(lines[:_SHOWN] + more) or "  (their descriptions are equal; their hashes are not)"
        return CaptureError(f"the ranks do not agree on {topic.about}:\n{shown}\n  {topic.hint}")

    def collect(self, value: Any) -> list[Any]:
        """Return every rank's value, in ascending order of ranks."""
        if not self.active:
            return [value]
        return self.communicator.all_gather(value, "what all ranks have found")

    def watch(self) -> Callable[[], list[int]]:
        """Return a function that gives, in any thread, the positions in the placement of ranks that have ended."""
        if not self.active:
            return list
        flat, current = self.placement.ranks.ravel().tolist(), self.communicator
        return lambda: [flat.index(rank) for rank in current.ended]

    def store_of(self, name: str) -> Any:
        """Return a store for messages between threads of all ranks; None where there are no other ranks."""
        return self.communicator.store_of(name) if self.active else None

    @property
    def communicator(self) -> Communicator:
        """The connections of these ranks."""
        return communicator(self.ids)

    def together(self, doing: str) -> CollectiveCall:
        """Return a context of a call of all ranks: if one of them raises an error alone, the others raise it too.

        doing: "step of TrainGraph"; the others report it.
        """
        return CollectiveCall(self, doing)

    @property
    def must_talk(self) -> bool:
        """Whether a rank has stopped since the last consensus."""
        return self.active and self.communicator.generation != self._agreed_in


class CollectiveCall:
    """The context of ``Ranks.together``: a call of all ranks."""

    def __init__(self, ranks: Ranks, doing: str) -> None:
        self._ranks, self._doing = ranks, doing
        self._generation: int | None = None  # of the communicator, if ranks talk

    def __enter__(self) -> None:
        _compat.note_change(self._leave)
        try:
            CALL_LOCK.acquire(self, self._doing)
            self._ranks.raised_by_all = 0
            if self._ranks.active:
                self._ranks.communicator.begin(self._doing)
                self._generation = self._ranks.communicator.generation
        except Exception:  # an interrupt is ``_leave``'s
            CALL_LOCK.release(self)
            _compat.forget_change(self._leave)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        try:
            if error is None or not self._ranks.active or id(error) == self._ranks.raised_by_all:
                return
            raised = self._ranks.communicator.revoke(self._wait_if_check(error))
            if raised is not error:
                raise raised from error
        finally:
            CALL_LOCK.release(self)
            _compat.forget_change(self._leave)

    def _leave(self) -> None:
        """Do what an interrupted ``__enter__`` or ``__exit__`` has left undone."""
        try:
            if self._generation is not None and self._generation == self._ranks.communicator.generation:
                self._ranks.communicator.revoke(KeyboardInterrupt("as the call began or ended"))
        finally:
            CALL_LOCK.release(self)

    def _wait_if_check(self, error: BaseException) -> BaseException:
        """Wait for all ranks where a check fails, on all or none, before memory that they read is released."""
        if not isinstance(error, CheckError):
            return error
        try:
            self._ranks.collect(None)
        except Exception as other:  # noqa: BLE001 - whatever keeps a rank away
            return other
        return error


def by_value(ranks: list[int], values: list[str]) -> list[str]:
    """Return "ranks 0, 1: a" for each distinct value."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        ranks_of.setdefault(value, []).append(rank)
    return [f"{_names(who)}: {value}" for value, who in ranks_of.items()]


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (" ..." if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def tensor_text(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
