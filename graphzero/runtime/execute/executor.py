"""Runs a lowered graph for every rank that lives in this process: op by op, or regions of it compiled.

Op by op it is the reference: deterministic, every value freed right after its last reader.  ``program`` compiles,
``region_compiler`` finds what else is called, this module binds state, runs, and says which line of the graph
failed.  What state is, and where it comes from, is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from graphzero import _compat
from graphzero.errors import GraphZeroError, SbpError, shorten_list
from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.arena import Arena
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.text.printer import print_line
from graphzero.ir.transfer_layout import shape_on
from graphzero.ir.verifier.stream_order import check_streams
from graphzero.ir.verifier.verify import examine
from graphzero.runtime.execute.conditions import KernelGuard
from graphzero.runtime.execute.program import Program, compile_graph
from graphzero.runtime.execute.region_compiler import RegionOp, region_compiler
from graphzero.runtime.execute.steps import Env, Meter
from graphzero.runtime.transport.failure_report import note_source
from graphzero.runtime.world.world import World


@dataclass
class Results:
    """Results of a run.

    outputs: as ``graph.outputs``: per value a list with one entry per local rank, or the literal that is there.
    aux: the graph's auxiliary values by name, one entry per local rank.
    """

    outputs: list[Any] = field(default_factory=list)
    aux: dict[str, list[Any]] = field(default_factory=dict)


class SlotBuffers:
    """Communication slots of executors that run one after the other on the same ranks: each is as large as the largest.

    buffers: by slot, one uint8 tensor for each local rank.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.nbytes: dict[int, int] = {}
        self.buffers: dict[int, list[Tensor]] = {}

    def reserve(self, slot_bytes: Mapping[int, int]) -> None:
        """Note the bytes that an executor needs in each slot, before any of them is allocated."""
        for slot, nbytes in slot_bytes.items():
            self.nbytes[slot] = max(self.nbytes.get(slot, 0), nbytes)

    def allocate(self, slot: int) -> list[Tensor]:
        """The buffers of a slot, the same ones each time."""
        if slot not in self.buffers:
            count, device = len(self.world.local_ranks), self.world.device
            self.buffers[slot] = [
                torch.empty(self.nbytes[slot], dtype=torch.uint8, device=device) for _ in range(count)
            ]
        return self.buffers[slot]


class ReleasedInputs(dict[str, Sequence[Any]]):
    """Inputs of a run that nothing else holds: a run empties them, so that each goes after its last reader."""


class Executor:
    """A graph of level "local" (or "lowered", where no argument depends on the rank), compiled for a world.

    ``kind`` is what ``GraphConfig.set_executor`` takes.  ``arena``: of this graph, for kind "eager" on a CPU.
    ``checking``: whether a run raises CheckError at a check that is not met.  ``slots``: those that it shares.
    Not reentrant: communication slots belong to the executor, and arena and collectives under way to the world, in
    which one program runs at a time.

    Attributes:
        graph: what runs, with its regions for ops where they are compiled.
        placement: of the ranks that the note on an error names: of a pipeline stage its own.
        meter: watches every run that is not given a meter of its own.
        stopped: the step in which the last run failed or was interrupted, by number, the number of steps where all of
            them ran; None before a run, and when what follows from it is done too, see ``finish``.
        slots: communication slot -> its bytes, one uint8 tensor per local rank; allocated by the first ``bind`` or
            ``run``, then kept.
        bound: placeholder name -> the tensors it is bound to.

    Raises:
        VerifyError: for a graph that no runtime can execute.
        ConfigError: for a kind that this machine cannot offer.
    """

    def __init__(
        self, graph: StepGraph, world: World, kind: str = "eager", arena: Arena | None = None,
        checking: bool = False, slots: SlotBuffers | None = None,
    ):  # fmt: skip
        examine(graph)
        self._guard: Any = KernelGuard() if graph.is_read else nullcontext()  # type: ignore[no-untyped-call]
        written, calls = graph, None if graph.is_read else region_compiler(kind, world)
        if calls is not None:
            graph = calls.join(graph)
            check_streams(graph)
        self.graph, self.world, self.placement, self.checking = graph, world, world.placement, checking
        self.program: Program = compile_graph(graph, world, calls, arena, checking)
        self.slots: dict[int, list[Tensor]] = {}
        self._slot_bytes = liveness(graph).slots
        self._slot_buffers = slots or SlotBuffers(world)
        self._slot_buffers.reserve(self._slot_bytes)
        for one in (written, graph):
            one.forget()
        self.meter: Meter | None = None
        self.stopped: int | None = None
        self._count = len(world.local_ranks)
        self._template: list[Env] = []
        self._placeholders = {node.name: node for node in graph.placeholders()}
        self._missing = set(self.program.places.persistent)
        self.bound: dict[str, list[Tensor]] = {}
        self._names_at: dict[int, list[str]] | None = None  # what is bound by where it lies; None: look
        self._writes_to_host = any(node.target is ops.to_host_launch for node in graph.nodes)
        self._autocasts = [kind for kind in {world.device.type, "cpu"} if torch.amp.is_autocast_available(kind)]

    # ---- state

    def bind(self, values: Mapping[str, Sequence[Tensor]]) -> None:
        """Give persistent placeholders their tensors, one per local rank; runs read them and write into them.

        Ranks that hold the same values may share one tensor, which is then written once.

        Raises SbpError where a tensor is not this rank's piece.
        """
        self._allocate()
        self._names_at = None
        for name, tensors in values.items():
            place = self.program.places.persistent[name]
            self._check(name, tensors)
            detached = [tensor.detach() for tensor in tensors]  # shares storage; no reader builds an autograd graph
            for template, tensor in zip(self._template, detached, strict=True):
                template[place] = tensor
            self.bound[name] = detached
            self._missing.discard(name)

    def release(self, x: Tensor) -> None:
        """Let go of what is bound where the values of ``x`` begin; ``bind`` must give it again before a run."""
        if self._names_at is None:
            self._names_at = {}
            for name, tensors in self.bound.items():
                self._names_at.setdefault(tensors[0].data_ptr(), []).append(name)
        for name in self._names_at.pop(_compat.local_tensor(x).data_ptr(), ()):
            for template in self._template:
                template[self.program.places.persistent[name]] = None
            del self.bound[name]
            self._missing.add(name)

    @property
    def is_bound(self) -> bool:
        """Whether every persistent placeholder has its tensors."""
        return not self._missing

    def _allocate(self) -> None:
        if self._template:
            return
        self.world.forget()  # a stopped run of another program may have begun transfers in the arena, which may move
        with torch.inference_mode(False):  # slots live longer than an inference mode that happens to be on
            for slot in self._slot_bytes:
                self.slots[slot] = self._slot_buffers.allocate(slot)
            arena = self.world.arena
            arena.grow(self.program.rooms.nbytes)
            templates: list[Env] = []
            for local, constants in enumerate(self.program.constants):
                for place, slot, exchanges in self.program.slotted:
                    constants[place] = exchanges[local].within(self.slots[slot][local])
                for room in self.program.rooms.all:
                    constants[room.place] = arena.view(local, room.offset, room.shapes[local], room.dtype)
                template = [None] * self.program.places.size
                for place, constant in constants.items():
                    template[place] = constant
                templates.append(template)
            self._template = templates

    def _check(self, name: str, tensors: Sequence[Tensor]) -> None:
        node = self._placeholders[name]
        type_, nd = value.tensor_type(node), value.sbp_of(node)
        if len(tensors) != self._count:
            raise SbpError(f"'{name}' needs one tensor for each of {self._count} local ranks, was given {len(tensors)}")
        for rank, tensor in zip(self.world.rank_ids, tensors, strict=True):
            shape = shape_on(self.graph, type_, nd, rank) if nd is not None else type_.shape
            if tuple(tensor.shape) != shape or tensor.dtype != type_.dtype:
                raise SbpError(
                    f"'{print_line(node)}'\n  on rank {rank} is {type_.dtype} of shape {list(shape)}, but was given "
                    f"{tensor.dtype} of shape {list(tensor.shape)}; bind each rank's own piece, as torch.chunk cuts"
                )

    # ---- runs

    def numbers(self, inputs: Mapping[str, Sequence[Any]]) -> dict[int, Any]:
        """The host numbers of a run by their places: those that it is given, and those computed from them."""
        places = self.program.places.inputs
        given = {places[name]: inputs[name][0] for name in places if value.is_scalar(self._placeholders[name])}
        e: Env = [None] * self.program.places.size
        for place, number in given.items():
            e[place] = number
        if self.program.host is not None:
            self.program.host.plain(e)
        return {place: e[place] for place in (*given, *self.program.host_places)}

    def run_step(
        self, inputs: Mapping[str, Sequence[Any]], meter: Meter | None = None, numbers: Mapping[int, Any] | None = None
    ) -> Results:
        """Run one step.

        Args:
            inputs: batch, hyper, scalar and seed placeholders by name: one value per local rank (host numbers are
                the same on all; the first counts).
            meter: watches this run: a MemoryMeter, a Timer or a Recorder.
            numbers: what ops are given for the host numbers, by place as ``numbers`` says them; computed if None.

        Raises:
            GraphZeroError: for a placeholder without a value.
            Exception: whatever an op raises, with a note that shows its line, the user's source line and the rank.
        """
        meter = meter or self.meter
        self._allocate()
        envs = [template.copy() for template in self._template]
        self._fill(envs, inputs)
        if isinstance(inputs, ReleasedInputs):
            inputs.clear()
        self.world.forget()
        at = -1
        casting = [kind for kind in self._autocasts if torch.is_autocast_enabled(kind)]
        no_autocast = _no_autocast(casting) if casting else nullcontext()
        with torch.no_grad(), _compat.below_autograd(), no_autocast, self._guard:
            try:
                self._host(envs, numbers)
                at = 0
                self.stopped = len(self.program.steps)
                if meter is None:
                    for step in self.program.steps:
                        step(envs)
                        at += 1
                else:
                    meter.register("communication", [slots[0] for slots in self.slots.values()])
                    if self.program.rooms.all:
                        meter.register("arena", self.world.arena.whole(0), self.program.rooms.nbytes)
                    for step in self.program.steps:
                        step.metered(envs, meter)
                        at += 1
                    meter.enter("", "")
                if self._writes_to_host:  # what waits between parts of stages may still be on its way there
                    self.world.host_copies.finish()
            except BaseException as error:
                self.stopped = max(at, 0)
                if isinstance(error, Exception):
                    self._explain(error, at, envs)
                self.world.host_copies.forget()
                raise
        return self._results(envs)

    @property
    def writes_state(self) -> bool:
        """Whether a run writes new states."""
        return self.program.first_write >= 0

    @property
    def has_written(self) -> bool:
        """Whether the last run has begun to write new states and has not finished."""
        return self.stopped is not None and 0 <= self.program.first_write <= self.stopped

    def finish(self) -> None:
        """Note that all that the last run has computed is in its final place."""
        self.stopped = None

    def _fill(self, envs: list[Env], inputs: Mapping[str, Sequence[Any]]) -> None:
        if self._missing:
            names = shorten_list(sorted(self._missing))
            raise GraphZeroError(f"bind() was not given {names} of graph {self.graph.name}")
        absent = [name for name in self.program.places.inputs if name not in inputs]
        if absent:
            raise GraphZeroError(f"run() was not given {shorten_list(absent)} of graph {self.graph.name}")
        for name, place in self.program.places.inputs.items():
            values = inputs[name]
            if len(values) != self._count:
                raise GraphZeroError(
                    f"'{name}' needs {self._count} values, one per local rank, was given {len(values)}"
                )
            for e, x in zip(envs, values, strict=True):
                e[place] = x

    def _host(self, envs: list[Env], numbers: Mapping[int, Any] | None) -> None:
        if numbers is None:
            if self.program.host is None:
                return
            self.program.host.plain(envs[0])
            numbers = {place: envs[0][place] for place in self.program.host_places}
        for e in envs:
            for place, number in numbers.items():
                e[place] = number

    def _results(self, envs: list[Env]) -> Results:
        outputs = [x[0] if isinstance(x, tuple) else [e[x] for e in envs] for x in self.program.outputs]
        return Results(outputs, {name: [e[place] for e in envs] for name, place in self.program.aux.items()})

    # ---- failures

    def _explain(self, error: Exception, at: int, envs: list[Env]) -> None:
        """Note what failed: a line of step ``at``, or, before the first, of what makes the host's numbers."""
        step = self.program.host if at < 0 else next(iter(self.program.steps[at:]), None)
        node = step.node_of(error.__traceback__) if step is not None else None
        if step is None or node is None:
            return
        local = step.local
        source = value.source_of(node) if node.op != "output" else ""
        note_source(error, source)
        rank = "" if local is None else f"rank {self.placement.ranks.flat[self.world.local_ranks[local]]} of "
        line = print_line(node) + (f"    {source}" if source else "")
        note = (
            f"while {rank}{self.placement!r} ran graph {self.graph.name}:\n  > "
            + (str(node.target) if isinstance(node.target, RegionOp) else line)
            + "".join(f"\n    {line}" for line in _operands(node, envs[local or 0], self.program))
        )
        if hasattr(error, "add_note"):  # from Python 3.11
            error.add_note(note)


def _operands(node: fx.Node, e: Env, program: Program) -> Iterator[str]:
    """The operands' lines, with the shape that this rank really holds."""
    for operand in dict.fromkeys(node.all_input_nodes if node.op != "output" else ()):
        operand_value = e[program.places.of[operand]]
        shape = f"    here {list(operand_value.shape)}" if isinstance(operand_value, Tensor) else ""
        yield f"{print_line(operand)}{shape}"


@_compat.contextmanager
def _no_autocast(kinds: Sequence[str]) -> Iterator[None]:
    """The graph holds its casts."""
    try:
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)
        yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
