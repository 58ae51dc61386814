"""Writing a state dict that fits into modules, optimizers, schedulers and the random stream of a Graph."""

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
from graphzero.runtime.state.modules import Found
from graphzero.runtime.state.state import State
from graphzero.runtime.tensors.resplit import resplit, whole
from graphzero.runtime.tensors.shards import as_dtensor, is_whole, local_of
from graphzero.runtime.tensors.submesh import on_mesh_of, on_whole
from graphzero.sbp.types import Nd


def load(checked: ValidStateDict, state: State, schedulers: Sequence[Any], strict: bool, nds: Mapping[Any, Nd]) -> None:
    """See ``Graph.load_state_dict``.  nds: (optimizer, path, key) -> SBP of states to come, where it is known.

    What was torn is whole again where it has been written; all is torn if this ends half way.
    """
    with written_whole(state, "load_state_dict()"):
        _write(checked, state, schedulers, strict, nds)
    for name, module in state.modules.items():
        partial_update.heal(_written(module, checked.modules.get(name, {})))


@_compat.contextmanager
def written_whole(state: State, doing: str) -> Iterator[None]:
    """All tensors are written within it: they are torn if it ends half way."""
    try:
        yield
    except BaseException as error:
        state.tear(
            f"{doing} ended half way ({type(error).__name__}: {error}), so parameters and optimizer states "
            "are partly the checkpoint's; load one, graph.load_state_dict(...), or make modules and optimizer anew"
        )
        raise
    finally:
        state.invalidate()


def _write(
    checked: ValidStateDict, state: State, schedulers: Sequence[Any], strict: bool, nds: Mapping[Any, Nd]
) -> None:
    found = state.tensors()
    with torch.no_grad():
        for name, module in state.modules.items():
            if name in checked.modules:
                load_module(module, checked.modules[name], state, strict)
        for i, entry in enumerate(checked.optimizers):
            load_optimizer(i, entry, state, found, lambda i, path, key, given, have: _state_value(
                given, have, nds.get((i, path, key)), state))  # fmt: skip
    load_rest(checked, state, schedulers)


def load_rest(checked: ValidStateDict, state: State, schedulers: Sequence[Any]) -> None:
    """What is neither a module's nor an optimizer's."""
    for scheduler, entry in zip(schedulers, checked.schedulers, strict=False):
        if scheduler is not None and entry is not None:
            scheduler.load_state_dict(copy.deepcopy(entry))
    if checked.random is not None:
        state.random.set(*checked.random)


def _written(module: nn.Module, given: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors of a module to which ``given`` has brought values: others than they had themselves."""
    have = module.state_dict(keep_vars=True)
    own = {key for key, x in have.items() if isinstance(x, Tensor) and _is_same(x, given.get(key))}
    if not own and have.keys() <= given.keys():
        yield from (entry.tensor for entry in tree.tensors({"": module}).values())
    yield from (x for key, x in have.items() if isinstance(x, Tensor) and key in given and key not in own)


def _is_same(x: Tensor, given: Any) -> bool:
    return isinstance(given, Tensor) and storage_id(local_of(x)) == storage_id(local_of(given))


def load_module(module: nn.Module, given: Mapping[str, Any], state: State, strict: bool) -> None:
    have = module.state_dict()
    made = OrderedDict((key, _like(held, have.get(key), state)) for key, held in given.items() if isinstance(key, str))
    if hasattr(given, "_metadata"):
        made._metadata = given._metadata  # type: ignore[attr-defined]
    module.load_state_dict(made, strict=strict)


def _like(given: Any, have: Any, state: State) -> Any:
    """``given``, laid out as the tensor that it is copied into."""
    if not isinstance(given, Tensor) or not isinstance(have, Tensor):
        return given
    if not isinstance(have, DTensor):
        return whole(given, state.placement) if isinstance(given, DTensor) else given
    made = _laid(given, state.nd_of(have), state)
    return on_mesh_of(made, have) if isinstance(made, DTensor) else made


def _laid(given: Tensor, nd: Nd, state: State) -> Tensor:
    if isinstance(given, DTensor):
        return resplit(on_whole(given, state.placement), nd, state.placement)
    return as_dtensor(given.to(state.world.device), state.placement, nd)


def load_optimizer(
    index: int, entry: Mapping[str, Any], state: State, found: Mapping[str, Found],
    value: Callable[[int, str, str, Any, Any], Any],
) -> None:  # fmt: skip
    """Groups and states of one.  value: what it is to hold for (optimizer, path, key, what is given, what it holds)."""
    optimizer, names = state.optimizers[index], tree.names(found)
    for group, given in zip(optimizer.param_groups, entry["param_groups"], strict=False):
        group.update({key: copy.deepcopy(held) for key, held in given.items() if key != "params"})
        for param in group["params"]:
            path, current = names[id(param)], optimizer.state.get(param, {})
            theirs = entry["state"].get(path, {})
            made = {key: value(index, path, key, x, current.get(key)) for key, x in theirs.items()}
            if entry["state"]:  # it may lack some, if not strict; one without any is of a fresh optimizer
                made = {**current, **made}
            optimizer.state.pop(param, None)
            if made:
                optimizer.state[param] = made


def _state_value(given: Any, have: Any, nd: Nd | None, state: State) -> Any:
    """A state as the optimizer keeps it: split like the one it follows, or as the compiled program wants it."""
    if not isinstance(given, Tensor):
        return copy.deepcopy(given)
    if given is have:
        return given
    if isinstance(have, DTensor):
        nd = state.nd_of(have)
    if isinstance(given, DTensor) and (nd is None or is_whole(nd)):
        return whole(given, state.placement) if nd is not None else given.detach().clone()
    if nd is not None and not is_whole(nd) and not state.placement.virtual and given.dim():
        made = _laid(given.detach(), nd, state)
        return made.clone() if made is given else made
    return given.detach().clone()
