"""From a graph to what the executor runs: straight-line Python, cut where ranks meet.

Here is which lines an instruction becomes.  Which there are, and in which order, is ``ir/streams/instructions.py``;
where values are is ``places``, how lines are written ``code``, what may be written over when ``writes``, what travels
``transfers``; what the result consists of is ``steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import Any

from torch import Tensor, fx

from graphzero.errors import VerifyError
from graphzero.ir import ops, value
from graphzero.ir.aliases import is_copy
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import inplace
from graphzero.ir.storage.arena import Arena
from graphzero.ir.streams.instructions import Instruction, InstructionKind, InstructionList
from graphzero.ir.streams.places import Places
from graphzero.ops import CHECK
from graphzero.runtime import kernels
from graphzero.runtime.execute import checks
from graphzero.runtime.execute.code import Code, Rooms
from graphzero.runtime.execute.collectives import Transfers
from graphzero.runtime.execute.packing import Exchange
from graphzero.runtime.execute.region_compiler import RegionCompiler, RegionOp
from graphzero.runtime.execute.steps import Segment, Step
from graphzero.runtime.execute.writes import Writes
from graphzero.runtime.world.host_copies import room_space
from graphzero.runtime.world.world import World

LOCAL_MOVES = (ops.slice_shard, ops.keep_first, ops.place_shard)


@dataclass
class Program:
    """A compiled graph.

    steps: segments and barriers, in order; first_write: number of the first that writes a state, -1
        for none; host: host numbers, computed once for all ranks.
    places: of values in an environment; host_places: what ``host`` fills.
    constants: per local rank, what is in which place from the start.
    slotted: exchanges that work within communication slots: (place, slot, one exchange per local rank).
    outputs, aux: place, or a literal wrapped in a 1-tuple.
    rooms: where results are put in the arena.
    """

    steps: list[Step]
    first_write: int
    host: Segment | None
    host_places: list[int]
    places: Places
    constants: list[dict[int, Any]]
    slotted: list[tuple[int, int, list[Exchange]]]
    outputs: list[Any]
    aux: dict[str, Any]
    rooms: Rooms


def compile_graph(
    graph: StepGraph, world: World, calls: RegionCompiler | None, arena: Arena | None, checking: bool
) -> Program:
    """Compile a lowered graph for the ranks that live in this process.

    calls: what to call for regions, where the graph has any.  arena: where results lie that do not find their own
    memory.  checking: whether checks raise.

    Raises VerifyError for a box left in it.
    """
    return _Compiler(graph, world, calls, arena, checking).compile()


class _Compiler:
    def __init__(
        self, graph: StepGraph, world: World, calls: RegionCompiler | None, arena: Arena | None, checking: bool
    ):
        self.graph, self.world, self.calls, self.checking = graph, world, calls, checking
        self.file_end = 0  # bytes of a file that rooms for activations take
        self.places = Places(graph)
        self.code = Code(world, self.places)
        self.writes = Writes(graph, self.places, self.code)
        self.rooms = Rooms(graph, arena, self.places, world.rank_ids)
        self.transfers = transfers = Transfers(graph, world, self.places, self.code, self.writes, self.rooms)
        self.write_lines: Mapping[InstructionKind, Callable[[fx.Node], None]] = {
            InstructionKind.CALL: self._call,
            InstructionKind.PACK: transfers.pack,
            InstructionKind.BEGIN: transfers.begin,
            InstructionKind.AWAIT: transfers.await_end,
            InstructionKind.UNPACK: transfers.unpack,
        }

    def compile(self) -> Program:
        instructions = InstructionList(self.graph, self.places)
        handed_over: set[int] = set()  # places that a region empties itself
        for number, one in enumerate(instructions.all):
            if instructions.repeated and number == instructions.repeated.start:
                self.code.cut()
                since = len(self.code.steps)
            if one.kind is InstructionKind.CALL and isinstance(one.node.target, RegionOp):
                after = takewhile(
                    lambda other: other.kind is InstructionKind.EMPTY, islice(instructions.all, number + 1, None)
                )
                places = [other.place for other in after if self._may_hand_over(one.node, other)]
                handed_over.update(places)
                self._region(one.node, one.node.target, places)
            elif one.node.target in ops.HOST_COPIES and one.kind is not InstructionKind.EMPTY:
                self._host_copy(one.node)
            elif one.kind is not InstructionKind.EMPTY:
                self.write_lines[one.kind](one.node)
            elif one.place in handed_over:
                handed_over.discard(one.place)
            else:
                self.code.empty(one.place, one.node)
            if instructions.repeated and number == instructions.repeated.stop - 1:
                self.code.repeat(since, self._number(self.places.repeated), instructions.times)
        self.writes.end(self.graph.output)
        self.code.cut()
        return self._program()

    def _may_hand_over(self, node: fx.Node, empty: Instruction) -> bool:
        """Return whether ``node`` reads a place last, also when it runs again."""
        return empty.node is node and (not value.repeats_of(node) or self.places.is_repeated(empty.place))

    def _number(self, repeated: Sequence[fx.Node]) -> fx.Node:
        """The expression for the number of the micro-batch that runs."""
        return next(node for node in repeated if node.target is ops.micro_batch)

    def _call(self, node: fx.Node) -> None:
        target: Any = node.target
        if target is ops.box:
            raise VerifyError(f"'{node.name}' is still a box, which no runtime can execute; run lower_boxing before")
        if target is ops.assign:
            self.writes.assign(node, value.operand(node), value.operand(node, 1))
        elif target in LOCAL_MOVES:
            moves = [kernels.local_move(self.graph, node, self.world, local) for local in self.code.locals]
            self.code.fill(node, f"{self.code.per_rank(moves)}({self.code.text(node.args[0])})")
        elif target is ops.accumulator:
            rooms = [kernels.accumulator(self.graph, node, self.world, local) for local in self.code.locals]
            self.code.fill(node, f"{self.code.per_rank(rooms)}()")
        elif target is ops.host_room:
            self._host_room(node)
        elif target in ops.IN_TURN:
            self.code.fill(node, self.code.call(kernels.IN_TURN[target], node.args, {}))
        elif (room := inplace.out_of(node)) is not None:
            self.writes.over_one(node, room)
        elif target in inplace.OVER_OPERANDS and node in self.places.results:
            self.writes.over_operands(node)
        elif (place := self.rooms.place_of(node)) is not None:
            self._into(node, place)
        else:
            self.code.fill(
                node, self.code.call(kernels.kernel(target), node.args, kernels.keywords(node, self.world.device))
            )
        if target is CHECK and self.checking:
            self.code.add(f"{self.code.name(partial(checks.raise_unmet, node))}({self.code.text(node)})", node)

    def _host_room(self, node: fx.Node) -> None:
        """Room in host memory, if that is a file at a place of its own for each rank."""
        space = room_space(self.graph, node, self.world.rank_ids)
        offsets = [self.file_end + space * local for local in self.code.locals]
        self.file_end += space * len(offsets)
        rooms = [partial(self.world.host_copies.room_for, offset) for offset in offsets]
        self.code.fill(node, f"{self.code.per_rank(rooms)}({self.code.text(node.args[0])})")

    def _host_copy(self, node: fx.Node) -> None:
        """Begin a copy between host memory and the device, or wait for one."""
        copies, name, text = self.world.host_copies, self.code.name, self.code.text
        if node.target is ops.to_device_launch:
            self.code.fill(node, f"{name(copies.begin_to_device)}({text(node.args[0])})")
        elif node.target is ops.to_device_wait:
            self.code.add(f"{name(copies.end)}({text(node.args[0])}, {text(node.args[1])})", node)
        elif node.target is ops.to_host_launch:
            self.writes.begin_to_host(node, copies)
        else:
            self.writes.end_to_host(node, copies)

    def _into(self, node: fx.Node, place: int) -> None:
        """Write a result at its place in the arena."""
        if is_copy(node.target):
            self.code.fill(node, f"{self.code.name(Tensor.copy_)}(e[{place}], {self.code.text(node.args[0])})")
        else:
            kernel, keyword = kernels.into(node)
            self.code.fill(node, self.code.call(kernel, node.args, dict(node.kwargs), f"{keyword}=e[{place}]"))

    def _region(self, node: fx.Node, op: RegionOp, emptied: list[int]) -> None:
        """Write one line that calls a region: operands that are not read later are handed over and freed inside."""
        assert self.calls is not None
        calls = [self.calls.region_function(op, local) for local in self.code.locals]
        call = self.code.name(calls[0]) if len(set(calls)) == 1 else self.code.per_rank(calls)
        given = "".join(f"e[{place}] = " for place in emptied)
        operands = ", ".join(map(self.code.text, node.args))
        self.code.fill(node, f"{call}(given)", before=f"given = [{operands}]; " + f"{given}None; " * bool(given))

    def _program(self) -> Program:
        graph, code, final = self.graph, self.code, {**self.places.of, **self.writes.saved}
        return Program(
            steps=code.steps,
            first_write=self.writes.first_step,
            host=code.host(),
            host_places=code.host_places,
            places=self.places,
            constants=code.constants,
            slotted=self.transfers.slotted,
            outputs=[final[x] if isinstance(x, fx.Node) else (x,) for x in graph.outputs],
            aux={name: final[node] for name, node in graph.aux.items()},
            rooms=self.rooms,
        )
