"""From one call's inputs to a program that runs, and the programs that a Graph has made so far.

``make`` captures, runs the passes and plans; ``Programs`` keeps what was made by its key.  A change of the
configuration alone makes a new program from the capture that is there.  What a key consists of is ``key``'s.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from graphzero import _compat
from graphzero.attributes import Attributes
from graphzero.capture import Captured, FloatLeaf, Step, TensorLeaf, capture
from graphzero.config import GraphConfig
from graphzero.fit import fit
from graphzero.ir import value
from graphzero.ir.arena import Arena
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import Role
from graphzero.key import Key
from graphzero.ops import CHECK
from graphzero.passes import NAMES, Bucket, Keep, Pass, Pin, Record, Zero, default_passes, pass_name
from graphzero.plan import Plan
from graphzero.runtime import cuda_graph
from graphzero.runtime.agree import digest
from graphzero.runtime.executor import Executor
from graphzero.runtime.garbage import collector_at_rest
from graphzero.runtime.inputs import Inputs
from graphzero.runtime.launch import has_fake_world
from graphzero.runtime.repeated import repeated
from graphzero.runtime.replay import Replayed
from graphzero.runtime.state import State
from graphzero.runtime.world import World
from graphzero.sbp.types import Nd

FED = ("batch", "scalar", "hyper", "seed")
YOUNG = 1  # generations of the collector in which is what compiling has made
_MANY = 8
HasState = Callable[[int, str], bool]  # (optimizer, path of a parameter)


@dataclass
class Compiled:
    """One program: its capture, the graph that runs, what its passes did, and what a step of it costs."""

    captured: Captured
    graph: StepGraph
    history: list[Record]
    plan: Plan
    roles: dict[str, Role]  # of what every call feeds it: placeholder -> role
    uses_seed: bool
    matmul: str
    kind: str  # of executor
    arena: Arena | None
    cuda_graph: bool  # whether steps are recorded and replayed
    _executor: Executor | None = None

    def executor(self, world: World) -> Executor:
        if self._executor is None:
            how = self.matmul, self.kind, self.arena, not has_fake_world()  # which has shapes, but no values
            if self.cuda_graph:
                self._executor = Replayed(self.graph, world, *how, recorder=cuda_graph.recorder_of(world))
            else:
                self._executor = Executor(self.graph, world, *how)
        return self._executor

    @cached_property
    def repeated(self) -> str:
        """An op that each rank computes for itself though all need the same bits, and its line; or nothing."""
        node = repeated(self.graph)
        return "" if node is None else f"'{node.name}' ({value.source_of(node) or node.target})"

    @property
    def decisions(self) -> tuple[str, ...]:
        """What was decided for this program when it was planned, and how it runs by now."""
        return (*self.plan.decisions, *([self._executor.about] if isinstance(self._executor, Replayed) else ()))

    def state_nds(self) -> dict[tuple[int, str, str], Nd]:
        """(optimizer, path, key) -> SBP of the optimizer states it keeps."""
        nds = {node.name: value.nd_of(node) for node in self.graph.placeholders("state")}
        return {(s.optimizer, s.param, s.key): nds[s.placeholder] for s in self.captured.states if s.placeholder in nds}

    def lines(self) -> dict[str, str]:
        """The program's text by line, for showing where two ranks' programs differ."""
        return {f"program line {i}": line.strip() for i, line in enumerate(str(self.graph).splitlines(), 1)}

    @cached_property
    def hash(self) -> int:
        """Of the program's text and every collective, the same in every process."""
        return digest(str(self.graph), *map(repr, self.plan.collectives))


class Programs:
    """A Graph's captures and programs by key; of more than ``config.max_programs`` those go that were used longest ago.

    Ranks call a Graph alike, so they let go of the same ones.
    """

    def __init__(self, name: str, attributes: Attributes, config: GraphConfig) -> None:
        self.name, self.attributes, self.config = name, attributes, config
        self.captures: dict[Any, list[Captured]] = {}
        self.programs: dict[Key, list[Compiled]] = {}
        self.hashes: dict[Key, int] = {}
        self._used: dict[int, Compiled] = {}  # id -> itself, the one used last at the end
        self._made = 0
        self._seen: dict[str, set[Any]] = {}  # what the first programs were made for, until the warning

    def find(
        self, key: Key, numbers: Mapping[Role, float], has_state: HasState, bound: Compiled | None
    ) -> Compiled | None:
        """The program for ``key`` whose guarded hyperparameters, attributes, and what it takes for granted of state,
        still hold.

        bound: the program whose state is bound and unchanged; that what it reads is there need not be looked at.
        """
        known = sorted(self.programs.get(key, ()), key=lambda p: p is not bound)
        sure = None if bound is None or bound.captured.entry.absent else bound
        found = next((p for p in known if self._holds(p.captured, numbers, None if p is sure else has_state)), None)
        if found is not None:
            self._used[id(found)] = self._used.pop(id(found))
        return found

    def find_capture(self, key: Key, numbers: Mapping[Role, float], has_state: HasState) -> Captured | None:
        return next((c for c in self.captures.get(key.captured, ()) if self._holds(c, numbers, has_state)), None)

    def _holds(self, captured: Captured, numbers: Mapping[Role, float], has_state: HasState | None) -> bool:
        entered = has_state is None or captured.enters(numbers, has_state)
        return entered and self.attributes.fits(captured) and captured.guards(dict(numbers))

    def add(self, key: Key, program: Compiled) -> None:
        known = self.captures.setdefault(key.captured, [])
        if program.captured not in known:
            known.append(program.captured)
            self.attributes.watch(program.captured)
        self.programs.setdefault(key, []).append(program)
        self._used[id(program)] = program
        self._let_go()
        self._warn(key, program)

    def alias(self, key: Key, program: Compiled) -> None:
        """``program`` serves ``key`` too: binding it has split the parameters that it found whole."""
        if not any(program is known for known in self.programs.setdefault(key, [])):
            self.programs[key].append(program)

    def hash_of(self, key: Key, describe: Callable[[], Mapping[str, str]]) -> int:
        """The same in every process."""
        if key not in self.hashes:
            self.hashes[key] = digest(*(f"{name}={text}" for name, text in describe().items()))
        return self.hashes[key]

    def _let_go(self) -> None:
        """Forget programs beyond the bound, with captures and hashes that none of the others needs."""
        most = self.config.max_programs
        if most is None or len(self._used) <= most:
            return
        for oldest in list(self._used)[: len(self._used) - most]:
            del self._used[oldest]
        left = {id(program.captured) for program in self._used.values()}
        self.programs = _those(self.programs, lambda program: id(program) in self._used)
        for captured in (c for known in self.captures.values() for c in known if id(c) not in left):
            self.attributes.forget(captured)
        self.captures = _those(self.captures, lambda captured: id(captured) in left)
        self.hashes = {key: hash_ for key, hash_ in self.hashes.items() if key in self.programs}
        _compat.forget_fakes()  # who has had so many shapes will have more
        gc.collect()  # graphs are cycles, and hold constants

    def _warn(self, key: Key, program: Compiled) -> None:
        self._made += 1
        if self._made > _MANY + 1:
            return
        attributes = ((f"attribute {name}", held) for name, held in program.captured.attributes.items())
        for name, found in (*key.captured, ("configuration", key.config), *attributes):
            self._seen.setdefault(name, set()).add(found)
        if self._made <= _MANY:
            return
        changing = [name for name, values in self._seen.items() if len(values) > 1] or ["guarded hyperparameters"]
        self._seen = {}
        most = self.config.max_programs
        kept = "" if most is None else f"; {most} are kept, those used last (config.max_programs)"
        warnings.warn(
            f"{self.name} has compiled {self._made} programs{kept}; what keeps changing: {', '.join(changing)}. Pad "
            "inputs to few shapes, pass numbers that change as floats or 0-d tensors, keep modules in the same mode",
            stacklevel=7,
        )


def _those(lists: Mapping[Any, list[Any]], wanted: Callable[[Any], bool]) -> dict[Any, list[Any]]:
    """What is wanted of each list, without lists that are empty then."""
    found = {key: [one for one in held if wanted(one)] for key, held in lists.items()}
    return {key: held for key, held in found.items() if held}


@collector_at_rest()  # each round of its own would look at all that compiling has made
def make(
    step: Step, inputs: Inputs, state: State, config: GraphConfig, captured: Captured | None, room: int | None = None
) -> Compiled:
    """Capture (unless given), run the passes, plan.  Touches no real tensor.

    room: bytes that one rank may have, if the configuration leaves the stage to that.
    """
    if config.cuda_graph:
        cuda_graph.check(state.world.placement)
    if captured is None:
        captured = capture(step, [leaf_of(leaf) for leaf in inputs.leaves], inputs.spec)
        gc.collect(YOUNG)  # what tracing leaves is several times what it makes
    placed = {**inputs.placed(), **state.placed(state.tensors(), captured.states)}
    graph = captured.graph
    if not config.check_values:
        leave_out_checks(graph)
    found = fit(graph, lambda stage: passes_of(config, placed, stage), config, room)
    gc.collect(YOUNG)
    roles = {node.name: node.meta["role"] for node in found.graph.placeholders(*FED)}
    uses_seed = any(role.kind == "seed" for role in roles.values())
    return Compiled(
        captured, found.graph, found.history, found.plan, roles, uses_seed, config.matmul, config.executor, found.arena,
        config.cuda_graph,
    )  # fmt: skip


def leave_out_checks(graph: StepGraph) -> None:
    """Take the checks out of a captured step, and what only they read."""
    aux = {name: node for name, node in graph.aux.items() if node.target is not CHECK}
    graph.set_output(graph.outputs, aux, graph.updates)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.graph.erase_node(node)


def leaf_of(leaf: Any) -> Any:
    if leaf.is_tensor:
        return TensorLeaf(leaf.name, leaf.raw.dtype, leaf.shape)
    return FloatLeaf(leaf.name, leaf.raw) if leaf.is_float else leaf.raw


def passes_of(config: GraphConfig, placed: Mapping[Role, Nd], stage: int) -> list[Pass]:
    """The built-in passes of a stage as configured, the user's own behind those they name."""
    zero = config.zero
    early = config.optimizer_in_backward
    built = Zero(stage, zero.shard_min_size, zero.axes, early) if stage else None
    may_keep = stage == 3 and (zero.keep_gathered or config.memory_budget is not None or zero.stage == "auto")
    keep = Keep(zero.keep_gathered) if may_keep else None
    passes = default_passes(Pin(placed), built, Bucket(config.bucket_bytes), config.links, keep, early)
    for own, after in config.user_passes:
        names = [pass_name(known) for known in passes]
        # Without ZeRO there is no pass "zero" and no "keep"; what would follow stands where these would have been.
        before = NAMES[: NAMES.index(after) + 1] if after in NAMES else (after,)
        at = names.index(next(name for name in reversed(before) if name in names))
        while at + 1 < len(passes) and any(passes[at + 1] is mine and a == after for mine, a in config.user_passes):
            at += 1
        passes.insert(at + 1, own)
    return passes
