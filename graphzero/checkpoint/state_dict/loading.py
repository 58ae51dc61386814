"""Loading of a state dict that fits into modules, optimizers, schedulers and the random stream of a Graph."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphzero import _compat
from graphzero._compat import storage_id
from graphzero.checkpoint.state_dict.validate import ValidStateDict
from graphzero.runtime.state import modules as tree
from graphzero.runtime.state import partial_update
from graphzero.runtime.state.layout import lay_out
from graphzero.runtime.state.modules import ModuleTensor
from graphzero.runtime.state.state import State
from graphzero.runtime.tensors.resplit import resplit, whole
from graphzero.runtime.tensors.shards import as_dtensor, is_whole, local_of
from graphzero.runtime.tensors.stage_tensors import connect_axes, home_of
from graphzero.runtime.tensors.submesh import on_mesh_of, on_whole
from graphzero.sbp.types import Nd


def load_state_dict(
    valid: ValidStateDict, state: State, schedulers: Sequence[Any], strict: bool, nds: Mapping[Any, Nd]
) -> None:  # fmt: skip
    """See ``Graph.load_state_dict``.  nds: (optimizer, path, key) -> SBP of states to come, where it is known.

    Marks of a partial update are taken from the tensors that are written; all are marked if this ends half way.
    """
    with all_or_partial(state, "load_state_dict()"), torch.no_grad():
        tensors = state.tensors()
        for name, module in state.modules.items():
            if name in valid.modules:
                load_module(module, valid.modules[name], state, strict)
        for i, entry in enumerate(valid.optimizers):
            load_optimizer(i, entry, state, tensors, lambda i, path, key, given, current: _state_value(
                given, current, nds.get((i, path, key)), state))  # fmt: skip
        load_schedulers_and_random(valid, state, schedulers)
    for name, module in state.modules.items():
        partial_update.clear_marks(_written_tensors(module, valid.modules.get(name, {})))


@_compat.contextmanager
def all_or_partial(state: State, doing: str) -> Iterator[None]:
    """A block that writes all tensors: they are marked as partly updated if it ends half way."""
    try:
        yield
    except BaseException as error:
        state.mark_partial_update(
            f"{doing} ended half way ({type(error).__name__}: {error}), so parameters and optimizer states "
            "are partly the checkpoint's; load one, graph.load_state_dict(...), or make new modules and a new optimizer"
        )
        raise
    finally:
        state.invalidate()


def load_schedulers_and_random(valid: ValidStateDict, state: State, schedulers: Sequence[Any]) -> None:
    for scheduler, entry in zip(schedulers, valid.schedulers, strict=False):
        if scheduler is not None and entry is not None:
            scheduler.load_state_dict(copy.deepcopy(entry))
    if valid.random is not None:
        state.random.set(*valid.random)


def _written_tensors(module: nn.Module, given: Mapping[str, Any]) -> Iterator[Tensor]:
    """Tensors of a module to which ``given`` has brought values: others than they had themselves."""
    current = module.state_dict(keep_vars=True)
    own = {key for key, x in current.items() if isinstance(x, Tensor) and _is_same_storage(x, given.get(key))}
    if not own and current.keys() <= given.keys():
        yield from (entry.tensor for entry in tree.tensors({"": module}).values())
    yield from (x for key, x in current.items() if isinstance(x, Tensor) and key in given and key not in own)


def _is_same_storage(x: Tensor, given: Any) -> bool:
    return isinstance(given, Tensor) and storage_id(local_of(x)) == storage_id(local_of(given))


def load_module(module: nn.Module, given: Mapping[str, Any], state: State, strict: bool) -> None:
    current = tree.module_state_dict(module)
    values = OrderedDict(
        (key, _laid_out_like(x, current.get(key), state)) for key, x in given.items() if isinstance(key, str)
    )
    if hasattr(given, "_metadata"):
        values._metadata = given._metadata  # type: ignore[attr-defined]
    module.load_state_dict(values, strict=strict)


def _laid_out_like(given: Any, current: Any, state: State) -> Any:
    """``given``, split as the tensor that it is copied into."""
    if not isinstance(given, Tensor) or not isinstance(current, Tensor):
        return given
    if not isinstance(current, DTensor):
        return whole(given, state.ranks.placement) if isinstance(given, DTensor) else given
    split = _split_as(given, state.nd_of(current), state, home_of(current, state.ranks.placement))
    return on_mesh_of(split, current) if isinstance(split, DTensor) else split


def _split_as(given: Tensor, nd: Nd, state: State, home: int | None = None) -> Tensor:
    """``given`` as ``nd`` says, on the ranks of the member ``home`` of ``pp`` alone if there is one."""
    everyone = state.ranks.placement
    if isinstance(given, DTensor) and home_of(given, everyone) not in (None, home):
        given = whole(given, everyone)
    if home is not None:
        connect_axes(everyone)
        return lay_out(given.to(state.world.device), nd, state.world, "a value", home=home).tensor
    if isinstance(given, DTensor):
        return resplit(on_whole(given, state.placement), nd, everyone)
    return as_dtensor(given.to(state.world.device), state.placement, nd)


def load_optimizer(
    index: int, entry: Mapping[str, Any], state: State, tensors: Mapping[str, ModuleTensor],
    make_value: Callable[[int, str, str, Any, Any], Any],
) -> None:  # fmt: skip
    """Load groups and states of an optimizer.

    make_value: the new state, of (optimizer, path, key, given value, current value).
    """
    optimizer, names = state.optimizers[index], tree.paths_by_id(tensors)
    for group, given_group in zip(optimizer.param_groups, entry["param_groups"], strict=False):
        group.update({key: copy.deepcopy(value) for key, value in given_group.items() if key != "params"})
        for param in group["params"]:
            path, current = names[id(param)], optimizer.state.get(param, {})
            given = entry["state"].get(path, {})
            states = {key: make_value(index, path, key, x, current.get(key)) for key, x in given.items()}
            if entry["state"]:  # it may lack some, if not strict; one without any is of a fresh optimizer
                states = {**current, **states}
            optimizer.state.pop(param, None)
            if states:
                optimizer.state[param] = states


def _state_value(given: Any, current: Any, nd: Nd | None, state: State) -> Any:
    """A state as the optimizer keeps it: split like the current one, or as the compiled program needs it."""
    if not isinstance(given, Tensor):
        return copy.deepcopy(given)
    if given is current:
        return given
    home = home_of(current, state.ranks.placement) if isinstance(current, DTensor) else None
    if isinstance(current, DTensor):
        nd = state.nd_of(current)
    if home is not None and nd is not None:
        split = _split_as(given.detach(), nd, state, home)
        return split.clone() if local_of(split).data_ptr() == local_of(given).data_ptr() else split
    if isinstance(given, DTensor) and (nd is None or is_whole(nd)):
        return whole(given, state.ranks.placement) if nd is not None else given.detach().clone()
    if nd is not None and not is_whole(nd) and not state.placement.virtual and given.dim():
        split = _split_as(given.detach(), nd, state)
        return split.clone() if split is given else split
    return given.detach().clone()
