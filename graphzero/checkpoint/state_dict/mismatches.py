"""What of a state dict does not fit what stands here, tensor by tensor and value by value, and how it is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
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


class Problems:
    """What does not fit, by kind."""

    def __init__(self, wakes: bool) -> None:
        self._wakes = wakes
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.wrong: list[str] = []

    def tensor(self, what: str, have: Any, given: Any, state: State, replaced: bool = False) -> None:
        """A tensor of a module, or an optimizer's state.  have: what stands here now, None for nothing.

        replaced: the one by the other; else values are copied.
        """
        if isinstance(have, Tensor) != isinstance(given, Tensor) and have is not None:
            kinds = ["a tensor" if isinstance(x, Tensor) else f"{type(x).__name__}" for x in (have, given)]
            self.wrong.append(f"{what} is {kinds[0]} here, {kinds[1]} in the state dict")
        elif isinstance(given, Tensor):
            reason = _why_unfit(have, given, state, replaced, self._wakes)
            self.wrong += [f"{what} {reason}"] if reason else []
        else:
            self.value(what, have, given)

    def value(self, what: str, have: Any, given: Any) -> None:
        """Any other value."""
        if not fits(have, given):
            self.wrong.append(f"{what} is {have!r:.40} here, {given!r:.40} in the state dict")

    def raise_any(self, strict: bool) -> None:
        kinds = [("wrong", self.wrong)]
        if strict:
            kinds = [("missing", self.missing), ("unexpected", self.unexpected), *kinds]
        lines = []
        for kind, held in kinds:
            if held:
                more = f" ... and {len(held) - SHOWN} more" if len(held) > SHOWN else ""
                lines.append(f"  {kind}: {', '.join(held[:SHOWN])}{more}")
        if lines:
            hint = "\n  strict=False loads what fits" if strict and not self.wrong else ""
            raise CheckpointError(
                "the state dict does not fit this graph; nothing was loaded\n" + "\n".join(lines) + hint
            )


def _why_unfit(have: Tensor | None, given: Tensor, state: State, replaced: bool, wakes: bool) -> str:
    if given.is_meta:
        return "has no values in the state dict (meta device)"
    if not _is_dense(given):
        return f"is no dense tensor in the state dict ({given.layout})"
    if partial_update.of(given):
        return f"was saved when {partial_update.of(given)}"
    if have is None:
        return "" if given.dtype in NUMBERS else f"is {tensor_text(given)} in the state dict, which are no numbers"
    if have.is_meta and not wakes:
        return "is on the meta device here, module.to_empty(...) first"
    if have.shape != given.shape:
        return f"is {list(have.shape)} here, {list(given.shape)} in the state dict"
    if not replaced and any(step == 0 and size > 1 for step, size in zip(have.stride(), have.shape, strict=True)):
        return "is expanded here, so many of its elements are one and cannot be written to: clone() it first"
    if have.dtype != given.dtype and not (
        {have.dtype, given.dtype} <= NUMBERS
        and (torch.can_cast(given.dtype, have.dtype) or replaced and not given.is_complex())
    ):
        return f"is {tensor_text(have)} here, {tensor_text(given)} in the state dict"
    if isinstance(given, DTensor) and isinstance(have, DTensor):
        try:
            nd_on(given, state.placement, "it")
        except PlacementError as error:
            return f"cannot be brought here: {error}"
    return ""


def _is_dense(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested and not x.is_quantized


def fits(have: Any, given: Any) -> bool:
    """Whether ``given`` is of the kind of ``have``: a number for a number, as many for a tuple.  None stands for a flag
    or a number that is not set."""
    if have is None:
        return given is None or isinstance(given, bool) or _is_number(given)
    if isinstance(have, bool):
        return given is None or isinstance(given, bool)
    if _is_number(have):
        is_counted = isinstance(have, int) and isinstance(given, float)
        return _is_number(given) and not (is_counted and not math.isfinite(given))
    if isinstance(have, Tensor):
        return isinstance(given, Tensor) and given.shape == have.shape and _is_dense(given) and not given.is_meta
    if isinstance(have, (list, tuple)):
        same = isinstance(given, (list, tuple)) and len(have) == len(given)
        return same and all(map(fits, have, given))
    if isinstance(have, Mapping):
        return isinstance(given, Mapping) and all(_fits_entry(have, *entry) for entry in given.items())
    return not isinstance(have, (str, bytes, torch.dtype, torch.device)) or isinstance(given, type(have))


def _fits_entry(have: Mapping[Any, Any], key: Any, given: Any) -> bool:
    """An entry of the kind of one that is there; any where none is."""
    if key in have:
        return fits(have[key], given)
    return not have or any(type(key) is type(other) and fits(held, given) for other, held in have.items())


def _is_number(x: Any) -> bool:
    if isinstance(x, Tensor):  # as a rate may be
        return x.numel() == 1 and not (x.is_meta or x.is_complex() or x.dtype is torch.bool) and _is_dense(x)
    if isinstance(x, int):
        return not isinstance(x, bool) and is_word(x)
    return isinstance(x, float)


def is_word(x: Any) -> bool:
    """Whether it is an int that torch takes: of 64 bits, with a sign or without."""
    return type(x) is not bool and isinstance(x, int) and -(1 << 63) <= x < 1 << 64
