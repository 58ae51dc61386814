"""State dicts of a Graph: read, made whole, checked and loaded.

One outline for all::

    {"modules": {attribute: module.state_dict()},
     "optimizers": [{"state": {"attribute.fqn": {...}}, "param_groups": [{..., "params": ["attribute.fqn", ...]}]}],
     "schedulers": [scheduler.state_dict() or None, ...], "random": {"seed": ..., "step": ...}}

torch's own ``load_state_dict`` of modules and optimizers takes these entries: an optimizer maps whatever stands in
"params" to its parameters in order.  A load is checked as a whole before anything is written.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphzero._compat import storage_id
from graphzero.errors import CheckpointError
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.runtime import modules as tree
from graphzero.runtime.agree import tensor_text
from graphzero.runtime.modules import Found, group_paths
from graphzero.runtime.resplit import resplit, whole
from graphzero.runtime.shards import as_dtensor, is_whole, local_of
from graphzero.runtime.state import State
from graphzero.runtime.storage import filled
from graphzero.runtime.submesh import on_mesh_of, on_whole
from graphzero.sbp.dtensor import nd_of_dtensor
from graphzero.sbp.types import B, Nd, S

_SHOWN = 6


def outline(state: State, schedulers: Sequence[Any], graph: StepGraph | None, specs: Sequence[Any]) -> dict[str, Any]:
    """What there is, as it is: live tensors.

    States that a compiled program will begin with, but that do not exist yet, are made as they will be (graph and
    specs: of that program), so that a checkpoint can be loaded into them; but not those that only the first step can
    make, whose values nobody knows before it.
    """
    found = state.tensors()
    names = tree.names(found)
    nds = {node.name: value.nd_of(node) for node in graph.placeholders("state")} if graph is not None else {}
    optimizers = []
    for i, optimizer in enumerate(state.optimizers):
        held = {names.get(id(p), ""): dict(x) for p, x in optimizer.state.items() if x}
        for spec in specs:
            if spec.optimizer == i and not spec.born and not isinstance(held.get(spec.param, {}).get(spec.key), Tensor):
                held.setdefault(spec.param, {})[spec.key] = _initial(spec, nds.get(spec.placeholder, ()), state)
        paths = group_paths(optimizer, names, i)
        groups = [{**g, "params": list(held)} for g, held in zip(optimizer.param_groups, paths, strict=True)]
        order = [name for group in groups for name in group["params"]]
        optimizers.append({"state": {name: held[name] for name in order if name in held}, "param_groups": groups})
    return {
        "modules": {name: module.state_dict() for name, module in state.modules.items()},
        "optimizers": optimizers,
        "schedulers": [None if s is None else s.state_dict() for s in schedulers],
        "random": {"seed": state.random.seed, "step": state.random.step},
    }


def _initial(spec: Any, nd: Nd, state: State) -> Tensor:
    if not spec.shape:
        return torch.full((), spec.fill, dtype=spec.dtype)
    return filled(spec.shape, spec.dtype, spec.fill, nd, state.world)


def tensors_in(x: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested dicts and lists, with its path."""
    if isinstance(x, Tensor):
        yield path, x
    entries = x.items() if isinstance(x, Mapping) else enumerate(x) if isinstance(x, (list, tuple)) else ()
    for key, held in entries:
        yield from tensors_in(held, f"{path}.{key}" if path else str(key))


def facts(x: Any) -> dict[str, str]:
    """What decides which collectives make a state dict whole: type and SBP of each tensor by path, in order."""
    return {path: f"{tensor_text(t)} {_sbp_text(t)}" for path, t in tensors_in(x)}


def _sbp_text(x: Tensor) -> str:
    return ", ".join(map(str, nd_of_dtensor(x))) if isinstance(x, DTensor) else "plain"


def is_sectioned(x: Tensor) -> bool:
    """Whether ranks hold a tensor in sections, which torch.distributed.checkpoint cannot save."""
    return isinstance(x, DTensor) and any(sbp.sections > 1 for sbp in nd_of_dtensor(x))


def saveable(x: Any) -> Any:
    """A state dict that torch.distributed.checkpoint saves and loads: sections are cut once instead.

    It takes what a rank holds for one block of the whole, whatever placements say.  Every rank calls it if there are
    sections.
    """
    return _map(x, lambda t: _cut_once(t) if is_sectioned(t) else t)


def _cut_once(x: Any) -> DTensor:
    nd = nd_of_dtensor(x)
    dims = [sbp.dim for sbp in nd]
    cut = tuple(sbp if sbp.sections == 1 else S(sbp.dim) if dims.count(sbp.dim) == 1 else B for sbp in nd)
    return resplit(x, cut)


def full(x: Any) -> Any:
    """A snapshot of a state dict, with plain whole tensors in place of DTensors; what was tied is so in it.  Every rank
    calls it."""
    made: dict[tuple[Any, ...], Tensor] = {}

    def own(t: Tensor) -> Tensor:
        held = local_of(t)
        place = type(t), storage_id(held), held.storage_offset(), t.shape, t.stride(), t.dtype
        if place not in made:
            found = whole(t) if isinstance(t, DTensor) else t.detach()
            made[place] = found.clone() if storage_id(found) == storage_id(held) else found
        return made[place]

    return _map(x, own, copy.deepcopy)


def _map(x: Any, fn: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda x: x) -> Any:
    """``x`` with ``fn`` of its tensors, and ``other`` of what holds none."""
    if isinstance(x, Tensor):
        return fn(x)
    if isinstance(x, dict):
        made: dict[Any, Any] = OrderedDict() if isinstance(x, OrderedDict) else {}
        made.update((key, _map(held, fn, other)) for key, held in x.items())
        if hasattr(x, "_metadata"):
            made._metadata = x._metadata  # type: ignore[attr-defined]
        return made
    if type(x) in (list, tuple):
        return type(x)(_map(held, fn, other) for held in x)
    return other(x)


# ---- loading


def load(sd: Mapping[str, Any], state: State, schedulers: Sequence[Any], strict: bool, nds: Mapping[Any, Nd]) -> None:
    """See ``Graph.load_state_dict``.  nds: (optimizer, path, key) -> SBP of states to come, where it is known."""
    _check_outline(sd)
    found = state.tensors()
    optimizers = [_named(entry, i, state, found) for i, entry in enumerate(sd.get("optimizers", ()))]
    _check(sd, optimizers, state, schedulers, found, strict)
    with torch.no_grad():
        for name, module in state.modules.items():
            if name in sd.get("modules", {}):
                _load_module(module, sd["modules"][name], state, strict)
        for i, entry in enumerate(optimizers[: len(state.optimizers)]):
            _load_optimizer(i, entry, state, found, nds)
    for scheduler, entry in zip(schedulers, sd.get("schedulers", ()), strict=False):
        if scheduler is not None and entry is not None:
            scheduler.load_state_dict(entry)
    if "random" in sd:
        state.random.set(sd["random"]["seed"], sd["random"]["step"])
    state.invalidate()


def _check_outline(sd: Any) -> None:
    """Raise CheckpointError for what is no state dict of a Graph at all."""
    wrong = []

    def expect(what: str, x: Any, kind: type, called: str) -> bool:
        if not isinstance(x, kind):
            wrong.append(f"{what} is a {type(x).__name__}, not {called}")
        return isinstance(x, kind)

    if expect("it", sd, Mapping, "a dict"):
        parts = sd.get("modules", {})
        if expect("modules", parts, Mapping, "a dict of the modules' state dicts by attribute"):
            for name, part in parts.items():
                expect(f"modules.{name}", part, Mapping, "a state dict")
        for part, called in (("optimizers", "one per optimizer"), ("schedulers", "one per optimizer")):
            expect(part, sd.get(part, []), (list, tuple), f"a list, {called}")  # type: ignore[arg-type]
        for i, entry in enumerate(sd.get("optimizers", []) if not wrong else []):
            if expect(f"optimizers.{i}", entry, Mapping, "a dict"):
                if expect(f"optimizers.{i}.state", entry.get("state"), Mapping, "a dict by parameter"):
                    for name, held in entry["state"].items():
                        expect(f"optimizers.{i}.state.{name}", held, Mapping, "a dict of states by key")
                expect(f"optimizers.{i}.param_groups", entry.get("param_groups"), (list, tuple), "a list")  # type: ignore[arg-type]
        if "random" in sd and not (isinstance(sd["random"], Mapping) and {"seed", "step"} <= sd["random"].keys()):
            wrong.append("random has no seed and step")
    if wrong:
        shown = "".join(f"\n  {line}" for line in wrong[:_SHOWN])
        raise CheckpointError(
            f"this is no state dict of a Graph; nothing was loaded{shown}\n  give what graph.state_dict() or "
            'full_state_dict() gave; a plain module\'s goes in as {"modules": {attribute: sd}}, with strict=False'
        )


def _named(entry: Mapping[str, Any], index: int, state: State, found: Mapping[str, Found]) -> dict[str, Any]:
    """An optimizer's entry keyed by paths; what torch's ``optimizer.state_dict()`` gives is numbered in order."""
    numbers = [name for group in entry["param_groups"] for name in group["params"]]
    if index >= len(state.optimizers) or not numbers or not all(isinstance(n, int) for n in numbers):
        return dict(entry)
    names = {id(e.tensor): path for path, e in found.items()}
    order = [path for group in group_paths(state.optimizers[index], names, index) for path in group]
    if len(order) != len(numbers):
        return dict(entry)
    name_of = dict(zip(numbers, order, strict=True))
    groups = [{**group, "params": [name_of[n] for n in group["params"]]} for group in entry["param_groups"]]
    return {"state": {name_of.get(n, n): held for n, held in entry["state"].items()}, "param_groups": groups}


class _Problems:
    """What does not fit, by kind."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.wrong: list[str] = []

    def shapes(self, what: str, have: Any, given: Any) -> None:
        if isinstance(have, Tensor) and not isinstance(given, Tensor):
            self.wrong.append(f"{what} is a tensor here, {type(given).__name__} in the state dict")
        elif isinstance(given, Tensor) and given.is_meta:
            self.wrong.append(f"{what} has no values in the state dict (meta device)")
        elif isinstance(have, Tensor) and isinstance(given, Tensor):
            if have.is_meta:
                self.wrong.append(f"{what} is on the meta device here, module.to_empty(...) first")
            elif have.shape != given.shape:
                self.wrong.append(f"{what} is {list(have.shape)} here, {list(given.shape)} in the state dict")

    def raise_any(self, strict: bool) -> None:
        kinds = [("wrong", self.wrong)]
        if strict:
            kinds = [("missing", self.missing), ("unexpected", self.unexpected), *kinds]
        lines = []
        for kind, held in kinds:
            if held:
                more = f" ... and {len(held) - _SHOWN} more" if len(held) > _SHOWN else ""
                lines.append(f"  {kind}: {', '.join(held[:_SHOWN])}{more}")
        if lines:
            hint = "\n  strict=False loads what fits" if strict and not self.wrong else ""
            raise CheckpointError(
                "the state dict does not fit this graph; nothing was loaded\n" + "\n".join(lines) + hint
            )


def _check(
    sd: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]], state: State, schedulers: Sequence[Any],
    found: Mapping[str, Found], strict: bool,
) -> None:  # fmt: skip
    problems = _Problems()
    problems.missing += [part for part in ("modules", "optimizers", "schedulers", "random") if part not in sd]
    problems.unexpected += [str(part) for part in sd if part not in ("modules", "optimizers", "schedulers", "random")]
    modules = sd.get("modules", {})
    problems.unexpected += [f"modules.{name}" for name in modules if name not in state.modules]
    for name, module in state.modules.items():
        have, given = module.state_dict(), modules.get(name)
        if given is None:
            problems.missing += [f"modules.{name}"] * bool(have)
            continue
        problems.missing += [f"modules.{name}.{key}" for key in have if key not in given]
        problems.unexpected += [f"modules.{name}.{key}" for key in given if key not in have]
        for key in (key for key in have if key in given):
            problems.shapes(f"modules.{name}.{key}", have[key], given[key])
    for part, have_count, given_count in (
        ("optimizers", len(state.optimizers), len(sd.get("optimizers", state.optimizers))),
        ("schedulers", len(schedulers), len(sd.get("schedulers", schedulers))),
    ):
        if have_count != given_count:
            problems.wrong.append(f"{part}: {have_count} here, {given_count} in the state dict")
    for i, entry in enumerate(optimizers[: len(state.optimizers)]):
        _check_optimizer(problems, i, entry, state, found)
    problems.raise_any(strict)


def _check_optimizer(
    problems: _Problems, index: int, entry: Mapping[str, Any], state: State, found: Mapping[str, Found]
) -> None:  # fmt: skip
    optimizer, what = state.optimizers[index], f"optimizers.{index}"
    names = {id(e.tensor): path for path, e in found.items()}
    have = list(map(set, group_paths(optimizer, names, index)))
    given = [set(group["params"]) for group in entry["param_groups"]]
    if len(have) != len(given):
        problems.wrong.append(f"{what}.param_groups: {len(have)} here, {len(given)} in the state dict")
    for j, (here, there) in enumerate(zip(have, given, strict=False)):
        problems.missing += [f"{what}.param_groups.{j}.{name}" for name in sorted(here - there)]
        problems.unexpected += [f"{what}.param_groups.{j}.{name}" for name in sorted(map(str, there - here))]
    everyone = set().union(*have)
    states = entry["state"]
    problems.unexpected += [f"{what}.state.{name}" for name in states if name not in everyone]
    for name in sorted(everyone):
        current = optimizer.state.get(found[name].tensor, {})
        if name not in states:
            problems.missing += [f"{what}.state.{name}"] * bool(current and states)
            continue
        problems.missing += [f"{what}.state.{name}.{key}" for key in current if key not in states[name]]
        for key, held in states[name].items():
            problems.shapes(f"{what}.state.{name}.{key}", current.get(key), held)


def _load_module(module: nn.Module, given: Mapping[str, Any], state: State, strict: bool) -> None:
    have = module.state_dict()
    made = OrderedDict((key, _like(held, have.get(key), state)) for key, held in given.items())
    if hasattr(given, "_metadata"):
        made._metadata = given._metadata  # type: ignore[attr-defined]
    module.load_state_dict(made, strict=strict)


def _like(given: Any, have: Any, state: State) -> Any:
    """``given``, laid out as the tensor that it is copied into."""
    if not isinstance(given, Tensor) or not isinstance(have, Tensor):
        return given
    if not isinstance(have, DTensor):
        return whole(given) if isinstance(given, DTensor) else given
    made = _laid(given, state.nd_of(have), state)
    return on_mesh_of(made, have) if isinstance(made, DTensor) else made


def _laid(given: Tensor, nd: Nd, state: State) -> Tensor:
    if isinstance(given, DTensor):
        return resplit(on_whole(given, state.placement), nd)
    return as_dtensor(given.to(state.world.device), state.placement, nd)


def _load_optimizer(
    index: int, entry: Mapping[str, Any], state: State, found: Mapping[str, Found], nds: Mapping[Any, Nd]
) -> None:  # fmt: skip
    optimizer = state.optimizers[index]
    names = {id(e.tensor): path for path, e in found.items()}
    for group, given in zip(optimizer.param_groups, entry["param_groups"], strict=False):
        group.update({key: copy.deepcopy(held) for key, held in given.items() if key != "params"})
        for param in group["params"]:
            path = names[id(param)]
            current = optimizer.state.pop(param, {})
            if path in entry["state"]:
                optimizer.state[param] = {
                    key: _state_value(held, current.get(key), nds.get((index, path, key)), state)
                    for key, held in entry["state"][path].items()
                }


def _state_value(given: Any, have: Any, nd: Nd | None, state: State) -> Any:
    """A state as the optimizer keeps it: split like the one it follows, or as the compiled program wants it."""
    if not isinstance(given, Tensor):
        return copy.deepcopy(given)
    if given is have:
        return given
    if isinstance(have, DTensor):
        nd = state.nd_of(have)
    if isinstance(given, DTensor) and (nd is None or is_whole(nd)):
        return whole(given) if nd is not None else given.detach().clone()
    if nd is not None and not is_whole(nd) and not state.placement.virtual and given.dim():
        made = _laid(given.detach(), nd, state)
        return made.clone() if made is given else made
    return given.detach().clone()
