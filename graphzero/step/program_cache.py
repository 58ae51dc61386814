"""The programs that a Graph has made so far, by the keys of the calls that they serve."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphzero import _compat
from graphzero.capture import Captured, GuardedAttributes, describe_path
from graphzero.ir.value import Role
from graphzero.step.build_call import BuildCall
from graphzero.step.program import StepProgram
from graphzero.step.program_key import ProgramKey
from graphzero.step.replicated_inputs import ReplicatedInputs
from graphzero.step.user_graph import UserGraph

_MANY = 8
_UNUSED = 64  # keys without a program that are remembered, beyond twice those with one


@dataclass
class CachedKey:
    """Cache entry of a key: the programs that serve it, the hash of its text, and which inputs ranks share."""

    programs: list[StepProgram] = field(default_factory=list)
    hash: int | None = None
    shared: ReplicatedInputs | None = None


class ProgramCache:
    """A Graph's captures and programs by key; of more than ``config.max_programs`` those go that were used longest ago.

    Ranks call a Graph alike, so they let go of the same ones.
    """

    def __init__(self, source: UserGraph, attributes: GuardedAttributes) -> None:
        self.source, self.attributes = source, attributes
        self.captures: dict[Any, list[Captured]] = {}
        self._known: dict[ProgramKey, CachedKey] = {}
        self._used: dict[int, StepProgram] = {}  # id -> itself, the one used last at the end
        self._made = 0
        self._seen: dict[str, set[Any]] = {}  # what the first programs were made for, until the warning

    def settle(self, attributes: GuardedAttributes) -> None:
        """An interrupted call may have left a program in one of the tables alone.  attributes: those of the Graph."""
        self.attributes = attributes
        for captured in (captured for captures in self.captures.values() for captured in captures):
            attributes.add_guards(captured.guards)
        programs = [program for known in self._known.values() for program in known.programs]
        self._used = {**self._used, **{id(program): program for program in programs if id(program) not in self._used}}

    @property
    def all(self) -> list[StepProgram]:
        """The one used last at the end."""
        return list(self._used.values())

    def known(self, key: ProgramKey) -> CachedKey:
        """Filled in as facts become known."""
        cached = self._known.get(key)
        if cached is None:
            if len(self._known) > 2 * len(self._used) + _UNUSED:
                self._known = {key: known for key, known in self._known.items() if known.programs}
            cached = self._known[key] = CachedKey()
        return cached

    def find(self, call: BuildCall, known: CachedKey) -> StepProgram | None:
        """The program for a call whose guards hold."""
        bound, has_state = call.state.program, call.state.has_state  # what is bound and unchanged need not be looked at
        candidates = known.programs
        if len(candidates) > 1:
            candidates = sorted(candidates, key=lambda program: program is not bound)
        for program in candidates:
            sure = program is bound and not program.captured.guards.optimizer_state.absent
            if program.captured.guards.check(call.numbers, None if sure else has_state, self.attributes.check):
                self._used.pop(id(program), None)  # an interrupted call may have left it out
                self._used[id(program)] = program
                return program
        return None

    def find_capture(self, call: BuildCall) -> Captured | None:
        """Find the capture for a call."""
        known, has_state = self.captures.get(call.key.captured, ()), call.state.has_state
        return next((x for x in known if x.guards.check(call.numbers, has_state, self.attributes.check)), None)

    def add(self, key: ProgramKey, program: StepProgram, numbers: Mapping[Role, float]) -> None:
        """``program`` has been made for ``key``, with these hyperparameters and float inputs."""
        known = self.captures.setdefault(key.captured, [])
        if program.captured not in known:
            known.append(program.captured)
            self.attributes.add_guards(program.captured.guards)
        self.known(key).programs.append(program)
        self._used[id(program)] = program
        self._let_go()
        self._warn(key, program, numbers)

    def alias(self, key: ProgramKey, program: StepProgram) -> None:
        """``program`` serves ``key`` too: binding it has split the parameters that it found whole."""
        known = self.known(key).programs
        if not any(program is other for other in known):
            known.append(program)

    def _let_go(self) -> None:
        """Forget programs beyond the bound, with captures that none of the others needs."""
        most = self.source.config.settings.max_programs
        if most is None or len(self._used) <= most:
            return
        for oldest in list(self._used)[: len(self._used) - most]:
            del self._used[oldest]
        left = {id(program.captured) for program in self._used.values()}
        for known in self._known.values():
            known.programs = [program for program in known.programs if id(program) in self._used]
        self._known = {key: known for key, known in self._known.items() if known.programs}
        for captured in (c for captures in self.captures.values() for c in captures if id(c) not in left):
            self.attributes.remove_guards(captured.guards)
        by_key = {key: [c for c in captures if id(c) in left] for key, captures in self.captures.items()}
        self.captures = {key: captures for key, captures in by_key.items() if captures}
        _compat.forget_fakes()  # who has had so many shapes will have more
        gc.collect()  # graphs are cycles, and hold constants

    def _warn(self, key: ProgramKey, program: StepProgram, numbers: Mapping[Role, float]) -> None:
        self._made += 1
        if self._made > _MANY + 1:
            return
        attributes = ((describe_path(path), value) for path, value in program.captured.guards.attributes.items())
        met = ("tensors that are not buffers", tuple(x for _, x in program.captured.guards.tensors))
        guarded = ((_name_of(role), numbers.get(role)) for role in program.captured.guards.numbers.guarded_roles)
        for name, part_value in (*key.captured, ("configuration", key.config), *attributes, met, *guarded):
            self._seen.setdefault(name, set()).add(part_value)
        if self._made <= _MANY:
            return
        changing = [name for name, values in self._seen.items() if len(values) > 1] or ["guarded hyperparameters"]
        self._seen = {}
        most = self.source.config.settings.max_programs
        limit = "" if most is None else f"; {most} are kept, those used last (config.max_programs)"
        warnings.warn(
            f"{self.source.name} has compiled {self._made} programs{limit}; what keeps changing: {', '.join(changing)}"
            ". Pad inputs to few shapes (config.set_shapes), pass numbers that change as floats or 0-d tensors, keep "
            "modules in the same mode",
            stacklevel=9,
        )


def _name_of(role: Role) -> str:
    return f"the value of {role.of}" if role.kind == "scalar" else f"{role.key} of {role.of}"
