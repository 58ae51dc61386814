"""Collectives in generated code: packed and begun at one line, awaited and unpacked at another, or both at one.

What travels is ``collectives``'s, how is the world's; here is where ranks meet.
"""

from __future__ import annotations

from functools import partial

from torch import fx

from graphzero.errors import VerifyError
from graphzero.ir import transfer_layout
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import inplace
from graphzero.ir.transfer import NO_SLOT_YET
from graphzero.runtime.execute import packing
from graphzero.runtime.execute.arena import Rooms
from graphzero.runtime.execute.code import Code
from graphzero.runtime.execute.environment import Places
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

    def begin(self, node: fx.Node) -> None:
        """A collective, or the launch of one."""
        layout = transfer_layout.layout_of(self.graph, node)
        assert layout is not None
        if layout.moves.slot == NO_SLOT_YET:
            raise VerifyError(f"'{node.name}' has no communication slot; run the pass slots before")
        exchanges = [Exchange(self.graph, layout, self.world, local) for local in self.code.locals]
        moves = layout.moves
        members = [self.code.text(member) for member in moves.members]
        starts = starter(moves, self.graph, self.world)
        if not moves.is_launch:
            place, fresh = self.places.new(), self.code.per_rank([exchange.fresh for exchange in exchanges])
            self.code.add(f"e[{place}] = {fresh}().pack([{', '.join(members)}])", node)
            self.code.barrier(node, lambda envs: starts([e[place] for e in envs]).wait())
            self.code.fill(node, f"e[{place}].unpack()", listed=True)
            self.code.empty(place, node)
            return
        if moves.slot is None:
            self._pack_direct(node, members[0], exchanges)
        else:
            slot = self.places.new()
            self.slotted.append((slot, moves.slot, exchanges))
            self.code.add(f"e[{self.places.of[node]}] = e[{slot}].pack([{', '.join(members)}])", node)
        at, pending = self.places.of[node], self.world.pending
        self.code.barrier(node, lambda envs: pending.__setitem__(at, starts([e[at] for e in envs])))

    def wait(self, node: fx.Node) -> None:
        (launch,) = node.args
        assert isinstance(launch, fx.Node)
        place, pending = self.places.of[launch], self.world.pending
        self.code.barrier(node, lambda envs: pending.pop(place).wait())
        self.code.fill(node, f"e[{place}].unpack()", listed=True)
        home = self._home_of_arrival(launch)
        if home is not None:
            (pick,) = node.users
            settle = self.code.name(packing.settle)
            self.code.add(f"{settle}(e[{self.places.of[home]}], e[{self.places.of[pick]}])", node)

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
