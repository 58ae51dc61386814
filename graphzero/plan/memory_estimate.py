"""What a program holds over time if some values of forward are computed again: counted, not made.

The sketch moves no node.  It says where the copies that ``Recompute`` makes would stand, how long each storage then
lives, and the bytes of it, in some milliseconds a try.  It leaves out what later passes do (buckets, slots, transfers
under way), so the plan of the program itself has the last word: see ``recomputation``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import Bytes, bytes_held, liveness
from graphzero.passes.memory.delay_gradients import rooms_of, takes_memory
from graphzero.passes.memory.recompute import Forward
from graphzero.plan.seconds import plain, seconds_of

Ops = frozenset[int]  # positions of ops of forward


@dataclass(frozen=True)
class Held:
    """Bytes over the positions of the program with its copies.

    total, activations: up to the end of backward, all, and of them what forward leaves for backward to read, or what is
    computed again for it.
    place: of each op, where it then stands.  begins, ends: of each storage of the program as it was.
    wanted: of each storage, the first position at which backward or a copy reads it.  copied: ops that run again.
    """

    total: Bytes
    activations: Bytes
    place: Bytes
    begins: Bytes
    ends: Bytes
    wanted: Bytes
    copied: Ops

    def part(self, name: str) -> Bytes:
        """By the name of a limit."""
        return self.total if name == "total" else self.activations


class Sketch:
    """Of a local graph whose backward reads what forward gathers, see ``merge_gathers``, and computes nothing again.

    names: of ops that may run again, by position.  seconds: what each costs.
    """

    def __init__(self, graph: StepGraph):
        at, forward = liveness(graph), Forward(graph)
        position = at.position
        self.names = {position[maker]: maker.name for maker in forward.free}
        self.gathers: Ops = frozenset(position[maker] for maker in forward.gathers)
        device = plain(graph.placement.device_type)
        self.seconds = {i: seconds_of(at, at.nodes[i], device) for i in (*self.names, *self.gathers)}
        self.maker = [-1] * len(at.nodes)  # of each value of forward that may be made again, the op that makes it
        for node, maker in forward.maker.items():
            if position[maker] in self.seconds:
                self.maker[position[node]] = position[maker]
        self.reads = [[position[x] for x in node.all_input_nodes] for node in at.nodes]
        self._beside = [  # what is copied with a value: what it reads, and all results where there are several
            [*seen, *(position[user] for user in node.users if value.is_multi(node))]
            for node, seen in zip(at.nodes, self.reads, strict=True)
        ]

        lives = [life for life in at.lives() if life.begin >= 0 and takes_memory(life.storage)]
        self._index = {life.storage: k for k, life in enumerate(lives)}
        self.nbytes = _array(life.nbytes for life in lives)
        self.begin, self.end = _array(life.begin for life in lives), _array(life.end for life in lives)
        self.made_by = _array(life.begin for life in lives)
        self.is_activation = np.array([life.category == "activations" for life in lives], dtype=bool)
        self.is_parameter = np.array([int(i) in self.gathers for i in self.made_by], dtype=bool)
        phases = [value.phase_of(node) if node.op == "call_function" else "" for node in at.nodes]
        self.is_forward = np.array([phases[i] == "forward" for i in self.made_by], dtype=bool)
        readers = [at.readers[life.storage] for life in lives]
        self.end_forward = _array(
            max([life.begin, *(i for i in some if phases[i] == "forward")])
            for life, some in zip(lives, readers, strict=True)
        )
        late = [[i for i in some if phases[i] != "forward"] for some in readers]
        self.first_late = _array(min(some, default=len(at.nodes)) for some in late)
        self.storages = [[self._index[s] for s in at.roots.get(node, ()) if s in self._index] for node in at.nodes]
        self.makes: dict[int, list[int]] = {}
        for k, i in enumerate(self.made_by.tolist()):
            self.makes.setdefault(i, []).append(k)
        self.backward = [
            (i, seen) for i, phase in enumerate(phases)
            if phase == "backward" and (seen := [x for x in self.reads[i] if self.maker[x] >= 0])
        ]  # fmt: skip
        rooms = [(position[node], at.roots[room][0]) for node in at.nodes for room in rooms_of(graph, node)]
        self.room = {i: self._index[storage] for i, storage in rooms if storage in self._index}
        self.resident = sum(at.resident().values())
        self.until = 1 + max((i for i, phase in enumerate(phases) if phase == "backward"), default=len(phases) - 1)

    @cached_property
    def needs(self) -> dict[int, list[tuple[int, int]]]:
        """Of each op that may run again, what it reads: (the op that made it, storage)."""
        return {
            i: sorted({(int(self.made_by[k]), k) for x in self.reads[i] for k in self.storages[x]})
            for i in self.seconds
        }  # fmt: skip

    @cached_property
    def nothing(self) -> Held:
        """With no value computed again."""
        return self.held(frozenset())

    def cost(self, copied: Iterable[int]) -> float:
        """Seconds of ops that run again."""
        return sum(self.seconds[i] for i in copied)

    # ---- where copies stand

    def held(self, dropped: Collection[int]) -> Held:
        """With ops of forward dropped: what they make does not stay, backward reads what they make again."""
        count = len(self.maker)
        gone = {*dropped, *self.gathers}
        inserted, copies = self._copies(gone)
        shift = np.zeros(count, dtype=np.int64)
        for before, some in inserted:
            shift[before] = len(some)
        place = np.arange(count, dtype=np.int64) + np.cumsum(shift)
        length = count + sum(len(some) for _, some in inserted)
        until = self.until + length - count

        is_gone = np.array([int(i) in gone for i in self.made_by], dtype=bool)
        ends = place[np.where(is_gone, self.end_forward, self.end)]
        late = np.append(place, length)
        wanted = np.where(is_gone, length, late[self.first_late])
        activations = self.is_activation & ~is_gone

        begin_again, end_again, read_again = self._lives_again(inserted, copies, place, ends, wanted, activations)
        again = list(begin_again)
        sizes = self.nbytes[again] if again else np.zeros(0, dtype=np.int64)
        begins_again, ends_again = _array(begin_again[k] for k in again), _array(end_again[k] for k in again)
        begins = place[self.begin]
        total = self.resident + bytes_held(
            np.concatenate([begins, begins_again]), np.concatenate([ends, ends_again]),
            np.concatenate([self.nbytes, sizes]), length,
        )  # fmt: skip
        self._share_rooms(total, place, ends, inserted, copies, end_again)
        counted = np.array([k in read_again and not self.is_parameter[k] for k in again], dtype=bool)
        held = bytes_held(
            np.concatenate([begins[activations], begins_again[counted]]),
            np.concatenate([ends[activations], ends_again[counted]]),
            np.concatenate([self.nbytes[activations], sizes[counted]]), length,
        )  # fmt: skip
        made = frozenset(one for one in copies if one in self.seconds)
        return Held(total[:until], held[:until], place, begins, ends, wanted, made)

    def _copies(self, gone: set[int]) -> tuple[list[tuple[int, list[int]]], set[int]]:
        """(op of backward, what is computed again right before it) in order; all that is computed again."""
        inserted, copies = list[tuple[int, list[int]]](), set[int]()
        for i, seen in self.backward:
            rest = [x for x in seen if x not in copies and self.maker[x] in gone]
            new = set[int]()
            while rest:
                one = rest.pop()
                if one not in new:
                    new.add(one)
                    rest += [x for x in self._beside[one] if x not in copies and self.maker[x] in gone]
            if new:
                copies |= new
                inserted.append((i, sorted(new)))
        return inserted, copies

    def _lives_again(
        self, inserted: list[tuple[int, list[int]]], copies: set[int], place: Bytes, ends: Bytes, wanted: Bytes,
        activations: NDArray[np.bool_],
    ) -> tuple[dict[int, int], dict[int, int], set[int]]:  # fmt: skip
        """Of storages of copies: where each begins, where it ends, and which ones backward itself reads.

        What copies read of forward lives until then: ``ends``, ``wanted`` and ``activations`` change.
        """
        begin_again: dict[int, int] = {}
        end_again: dict[int, int] = {}
        read_again = set[int]()
        for before, some in inserted:
            first = int(place[before]) - len(some)
            for at, one in enumerate(some, first):
                for k in self.storages[one]:
                    begin_again.setdefault(k, at)
                    end_again[k] = at
                for x in self.reads[one]:
                    for k in self.storages[x]:
                        if x in copies:
                            end_again[k] = at
                        else:
                            ends[k] = max(ends[k], at)
                            wanted[k] = min(wanted[k], at)
                            activations[k] |= self.is_forward[k] and not self.is_parameter[k]
        for i, seen in self.backward:
            for x in seen:
                if x in copies:
                    for k in self.storages[x]:
                        end_again[k] = max(end_again[k], int(place[i]))
                        read_again.add(k)
        return begin_again, end_again, read_again

    def _share_rooms(
        self, total: Bytes, place: Bytes, ends: Bytes, inserted: list[tuple[int, list[int]]], copies: set[int],
        end_again: dict[int, int],
    ) -> None:  # fmt: skip
        """Take off where a result is put into the storage of an operand that nobody reads again."""
        if self.room:
            over = _array(self.room)
            rooms = _array(self.room.values())
            free = ends[rooms] == place[over]
            total[place[over[free]]] -= self.nbytes[rooms[free]]
        for before, some in inserted:
            first = int(place[before]) - len(some)
            for at, one in enumerate(some, first):
                room = self.room.get(one)
                if (
                    room is not None
                    and (end_again.get(room) if int(self.made_by[room]) in copies else ends[room]) == at
                ):
                    total[at] -= self.nbytes[room]


def _array(numbers: Iterable[int]) -> Bytes:
    return np.array(list(numbers), dtype=np.int64)
