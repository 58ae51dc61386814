"""Differences between a state dict and what a Graph holds: names, tensors and other values, and their report."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero.checkpoint.files.json_values import NUMBERS
from graphzero.errors import CheckpointError, PlacementError
from graphzero.runtime.state import partial_update
from graphzero.runtime.state.state import State
from graphzero.runtime.tensors.submesh import nd_on
from graphzero.runtime.world.consensus import tensor_text

SHOWN = 6


class StateDictComparison:
    """Lists of what is missing, unexpected and wrong in a state dict.

    materializes: whether tensors on the meta device are allocated before values are copied to them.
    """

    def __init__(self, state: State, materializes: bool) -> None:
        self._state, self._materializes = state, materializes
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.wrong: list[str] = []

    def compare_names(
        self, path: str, required: Iterable[Any], given: Iterable[Any], known: Collection[Any] | None = None
    ) -> None:
        """Names that must be there, and those that may be: ``known``, by default the same."""
        required, given = dict.fromkeys(required), dict.fromkeys(given)
        known = required if known is None else known
        self.missing += [f"{path}{name}" for name in required if name not in given]
        self.unexpected += [f"{path}{name}" for name in given if name not in known]

    def compare_tensors(self, path: str, current: Any, given: Any, is_replaced: bool = False) -> None:
        """A tensor of a module, or an optimizer's state.  current: what the Graph holds, None for nothing yet.

        is_replaced: the given tensor takes the place of the current one; else values are copied.
        """
        if isinstance(current, Tensor) != isinstance(given, Tensor) and current is not None:
            kinds = ["a tensor" if isinstance(x, Tensor) else f"{type(x).__name__}" for x in (current, given)]
            self.wrong.append(f"{path} is {kinds[0]} here, {kinds[1]} in the state dict")
        elif isinstance(given, Tensor):
            reason = self._tensor_mismatch(current, given, is_replaced)
            self.wrong += [f"{path} {reason}"] if reason else []
        else:
            self.compare_values(path, current, given)

    def compare_values(self, path: str, current: Any, given: Any) -> None:
        if not is_same_kind(current, given):
            self.wrong.append(f"{path} is {current!r:.40} here, {given!r:.40} in the state dict")

    def raise_differences(self, strict: bool) -> None:
        """Raise CheckpointError if anything is wrong or, with ``strict``, missing or unexpected."""
        lines = difference_lines(self.missing, self.unexpected, self.wrong, strict)
        if lines:
            hint = "\n  strict=False loads what fits" if strict and not self.wrong else ""
            raise CheckpointError(f"the state dict does not fit this graph; nothing was loaded{lines}{hint}")

    def _tensor_mismatch(self, current: Tensor | None, given: Tensor, is_replaced: bool) -> str:
        if given.is_meta:
            return "has no values in the state dict (meta device)"
        if not _is_dense(given):
            return f"is not a dense tensor in the state dict ({given.layout})"
        if partial_update.reason_of(given):
            return f"was saved when {partial_update.reason_of(given)}"
        if current is None:
            return "" if given.dtype in NUMBERS else f"is {tensor_text(given)} in the state dict, which are not numbers"
        if current.is_meta and not self._materializes:
            return "is on the meta device here, module.to_empty(...) first"
        if current.shape != given.shape:
            return f"is {list(current.shape)} here, {list(given.shape)} in the state dict"
        if not is_replaced and any(s == 0 and n > 1 for s, n in zip(current.stride(), current.shape, strict=True)):
            return "is expanded here, so many of its elements are one and cannot be written to: clone() it first"
        if current.dtype != given.dtype and not (
            {current.dtype, given.dtype} <= NUMBERS
            and (torch.can_cast(given.dtype, current.dtype) or is_replaced and not given.is_complex())
        ):
            return f"is {tensor_text(current)} here, {tensor_text(given)} in the state dict"
        if isinstance(given, DTensor) and isinstance(current, DTensor):
            try:
                nd_on(given, self._state.placement, "it")
            except PlacementError as error:
                return f"cannot be brought here: {error}"
        return ""


def difference_lines(missing: list[str], unexpected: list[str], wrong: list[str], strict: bool) -> str:
    """Lines of a message with the first differences of each kind."""
    kinds = [("missing", missing), ("unexpected", unexpected)] if strict else []
    return "".join(
        f"\n  {kind}: {', '.join(paths[:SHOWN])}" + f" ... and {len(paths) - SHOWN} more" * (len(paths) > SHOWN)
        for kind, paths in [*kinds, ("wrong", wrong)]
        if paths
    )


def _is_dense(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested and not x.is_quantized


def is_same_kind(current: Any, given: Any) -> bool:
    """Return whether a value may take the place of another: a number of a number, as many for a tuple.

    None stands for a flag or a number that is not set.
    """
    if current is None:
        return given is None or isinstance(given, bool) or _is_number(given)
    if isinstance(current, bool):
        return given is None or isinstance(given, bool)
    if _is_number(current):
        is_count = isinstance(current, int) and isinstance(given, float)
        return _is_number(given) and not (is_count and not math.isfinite(given))
    if isinstance(current, Tensor):
        return isinstance(given, Tensor) and given.shape == current.shape and _is_dense(given) and not given.is_meta
    if isinstance(current, (list, tuple)):
        is_as_long = isinstance(given, (list, tuple)) and len(current) == len(given)
        return is_as_long and all(map(is_same_kind, current, given))
    if isinstance(current, Mapping):
        return isinstance(given, Mapping) and all(_is_same_kind_of_entry(current, *entry) for entry in given.items())
    return not isinstance(current, (str, bytes, torch.dtype, torch.device)) or isinstance(given, type(current))


def _is_same_kind_of_entry(current: Mapping[Any, Any], key: Any, given: Any) -> bool:
    """Return whether an entry is of the kind of the current one, of a key that is new of the kind of any."""
    if key in current:
        return is_same_kind(current[key], given)
    return not current or any(type(key) is type(k) and is_same_kind(value, given) for k, value in current.items())


def _is_number(x: Any) -> bool:
    if isinstance(x, Tensor):  # as a rate may be
        return x.numel() == 1 and not (x.is_meta or x.is_complex() or x.dtype is torch.bool) and _is_dense(x)
    return is_int64(x) if isinstance(x, int) else isinstance(x, float)


def is_int64(x: Any) -> bool:
    """Return whether ``x`` is an int that torch takes: of 64 bits, signed or unsigned."""
    return type(x) is not bool and isinstance(x, int) and -(1 << 63) <= x < 1 << 64
