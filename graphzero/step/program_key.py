"""The key of a call, which guards what is known before build runs: shapes, dtypes, modules, optimizers, settings.

A call whose key is known runs the program that was made for it, if what that program's capture has read still holds:
guarded hyperparameters, attributes, and which optimizer states there are.  These are not in the key, because which
of them count is known only when build has run once; ``ProgramCache.find`` checks them (``capture/guards``).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from graphzero.capture import Input, Inputs
from graphzero.capture.problems import check_modules
from graphzero.config import Settings
from graphzero.errors import ConfigError
from graphzero.runtime.state import modules as tree
from graphzero.runtime.state.modules import ModuleTensor, walk
from graphzero.runtime.state.state import State
from graphzero.runtime.state.tensor_ref import TensorRef
from graphzero.runtime.world.consensus import tensor_text
from graphzero.sbp.placement import DEVICE_TYPES
from graphzero.sbp.types import Nd
from graphzero.step.build_inputs import text_of
from graphzero.step.input_transform import active_transform


@dataclass(frozen=True)
class ProgramKey:
    """Key of a program. ``captured`` selects the capture; ``placed`` and ``config`` select what passes make of it.

    captured: (what it is, value): structure, shapes and dtypes of inputs, torch's settings, modules with their mode and
    hooks, parameters, optimizers with their groups.  placed: SBPs of inputs, parameters and buffers.
    """

    captured: tuple[tuple[str, Any], ...]
    placed: tuple[Any, ...]
    config: tuple[Any, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.captured, self.placed, self.config))


class ProgramKeyBuilder:
    """The keys of one Graph's calls; what follows from modules and parameter groups is kept while those stay."""

    def __init__(self) -> None:
        self._counters: tuple[Any, ...] = ()  # see ``State.counter_layout``
        self._of: Mapping[str, ModuleTensor] | None = None
        self._held: tuple[list[list[int]], list[Tensor]] = [], []  # by optimizers: sizes of groups, and what is in them
        self._known: dict[int, TensorRef] = {}
        self._paths: dict[int, str] = {}
        self._parts: tuple[tuple[str, Any], ...] = ()
        self._facts: tuple[Any, ...] = ()
        self._last: ProgramKey | None = None

    def read_counters(self, state: State, tensors: Mapping[str, ModuleTensor]) -> None:
        """Look at the step counters of optimizers, which other code may have changed."""
        self._counters = state.counter_layout(tree.paths_by_id(tensors))

    def build_key(
        self,
        inputs: Inputs,
        state: State,
        tensors: Mapping[str, ModuleTensor],
        settings: Settings,
        groups: tuple[Any, ...],
        build: int,
    ) -> ProgramKey:
        """See ``ProgramKey``; the same object for the same call again.  groups: constants of parameter groups.  build:
        the number of the Graph's build, where it has been replaced.

        Raises ConfigError for an optimizer's parameter that no module of the Graph has, CaptureError for a module that
        does part of a Graph's work."""
        self._look(state, tensors)
        chosen, nds, modes = [_selects(leaf) for leaf in inputs.leaves], state.given_nds(tensors), _modes()
        placed, fixed = [leaf.nd for leaf in inputs.leaves], self._parts
        facts = inputs.spec, chosen, placed, modes, groups, build, self._counters, fixed, nds, settings.fingerprint
        if self._last is None or facts != self._facts:
            names = [f"input {leaf.name}" for leaf in inputs.leaves]
            parts = [("input structure", inputs.spec), *zip(names, chosen, strict=True)]
            parts += [("torch settings", modes), ("optimizer settings", groups), ("step counters", self._counters)]
            parts += [("mixed precision", settings.amp), ("number of build, which was replaced", build)]
            if (transform := active_transform(settings)) is not None:
                parts.append(transform.capture_key(settings))
            self._last = ProgramKey((*parts, *fixed), placed_of(inputs, nds), settings.fingerprint)
            self._facts = facts
        return self._last

    def _look(self, state: State, module_tensors: Mapping[str, ModuleTensor]) -> None:
        """At modules and at what optimizers hold."""
        groups = [[group["params"] for group in o.param_groups] for o in state.optimizers]
        sizes = [list(map(len, each)) for each in groups]
        params = list(chain.from_iterable(chain.from_iterable(groups)))
        if self._of is module_tensors and sizes == self._held[0] and all(map(is_, params, self._held[1])):
            return
        check_modules(walk(state.modules))
        names = tree.paths_by_id(module_tensors)
        for i, optimizer in enumerate(state.optimizers):
            self._check_current(optimizer, i, names, module_tensors)
        self._known = {key: known for key, known in self._known.items() if known.is_alive}
        self._known.update({id(entry.tensor): TensorRef(entry.tensor) for entry in module_tensors.values()})
        self._paths = {key: path for key, path in self._paths.items() if key in self._known} | names
        tensors = tuple((p, e.tensor.shape, e.tensor.dtype, e.tensor.requires_grad) for p, e in module_tensors.items())
        modules = tuple((weakref.ref(m), *tree.module_mode(m)) for _, m in walk(state.modules))
        modules += tuple((p, tree.hook_ids(e.tensor)) for p, e in module_tensors.items())
        parts: list[tuple[str, Any]] = [("modules", _Hashed(modules)), ("parameters", _Hashed(tensors))]
        parts += [(f"optimizer {i}", _Hashed(_layout(o, names, i))) for i, o in enumerate(state.optimizers)]
        self._of, self._held, self._parts = module_tensors, (sizes, params), tuple(parts)

    def _check_current(
        self, optimizer: Optimizer, index: int, names: Mapping[int, str], tensors: Mapping[str, ModuleTensor]
    ) -> None:
        """Refuse an optimizer that holds a parameter which a module had once, and has no more."""
        for param in [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]:
            former = self._known.get(id(param))
            if former is not None and former.is_of(param):
                path = self._paths[id(param)]
                now = (
                    f"holds {tensor_text(tensors[path].tensor)} there now" if path in tensors else "has none there now"
                )
                raise ConfigError(
                    f"optimizer {index} ({type(optimizer).__name__}) still holds the former {path}, "
                    f"{tensor_text(param)}; its module {now}, so the optimizer would step a tensor that is not used. "
                    "Make a new optimizer and Graph after modules change, or put the new parameters in its param_groups"
                )


def differing(one: ProgramKey, other: ProgramKey) -> list[str]:
    """Names of the parts in which two keys differ."""
    mine, its = dict(one.captured), dict(other.captured)
    names = [name for name in dict.fromkeys((*mine, *its)) if mine.get(name) != its.get(name)]
    names += ["how tensors are placed"] * (one.placed != other.placed)
    return names + ["configuration"] * (one.config != other.config)


def placed_of(inputs: Inputs, nds: Sequence[Nd]) -> tuple[Any, ...]:
    """Placement of inputs, parameters and buffers, see ``State.nds``."""
    return tuple(leaf.nd for leaf in inputs.leaves), _Hashed(nds)


def describe(key: ProgramKey, inputs: Inputs, state: State) -> dict[str, str]:
    """The key's parts, but for the settings, as text that is the same in every process."""
    parts = {f"input {leaf.name}": text_of(leaf) for leaf in inputs.leaves}
    for name, part in key.captured:
        if name not in parts and name != "modules":
            parts[name] = str(part)
    modules = [(path, module.training) for path, module in walk(state.modules)]
    flags = {flag for _, flag in modules}
    parts["training flags"] = str(flags.pop()) if len(flags) == 1 else str(modules)
    for path, shape, dtype, grad in dict(key.captured)["parameters"]:
        parts[f"tensor {path}"] = f"{str(dtype).removeprefix('torch.')}{list(shape)}{'' if grad else ', no grad'}"
    del parts["parameters"]
    parts["placed"] = str(key.placed)
    return parts


def _layout(optimizer: Optimizer, names: Mapping[int, str], index: int) -> tuple[Any, ...]:
    """Its class and the parameters of its groups."""
    return type(optimizer).__qualname__, tree.group_paths(optimizer, names, index)


def _selects(leaf: Input) -> Any:
    """The part of an input that selects a capture. A float is read at run time and selects none."""
    if leaf.shape is not None:
        return leaf.raw.dtype, leaf.shape
    return (float,) if isinstance(leaf.raw, float) else (type(leaf.raw), leaf.raw)


def _modes() -> tuple[Any, ...]:
    casts = tuple([(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICE_TYPES])
    return casts, torch.is_autocast_cache_enabled(), torch.is_grad_enabled(), torch.get_default_dtype()


class _Hashed(tuple[Any, ...]):
    """A tuple that hashes once."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash
