"""The check of a state dict against a Graph, as a whole and before anything is written.

Any object may be given.  The answer is a ``ValidStateDict``, which ``loading`` writes, or a CheckpointError that lists
what does not fit by path.  Names, shapes, dtypes that can be cast, and kinds of all other values are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero.checkpoint.state_dict.collect import describe_tensor, leaves_with_paths
from graphzero.checkpoint.state_dict.comparison import SHOWN, StateDictComparison, is_int64
from graphzero.errors import CheckpointError
from graphzero.runtime.state import modules as tree
from graphzero.runtime.state.modules import group_paths
from graphzero.runtime.state.state import State
from graphzero.runtime.tensors.fingerprint import content
from graphzero.runtime.tensors.shards import is_whole
from graphzero.sbp.dtensor import nd_of_dtensor

_PARTS = ("modules", "optimizers", "schedulers", "random")
# Entries of a parameter group that may come and go: how torch steps it, and what schedulers note in it.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"}
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
StateKeys = Callable[[int, str], Iterable[str]]  # (optimizer, path) -> keys of its states; none where unknown


@dataclass(frozen=True)
class ValidStateDict:
    """The entries of a state dict that fit.  optimizers: keyed by paths of parameters.  random: (seed, step), if given.

    is_complete: whether nothing is missing, so that all ranks that load it are alike again.
    """

    modules: Mapping[str, Mapping[str, Any]]
    optimizers: Sequence[Mapping[str, Any]]
    schedulers: Sequence[Any]
    random: tuple[int | None, int] | None
    is_complete: bool


def validate_state_dict(
    sd: Any, state: State, schedulers: Sequence[Any], strict: bool, expected_states: StateKeys,
    materializes: bool = False,
) -> ValidStateDict:  # fmt: skip
    """``sd``, if it fits.  Raises CheckpointError, with all differences.

    expected_states: of optimizers that hold none yet.  materializes: see ``StateDictComparison``.
    """
    _check_structure(sd)
    validator = _Validator(state, materializes, expected_states)
    validator.compare_names("", _PARTS, sd)
    validator.check_modules(sd.get("modules", {}))
    for part, current in (("optimizers", state.optimizers), ("schedulers", schedulers)):
        if part in sd and len(current) != len(sd[part]):
            validator.wrong.append(f"{part}: {len(current)} here, {len(sd[part])} in the state dict")
    given_optimizers = sd.get("optimizers", ())[: len(state.optimizers)]
    fitting_optimizers = [validator.check_optimizer(i, entry) for i, entry in enumerate(given_optimizers)]
    pairs = enumerate(zip(schedulers, sd.get("schedulers", ()), strict=False))
    fitting_schedulers = [validator.check_scheduler(f"schedulers.{i}", *pair) for i, pair in pairs]
    validator.raise_differences(strict)
    random = (sd["random"]["seed"], sd["random"]["step"]) if "random" in sd else None
    return ValidStateDict(
        sd.get("modules", {}), fitting_optimizers, fitting_schedulers, random, not validator.missing
    )  # fmt: skip


def needs_all_ranks(sd: Any, state: State) -> bool:
    """Return whether all ranks are needed to load ``sd``: it, or the Graph, holds DTensors."""
    tensors = [entry.tensor for entry in state.tensors().values()]
    states = [optimizer.state for optimizer in state.optimizers]
    return any(isinstance(x, DTensor) for x in (*tensors, *(x for _, x in leaves_with_paths([sd, *states]))))


def describe_contents(valid: ValidStateDict) -> dict[str, str]:
    """Text by path of what must be equal on all ranks that load: of whole tensors with a hash of their values."""
    return {
        path: _describe_leaf(x) for part, entries in vars(valid).items() for path, x in leaves_with_paths(entries, part)
    }


def _describe_leaf(x: Any) -> str:
    if isinstance(x, Tensor):
        is_split = isinstance(x, DTensor) and not is_whole(nd_of_dtensor(x))
        return describe_tensor(x) + ("" if is_split else f", hash {content(x):x}")
    return repr(x) if x is None or isinstance(x, (bool, int, float, complex, str, bytes)) else type(x).__name__


# ---- which dicts and lists a state dict consists of


def _check_structure(sd: Any) -> None:
    """Raise CheckpointError for an object that is not a state dict of a Graph at all."""
    errors = [*_structure_errors("", sd, "state dict"), *_random_errors(sd)]
    if errors:
        lines = "".join(f"\n  {line}" for line in errors[:SHOWN])
        more = f"\n  ... and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
        raise CheckpointError(
            f"this is not a state dict of a Graph; nothing was loaded{lines}{more}\n  give what graph.state_dict() or "
            'full_state_dict() gave; a plain module\'s goes in as {"modules": {attribute: sd}}, with strict=False'
        )


_SEQUENCE = (list, tuple)
# Type, its description for messages, and schemas: one of all entries, or (name, default, schema) of each that counts.
_SCHEMAS: dict[str, tuple[Any, str, str | Sequence[tuple[str, Any, str]]]] = {
    "state dict": (Mapping, "a dict", [
        ("modules", {}, "modules"), ("optimizers", [], "optimizers"), ("schedulers", [], "schedulers")]),
    "modules": (Mapping, "a dict of the modules' state dicts by attribute", "module"),
    "module": (Mapping, "a state dict", ()),
    "optimizers": (_SEQUENCE, "a list, one per optimizer", "optimizer"),
    "optimizer": (Mapping, "a dict", [("state", None, "states"), ("param_groups", None, "groups")]),
    "states": (Mapping, "a dict by parameter", "state"),
    "state": (Mapping, "a dict of states by key", ()),
    "groups": (_SEQUENCE, "a list", "group"),
    "group": (Mapping, "a dict", [("params", None, "params")]),
    "params": (_SEQUENCE, "a list of names", "param"),
    "param": ((str, int), "the name of a parameter", ()),
    "schedulers": (_SEQUENCE, "a list, one per optimizer", "scheduler"),
    "scheduler": ((Mapping, type(None)), "a scheduler's state dict", ()),
}  # fmt: skip


def _structure_errors(path: str, x: Any, schema: str) -> Iterator[str]:
    """Lines such as "optimizers is a dict, not a list, one per optimizer"."""
    kind, description, children = _SCHEMAS[schema]
    if not isinstance(x, kind) or isinstance(x, bool):
        yield f"{path or 'it'} is a {type(x).__name__}, not {description}"
        return
    if isinstance(children, str):
        entries = [
            (str(key), child, children) for key, child in (x.items() if isinstance(x, Mapping) else enumerate(x))
        ]
    else:
        entries = [(name, x.get(name, default), child) for name, default, child in children]
    for name, child, child_schema in entries:
        yield from _structure_errors(f"{path}.{name}" if path else name, child, child_schema)


def _random_errors(sd: Any) -> Iterator[str]:
    if not isinstance(sd, Mapping) or "random" not in sd:
        return
    random = sd["random"]
    if not (isinstance(random, Mapping) and {"seed", "step"} <= random.keys()):
        yield "random has no seed and step"
        return
    seed, step = random["seed"], random["step"]
    if seed is not None and not is_int64(seed):
        yield f"random.seed is {seed!r:.40}, not an int of 64 bits or None"
    if not is_int64(step) or not 0 <= step < 1 << 63:
        yield f"random.step is {step!r:.40}, not a number of steps"


# ---- part by part


class _Validator(StateDictComparison):
    """The comparison of each part of a state dict."""

    def __init__(self, state: State, materializes: bool, expected_states: StateKeys) -> None:
        super().__init__(state, materializes)
        self._expected_states, self._tensors = expected_states, state.tensors()
        self._names = tree.paths_by_id(self._tensors)

    def check_modules(self, given_modules: Mapping[str, Mapping[str, Any]]) -> None:
        current_modules = {name: tree.module_state_dict(module) for name, module in self._state.modules.items()}
        self.compare_names("modules.", filter(current_modules.get, current_modules), given_modules, current_modules)
        for name, current in current_modules.items():
            if name not in given_modules:
                continue
            given = given_modules[name]
            self.compare_names(f"modules.{name}.", current, given)
            for key, x in current.items():
                if key in given and isinstance(x, Tensor):  # set_extra_state judges all else
                    self.compare_tensors(f"modules.{name}.{key}", x, given[key])

    def check_optimizer(self, index: int, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """``entry``, keyed by paths, without states and hyperparameters that the optimizer does not know."""
        optimizer, what = self._state.optimizers[index], f"optimizers.{index}"
        current_groups = group_paths(optimizer, self._names, index)
        entry = _keyed_by_paths(entry, [path for group in current_groups for path in group])
        given_groups = entry["param_groups"]
        if len(current_groups) != len(given_groups):
            self.wrong.append(f"{what}.param_groups: {len(current_groups)} here, {len(given_groups)} in the state dict")
        fitting_groups = []
        for j, (current, group) in enumerate(zip(current_groups, given_groups, strict=False)):
            path, given = f"{what}.param_groups.{j}", group["params"]
            self.compare_names(f"{path}.", sorted(set(current)), sorted(set(given), key=str))
            if len(set(given)) != len(given):
                self.wrong.append(f"{path}.params names a parameter twice")
            fitting_groups.append(self._check_group(path, optimizer, j, group))
        states, every_path = entry["state"], sorted({path for group in current_groups for path in group})
        current_states = {path: optimizer.state.get(self._tensors[path].tensor, {}) for path in every_path}
        required = [path for path in every_path if states and current_states[path]]
        self.compare_names(f"{what}.state.", required, states, current_states)
        fitting_states = {
            path: self._check_states(f"{what}.state.{path}", index, path, current_states[path], states[path])
            for path in every_path
            if path in states
        }
        return {"state": fitting_states, "param_groups": fitting_groups}

    def _check_states(
        self, what: str, index: int, path: str, current: Mapping[str, Any], given: Mapping[str, Any]
    ) -> Mapping[str, Any]:  # fmt: skip
        known = set(current) or set(self._expected_states(index, path) if given else ())
        self.compare_names(f"{what}.", sorted(known, key=str), given, known or given)
        fitting = {key: value for key, value in given.items() if key in known or not known}
        for key, value in fitting.items():
            self.compare_tensors(f"{what}.{key}", current.get(key), value, is_replaced=True)
        return fitting

    def _check_group(
        self, what: str, optimizer: torch.optim.Optimizer, group: int, given: Mapping[str, Any]
    ) -> Mapping[str, Any]:  # fmt: skip
        current = optimizer.param_groups[group]
        # Optimizers that are not torch's may count in groups from their first step on.
        is_of_torch = type(optimizer).__module__.startswith("torch.optim")
        counts = {key for key, value in given.items() if type(value) in (int, float) and not is_of_torch}
        known = current.keys() | _IMPLEMENTATION | _OF_SCHEDULERS | counts
        self.compare_names(f"{what}.", [key for key in optimizer.defaults if key not in _IMPLEMENTATION], given, known)
        fitting = {key: value for key, value in given.items() if key in known}
        for key, value in fitting.items():
            if key in _IMPLEMENTATION:
                self.compare_values(f"{what}.{key}", bool(current.get(key)), value)
            elif key != "params":
                self.compare_values(f"{what}.{key}", current.get(key, 0.0), value)
        return fitting

    def check_scheduler(self, what: str, scheduler: Any, given: Mapping[str, Any] | None) -> Any:
        """``given`` without entries that the scheduler does not know."""
        if scheduler is None or given is None:
            self.compare_names("", [what] * (scheduler is not None), [what] * (given is not None))
            return None
        current = scheduler.state_dict()
        own = {key for key in current if not str(key).startswith("_")}  # the others are torch's own, and come and go
        known = {
            key for key in given if key in current or str(key).startswith("_") and not hasattr(scheduler, str(key))
        }
        self.compare_names(f"{what}.", sorted(own, key=str), given, known)
        for key, value in given.items():
            if key in current:
                self.compare_values(f"{what}.{key}", current[key], value)
        return {key: value for key, value in given.items() if key in known}


def _keyed_by_paths(entry: Mapping[str, Any], paths: Sequence[str]) -> Mapping[str, Any]:
    """An optimizer's entry keyed by paths; ``optimizer.state_dict()`` of torch numbers parameters in order."""
    numbers = [name for group in entry["param_groups"] for name in group["params"]]
    is_numbered = bool(numbers) and all(isinstance(number, int) for number in numbers)
    if not is_numbered or len(paths) != len(numbers) or len(set(numbers)) != len(numbers):
        return entry
    path_of = dict(zip(numbers, paths, strict=True))
    groups = [{**group, "params": [path_of[number] for number in group["params"]]} for group in entry["param_groups"]]
    return {"state": {path_of.get(n, n): state for n, state in entry["state"].items()}, "param_groups": groups}
