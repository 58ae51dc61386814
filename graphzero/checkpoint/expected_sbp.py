"""How tensors will lie that are not there yet: as the program has them, else as ZeRO is going to cut them.

A guess that a program does not share costs one more exchange at the first call, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from graphzero.passes.place.zero import zero_split
from graphzero.runtime.state.modules import Found
from graphzero.sbp.types import B, Nd
from graphzero.step.user_graph import UserGraph


class ExpectedSbp:
    """Of one Graph.  known: (optimizer, path, key) -> SBP of states, of the program that is there."""

    def __init__(self, source: UserGraph, known: Mapping[Any, Nd]) -> None:
        self._source, self._known, self._state = source, known, source.state()
        self._found = self._state.tensors()

    def of_state(self, optimizer: int, path: str, key: str, shape: tuple[int, ...]) -> Nd:
        """An optimizer's state of the parameter ``path``."""
        if (optimizer, path, key) in self._known:
            return self._known[optimizer, path, key]
        param = self._found[path]
        if shape != tuple(param.tensor.shape):
            return (B,) * len(self._source.placement.names)
        return self._cut(param.tensor, self._state.given(param))

    def of_tensor(self, entry: Found) -> Nd:
        """A parameter or buffer."""
        given, settings = self._state.given(entry), self._source.config.settings
        is_cut = settings.zero.stage in (3, "auto") or settings.amp.dtype is not None and self._is_stepped(entry)
        return self._cut(entry.tensor, given) if entry.kind == "param" and is_cut else given

    def _is_stepped(self, entry: Found) -> bool:
        groups = (group["params"] for spec in self._source.optimizers for group in spec.optimizer.param_groups)
        return any(param is entry.tensor for params in groups for param in params)

    def _cut(self, x: Tensor, nd: Nd) -> Nd:
        zero, placement = self._source.config.settings.zero, self._source.placement
        axes = [placement.axis(name) for name in zero.axes] if zero.stage else []
        return zero_split(tuple(x.shape), nd, placement.hierarchy, axes, zero.shard_min_size)
