"""Values of plain tensors, and facts that decide the program, which all ranks take from the first rank, once.

After it each rank has its own, and that they stay equal is checked in every call (``consensus``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from graphzero.runtime.state import modules as tree
from graphzero.runtime.state.tensor_ref import TensorRef
from graphzero.sbp.placement import Placement

StateTypes = Mapping[str, tuple[torch.dtype, tuple[int, ...], bool]]  # key -> dtype, shape, whether it is a DTensor


class FirstValues:
    """Tensors that already have the first rank's values, by their identity."""

    def __init__(self, device: torch.device, placement: Placement) -> None:
        """placement: all ranks.  device: of this process' tensors."""
        self.device, self.placement = device, placement
        self._taken: dict[str, TensorRef] = {}
        self._counted: set[str] = set()

    def has(self, tensor: Tensor, what: str) -> bool:
        known = self._taken.get(what)
        return known is not None and known.is_of(tensor)

    def take(self, tensor: Tensor, what: str) -> None:
        """Move a plain tensor to the device; the first time it is seen, take the first rank's values."""
        tree.to_device(tensor, self.device)
        if not self.has(tensor, what):
            tree.from_first_rank(tensor, self.placement)
            self.note(tensor, what)

    def note(self, tensor: Tensor, what: str) -> None:
        """Note that all ranks have made the same ``tensor``, or made it out of equal values."""
        self._taken[what] = TensorRef(tensor)

    def has_counted(self, what: str) -> bool:
        return what in self._counted

    def take_count(self, tensor: Tensor, whats: Iterable[str]) -> None:
        """``take`` for the equal counts of several, whose tensor each binding makes again; the first one counts."""
        new = set(whats) - self._counted
        if new:
            tree.from_first_rank(tensor, self.placement)
            self._counted |= new


@dataclass
class Decisions:
    """Facts of one rank's optimizers and schedulers that decide the program.

    groups: per optimizer and group, the plain hyperparameters.  schedulers: the plain numbers of each.
    states: (optimizer, path) -> the states that are there.
    """

    groups: list[list[dict[str, Any]]]
    schedulers: list[dict[str, Any]]
    states: dict[tuple[int, str], StateTypes]


def decisions_of(optimizers: Sequence[Optimizer], schedulers: Sequence[Any], names: Mapping[int, str]) -> Decisions:
    """``names``: id of a parameter -> its path."""
    groups = [
        [{k: v for k, v in group.items() if k != "params" and _is_plain(v)} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    counts = [{k: v for k, v in vars(s).items() if _is_plain(v)} if s is not None else {} for s in schedulers]
    states: dict[tuple[int, str], StateTypes] = {}
    for i, optimizer in enumerate(optimizers):
        for param, param_states in optimizer.state.items():
            if id(param) in names:
                states[i, names[id(param)]] = {
                    key: (x.dtype, tuple(x.shape), isinstance(x, DTensor))
                    for key, x in param_states.items()
                    if isinstance(x, Tensor)
                }
    return Decisions(groups, counts, states)


def follow(
    theirs: Decisions, optimizers: Sequence[Optimizer], schedulers: Sequence[Any], names: Mapping[int, str]
) -> None:
    """Make optimizers and schedulers hold what the first rank's do; values of states follow when they are bound."""
    for optimizer, groups in zip(optimizers, theirs.groups, strict=True):
        for group, changed in zip(optimizer.param_groups, groups, strict=True):
            group.update(changed)
    for scheduler, counts in zip(schedulers, theirs.schedulers, strict=True):
        if scheduler is not None:
            vars(scheduler).update(counts)
    for i, optimizer in enumerate(optimizers):
        for param in [p for group in optimizer.param_groups for p in group["params"]]:
            _match_states(optimizer, param, theirs.states.get((i, names[id(param)]), {}))


def _is_plain(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return all(_is_plain(item) for item in x)
    return x is None or isinstance(x, (bool, int, float, str))


def _match_states(optimizer: Optimizer, param: Tensor, wanted: StateTypes) -> None:
    current = optimizer.state.get(param, {})
    for key in [key for key, x in current.items() if isinstance(x, Tensor) and key not in wanted]:
        del current[key]
    for key, (dtype, shape, is_split) in wanted.items():
        if not isinstance(current.get(key), Tensor) and not is_split:
            optimizer.state[param][key] = torch.zeros(shape, dtype=dtype, device=param.device if shape else "cpu")
