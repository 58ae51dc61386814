"""State dicts of a Graph: read, and made whole.

One outline for all::

    {"modules": {attribute: module.state_dict()},
     "optimizers": [{"state": {"attribute.fqn": {...}}, "param_groups": [{..., "params": ["attribute.fqn", ...]}]}],
     "schedulers": [scheduler.state_dict() or None, ...], "random": {"seed": ..., "step": ...}}

torch's own ``load_state_dict`` of modules and optimizers takes these entries: an optimizer maps whatever stands in
"params" to its parameters in order.  ``checked`` says whether one fits, ``loading`` writes it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero._compat import storage_id
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.runtime.state import modules as tree
from graphzero.runtime.state import partial_update
from graphzero.runtime.state.layout import filled
from graphzero.runtime.state.modules import group_paths
from graphzero.runtime.state.state import State
from graphzero.runtime.tensors.gather import wholes
from graphzero.runtime.tensors.resplit import resplit
from graphzero.runtime.tensors.shards import local_of
from graphzero.runtime.world.consensus import tensor_text
from graphzero.sbp.dtensor import nd_of_dtensor
from graphzero.sbp.placement import Placement
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


def plain(outline: Mapping[str, Any]) -> dict[str, Any]:
    """``outline`` in plain dicts, with what state dicts of modules carry as an attribute, versions, in "metadata"."""
    modules = outline["modules"]
    metadata = {name: dict(getattr(held, "_metadata", {})) for name, held in modules.items()}
    return {**outline, "modules": {name: dict(held) for name, held in modules.items()}, "metadata": metadata}


def with_metadata(given: Mapping[str, Any]) -> dict[str, Any]:
    """What ``plain`` was given.  Raises ValueError for metadata that no module writes."""
    modules = {}
    for name, held in given["modules"].items():
        modules[name] = made = OrderedDict(held)
        metadata = OrderedDict(given["metadata"].get(name, {}))
        for path, one in metadata.items():
            if not isinstance(one, Mapping) or not isinstance(one.get("version"), (int, type(None))):
                raise ValueError(f"state.metadata.{name}.{path!s:.80} is {one!r:.80}, not the version of a module")
        made._metadata = metadata  # type: ignore[attr-defined]
    return {name: held for name, held in given.items() if name != "metadata"} | {"modules": modules}


def leaves_with_paths(x: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in nested dicts and lists, with its path."""
    entries = x.items() if isinstance(x, Mapping) else enumerate(x) if isinstance(x, (list, tuple)) else None
    if entries is None:
        yield path, x
    else:
        for key, value in entries:
            yield from leaves_with_paths(value, f"{path}.{key}" if path else str(key))


def tensors_with_paths(x: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested dicts and lists, with its path."""
    return ((path, leaf) for path, leaf in leaves_with_paths(x) if isinstance(leaf, Tensor))


def describe_tensors(x: Any) -> dict[str, str]:
    """Type and SBP of each tensor by path, in order: they decide which collectives make a state dict whole."""
    return {path: describe_tensor(tensor) for path, tensor in tensors_with_paths(x)}


def describe_tensor(x: Tensor) -> str:
    sbp = ", ".join(map(str, nd_of_dtensor(x))) if isinstance(x, DTensor) else "plain"
    return f"{tensor_text(x)} {sbp}"


def is_sectioned(x: Tensor) -> bool:
    """Whether ranks hold a tensor in sections, which torch.distributed.checkpoint cannot save."""
    return isinstance(x, DTensor) and any(sbp.sections > 1 for sbp in nd_of_dtensor(x))


def saveable(x: Any, placement: Placement) -> Any:
    """A state dict that torch.distributed.checkpoint saves and loads: sections are cut once instead.

    It takes what a rank holds for one block of the whole, whatever placements say.  Every rank calls it if there are
    sections.
    """
    return _map(x, lambda t: _cut_once(t, placement) if is_sectioned(t) else t)


def _cut_once(x: Any, placement: Placement) -> DTensor:
    nd = nd_of_dtensor(x)
    dims = [sbp.dim for sbp in nd]
    cut = tuple(sbp if sbp.sections == 1 else S(sbp.dim) if dims.count(sbp.dim) == 1 else B for sbp in nd)
    return resplit(x, cut, placement)


def full(x: Any, placement: Placement, torn_by: str = "") -> Any:
    """A snapshot of a state dict, with plain whole tensors in place of DTensors; what was tied is so in it.  Every rank
    calls it.

    torn_by: what has happened to its values if they are ``torn``, so that the snapshot's are too.
    """
    held = {_place(t): t for _, t in tensors_with_paths(x)}
    split = {place: t for place, t in held.items() if isinstance(t, DTensor)}
    made = dict(zip(split, wholes(list(split.values()), placement), strict=True))

    def own(t: Tensor) -> Tensor:
        place = _place(t)
        found = made.setdefault(place, t.detach())
        if storage_id(found) == storage_id(local_of(t)):
            found = made[place] = found.clone()
        return found

    found = _map(x, own, copy.deepcopy)
    partial_update.mark(made.values() if torn_by else (), torn_by)
    return found


def _place(t: Tensor) -> tuple[Any, ...]:
    """What it is and where its values stand: of what is tied, the same."""
    held = local_of(t)
    return type(t), storage_id(held), held.storage_offset(), t.shape, t.stride(), t.dtype


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
