"""Generated code in the making: lines of Python over a rank's environment, gathered in segments, cut by barriers.

Large temporaries have rooms in the buffer of each local rank that stays from step to step, where ``ir.storage.arena``
says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from graphzero.ir import transfer_layout, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.arena import Arena
from graphzero.ir.streams.places import Places
from graphzero.runtime.execute.steps import Barrier, Env, Line, Segment, Step, WholeStep
from graphzero.runtime.world.world import World
from graphzero.sbp.shards import LocalSize, LocalStart

LONGEST = 1000  # lines of one generated function
Shape = tuple[int, ...]


class Code:
    """steps: segments and barriers so far.  names: the globals of generated code.

    constants: per local rank, what is in which place from the start.  host_places: what ``host`` fills.
    """

    def __init__(self, world: World, places: Places) -> None:
        self.world, self.places = world, places
        self.locals = range(len(world.local_ranks))
        self.steps: list[Step] = []
        self.names: dict[str, Any] = {}
        self.constants: list[dict[int, Any]] = [{} for _ in self.locals]
        self.host_places: list[int] = []
        self._lines: list[Line] = []
        self._host: list[Line] = []
        self._called: dict[int, str] = {}  # id of an object -> its name

    # ---- lines

    def add(self, text: str, node: fx.Node, makes: tuple[tuple[int, tuple[Any, ...]], ...] = ()) -> None:
        self._lines.append(Line(text, node, makes))

    def empty(self, place: int, node: fx.Node) -> None:
        self.add(f"e[{place}] = None", node)

    def fill(self, node: fx.Node, call: str, listed: bool = False, before: str = "") -> None:
        """``call`` fills the places of the node's results; ``listed``: it returns a list, of one too.

        before: what is on the line before that, ending in a semicolon.
        """
        of, results = self.places.of, self.places.results
        if node in results:
            picked = {user.args[1]: user.name for user in node.users}
            numbered = enumerate(results[node])
            makes = tuple((p, tuple(filter(None, (picked.get(i), (node.name, i))))) for i, p in numbered)
            text = f"[{', '.join(f'e[{place}]' for place in results[node])}] = {call}"
        else:
            makes = ((of[node], (node.name,)),)
            text = f"e[{of[node]}] = {call}"
            if listed and not value.is_multi(node):
                text += "[0]"
        if value.is_scalar(node):
            self._host.append(Line(text, node))
            self.host_places.append(of[node])
            return
        if len(self._lines) >= LONGEST:
            self.cut()
        self.add(before + text, node, makes)

    def cut(self) -> None:
        """End the segment; what follows is another one."""
        if self._lines:
            self.steps.append(self.segment(self._lines))
            self._lines = []

    def barrier(self, node: fx.Node, action: Callable[[list[Env]], Any], meets: bool = True) -> None:
        """Here all local ranks do ``action`` together.  meets: whether they come to it from work of their own."""
        self.cut()
        self.steps.append((Barrier if meets else WholeStep)(node, action))

    def repeat(self, since: int, node: fx.Node, times: int) -> None:
        """Repeat the steps from number ``since`` on ``times`` times; each repetition gets its number."""
        self.cut()
        once, place = self.steps[since:], self.places.of[node]

        def set_number(i: int, envs: list[Env]) -> None:
            for e in envs:
                e[place] = i

        self.steps[since:] = [step for i in range(times) for step in (WholeStep(node, partial(set_number, i)), *once)]

    def segment(self, lines: list[Line]) -> Segment:
        return Segment(lines, self.names)

    def host(self) -> Segment | None:
        """The lines that compute host numbers, the same for all ranks."""
        return self.segment(self._host) if self._host else None

    # ---- words

    def call(self, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *said: str) -> str:
        """``said``: more arguments, as they are."""
        words = [*map(self.text, args), *(f"{k}={self.text(v)}" for k, v in kwargs.items()), *said]
        return f"{self.name(kernel)}({', '.join(words)})"

    def text(self, arg: Any) -> str:
        """An argument as it is in generated code."""
        if isinstance(arg, fx.Node):
            return f"e[{self.places.of[arg]}]"
        if isinstance(arg, (list, tuple)):
            inner = ", ".join(self.text(item) for item in arg)
            return f"[{inner}]" if isinstance(arg, list) else f"({inner}{',' * (len(arg) == 1)})"
        if isinstance(arg, (LocalSize, LocalStart)):
            return self.per_rank([self.world.resolve(arg, local) for local in self.locals])
        if arg is None or isinstance(arg, (bool, int, str)) or (isinstance(arg, float) and abs(arg) < float("inf")):
            return repr(arg)
        return self.name(arg)

    def per_rank(self, values: list[Any]) -> str:
        """Something that each rank has its own of."""
        place = self.places.new()
        for constants, x in zip(self.constants, values, strict=True):
            constants[place] = x
        return f"e[{place}]"

    def name(self, x: Any) -> str:
        """A name for something that all ranks share."""
        key = id(x)
        if key not in self._called:
            self._called[key] = f"f{len(self._called)}"
            self.names[self._called[key]] = x  # keeps it alive, and with it its id
        return self._called[key]


@dataclass(frozen=True)
class Room:
    """A tensor in the arena, in ``place`` of every environment: its offset in bytes, its shape on each local rank."""

    place: int
    offset: int
    dtype: torch.dtype
    shapes: Sequence[Shape]


@dataclass
class Rooms:
    """all: the rooms of a program, those that its code has asked for."""

    graph: StepGraph
    arena: Arena | None
    places: Places
    ranks: Sequence[int]  # ids of the local ones
    all: list[Room] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes if self.arena is not None else 0

    def place_of(self, node: fx.Node) -> int | None:
        """The place of the room in which a node's result is to be; None where it finds its own memory."""
        offset = self.arena.offsets.get((node, 0)) if self.arena is not None else None
        if offset is None:
            return None
        layout = transfer_layout.layout_of(self.graph, node)
        if layout is not None:
            dtype = layout.moves.dtype
            shapes: list[Shape] = [(layout.arrived_elements,)] * len(self.ranks)
        else:
            type_, nd = value.tensor_type(node), value.nd_of(node)
            dtype, shapes = type_.dtype, [transfer_layout.shape_on(self.graph, type_, nd, rank) for rank in self.ranks]
        room = Room(self.places.new(), offset, dtype, shapes)
        self.all.append(room)
        return room.place
