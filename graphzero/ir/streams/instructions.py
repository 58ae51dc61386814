"""The instructions that a process issues for a program, in order: executors run them, ``check_streams`` examines them.

    b = mul(a, 2.0)                              CALL
    l = launch('bucket_all_gather', 0, [b, c])   PACK  BEGIN     b and c may go from here on
    w = wait(l)                                  AWAIT  UNPACK
    r = all_reduce(d, 'dp')                      PACK  BEGIN  AWAIT  UNPACK
    s = to_device_launch(m)                      BEGIN
    t = to_device_wait(s, m)                     AWAIT

and after the last reader of a value EMPTY, the place in which it is.  All but BEGIN is work of the one stream
that computes.  BEGIN hands a transfer to the stream of its axis, or a copy to that of its direction: it runs after
what has been issued so far, and AWAIT lets what is issued later run after it.  Names of a value, and numbers of
micro-batches, issue nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.aliases import is_name
from graphzero.ir.graph import StepGraph
from graphzero.ir.streams.places import Places
from graphzero.ir.transfer import is_transfer

NO_PLACE = -1


class InstructionKind(Enum):
    """Kinds of instructions.

    CALL: an op.  PACK: the values of a transfer are laid where it sends from.  BEGIN: it is begun.  AWAIT: it has
    ended for all that follows.  UNPACK: its results are taken from where it has received.  EMPTY: a place is emptied.
    """

    CALL = "call"
    PACK = "pack"
    BEGIN = "begin"
    AWAIT = "await"
    UNPACK = "unpack"
    EMPTY = "empty"


class Instruction(NamedTuple):
    """place: that EMPTY empties."""

    kind: InstructionKind
    node: fx.Node
    place: int = NO_PLACE


class InstructionList:
    """The instructions of a program.

    all: in order, those of a micro-batch once.  repeated: the numbers of these, which run ``times`` times.
    """

    def __init__(self, graph: StepGraph, places: Places) -> None:
        self.all: list[Instruction] = []
        self.repeated, self.times = range(0), 1
        emptied, body = places.emptied_after(), places.repeated
        begin = 0
        for node in graph.nodes:
            if body and node is body[0]:
                begin = len(self.all)
            self.all += (Instruction(kind, node) for kind in _issued_kinds(node, places))
            done = emptied.get(node, [])
            if node in places.buffers:
                self._empty(node, [places.buffers[node]])
            if body and node is body[-1]:
                self._empty(node, filter(places.is_repeated, done))
                self.repeated, self.times = range(begin, len(self.all)), value.repeats_of(node)
                done = [place for place in done if not places.is_repeated(place)]
            self._empty(node, done)

    def _empty(self, node: fx.Node, places: Iterable[int]) -> None:
        self.all += (Instruction(InstructionKind.EMPTY, node, place) for place in places)


def begun_by(node: fx.Node) -> fx.Node:
    """The node that begins the transfer or the copy that ``node`` waits for; ``node`` itself where it begins one."""
    return value.operand(node) if node.target is ops.wait or node.target in ops.HOST_WAITS else node


def _issued_kinds(node: fx.Node, places: Places) -> Iterator[InstructionKind]:
    if node.op != "call_function" or is_name(node.target) or places.is_picked(node) or node.target is ops.micro_batch:
        return
    if node.target in ops.HOST_COPIES:
        yield InstructionKind.BEGIN if node.target in ops.HOST_LAUNCHES else InstructionKind.AWAIT
        return
    if not is_transfer(node):
        yield InstructionKind.CALL
        return
    if node.target is not ops.wait:
        yield InstructionKind.PACK
        yield InstructionKind.BEGIN
    if node.target is not ops.launch:
        yield InstructionKind.AWAIT
        yield InstructionKind.UNPACK
