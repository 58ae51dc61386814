"""Whether a state dict fits a Graph, decided as a whole before anything is written.

Whatever stands in it, the answer is a ``Checked``, which ``loading`` writes, or a CheckpointError that lists what does
not fit by path.  What is compared: names, shapes, dtypes that can be cast, and kinds of all other values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero.checkpoint.state_dict.mismatches import Problems
from graphzero.checkpoint.state_dict.structure import check_outline
from graphzero.runtime.state import modules as tree
from graphzero.runtime.state.modules import Found, group_paths
from graphzero.runtime.state.state import State
from graphzero.runtime.tensors.fingerprint import content
from graphzero.runtime.tensors.shards import is_whole
from graphzero.runtime.world.consensus import tensor_text
from graphzero.sbp.dtensor import nd_of_dtensor

_PARTS = ("modules", "optimizers", "schedulers", "random")
# What may come and go in a parameter group: how torch steps it, which it fills in itself, and what schedulers note.
_HOW = {"foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"}
_NOTED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
StateKeys = Callable[[int, str], Iterable[str]]  # (optimizer, path) -> the states it will have; none where unknown


@dataclass(frozen=True)
class Checked:
    """What of a state dict fits.  optimizers: keyed by paths of parameters.  random: (seed, step), if it is there.

    is_complete: whether nothing is missing, so that all ranks that load it are alike again.
    """

    modules: Mapping[str, Mapping[str, Any]]
    optimizers: Sequence[Mapping[str, Any]]
    schedulers: Sequence[Any]
    random: tuple[int | None, int] | None
    is_complete: bool


def check(
    sd: Any, state: State, schedulers: Sequence[Any], strict: bool, to_come: StateKeys, wakes: bool = False
) -> Checked:
    """``sd``, if it fits.  Raises CheckpointError, with all that does not.

    to_come: the states of optimizers that hold none yet.  wakes: what is on the meta device is going to be allocated.
    """
    check_outline(sd)
    problems, found = Problems(wakes), state.tensors()
    problems.missing += [part for part in _PARTS if part not in sd]
    problems.unexpected += [str(part) for part in sd if part not in _PARTS]
    _check_modules(problems, sd.get("modules", {}), state)
    counts = (("optimizers", len(state.optimizers)), ("schedulers", len(schedulers)))
    for part, have in counts:
        given = len(sd.get(part, [None] * have))
        if have != given:
            problems.wrong.append(f"{part}: {have} here, {given} in the state dict")
    given_optimizers = sd.get("optimizers", ())
    optimizers = [_named(entry, i, state, found) for i, entry in enumerate(given_optimizers[: len(state.optimizers)])]
    fitting = [_check_optimizer(problems, i, entry, state, found, to_come) for i, entry in enumerate(optimizers)]
    pairs = zip(schedulers, sd.get("schedulers", ()), strict=False)
    counts_of = [_check_scheduler(problems, f"schedulers.{i}", *pair) for i, pair in enumerate(pairs)]
    problems.raise_any(strict)
    random = (sd["random"]["seed"], sd["random"]["step"]) if "random" in sd else None
    return Checked(sd.get("modules", {}), fitting, counts_of, random, not problems.missing)


def is_split(sd: Any, state: State) -> bool:
    """Whether all ranks are needed to load ``sd``: it, or what stands here, holds DTensors."""
    held = [entry.tensor for entry in state.tensors().values()]
    states = [optimizer.state for optimizer in state.optimizers]
    return any(isinstance(x, DTensor) for x in (*held, *(x for _, x in _leaves([sd, *states], ""))))


def contents(checked: Checked) -> dict[str, str]:
    """What must be the same on all ranks that load: of whole tensors their values, as a hash; of pieces their kind."""
    return {path: _told(x) for part, held in vars(checked).items() for path, x in _leaves(held, part)}


def _leaves(x: Any, path: str) -> Iterable[tuple[str, Any]]:
    entries = x.items() if isinstance(x, Mapping) else enumerate(x) if isinstance(x, (list, tuple)) else None
    if entries is None:
        yield path, x
    else:
        for key, held in entries:
            yield from _leaves(held, f"{path}.{key}")


def _told(x: Any) -> str:
    if isinstance(x, Tensor):
        nd = nd_of_dtensor(x) if isinstance(x, DTensor) else ()
        values = f", hash {content(x):x}" if is_whole(nd) else ""
        return f"{tensor_text(x)} {', '.join(map(str, nd))}{values}"
    return repr(x) if x is None or isinstance(x, (bool, int, float, complex, str, bytes)) else type(x).__name__


# ---- part by part


def _check_modules(problems: Problems, modules: Mapping[str, Mapping[str, Any]], state: State) -> None:
    problems.unexpected += [f"modules.{name}" for name in modules if name not in state.modules]
    for name, module in state.modules.items():
        have, given = module.state_dict(), modules.get(name)
        if given is None:
            problems.missing += [f"modules.{name}"] * bool(have)
            continue
        problems.missing += [f"modules.{name}.{key}" for key in have if key not in given]
        problems.unexpected += [f"modules.{name}.{key}" for key in given if key not in have]
        for key, held in have.items():
            if key in given and isinstance(held, Tensor):  # what else there is, set_extra_state judges
                problems.tensor(f"modules.{name}.{key}", held, given[key], state)


def _named(entry: Mapping[str, Any], index: int, state: State, found: Mapping[str, Found]) -> dict[str, Any]:
    """An optimizer's entry keyed by paths; what torch's ``optimizer.state_dict()`` gives is numbered in order."""
    numbers = [name for group in entry["param_groups"] for name in group["params"]]
    if not numbers or not all(isinstance(n, int) for n in numbers):
        return dict(entry)
    order = [path for group in group_paths(state.optimizers[index], tree.names(found), index) for path in group]
    if len(order) != len(numbers) or len(set(numbers)) != len(numbers):
        return dict(entry)
    name_of = dict(zip(numbers, order, strict=True))
    groups = [{**group, "params": [name_of[n] for n in group["params"]]} for group in entry["param_groups"]]
    return {"state": {name_of.get(n, n): held for n, held in entry["state"].items()}, "param_groups": groups}


def _check_optimizer(
    problems: Problems, index: int, entry: Mapping[str, Any], state: State, found: Mapping[str, Found],
    to_come: StateKeys,
) -> Mapping[str, Any]:  # fmt: skip
    """``entry`` without the states that nobody knows here."""
    optimizer, what = state.optimizers[index], f"optimizers.{index}"
    fitting: dict[str, Mapping[str, Any]] = {}
    groups: list[Mapping[str, Any]] = []
    have = group_paths(optimizer, tree.names(found), index)
    given = [group["params"] for group in entry["param_groups"]]
    if len(have) != len(given):
        problems.wrong.append(f"{what}.param_groups: {len(have)} here, {len(given)} in the state dict")
    for j, (here, there) in enumerate(zip(have, given, strict=False)):
        problems.missing += [f"{what}.param_groups.{j}.{name}" for name in sorted(set(here) - set(there), key=str)]
        problems.unexpected += [f"{what}.param_groups.{j}.{name}" for name in sorted(map(str, set(there) - set(here)))]
        if len(set(there)) != len(there):
            problems.wrong.append(f"{what}.param_groups.{j}.params names a parameter twice")
        groups.append(_check_group(problems, f"{what}.param_groups.{j}", optimizer, j, entry["param_groups"][j]))
    states, everyone = entry["state"], {name for names in have for name in names}
    problems.unexpected += [f"{what}.state.{name}" for name in states if name not in everyone]
    for name in sorted(everyone):
        current = optimizer.state.get(found[name].tensor, {})
        if name not in states:
            problems.missing += [f"{what}.state.{name}"] * bool(current and states)
            continue
        known = set(current) or set(to_come(index, name) if states[name] else ())
        problems.missing += [f"{what}.state.{name}.{key}" for key in sorted(known, key=str) if key not in states[name]]
        if known:
            problems.unexpected += [f"{what}.state.{name}.{key}" for key in states[name] if key not in known]
        fitting[name] = {key: held for key, held in states[name].items() if key in known or not known}
        for key, held in fitting[name].items():
            problems.tensor(f"{what}.state.{name}.{key}", current.get(key), held, state, replaced=True)
    return {"state": fitting, "param_groups": groups}


def _check_group(
    problems: Problems, what: str, optimizer: torch.optim.Optimizer, group: int, given: Mapping[str, Any]
) -> Mapping[str, Any]:
    """``given`` without what nobody knows here."""
    have = optimizer.param_groups[group]
    is_own = type(optimizer).__module__.startswith("torch.optim")  # another one may count in groups from its first step
    counts = {key for key, held in given.items() if type(held) in (int, float) and not is_own}
    fitting = {k: held for k, held in given.items() if k in have or k in _HOW or k in _NOTED or k in counts}
    problems.missing += [f"{what}.{key}" for key in optimizer.defaults if key not in given and key not in _HOW]
    problems.unexpected += [f"{what}.{key}" for key in given if key not in fitting]
    for key, held in fitting.items():
        if key in _HOW:
            problems.value(f"{what}.{key}", bool(have.get(key)), held)
        elif key != "params":
            problems.value(f"{what}.{key}", have.get(key, 0.0), held)
    return fitting


def _check_scheduler(problems: Problems, what: str, scheduler: Any, given: Mapping[str, Any] | None) -> Any:
    """``given`` without what nobody knows here."""
    if scheduler is None or given is None:
        problems.unexpected += [what] * (given is not None)
        problems.missing += [what] * (scheduler is not None)
        return None
    have = scheduler.state_dict()
    own = {key for key in have if not str(key).startswith("_")}  # the others are torch's own, and come and go
    problems.missing += [f"{what}.{key}" for key in sorted(own, key=str) if key not in given]
    known = {key for key in given if key in have or str(key).startswith("_") and not hasattr(scheduler, str(key))}
    problems.unexpected += [f"{what}.{key}" for key in given if key not in known]
    for key, held in given.items():
        if key in have:
            problems.value(f"{what}.{key}", have[key], held)
    return {key: held for key, held in given.items() if key in known}
