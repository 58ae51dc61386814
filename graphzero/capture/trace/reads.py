"""Attributes of the Graph and its modules that build reads: numbers, flags, words, functions, and tensors that
are no buffers.

Tracing writes down what they are, as ``dropout.p``, so a capture holds only while they are that.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from graphzero.capture.objects.patches import patched
from graphzero.capture.spec import Step

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)
_CODE = (FunctionType, BuiltinFunctionType)
_NEVER = frozenset({"training"})  # part of the program's key


@contextmanager
def reading(step: Step, root: nn.Module) -> Iterator[dict[str, Any]]:
    """Path -> ``frozen`` value of every attribute read inside: ``model.1.p``, or ``scale`` of the Graph itself."""
    found: dict[str, Any] = {}
    graph = getattr(step.build, "__self__", None)
    paths = {id(module): f"{path}." for path, module in root.named_modules() if path}
    classes: list[type] = [nn.Module]
    if graph is not None and not isinstance(graph, nn.Module):
        paths[id(graph)] = ""
        classes.append(type(graph))

    def watched(original: Any) -> Any:
        def read(self: Any, name: str) -> Any:
            held = original(self, name)
            path = paths.get(id(self))
            if path is not None and name not in _NEVER and _is_fixed(held) and _is_stored(self, name, held):
                found.setdefault(path + name, frozen(held))
            return held

        return read

    first, *others = classes
    with patched(first, "__getattribute__", watched(first.__getattribute__)):
        if not others:
            yield found
            return
        with patched(others[0], "__getattribute__", watched(others[0].__getattribute__)):
            yield found


@dataclass(frozen=True)
class Written:
    """Which tensor it is, and how often it has been written to."""

    id: int
    version: int

    def __repr__(self) -> str:
        return f"a tensor, written to {self.version} times"


@dataclass(frozen=True)
class Chosen:
    """Which function it is."""

    id: int
    name: str

    def __repr__(self) -> str:
        return f"the function {self.name}"


def frozen(held: Any) -> Any:
    """What can be compared: a tensor by identity and version, a function by identity, anything else by itself."""
    if isinstance(held, _CODE):
        return Chosen(id(held), held.__qualname__)
    return Written(id(held), held._version) if isinstance(held, Tensor) else held


def _is_fixed(held: Any) -> bool:
    if type(held) is tuple:
        return all(isinstance(item, _PLAIN) for item in held)
    return isinstance(held, (*_PLAIN, *_CODE)) or type(held) is Tensor


def _is_stored(owner: Any, name: str, held: Any) -> bool:
    """Whether it stands in the object or its class, and is not computed by a property."""
    inside = object.__getattribute__(owner, "__dict__")
    return name in inside or inspect.getattr_static(type(owner), name, inside) is held
