"""State dicts of a Graph: collected from its tensors, described, and made whole.

One outline for all::

    {"modules": {attribute: module.state_dict()},
     "optimizers": [{"state": {"attribute.fqn": {...}}, "param_groups": [{..., "params": ["attribute.fqn", ...]}]}],
     "schedulers": [scheduler.state_dict() or None, ...], "random": {"seed": ..., "step": ...}}

torch's own ``load_state_dict`` of modules and optimizers takes these entries: an optimizer maps whatever is in
"params" to its parameters in order.  ``validate`` checks whether one fits, ``loading`` writes it.
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
from graphzero.capture import LOSS_SCALE
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.runtime.state import modules as tree
from graphzero.runtime.state import partial_update
from graphzero.runtime.state.layout import filled
from graphzero.runtime.state.modules import group_paths
from graphzero.runtime.state.state import State
from graphzero.runtime.tensors.gather import wholes
from graphzero.runtime.tensors.resplit import resplit
from graphzero.runtime.tensors.shards import local_of, memory_key
from graphzero.runtime.world.consensus import tensor_text
from graphzero.sbp.dtensor import nd_of_dtensor
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import B, Nd, S


def outline(state: State, schedulers: Sequence[Any], graph: StepGraph | None, specs: Sequence[Any]) -> dict[str, Any]:
    """The state dict with live tensors.

    States that a compiled program will begin with, but that do not exist yet, are made as they will be (graph and
    specs: of that program), so that a checkpoint can be loaded into them; but not those that only the first step can
    make, whose values nobody knows before it.
    """
    tensors = state.tensors()
    names = tree.paths_by_id(tensors)
    nds = {node.name: value.nd_of(node) for node in graph.placeholders("state")} if graph is not None else {}
    optimizers = []
    for i, optimizer in enumerate(state.optimizers):
        states = {names.get(id(p), ""): dict(x) for p, x in optimizer.state.items() if x}
        for spec in specs:
            if spec.optimizer == i and not spec.created:
                current = states.get(spec.param, {}).get(spec.key)
                if not isinstance(current, Tensor):
                    states.setdefault(spec.param, {})[spec.key] = _initial_state(
                        spec, nds.get(spec.placeholder, ()), state
                    )
        paths = group_paths(optimizer, names, i)
        groups = [{**g, "params": list(params)} for g, params in zip(optimizer.param_groups, paths, strict=True)]
        order = [name for group in groups for name in group["params"]]
        optimizers.append({"state": {name: states[name] for name in order if name in states}, "param_groups": groups})
    return {
        "modules": {name: tree.module_state_dict(module) for name, module in state.modules.items()},
        "optimizers": optimizers,
        "schedulers": [None if s is None else s.state_dict() for s in schedulers],
        "random": {"seed": state.random.seed, "step": state.random.step},
    }


def _initial_state(spec: Any, nd: Nd, state: State) -> Tensor:
    if not spec.shape:
        return torch.full((), spec.fill, dtype=spec.dtype)
    return filled(spec.shape, spec.dtype, spec.fill, nd, state.world)


def to_plain_dicts(outline: Mapping[str, Any]) -> dict[str, Any]:
    """``outline`` in plain dicts; versions of modules, an attribute of their state dicts, are in "metadata"."""
    modules = outline["modules"]
    metadata = {name: dict(getattr(sd, "_metadata", {})) for name, sd in modules.items()}
    return {**outline, "modules": {name: dict(sd) for name, sd in modules.items()}, "metadata": metadata}


def from_plain_dicts(given: Mapping[str, Any]) -> dict[str, Any]:
    """The argument of ``to_plain_dicts``.  Raises ValueError for metadata that no module writes."""
    modules = {}
    for name, sd in given["modules"].items():
        modules[name] = module = OrderedDict(sd)
        metadata = OrderedDict(given["metadata"].get(name, {}))
        for path, entry in metadata.items():
            if not isinstance(entry, Mapping) or not isinstance(entry.get("version"), (int, type(None))):
                raise ValueError(f"state.metadata.{name}.{path!s:.80} is {entry!r:.80}, not the version of a module")
        module._metadata = metadata  # type: ignore[attr-defined]
    return {name: part for name, part in given.items() if name != "metadata"} | {"modules": modules}


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
    """Return whether ranks hold a tensor in sections, which torch.distributed.checkpoint cannot save."""
    return isinstance(x, DTensor) and any(sbp.sections > 1 for sbp in nd_of_dtensor(x))


def without_sections(x: Any, placement: Placement) -> Any:
    """A state dict that torch.distributed.checkpoint saves and loads: dims in sections are split once instead.

    It takes a rank's piece for one block of the whole, whatever placements say.  Every rank calls it if there are
    sections.
    """
    return _map_tensors(x, lambda t: _split_once(t, placement) if is_sectioned(t) else t)


def _split_once(x: Any, placement: Placement) -> DTensor:
    nd = nd_of_dtensor(x)
    dims = [sbp.dim for sbp in nd]
    split = tuple(sbp if sbp.sections == 1 else S(sbp.dim) if dims.count(sbp.dim) == 1 else B for sbp in nd)
    return resplit(x, split, placement)


def gather_full(x: Any, placement: Placement, partial_update_reason: str = "") -> Any:
    """A copy of a state dict, with plain whole tensors in place of DTensors; ties are kept.  Every rank calls it.

    partial_update_reason: see ``partial_update``, of the values, so that those of the copy are marked too.
    """
    tensors = {memory_key(t): t for _, t in tensors_with_paths(x)}
    split = {key: t for key, t in tensors.items() if isinstance(t, DTensor)}
    copies = dict(zip(split, wholes(list(split.values()), placement), strict=True))

    def copy_of(t: Tensor) -> Tensor:
        key = memory_key(t)
        own = copies.setdefault(key, t.detach())
        if storage_id(own) == storage_id(local_of(t)):
            own = copies[key] = own.clone()
        return own

    full = _map_tensors(x, copy_of, copy.deepcopy)
    partial_update.mark(copies.values() if partial_update_reason else (), partial_update_reason)
    return full


def _map_tensors(x: Any, fn: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda x: x) -> Any:
    """``x`` with ``fn`` of its tensors, and ``other`` of values that hold none."""
    if isinstance(x, Tensor):
        return fn(x)
    if isinstance(x, dict):
        entries: dict[Any, Any] = OrderedDict() if isinstance(x, OrderedDict) else {}
        entries.update((key, _map_tensors(value, fn, other)) for key, value in x.items())
        if hasattr(x, "_metadata"):
            entries._metadata = x._metadata  # type: ignore[attr-defined]
        return entries
    if type(x) in (list, tuple):
        return type(x)(_map_tensors(value, fn, other) for value in x)
    return other(x)


def move_out_of_modules(outline: dict[str, Any]) -> dict[str, Any]:
    """``outline`` with the loss scale besides the modules: {"scale", "growth_tracker", "hysteresis"}."""
    scale = outline["modules"].pop(LOSS_SCALE, None)
    return outline if scale is None else {**outline, LOSS_SCALE: dict(scale)}


def move_into_modules(sd: Any, modules: Mapping[str, nn.Module]) -> Any:
    """A state dict with the loss scale among the modules, as in the Graph.

    Other precisions have none: a scale that is not given stays as it is, one that the Graph does not have is left out.
    """
    if not isinstance(sd, Mapping) or not isinstance(sd.get("modules", {}), Mapping):
        return sd
    parts = {name: part for name, part in sd.items() if name != LOSS_SCALE}
    if LOSS_SCALE in modules:
        scale = sd.get(LOSS_SCALE, modules[LOSS_SCALE].state_dict())
        parts["modules"] = {**sd.get("modules", {}), LOSS_SCALE: scale}
    return parts
