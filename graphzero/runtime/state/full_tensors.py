"""Whole tensors in modules, in place of split ones, for as long as eager code is to see them.

What stood there is put back as it was, object and memory; what was written in place is then taken into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphzero.runtime.state import modules as tree
from graphzero.runtime.state.modules import ModuleTensor
from graphzero.runtime.state.preflight import describe_tensor
from graphzero.runtime.state.state import State
from graphzero.runtime.tensors.gather import WINDOW, take_piece, wholes
from graphzero.runtime.tensors.shards import local_of

_open: dict[int, str] = {}  # id of a module -> the Graph that shows whole tensors in it


@dataclass(frozen=True)
class FullTensor:
    """One tensor while eager code may see it.

    entry: what stands there else, and where.  memory: this rank's values of that, as they stood.
    made: what stands there now, None if that is the same, for it is whole.
    """

    entry: ModuleTensor
    memory: Tensor
    made: Tensor | None

    @property
    def is_split(self) -> bool:
        return self.made is not None

    def now(self) -> Tensor | None:
        """What eager code has left there; None for nothing, or where a tie is none any more."""
        first, *others = (_held(self.entry.kind, module).get(name) for module, name in self.entry.places)
        return first if all(x is first for x in others) else None

    def fits(self, now: Tensor | None) -> bool:
        """Whether its values can be taken."""
        shape = self.entry.tensor.shape if self.is_split else self.memory.shape
        return now is not None and type_of(now) == (False, shape, self.memory.dtype)


def type_of(x: Tensor) -> tuple[bool, torch.Size, torch.dtype]:
    return isinstance(x, DTensor), x.shape, x.dtype


@dataclass(frozen=True)
class EagerWrite:
    """What eager code has left in the place of one tensor: its values, which are to be taken."""

    of: FullTensor
    values: Tensor

    def take(self) -> None:
        """Into what stood there before, in the memory that it had."""
        kept = self.of.entry.tensor
        if isinstance(kept, DTensor):
            take_piece(kept, self.values)
        elif self.values.data_ptr() != self.of.memory.data_ptr():
            self.of.memory.copy_(self.values)


def _held(kind: str, module: nn.Module) -> Mapping[str, Tensor | None]:
    return module._parameters if kind == "param" else module._buffers


def extra_bytes(found: Mapping[str, ModuleTensor]) -> int:
    """What ``show`` allocates: the split tensors once more, whole, and while it gathers, pieces on their way."""
    split = [entry.tensor for entry in found.values() if isinstance(entry.tensor, DTensor)]
    return sum(x.numel() * x.element_size() for x in split) + WINDOW * bool(split)


def facts(state: State, found: Mapping[str, ModuleTensor]) -> dict[str, str]:
    """What must be the same on all ranks, by name."""
    return {f"{entry.kind} {entry.path}": describe_tensor(state, entry.tensor, entry.path) for entry in found.values()}


def gather(state: State, found: Mapping[str, ModuleTensor]) -> list[FullTensor]:
    """Whole tensors for ``show``; every rank calls it when ``facts`` are the same.

    As in a first call, a plain tensor that nobody has seen moves to the device and takes rank 0's values.
    """
    for entry in found.values():
        if not isinstance(entry.tensor, DTensor):
            state.first_values.take(entry.tensor, entry.path)
    split = {path: entry.tensor for path, entry in found.items() if isinstance(entry.tensor, DTensor)}
    made = dict(zip(split, wholes(list(split.values()), state.placement), strict=True))
    shown = []
    for path, entry in found.items():
        stands = tree.like(made[path], entry.tensor) if path in made else None
        shown.append(FullTensor(entry, local_of(entry.tensor), stands))
    return shown


def show(shown: Iterable[FullTensor]) -> None:
    """Put them into the modules."""
    for one in shown:
        if one.made is not None:
            tree.put(one.entry, one.made)


def put_back(shown: Iterable[FullTensor]) -> tuple[list[EagerWrite], list[str]]:
    """What stood in the modules stands there again, in the memory that it had; no rank is needed.

    Returns what is to be taken into it, and the paths of those where something stood that cannot be.  A whole buffer in
    whose place eager code has put one of another shape or dtype is its own affair, and stays.
    """
    left, lost = [], []
    for one in shown:
        entry, now = one.entry, one.now()
        kept = entry.tensor
        if one.fits(now):
            assert now is not None
            left.append(EagerWrite(one, now.detach()))
            if kept is not now and kept.requires_grad != now.requires_grad:
                kept.requires_grad_(now.requires_grad)
        elif now is not None and now is not kept and entry.kind == "buffer" and not one.is_split:
            continue
        else:
            lost.append(entry.path)
        if not one.is_split and (kept.data_ptr(), kept.dtype) != (one.memory.data_ptr(), one.memory.dtype):
            kept.data = one.memory
        tree.put(entry, kept)
    return left, lost


def let_go(shown: Iterable[FullTensor]) -> None:
    """Empty the whole tensors: who still holds one, or writes to it, finds nothing."""
    for made in (one.made for one in shown):
        if made is not None:
            made.grad = None
            made.data = made.detach().new_empty(0)


# ---- in which modules


def is_any_open() -> bool:
    return bool(_open)


def opened(modules: Mapping[str, nn.Module]) -> str:
    """The Graph that shows whole tensors in one of these, or nothing."""
    return next((_open[id(module)] for _, module in tree.walk(modules) if id(module) in _open), "")


def mark(shown: Iterable[FullTensor], who: str) -> None:
    """Note it of all modules that hold what is shown."""
    _open.update({id(module): who for one in shown for module, _ in one.entry.places})


def unmark(shown: Iterable[FullTensor]) -> None:
    for one in shown:
        for module, _ in one.entry.places:
            _open.pop(id(module), None)
