"""From a graph to what the executor runs: straight-line Python, cut where ranks meet.

What a segment and a barrier are is ``steps``; here every value gets its place in the environment, names of one
value (``use``, ``pin``, ``getitem`` ...) the same one, and a place is emptied right after its last reader.  Values
that leave the step and would change under a write are copied before it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from graphzero.errors import VerifyError
from graphzero.ir import inplace, layout, ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.memory import storage_roots
from graphzero.runtime import collectives, kernels
from graphzero.runtime.collectives import Direct, Exchange, starter
from graphzero.runtime.steps import COMMUNICATING, Barrier, Env, Line, Segment
from graphzero.runtime.world import Handle, World, place_of
from graphzero.sbp.local import LocalSize, LocalStart

PERSISTENT = ("param", "buffer", "state", "constant")
LONGEST = 1000  # lines of one generated function
LOCAL_MOVES = (ops.slice_shard, ops.keep_first, ops.place_shard)


@dataclass
class Program:
    """A compiled graph.

    steps: segments and barriers, in order; first_write: number of the first that writes a state, -1
        for none; host: host numbers, computed once for all ranks.
    size: places of an environment; constants: per local rank, what stands in which place from the start.
    slotted: exchanges that work within communication slots: (place, slot, one exchange per local rank).
    persistent, inputs: place of each placeholder by name; host_places: what ``host`` fills.
    outputs, aux: place, or a literal wrapped in a 1-tuple; pending: collectives under way.
    names: the globals of generated code; places: of every value by name.
    """

    steps: list[Segment | Barrier] = field(default_factory=list)
    first_write: int = -1
    host: Segment | None = None
    host_places: list[int] = field(default_factory=list)
    size: int = 0
    constants: list[dict[int, Any]] = field(default_factory=list)
    slotted: list[tuple[int, int, list[Exchange]]] = field(default_factory=list)
    persistent: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    aux: dict[str, Any] = field(default_factory=dict)
    pending: dict[int, Handle] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)


def compile_graph(graph: StepGraph, world: World) -> Program:
    """Compile a lowered graph for the ranks that live in this process.  Raises VerifyError for a box left in it."""
    return _Compiler(graph, world).compile()


class _Compiler:
    def __init__(self, graph: StepGraph, world: World):
        self.graph, self.world = graph, world
        self.locals = range(len(world.local_ranks))
        self.program = Program(constants=[{} for _ in self.locals])
        self.places: dict[fx.Node, int] = {}
        self.results: dict[fx.Node, list[int]] = {}  # of ops with several results that only getitem reads
        self.saved: dict[fx.Node, int] = {}  # where a result stands that a write would have changed
        self.lines: list[Line] = []
        self.host: list[Line] = []
        self.called: dict[Any, str] = {}
        self.roots = storage_roots(graph)
        self.written = {node.args[0].name for node in graph.nodes if node.target is ops.assign}  # type: ignore[union-attr]
        self.written |= {name for name, new in graph.updates.items() if self._home(new).name == name}

    def compile(self) -> Program:
        self._place_all()
        self.frees = self._last_readers()
        self.safe = self._endangered()
        for node in self.graph.nodes:
            if node.op == "call_function":
                self._node(node)
            for place in self.frees.get(node, ()):
                self._free(node, place)
        self._finish()
        self.program.places = {node.name: place for node, place in self.places.items()}
        return self.program

    # ---- places and lives

    def _new(self) -> int:
        self.program.size += 1
        return self.program.size - 1

    def _place_all(self) -> None:
        for node in self.graph.nodes:
            source = node.args[0] if node.args else None
            if node.op == "output":
                continue
            if node.op == "placeholder":
                self.places[node] = self._new()
                self._placeholder(node)
            elif node.target in kernels.SAME or node.target is ops.assign:
                self.places[node] = self.places[source]  # type: ignore[index]
            elif self._is_put(node):
                self.places[node] = self.places[inplace.out_of(node)]  # type: ignore[index]
            elif node.target is operator.getitem and source in self.results:
                self.places[node] = self.results[source][node.args[1]]  # type: ignore[index]
            else:
                self.places[node] = self._new()
                if value.is_multi(node) and node.target is not ops.launch and _only_picked(node):
                    self.results[node] = self._result_places(node)

    def _result_places(self, node: fx.Node) -> list[int]:
        places = [self._new() for _ in value.type_of(node)]
        for i, room in enumerate(inplace.outs_of(node)):
            if room is not None:
                places[i] = self.places[room]
        return places

    def _placeholder(self, node: fx.Node) -> None:
        role = value.role_of(node)
        persistent = role is not None and role.kind in PERSISTENT
        (self.program.persistent if persistent else self.program.inputs)[node.name] = self.places[node]

    def _last_readers(self) -> dict[fx.Node, list[int]]:
        """Node -> places to empty after it."""
        last: dict[int, fx.Node] = {}
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target not in kernels.SAME:
                for place in (self.places[node], *self.results.get(node, ())):
                    last.setdefault(place, node)
                if not (node.target is operator.getitem and node.args[0] in self.results):
                    last.update((self.places[arg], node) for arg in node.all_input_nodes)
        kept = {self.places[node] for node in self.graph.output.all_input_nodes}
        kept |= set(self.program.persistent.values())
        kept |= {self.places[node] for node in self.places if value.is_scalar(node)}
        frees: dict[fx.Node, list[int]] = {}
        for place, node in last.items():
            if place not in kept and not (node in self.results and place == self.places[node]):
                frees.setdefault(node, []).append(place)
        return frees

    def _free(self, node: fx.Node, place: int) -> None:
        self.lines.append(Line(f"e[{place}] = None", node))

    # ---- values that must outlive a write

    def _endangered(self) -> dict[fx.Node, set[str]]:
        """Results whose storage is, or may be, that of persistent placeholders: node -> their names.

        They are copied before the first write; what is written last may itself be another one's old value.
        """
        found = {}
        returned = [*value.flat_nodes(self.graph.outputs), *self.graph.aux.values()]
        unwritten = [new for name, new in self.graph.updates.items() if name not in self.written and new.name != name]
        for node in (*returned, *unwritten):
            roots = {root[0].name for root in self.roots[node] if root is not None}
            roots &= self.program.persistent.keys()
            if roots and node.target is not ops.assign:
                found[node] = roots
        return found

    def _save(self, at: fx.Node, name: str | None = None) -> None:
        """Copy what would change when ``name`` (None: anything) is written."""
        if name is not None and self.program.first_write < 0:
            self._cut()
            self.program.first_write = len(self.program.steps)
        for node, roots in list(self.safe.items()):
            if name is None or name in roots:
                del self.safe[node]
                copy = self._new()
                self.lines.append(Line(f"e[{copy}] = e[{self.places[node]}].clone()", at, ((copy, (node.name,)),)))
                self.saved[node] = copy

    # ---- ops

    def _node(self, node: fx.Node) -> None:
        target: Any = node.target
        if target in kernels.SAME or (target is operator.getitem and node.args[0] in self.results):
            return
        if target is ops.box:
            raise VerifyError(f"'{node.name}' is still a box, which no runtime can execute; run lower_boxing before")
        if target is ops.assign:
            self._assign(node, node.args[0], node.args[1])  # type: ignore[arg-type]
        elif target is ops.wait:
            self._wait(node)
        elif target in COMMUNICATING:
            self._collective(node)
        elif target in LOCAL_MOVES:
            moves = [kernels.local_move(self.graph, node, self.world, local) for local in self.locals]
            self._line(node, f"{self._per_rank(moves)}({self._text(node.args[0])})")
        elif inplace.out_of(node) is not None:
            self._write(node, inplace.out_of(node))  # type: ignore[arg-type]
        elif target in inplace.OVER_OPERANDS and node in self.results:
            self._write_over_operands(node)
        else:
            self._line(node, self._call(node, kernels.kernel(target), kernels.keywords(node, self.world.device)))

    def _call(self, node: fx.Node, kernel: Callable[..., Any], kwargs: dict[str, Any]) -> str:
        words = [*map(self._text, node.args), *(f"{k}={self._text(v)}" for k, v in kwargs.items())]
        return f"{self._name(kernel)}({', '.join(words)})"

    def _write(self, node: fx.Node, room: fx.Node) -> None:
        """A result that is put into the storage of ``room``."""
        kernel, told = kernels.writing(node, room)
        call = self._call(node, kernel, inplace.plain_kwargs(node) | told)
        self._write_once(node, call, [self._home(node)], [self.places[room]])

    def _write_over_operands(self, node: fx.Node) -> None:
        """An op that works in its operands' storage: where a result has another, the operand is copied there first."""
        form, numbers = inplace.OVER_OPERANDS[node.target]
        words, homes = [*map(self._text, node.args)], []
        picks = {user.args[1]: user for user in node.users}
        outs = inplace.outs_of(node) or (None,) * len(numbers)
        for i, (at, room, place) in enumerate(zip(numbers, outs, self.results[node], strict=True)):
            homes.append(self._home(node, i))
            if room is None:
                names = tuple(filter(None, (picks[i].name if i in picks else None, (node.name, i))))
                self.lines.append(Line(f"e[{place}] = {words[at]}.clone()", node, ((place, names),)))
                words[at] = f"e[{place}]"
        call = f"{self._name(kernels.kernel(form))}({', '.join(words)})"
        self._write_once(node, call, homes, self.results[node])

    def _write_once(self, node: fx.Node, call: str, homes: list[fx.Node], places: list[int]) -> None:
        """A call that writes into ``places``, which live in ``homes``: for each tensor once, if ranks share it."""
        for home in homes:
            if home.name in self.program.persistent:
                self._save(node, home.name)
        if not any(map(self._is_shared, homes)):
            self.lines.append(Line(call, node))
            return
        segment = Segment([Line(call, node)], self.program.names)

        def write(envs: list[Env]) -> None:
            written: dict[Any, Env] = {}
            for e in envs:
                found = [place_of(e[place]) for place in places]
                first = next((written[one] for one in found if one in written), None)
                if first is None:
                    segment.plain(e)
                    written.update(dict.fromkeys(found, e))
                else:  # this rank's piece is that of the first: what it holds apart becomes the same
                    for one, place in zip(found, places, strict=True):
                        if one not in written:
                            e[place].copy_(first[place])

        self._barrier(node, write)

    def _is_put(self, node: fx.Node) -> bool:
        """Whether an op's result stands in the place of the value that it is written over."""
        return node.target is not ops.launch and inplace.out_of(node) is not None

    def _home(self, node: fx.Node, result: int = 0) -> fx.Node:
        """The node in whose storage a result lives."""
        root = self.roots[node][result]
        return root[0] if root is not None else node

    def _is_shared(self, old: fx.Node) -> bool:
        """Whether local ranks may hold one tensor between them, which one of them must not write while others read."""
        split = value.is_tensor(old) and all(sbp.is_split for sbp in value.nd_of(old))
        return old.op == "placeholder" and len(self.locals) > 1 and not split

    def _line(self, node: fx.Node, call: str, listed: bool = False) -> None:
        """``call`` fills the places of the node's results; ``listed``: it returns a list, of one too."""
        if node in self.results:
            places = self.results[node]
            picked = {user.args[1]: user.name for user in node.users}
            makes = tuple((p, tuple(filter(None, (picked.get(i), (node.name, i))))) for i, p in enumerate(places))
            text = f"[{', '.join(f'e[{place}]' for place in places)}] = {call}"
        else:
            makes = ((self.places[node], (node.name,)),)
            text = f"e[{self.places[node]}] = {call}"
            if listed and not value.is_multi(node):
                text += "[0]"
        if value.is_scalar(node):
            self.host.append(Line(text, node))
            self.program.host_places.append(self.places[node])
            return
        if len(self.lines) >= LONGEST:
            self._cut()
        self.lines.append(Line(text, node, makes))

    def _assign(self, at: fx.Node, old: fx.Node, new: fx.Node) -> None:
        self._save(at, old.name)  # which may save ``new``
        target, source = self.places[old], self.saved.get(new, self.places[new])
        self._write_once(at, f"e[{target}].copy_(e[{source}])", [old], [target])

    def _collective(self, node: fx.Node) -> None:
        found = layout.layout_of(self.graph, node)
        assert found is not None
        exchanges = [Exchange(self.graph, found, self.world, local) for local in self.locals]
        begin = starter(found, self.graph, self.world)
        members = f"[{', '.join(self._text(member) for member in found.members)}]"
        pending = self.program.pending
        if ops.is_direct(node):
            place, made = self.places[node], self._new()
            begins = self._per_rank([partial(Direct, exchange) for exchange in exchanges])
            self._arrival(node, made, exchanges)
            self.lines.append(Line(f"e[{place}] = {begins}({members[1:-1]}, e[{made}])", node))
            self._free(node, made)
            self._barrier(node, lambda envs: pending.__setitem__(place, begin([e[place] for e in envs])))
            return
        if node.target is ops.launch:
            place, constant = self.places[node], self._new()
            self.program.slotted.append((constant, int(node.args[1]), exchanges))  # type: ignore[arg-type]
            self.lines.append(Line(f"e[{place}] = e[{constant}].pack({members})", node))
            self._barrier(node, lambda envs: pending.__setitem__(place, begin([e[place] for e in envs])))
            return
        place = self._new()
        fresh = self._per_rank([exchange.fresh for exchange in exchanges])
        self.lines.append(Line(f"e[{place}] = {fresh}().pack({members})", node))
        self._barrier(node, lambda envs: begin([e[place] for e in envs]).wait())
        self._line(node, f"e[{place}].unpack()", listed=True)
        self._free(node, place)

    def _arrival(self, launch: fx.Node, made: int, exchanges: list[Exchange]) -> None:
        """Fill place ``made`` with the storage in which a collective without a slot arrives."""
        home = self._home_of_arrival(launch)
        if home is not None:
            self._save(launch, home.name)
            if self._is_shared(home):
                self._barrier(launch, lambda envs: None)  # no rank writes while another has lines before this to run
            rooms, given = self._per_rank([exchange.storage_of for exchange in exchanges]), f"e[{self.places[home]}]"
        else:
            rooms, given = self._per_rank([exchange.result_storage for exchange in exchanges]), ""
        self.lines.append(Line(f"e[{made}] = {rooms}({given})", launch, ((made, ((launch.name, 0),)),)))

    def _home_of_arrival(self, launch: fx.Node) -> fx.Node | None:
        """The state that the result of a launch becomes as it arrives."""
        room = inplace.out_of(launch)
        return None if room is None else self._home(room)

    def _wait(self, node: fx.Node) -> None:
        (launch,) = node.args
        assert isinstance(launch, fx.Node)
        place, pending = self.places[launch], self.program.pending
        self._barrier(node, lambda envs: pending.pop(place).wait())
        self._line(node, f"e[{place}].unpack()", listed=True)
        home = self._home_of_arrival(launch)
        if home is not None:
            (pick,) = node.users
            settle = self._name(collectives.settle)
            self.lines.append(Line(f"{settle}(e[{self.places[home]}], e[{self.places[pick]}])", node))

    # ---- steps

    def _cut(self) -> None:
        if self.lines:
            self.program.steps.append(Segment(self.lines, self.program.names))
            self.lines = []

    def _barrier(self, node: fx.Node, action: Callable[[list[Env]], Any]) -> None:
        self._cut()
        self.program.steps.append(Barrier(node, action))

    def _finish(self) -> None:
        program, output = self.program, self.graph.output
        self._save(output)
        placeholders = {node.name: node for node in self.graph.placeholders()}
        for name, new in self.graph.updates.items():
            if name not in self.written and new.name != name:
                self._assign(output, placeholders[name], new)
        self._cut()
        if self.host:
            program.host = Segment(self.host, program.names)
        final = {**self.places, **self.saved}
        program.outputs = [final[x] if isinstance(x, fx.Node) else (x,) for x in self.graph.outputs]
        program.aux = {name: final[node] for name, node in self.graph.aux.items()}

    # ---- arguments

    def _text(self, arg: Any) -> str:
        """An argument as it stands in generated code."""
        if isinstance(arg, fx.Node):
            return f"e[{self.places[arg]}]"
        if isinstance(arg, (list, tuple)):
            inner = ", ".join(self._text(item) for item in arg)
            return f"[{inner}]" if isinstance(arg, list) else f"({inner}{',' * (len(arg) == 1)})"
        if isinstance(arg, (LocalSize, LocalStart)):
            return self._per_rank([self.world.resolve(arg, local) for local in self.locals])
        if arg is None or isinstance(arg, (bool, int, str)) or (isinstance(arg, float) and abs(arg) < float("inf")):
            return repr(arg)
        return self._name(arg)

    def _per_rank(self, values: list[Any]) -> str:
        """Something that each rank has its own of."""
        place = self._new()
        for constants, x in zip(self.program.constants, values, strict=True):
            constants[place] = x
        return f"e[{place}]"

    def _name(self, x: Any) -> str:
        """A name for something that all ranks share."""
        key = id(x)
        if key not in self.called:
            self.called[key] = f"f{len(self.called)}"
            self.program.names[self.called[key]] = x  # keeps it alive, and with it its id
        return self.called[key]


def _only_picked(node: fx.Node) -> bool:
    return all(user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users)
