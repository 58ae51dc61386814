"""Initialising modules on the meta device: user code runs as in one process, no rank holds more than it is to keep.

User code is given tensors of the right shape on the real device, whose storage is there only while ops are about them:
then this rank's piece is kept, and the storage is freed.  All ranks draw the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphzero import _compat
from graphzero.errors import ConfigError, shorten_list
from graphzero.runtime.state.modules import ModuleTensor
from graphzero.runtime.tensors import resplit
from graphzero.runtime.tensors.shards import as_dtensor, is_whole
from graphzero.runtime.tensors.stage_tensors import on_stage, own_member
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Nd

_OVERWRITE = {"normal_", "uniform_", "fill_", "zero_", "copy_", "exponential_", "log_normal_", "cauchy_", "random_"}
_MEMORY: Any = (Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__)
_SHOWN = 4


class DeferredInit(TorchDispatchMode):
    """entries: the stand-ins; nds: how each is to lie, by path.

    placed: paths of those that are to be DTensors even if every rank holds all of them.  placement: all ranks.
    homes: path -> the member of ``pp`` whose ranks alone are to keep it.
    """

    def __init__(
        self, entries: Sequence[ModuleTensor], nds: Mapping[str, Nd], placed: Container[str], placement: Placement,
        homes: Mapping[str, int],
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self._by_storage = {_compat.storage_id(entry.tensor): entry for entry in entries}
        self._nds, self._placed, self._placement, self._homes = nds, placed, placement, homes
        self._open: dict[str, ModuleTensor] = {}
        self._kept: dict[str, DTensor] = {}  # pieces of those that are not open
        self._written: set[str] = set()

    def result(self) -> dict[str, tuple[Tensor, Nd]]:
        """The tensor of each entry, with its SBP.  Raises ConfigError for those that nothing was written to."""
        entries = list(self._by_storage.values())
        idle = [entry.path for entry in entries if entry.tensor.numel() and entry.path not in self._written]
        if idle:
            raise ConfigError(
                f"nothing was written to {shorten_list(idle, _SHOWN)}, so their values would be "
                "undefined; have init= write to them: it is called with each module, children first, as by Module.apply"
            )
        self._close(set())
        return {entry.path: (self._final(entry), self._nds[entry.path]) for entry in entries}

    def _final(self, entry: ModuleTensor) -> Tensor:
        x = entry.tensor.detach()
        if entry.path in self._kept:
            return self._kept[entry.path]
        if not entry.tensor.numel() and self._is_cut(entry.path) or entry.path in self._placed:
            return self._piece_of(x, entry.path)
        return x

    def _piece_of(self, x: Tensor, path: str) -> DTensor:
        nd, home = self._nds[path], self._homes.get(path)
        if home is not None:
            own = x.clone() if home == own_member(self._placement) else x  # the memory of the stand-in goes
            return on_stage(own, self._placement, home, nd)
        return as_dtensor(x, self._placement.without_pipeline(own_member(self._placement)), nd)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        entries = {entry.path: entry for x in leaves if (entry := self._entry(x)) is not None}
        if entries and not _is_view(func):
            self._close(set(entries))
            for entry in entries.values():
                self._hold(entry, fresh=self._entry(args[0]) is entry and _writes_all(func, args[0], entry))
            written = (self._entry(x) for x in _written(func, args, kwargs))
            self._written.update(entry.path for entry in written if entry is not None)
        return func(*args, **kwargs)

    def _entry(self, x: Any) -> ModuleTensor | None:
        return self._by_storage.get(_compat.storage_id(x)) if isinstance(x, Tensor) else None

    def cut_path(self, x: Any) -> str:
        """The path of the stand-in in whose storage ``x`` lies, if it is to be cut; else ""."""
        entry = self._entry(x)
        return entry.path if entry is not None and self._is_cut(entry.path) else ""

    def _is_cut(self, path: str) -> bool:
        return not (self._placement.virtual or is_whole(self._nds[path])) or path in self._homes

    def _hold(self, entry: ModuleTensor, fresh: bool) -> None:
        """Have the whole tensor; ``fresh``: its values do not matter."""
        if entry.path in self._open:
            return
        self._open[entry.path] = entry
        fill_storage(entry.tensor)
        piece = self._kept.pop(entry.path, None)
        if piece is not None and not fresh:
            entry.tensor.detach().copy_(resplit.whole(piece, self._placement))

    def _close(self, but: set[str]) -> None:
        """Keep this rank's pieces of what is to be cut, and free the rest."""
        for path in [path for path in self._open if path not in but and self._is_cut(path)]:
            entry = self._open.pop(path)
            self._kept[path] = self._piece_of(entry.tensor.detach(), path)
            entry.tensor.untyped_storage().resize_(0)


class NoMemoryAccess(TorchFunctionMode):
    """Within it nobody gets at the memory of a stand-in that is to be cut: it comes and goes with the ops on it."""

    def __init__(self, mode: DeferredInit) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MEMORY and (path := self._mode.cut_path(args[0])):
            raise ConfigError(
                f"init= takes the memory of {path} ({func.__name__}), which no rank keeps whole; make the values "
                "separately and copy them: p.copy_(torch.from_numpy(array))"
            )
        return func(*args, **(kwargs or {}))


def fill_storage(x: Tensor) -> None:
    """Give a tensor without storage its bytes, of no particular value."""
    x.untyped_storage().resize_(x.numel() * x.element_size())


@_compat.contextmanager
def stand_ins_for(entries: Sequence[ModuleTensor], device: torch.device) -> Iterator[list[ModuleTensor]]:
    """Within it modules hold plain tensors without storage, in place of what is on the meta device."""
    stand_ins = []
    for entry in entries:
        x = torch.empty(entry.tensor.shape, dtype=entry.tensor.dtype, device=device)
        x.untyped_storage().resize_(0)
        is_param = entry.kind == "param"
        stand_ins.append(replace(entry, tensor=nn.Parameter(x, entry.tensor.requires_grad) if is_param else x))
    with _compat.undoing(lambda: _exchange(entries)):
        _exchange(stand_ins)
        yield stand_ins


def _exchange(entries: Sequence[ModuleTensor]) -> None:
    for entry in entries:
        for module, name in entry.places:
            tensors: dict[str, Any] = module._parameters if entry.kind == "param" else module._buffers
            tensors[name] = entry.tensor


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an op writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (x for x in pytree.tree_leaves(given) if isinstance(x, Tensor))


def _writes_all(func: Any, x: Tensor, entry: ModuleTensor) -> bool:
    name = func._schema.name.rpartition("::")[2]
    return name in _OVERWRITE and x.numel() == entry.tensor.numel()


def default_init(module: nn.Module) -> None:
    """``reset_parameters`` of a module that holds parameters or buffers itself."""
    own_names = [name for name, x in (*module._parameters.items(), *module._buffers.items()) if x is not None]
    if not own_names:
        return
    reset: Callable[[], None] | None = getattr(module, "reset_parameters", None)
    reset = reset or getattr(module, "_reset_parameters", None)
    if reset is None:
        raise ConfigError(
            f"a {type(module).__name__} holds {shorten_list(own_names, _SHOWN)} and has no reset_parameters; set "
            "their values: gz.materialize(graph, init), where init(module) is called with each module, children first"
        )
    reset()
