"""Which program a call runs: its arguments read, the key made, the ranks agreed, the program found or compiled.

All of it happens before a step is taken, and what one rank cannot do, or would do otherwise, raises on every rank.
What a key consists of is ``key``'s, how a program is made ``compiled``'s; binding and running it are the Graph's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphzero import compiled
from graphzero.attributes import Attributes
from graphzero.capture import OptimizerSpec, Step
from graphzero.compiled import Compiled, Programs
from graphzero.config import GraphConfig
from graphzero.errors import GraphZeroError
from graphzero.groups import Groups
from graphzero.ir import value
from graphzero.ir.value import Role
from graphzero.key import Key, Keys, describe, placed_of
from graphzero.runtime import device_memory
from graphzero.runtime.agree import CALL, COMPILE, PROGRAM, Ranks, digest
from graphzero.runtime.equal_inputs import FIRST, Shared
from graphzero.runtime.executor import Results
from graphzero.runtime.inputs import Inputs, Reader, check_values, output_value, rank_values
from graphzero.runtime.seed import Stream
from graphzero.runtime.state import State
from graphzero.runtime.world import World
from graphzero.zero_config import AUTO

_TAKEN = "steps taken (a call has stopped on some ranks only: load a checkpoint on all, graph.load_state_dict(...))"


@dataclass(frozen=True)
class Prepared:
    """A call that may run: ``numbers`` are the hyperparameters and float inputs that it feeds the program."""

    program: Compiled
    inputs: Inputs
    key: Key
    numbers: Mapping[Role, float]
    state: State

    def arguments(self, world: World, random: Stream) -> dict[str, list[Any]]:
        """What the program reads anew in each call, by placeholder."""
        count = len(world.local_ranks)
        leaves = {leaf.name: leaf for leaf in self.inputs.leaves}
        found: dict[str, list[Any]] = {}
        for name, role in self.program.roles.items():
            if role.kind in ("batch", "scalar"):
                found[name] = rank_values(leaves[role.of], world)
            elif role.kind == "hyper":
                found[name] = [self.numbers[role]] * count
            elif role.kind == "seed":
                found[name] = [random.key(world.device)] * count
        return found

    def outputs(self, results: Results, world: World) -> Any:
        """What ``build`` returns, of what the program hands back."""
        pairs = zip(self.program.graph.outputs, results.outputs, strict=True)
        flat = [self._output(node, held, world) for node, held in pairs]
        return pytree.tree_unflatten(flat, self.program.captured.out_spec)

    def _output(self, node: Any, held: Any, world: World) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if not value.is_tensor(node):
            return held[0]
        shape = value.tensor_type(node).shape
        return output_value(held, value.nd_of(node), shape, world, self.inputs.has_dtensor)


class Selection:
    """Selects among the programs of one Graph, and makes those that are not there yet.

    step: the Graph's name, placement, build, modules and optimizers as of now; for compiling.  state: its tensors as
    of now, asked for once a call.  optimizers: grows with the Graph's ``add_optimizer``.
    reader: makes what reads arguments; called once, raises for a build that cannot be called.
    bound: the program whose state is bound, None when that has changed.
    taken: steps that the Graph has taken since it was made or loaded; a call that a rank has stopped is one on some.
    completed: those after which all schedulers have stepped too; one that raises leaves its rank behind.
    """

    def __init__(
        self, programs: Programs, attributes: Attributes, ranks: Ranks, config: GraphConfig,
        optimizers: Sequence[OptimizerSpec], step: Callable[[], Step], state: Callable[[], State],
        reader: Callable[[], Reader],
    ) -> None:  # fmt: skip
        self.bound: Compiled | None = None
        self.taken = self.completed = 0
        self._programs, self._attributes, self._ranks, self._config = programs, attributes, ranks, config
        self._optimizers, self._step, self._now, self._make_reader = optimizers, step, state, reader
        self._reader: Reader | None = None
        self._keys, self._groups = Keys(), Groups()
        self._shared: dict[Key, Shared] = {}
        self._repeats = False  # whether the program bound last has what each rank computes by itself
        self._stateless: str | None = None  # names of parameters without optimizer state, None: look

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], schedulers: Sequence[Any], running: bool
    ) -> Prepared:
        """The program for these arguments, agreed on by all ranks, and the numbers that this call feeds it.

        running: for a call, not for ``compile``.
        """
        failure: Exception | None = None
        state: State | None = None
        inputs: Inputs | None = None
        key: Key | None = None
        parts: Callable[[], Mapping[str, str]] = _nothing
        hash_, restart = 0, False
        try:
            state = self._now()
            if running and (torn := state.why_torn()):
                raise GraphZeroError(torn)
            inputs, key = self._read(args, kwargs, state)
            self._check_runnable(inputs, running, state)
            hash_, parts = self._hash(key, inputs, state, running)
            restart = state.random.is_outdated
        except Exception as error:  # noqa: BLE001 - every rank must hear of it; agree raises it
            failure = error
        is_new = not self._programs.programs if key is None else key not in self._programs.programs
        is_unbound = running and self.bound is None
        is_talking = is_new or is_unbound or self._config.check_inputs != "first" or self._ranks.must_talk
        if is_talking:
            needs = is_unbound, running and self._compares(key)  # what one rank has to do, all do
            agreed = self._ranks.agree(CALL if running else COMPILE, hash_, parts, failure, restart, needs)
            restart = agreed.wish
            if agreed.needs[0]:
                self.bound = None
            if agreed.needs[1] and self._ranks.active and inputs is not None and key is not None:
                self._shared[key].check(inputs, self._ranks)
        elif failure is not None:
            raise failure
        assert state is not None and inputs is not None and key is not None
        state.meet()
        if running:  # before the capture, which hyperparameters of rank 0 may decide
            if not state.is_started:
                state.start(schedulers)
                self._groups.look(self._optimizers)
            if restart and (is_talking or not self._ranks.active):
                state.random.set(None, 0)
        numbers = self._numbers(inputs)
        program = self._programs.find(key, numbers, state.has_state, self.bound)
        if program is None:
            program = self._compile(key, inputs, numbers, state)
        elif not is_talking:  # a rank that runs another program would wait, or take what is not meant for it
            self._ranks.agree(PROGRAM, program.hash, program.lines)
        return Prepared(program, inputs, key, numbers, state)

    def _compares(self, key: Key | None) -> bool:
        """Whether this call is one of those that compare the larger inputs that ranks are given alike."""
        shared = None if key is None else self._shared.get(key)
        if shared is None or not shared.all:
            return False
        return shared.calls < FIRST or self._config.check_inputs == "values"

    def bind(self, call: Prepared) -> None:
        """The program of ``call`` is bound: the same call, made again, finds it though parameters are split now."""
        self.bound, self._stateless = call.program, None
        self._repeats = bool(call.program.repeated)
        placed = placed_of(call.inputs, call.state, call.state.tensors())
        self._programs.alias(replace(call.key, placed=placed), call.program)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> tuple[Inputs, Key]:
        if self._reader is None:
            self._reader = self._make_reader()
        inputs = self._reader.read(args, kwargs, self._config.inputs)
        found = state.tensors()
        if state.is_stale(found):
            self._keys.count(state, found)
            self.bound = self._stateless = None
        self._attributes.look(state.modules, found)
        self._groups.look(self._optimizers)
        return inputs, self._keys.of(inputs, state, found, self._config, self._groups.baked)

    def _check_runnable(self, inputs: Inputs, running: bool, state: State) -> None:
        if running:
            check_values(inputs)
            if self.bound is None:
                state.check_real()

    def _numbers(self, inputs: Inputs) -> dict[Role, float]:
        return {**self._groups.numbers, **inputs.scalars()}

    def _hash(
        self, key: Key, inputs: Inputs, state: State, running: bool
    ) -> tuple[int, Callable[[], Mapping[str, str]]]:
        """A hash of what must be equal on all ranks before this call, and its parts for a message."""
        if not self._ranks.active:
            return 0, _nothing
        numbers = self._numbers(inputs) if state.is_started else inputs.scalars()
        if self._stateless is None and state.is_started:  # the first call takes what rank 0 has
            self._stateless = state.stateless()
        stateless, random = self._stateless or "", state.random
        draws = f"seed {random.seed}, step {random.step}" if state.is_started else "not begun"
        shared = self._shared.get(key)
        if shared is None:
            if len(self._shared) > 2 * len(self._programs.programs) + 64:
                self._shared.clear()
            shared = self._shared[key] = Shared(inputs, state.placement)
        threads = torch.get_num_threads() if self._repeats else 0
        is_known = key in self._programs.programs  # else this rank compiles, which needs all ranks

        def parts() -> dict[str, str]:
            found = describe(key, inputs, state, self._config)
            found |= self._attributes.describe() | {"parameters without optimizer state": stateless}
            found |= shared.describe(inputs) if running else {}
            found |= {"random draws": draws, "check_inputs": self._config.check_inputs, "threads": str(threads)}
            found[_TAKEN] = f"{self.taken}" + (f", {self.completed} completed" if self.completed != self.taken else "")
            found["collectives that a stopped step has left"] = state.under_way
            found["modules"] = "as in an earlier call" if is_known else "not as in any call so far"
            return found | {f"{role.kind} {role.path}": repr(number) for role, number in numbers.items()}

        known = self._programs.hash_of(key, lambda: describe(key, inputs, state, self._config))
        steps = f"{self.taken} {self.completed}"
        facts = [stateless, draws, self._config.check_inputs, steps, state.under_way, str(is_known)]
        facts += [str(threads), *self._attributes.texts, *(shared.values(inputs) if running else ())]
        return digest(str(known), *facts, *map(repr, numbers.values())), parts

    def _compile(self, key: Key, inputs: Inputs, numbers: dict[Role, float], state: State) -> Compiled:
        program: Compiled | None = None
        failure: Exception | None = None
        needs_room = self._config.zero.stage == AUTO and self._config.memory_budget is None  # on all ranks or on none
        room = device_memory.room(self._ranks) if needs_room else None
        try:
            captured = self._programs.find_capture(key, numbers, state.has_state)
            program = compiled.make(self._step(), inputs, state, self._config, captured, room)
        except Exception as error:  # noqa: BLE001 - every rank must hear of it; agree raises it
            failure = error
        made = program
        self._ranks.agree(
            PROGRAM, made.hash if made and self._ranks.active else 0, lambda: made.lines() if made else {}, failure
        )
        assert program is not None
        self._programs.add(key, program)
        return program


def _nothing() -> dict[str, str]:
    return {}
