"""Checks of a binding before it is made: that it is possible, and the same on all ranks.

``binding`` takes values from rank 0 and gives tensors other layouts, for which all ranks are needed, so they compare
the tensors that each is going to bind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero import _compat
from graphzero.errors import CaptureError, ConfigError
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.replicated import arithmetic
from graphzero.ir.value import StateSpec
from graphzero.runtime.state.host_states import HostStates
from graphzero.runtime.state.layout import check_real
from graphzero.runtime.state.modules import ModuleTensor
from graphzero.runtime.state.placement_checks import check_apart, find_mapped_memory, name_of_tensor
from graphzero.runtime.state.state import State
from graphzero.runtime.tensors.fingerprint import content
from graphzero.runtime.tensors.shards import is_whole
from graphzero.runtime.world.consensus import tensor_text
from graphzero.sbp.dtensor import nd_of_dtensor


def check_binding(
    state: State, graph: StepGraph, specs: Sequence[StateSpec], entries: Mapping[str, ModuleTensor], host: HostStates
) -> dict[str, str]:
    """Raise ConfigError for a tensor without values, a state that does not fit, memory that a step cannot write, or a
    folder that cannot hold states; CaptureError for states that do not belong to one step.

    Returns what a step writes in memory that other processes may have too, and which memory that is.
    """
    for node in graph.placeholders("param", "buffer"):
        role = value.role_of(node)
        assert role is not None
        tensor = entries[role.of].tensor
        check_real(tensor, f"{role.kind} {role.of}")
        if node.name in graph.updates and tensor.is_inference():
            raise ConfigError(
                f"{role.kind} {role.of} was made within torch.inference_mode(), so a step cannot write to it; make the "
                "model outside of it, or take a copy that was: copy.deepcopy(model)"
            )
    counts, held_states = counters(graph, specs, entries), {}
    for spec in specs:
        current = None if spec.created else held_state(state, spec, entries)
        if current is not None:
            _check_state(current, spec, is_counter(entries[spec.param].tensor, spec))
            if spec.placeholder not in counts:
                held_states[spec] = current
    for counted in counts.values():
        _check_equal(state, counted, entries)
    host.reserve({spec.placeholder: tensor for spec, tensor in held_states.items()})
    return _check_memory(state, graph, held_states, entries)


def check_ranks_apart(ranks: Sequence[int], everyone: Sequence[Mapping[str, str]]) -> None:
    """Raise ConfigError where two ranks would write to one memory.  everyone: of each, from ``check_binding``."""
    known: dict[str, tuple[int, str]] = {}
    for rank, shared in zip(ranks, everyone, strict=True):
        for name, place in shared.items():
            other, its = known.setdefault(place, (rank, name))
            if other != rank:
                raise ConfigError(
                    f"the {its} of rank {other} and the {name} of rank {rank} share memory, as "
                    "torch.multiprocessing hands tensors over, and each rank would write its update there; give each "
                    "process its own before the optimizer is made: model = copy.deepcopy(model)"
                )


def describe_binding(
    state: State, specs: Sequence[StateSpec], constants: Mapping[str, Tensor], entries: Mapping[str, ModuleTensor],
    repeated: str,
) -> dict[str, str]:  # fmt: skip
    """Text by name of the tensors that this rank is going to bind: compared among ranks before any of them binds.

    repeated: what each computes for itself, for states that are to stay equal.
    """
    texts = describe_entries(state, entries)
    for spec in specs:
        what, current = name_of(spec), held_state(state, spec, entries)
        if spec.created or current is None:
            texts[what] = "none yet"
        elif is_counter(entries[spec.param].tensor, spec):
            is_new = not state.first_values.has_counted(what)
            texts[what] = "a count, to be taken from rank 0" if is_new else f"a count, {float(current):g}"
        else:
            texts[what] = describe_tensor(state, current, what)
    texts.update((f"constant {name}", f"{tensor_text(x)}, hash {content(x):x}") for name, x in constants.items())
    if repeated:
        texts[f"arithmetic of {repeated}, which each rank does for itself"] = arithmetic(state.world.device)
    return texts


def counters(
    graph: StepGraph, specs: Sequence[StateSpec], entries: Mapping[str, ModuleTensor]
) -> dict[str, list[StateSpec]]:
    """Placeholder -> the counts that it stands for; a placeholder may stand for the equal counts of many parameters."""
    members: dict[str, list[StateSpec]] = {node.name: [] for node in graph.placeholders("state")}
    for spec in specs:
        if spec.placeholder in members:
            members[spec.placeholder].append(spec)
    return {
        name: here
        for name, here in members.items()
        if len(here) > 1 or here and is_counter(entries[here[0].param].tensor, here[0])
    }


def is_counter(param: Tensor, spec: StateSpec) -> bool:
    """Return whether a 0-d state counts, as step does; the moments of a 0-d parameter do not."""
    return not spec.shape and (param.dim() > 0 or spec.key == "step")


def describe_entries(state: State, entries: Mapping[str, ModuleTensor]) -> dict[str, str]:
    """Text by name of the parameters and buffers, which must be the same on all ranks."""
    return {
        f"{entry.kind} {entry.path}": describe_tensor(state, entry.tensor, entry.path) for entry in entries.values()
    }


def describe_tensor(state: State, x: Any, what: str) -> str:
    """Type and SBP of a tensor, and whether its values are still to be taken from rank 0."""
    if not isinstance(x, Tensor):
        return repr(x)
    if isinstance(x, DTensor):
        return f"{tensor_text(x)} {', '.join(map(str, nd_of_dtensor(x)))}"
    is_new = not x.is_meta and not state.first_values.has(x, what)
    return f"{tensor_text(x)}{', new here, to be taken from rank 0' if is_new else ', as it was'}"


def name_of(spec: StateSpec) -> str:
    return f"state {spec.param}/{spec.key}" + f" of optimizer {spec.optimizer}" * bool(spec.optimizer)


def held_state(state: State, spec: StateSpec, entries: Mapping[str, ModuleTensor]) -> Any:
    """The value of a state in the optimizer: a tensor, a number, or None."""
    return state.optimizers[spec.optimizer].state.get(entries[spec.param].tensor, {}).get(spec.key)


def count_of(state: State, spec: StateSpec, entries: Mapping[str, ModuleTensor]) -> Any:
    """Number of steps that one parameter has taken: a number, or a tensor that holds one."""
    current = None if spec.created else held_state(state, spec, entries)
    return (0.0 if spec.created else spec.fill) if current is None else current


def _check_memory(
    state: State, graph: StepGraph, states: Mapping[StateSpec, Tensor], entries: Mapping[str, ModuleTensor]
) -> dict[str, str]:
    """Raise ConfigError where what the program, or any that trains these parameters, writes is not its own to write.

    states: of optimizers, but for counts.  Returns what ``check_binding`` does, if it has not been returned already.
    """
    locals_ = map(_compat.local_tensor, chain((entry.tensor for entry in entries.values()), states.values()))
    locations = [(x.data_ptr(), x.shape, x.stride(), x.requires_grad) for x in locals_ if x.layout is torch.strided]
    if state.apart.get(graph) == locations:
        return {}
    tensors = {name_of_tensor(entry): entry.tensor for entry in entries.values()}
    updated = {
        name_of_tensor(entries[node.meta["role"].of]): node
        for node in graph.placeholders("param", "buffer")
        if node.name in graph.updates
    }
    named = {name_of(spec): tensor for spec, tensor in states.items()}
    written = {name for name, x in tensors.items() if x.requires_grad} | updated.keys() | named.keys()
    check_apart(tensors | named, written)
    foreign = find_mapped_memory(tensors | named)
    takes = state.ranks.active
    for name, place in foreign.items():
        if not place.can_write and (name in written or takes):
            raise ConfigError(
                f"the {name} is in read-only memory, as a mapped file is, and a step writes to "
                f"it{', or rank 0 gives it its values' * takes}; give it its own: p.data = p.data.clone()"
            )
    state.apart[graph] = locations
    whole = {name for name, node in updated.items() if is_whole(value.nd_of(node))} | named.keys()
    return {name: place.shared for name, place in foreign.items() if place.shared and name in whole}


def _check_state(state: Any, spec: StateSpec, counts: bool) -> None:
    if isinstance(state, Tensor):
        check_real(state, name_of(spec))
    elif not counts or not isinstance(state, (int, float)):
        raise ConfigError(
            f"{name_of(spec)} is a {type(state).__name__}, the program's is a tensor of shape {list(spec.shape)}; load "
            "a checkpoint, or drop the state to begin again: del optimizer.state[p]"
        )
    if isinstance(state, Tensor) and (state.numel() != 1 if counts else tuple(state.shape) != spec.shape):
        raise ConfigError(
            f"{name_of(spec)} has shape {list(state.shape)}, the program's is {list(spec.shape)}; where a parameter "
            "was reshaped, its old state no longer fits: del optimizer.state[p], or make a new optimizer"
        )


def _check_equal(state: State, specs: Sequence[StateSpec], entries: Mapping[str, ModuleTensor]) -> None:
    if len({float(count_of(state, spec, entries)) for spec in specs}) > 1:
        raise CaptureError(
            f"the parameters from {specs[0].param} on have taken different numbers of steps ({specs[0].key}), or "
            "some have no state: load a checkpoint that holds the state of every parameter"
        )
