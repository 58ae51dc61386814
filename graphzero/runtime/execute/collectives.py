"""Collectives in generated code: how they are packed, begun, awaited and unpacked.

When, ``ir/streams/instructions.py`` says; what travels is ``packing``'s, how is the world's.
"""

from __future__ import annotations

from functools import partial

from torch import fx

from graphzero.errors import VerifyError
from graphzero.ir import ops, transfer_layout
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import inplace
from graphzero.ir.streams.instructions import begun_by
from graphzero.ir.streams.places import Places
from graphzero.ir.transfer import NO_SLOT_YET, transfer_of
from graphzero.runtime.execute import packing
from graphzero.runtime.execute.code import Code, Rooms
from graphzero.runtime.execute.packing import Direct, Exchange, starter
from graphzero.runtime.execute.writes import Writes
from graphzero.runtime.world.world import World


class Transfers:
    """slotted: exchanges that work within communication slots: (place, slot, one exchange per local rank)."""

    def __init__(
        self, graph: StepGraph, world: World, places: Places, code: Code, writes: Writes, rooms: Rooms
    ) -> None:
        self.graph, self.world, self.places, self.code = graph, world, places, code
        self.writes, self.rooms = writes, rooms
        self.slotted: list[tuple[int, int, list[Exchange]]] = []

    def pack(self, node: fx.Node) -> None:
        """Lay what a collective moves where it sends from."""
        layout = transfer_layout.layout_of(self.graph, node)
        assert layout is not None
        moves = layout.moves
        if moves.slot == NO_SLOT_YET:
            raise VerifyError(f"'{node.name}' has no communication slot; run the pass slots before")
        exchanges = [Exchange(self.graph, layout, self.world, local) for local in self.code.locals]
        members = [self.code.text(member) for member in moves.members]
        if moves.is_direct:
            self._pack_direct(node, members[0], exchanges)
        elif moves.is_launch:
            assert moves.slot is not None
            slot = self.places.new()
            self.slotted.append((slot, moves.slot, exchanges))
            self.code.add(f"e[{self.places.of[node]}] = e[{slot}].pack([{', '.join(members)}])", node)
        else:
            fresh = self.code.per_rank([exchange.fresh for exchange in exchanges])
            self.code.add(f"e[{self.places.buffers[node]}] = {fresh}().pack([{', '.join(members)}])", node)

    def begin(self, node: fx.Node) -> None:
        """Begin a collective, which goes on until it is awaited."""
        moves = transfer_of(node)
        assert moves is not None
        starts, place, pending = starter(moves, self.graph, self.world), self._place(node), self.world.pending
        self.code.barrier(node, lambda envs: pending.__setitem__(place, starts([e[place] for e in envs])))

    def await_end(self, node: fx.Node) -> None:
        """Let what follows run after a collective: the one that ``node`` waits for, or itself."""
        place, pending = self._place(begun_by(node)), self.world.pending
        self.code.barrier(node, lambda envs: pending.pop(place).wait(), meets=node.target is ops.wait)

    def unpack(self, node: fx.Node) -> None:
        """Take the results of a collective that has ended."""
        begun = begun_by(node)
        self.code.fill(node, f"e[{self._place(begun)}].unpack()", listed=True)
        home = self._home_of_arrival(begun)
        if home is not None:
            (pick,) = node.users
            settle = self.code.name(packing.settle)
            self.code.add(f"{settle}(e[{self.places.of[home]}], e[{self.places.of[pick]}])", node)

    def _place(self, node: fx.Node) -> int:
        """The place of a collective's buffer while the transfer is under way."""
        return self.places.buffers.get(node, self.places.of[node])

    def _pack_direct(self, launch: fx.Node, member: str, exchanges: list[Exchange]) -> None:
        """Transfer one value out of its own storage, without packing."""
        begins = self.code.per_rank([partial(Direct, exchange) for exchange in exchanges])
        room = self.rooms.place_of(launch)
        if room is not None:
            self.code.add(f"e[{self.places.of[launch]}] = {begins}({member}, e[{room}])", launch)
            return
        place = self.places.new()
        self._make_room(launch, place, exchanges)
        self.code.add(f"e[{self.places.of[launch]}] = {begins}({member}, e[{place}])", launch)
        self.code.empty(place, launch)

    def _make_room(self, launch: fx.Node, count: int, exchanges: list[Exchange]) -> None:
        """Fill place ``count`` with the storage in which a collective without a slot arrives."""
        home = self._home_of_arrival(launch)
        if home is not None:
            self.writes.save(launch, home.name)
            if self.writes.is_shared(home):
                self.code.barrier(launch, lambda envs: None)  # no rank writes while another has lines above to run
            rooms = self.code.per_rank([exchange.storage_of for exchange in exchanges])
            given = f"e[{self.places.of[home]}]"
        else:
            rooms, given = self.code.per_rank([exchange.result_storage for exchange in exchanges]), ""
        self.code.add(f"e[{count}] = {rooms}({given})", launch, ((count, ((launch.name, 0),)),))

    def _home_of_arrival(self, launch: fx.Node) -> fx.Node | None:
        """The state that the result of a launch becomes as it arrives."""
        room = inplace.out_of(launch)
        return None if room is None else self.places.home(room)
