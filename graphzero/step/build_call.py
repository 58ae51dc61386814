"""One call of a Graph as read: its arguments, the present state, and the key of its program.

This is the only place that reads them.  The key, capture, the ranks' agreement, what the program is fed and what the
user is given back all go by the one record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from graphzero.capture import GuardedAttributes, Inputs, constants_of_average
from graphzero.config import Settings
from graphzero.ir.value import Role
from graphzero.runtime.state.state import State
from graphzero.step.build_inputs import BuildInputReader
from graphzero.step.input_transform import TransformedInputs, active_transform
from graphzero.step.parameter_groups import ParameterGroups
from graphzero.step.program_key import ProgramKey, ProgramKeyBuilder
from graphzero.step.user_graph import UserGraph


@dataclass(frozen=True)
class BuildCall:
    """inputs: the arguments of build.  state: the tensors of modules and optimizers.  key: of its program.

    settings: of the Graph, as they are now.
    numbers: the hyperparameters and float inputs that it feeds the program, by role.
    is_global: whether the caller speaks of global tensors, so that outputs are given as such.
    transformed: what a transform of the inputs knows of them, if one is on.
    """

    inputs: Inputs
    state: State
    settings: Settings
    key: ProgramKey
    numbers: Mapping[Role, float]
    is_global: bool
    transformed: TransformedInputs | None = None


class BuildCallReader:
    """Reads the calls of one Graph; what follows from modules and parameter groups is kept while those stay."""

    def __init__(self, source: UserGraph, attributes: GuardedAttributes) -> None:
        self._source, self._attributes = source, attributes
        self._keys, self._groups = ProgramKeyBuilder(), ParameterGroups()
        self._reader: BuildInputReader | None = None  # of ``_build``, which is the ``_number``-th of ``_builds``
        self._build: tuple[Any, CodeType | None] = None, None
        self._builds: list[tuple[Any, CodeType | None]] = []
        self._number = 0

    def read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State, running: bool) -> BuildCall:
        """The record of a call, or of ``compile`` for such arguments, where not ``running``.

        Raises the errors of ``BuildInputReader.read_inputs``, ConfigError for an optimizer's parameter that no module
        of the Graph has and, where tensors are to be bound, ConfigError or PlacementError for one that has no values or
        device.
        """
        reader = self._reader_of_build()
        settings = self._source.config.settings
        transform, transformed = active_transform(settings), None
        if transform is None:
            inputs = reader.read_inputs(args, kwargs, dict(settings.inputs), running)
        else:
            ranks = self._source.ranks
            inputs, transformed = transform.read_inputs(reader, ranks, settings, args, kwargs, running)
        tensors, is_bound = state.check_binding()
        if not is_bound:
            self._keys.read_counters(state, tensors)
        self._attributes.read_values(state.modules, tensors)
        self._groups.read_groups(self._source.optimizers)
        baked = (*self._groups.baked, *map(constants_of_average, self._source.averages))
        key = self._keys.build_key(inputs, state, tensors, settings, baked, self._number)
        if running and state.program is None:
            state.check_real()
        is_global = any(leaf.is_global for leaf in inputs.leaves)
        return BuildCall(inputs, state, settings, key, self._numbers(inputs), is_global, transformed)

    def _reader_of_build(self) -> BuildInputReader:
        """The reader for build as it is now: a person may have replaced it, and IPython's autoreload its code."""
        build = self._source.owner.build
        function, code = getattr(build, "__func__", build), getattr(build, "__code__", None)
        if self._reader is None or function is not self._build[0] or code is not self._build[1]:
            self._reader, self._build = self._source.reader(), (function, code)
            same = (i for i, (one, its) in enumerate(self._builds) if one is function and its is code)
            self._number = next(same, len(self._builds))
            if self._number == len(self._builds):
                self._builds.append(self._build)
        return self._reader

    def with_numbers_now(self, call: BuildCall) -> BuildCall:
        """``call`` with hyperparameters that have changed since it was read."""
        self._groups.read_groups(self._source.optimizers)
        return replace(call, numbers=self._numbers(call.inputs))

    def _numbers(self, inputs: Inputs) -> Mapping[Role, float]:
        scalars = {Role("scalar", leaf.name): leaf.raw for leaf in inputs.leaves if isinstance(leaf.raw, float)}
        return {**self._groups.numbers, **scalars} if scalars else self._groups.numbers
