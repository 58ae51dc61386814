"""Full tensors in modules, in place of split ones, for as long as eager code is to see them.

Afterwards the split tensors are put back, the same objects in the same memory, with what was written in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphzero.runtime.state import modules as tree
from graphzero.runtime.state.modules import ModuleTensor
from graphzero.runtime.state.state import State
from graphzero.runtime.tensors.gather import WINDOW, take_piece, wholes
from graphzero.runtime.tensors.shards import local_of

_open: dict[int, str] = {}  # id of a module -> the Graph that shows whole tensors in it


@dataclass(frozen=True)
class FullTensor:
    """A tensor while eager code may see it.

    entry: the original, and its places in modules.  memory: this rank's values of the original, as they were.
    full: the full tensor that is there now, None if the original is whole.
    """

    entry: ModuleTensor
    memory: Tensor
    full: Tensor | None

    @property
    def is_split(self) -> bool:
        return self.full is not None

    def current(self) -> Tensor | None:
        """The tensor that eager code has left there; None for nothing, or where a tie is broken."""
        first, *others = (_tensor_dicts(self.entry.kind, module).get(name) for module, name in self.entry.places)
        return first if all(x is first for x in others) else None

    def fits(self, now: Tensor | None) -> bool:
        """Return whether its values can be taken."""
        shape = self.entry.tensor.shape if self.is_split else self.memory.shape
        return now is not None and type_of(now) == (False, shape, self.memory.dtype)

    def take_values(self, values: Tensor) -> None:
        """Copy what eager code has left there into the original, in the memory that it had."""
        original = self.entry.tensor
        if isinstance(original, DTensor):
            take_piece(original, values)
        elif values.data_ptr() != self.memory.data_ptr():
            self.memory.copy_(values)


def type_of(x: Tensor) -> tuple[bool, torch.Size, torch.dtype]:
    return isinstance(x, DTensor), x.shape, x.dtype


def _tensor_dicts(kind: str, module: nn.Module) -> Mapping[str, Tensor | None]:
    return module._parameters if kind == "param" else module._buffers


def extra_bytes(entries: Mapping[str, ModuleTensor]) -> int:
    """Bytes that ``gather_full_tensors`` allocates: split tensors once more, whole, and a window of pieces."""
    split = [entry.tensor for entry in entries.values() if isinstance(entry.tensor, DTensor)]
    return sum(x.numel() * x.element_size() for x in split) + WINDOW * bool(split)


def gather_full_tensors(state: State, entries: Mapping[str, ModuleTensor]) -> list[FullTensor]:
    """Whole tensors for ``put_in_modules``; every rank calls it when ``preflight.describe_entries`` are the same.

    As in a first call, a plain tensor that nobody has seen moves to the device and takes rank 0's values.
    """
    for entry in entries.values():
        if not isinstance(entry.tensor, DTensor):
            state.first_values.take(entry.tensor, entry.path)
    split = {path: entry.tensor for path, entry in entries.items() if isinstance(entry.tensor, DTensor)}
    wholes_by_path = dict(zip(split, wholes(list(split.values()), state.ranks.placement), strict=True))
    shown = []
    for path, entry in entries.items():
        replacement = tree.copy_attributes(wholes_by_path[path], entry.tensor) if path in wholes_by_path else None
        shown.append(FullTensor(entry, local_of(entry.tensor), replacement))
    return shown


def put_in_modules(shown: Sequence[FullTensor], who: str) -> None:
    """Put the full tensors into the modules, which are those of ``open_graph_of`` from here on.  who: the Graph."""
    _open.update({id(module): who for one in shown for module, _ in one.entry.places})
    for one in shown:
        if one.full is not None:
            tree.put_tensor(one.entry, one.full)


def restore_originals(shown: Sequence[FullTensor]) -> tuple[list[tuple[FullTensor, Tensor]], list[str]]:
    """Put the originals back into the modules, in the memory that they had; no other rank is needed.

    Returns what each is to take, and the paths of those where something was that cannot be.  A whole buffer in
    whose place eager code has put one of another shape or dtype is its own affair, and stays.
    """
    left, lost = [], []
    for one in shown:
        entry, current = one.entry, one.current()
        original = entry.tensor
        if one.fits(current):
            assert current is not None
            left.append((one, current.detach()))
            if original is not current and original.requires_grad != current.requires_grad:
                original.requires_grad_(current.requires_grad)
        elif current is not None and current is not original and entry.kind == "buffer" and not one.is_split:
            continue
        else:
            lost.append(entry.path)
        if not one.is_split and (original.data_ptr(), original.dtype) != (one.memory.data_ptr(), one.memory.dtype):
            original.data = one.memory
        tree.put_tensor(entry, original)
    for module, _ in (place for one in shown for place in one.entry.places):
        _open.pop(id(module), None)
    return left, lost


def release_memory(shown: Iterable[FullTensor]) -> None:
    """Empty the whole tensors: who still holds one, or writes to it, finds nothing."""
    for whole in (one.full for one in shown):
        if whole is not None:
            whole.grad = None
            whole.data = whole.detach().new_empty(0)


def open_graph_of(modules: Mapping[str, nn.Module]) -> str:
    """The Graph that shows whole tensors in one of these, or nothing."""
    walked = tree.walk(modules) if _open else ()
    return next((_open[id(module)] for _, module in walked if id(module) in _open), "")
