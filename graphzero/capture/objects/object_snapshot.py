"""Snapshots of Python containers and objects: kept, compared with later contents, and restored.

Only what differs is written, entry by entry and by the methods of the built-in class: a class that refuses writes (a
frozen configuration) or acts on them is not asked, and nothing is emptied in order to be filled again.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from types import CellType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor

MISSING: Any = object()


class ObjectSnapshot:
    """Contents of ``holder`` at one moment, as a flat list of objects compared by identity.

    owner: the object that has it, and the attribute; "" if these are the object's attributes themselves.
    """

    __slots__ = ("content", "holder", "owner")

    def __init__(self, holder: Any, owner: tuple[Any, str] = (None, "")) -> None:
        self.holder, self.owner = holder, owner
        self.content = self.read_content(holder)

    def read_content(self, holder: Any) -> list[Any]:
        raise NotImplementedError

    def write_content(self, content: list[Any]) -> None:
        """Have ``holder`` hold ``content``, as ``read_content`` gives it."""
        raise NotImplementedError

    def children(self) -> list[Any]:
        """Objects that it holds, for further snapshots."""
        return self.content

    def differs(self) -> bool:
        now = self.read_content(self.holder)
        return len(now) != len(self.content) or not all(map(operator.is_, now, self.content))

    def new_content(self) -> list[Any]:
        """Objects that are there now and were not before."""
        before = set(map(id, self.content))
        return [x for x in self.read_content(self.holder) if id(x) not in before]

    def restore(self) -> None:
        if self.differs():
            self.write_content(self.content)


def restore_all(snapshots: Iterable[ObjectSnapshot]) -> None:
    for contents in snapshots:
        contents.restore()


class DictSnapshot(ObjectSnapshot):
    """Contents of a dict: all keys, then all values."""

    __slots__ = ()

    def read_content(self, holder: Any) -> list[Any]:
        kind = _dict_class(holder)
        return [*kind.keys(holder), *kind.values(holder)]

    def items(self) -> Iterator[tuple[Any, Any]]:
        return pairs(self.content)

    def children(self) -> list[Any]:
        return [x for _, x in self.items()]

    def changed(self) -> list[tuple[Any, Any, Any]]:
        """(key, value before, value now) of what was added or set."""
        before, now = dict(self.items()), list(_dict_class(self.holder).items(self.holder))
        return [(key, before.get(key), x) for key, x in now if before.get(key, MISSING) is not x]

    def write_content(self, content: list[Any]) -> None:
        kind, holder, before = _dict_class(self.holder), self.holder, dict(pairs(content))
        for key in [key for key in kind.keys(holder) if key not in before]:
            kind.__delitem__(holder, key)
        for key, x in before.items():
            if kind.get(holder, key, MISSING) is not x:
                kind.__setitem__(holder, key, x)
        if not all(map(operator.is_, kind.keys(holder), before)):
            for key, x in before.items():  # to the end, one after another
                kind.__delitem__(holder, key)
                kind.__setitem__(holder, key, x)


def pairs(content: list[Any]) -> Iterator[tuple[Any, Any]]:
    """(key, value) of all keys, then all values."""
    half = len(content) // 2
    return zip(content[:half], content[half:], strict=True)


def _dict_class(holder: Any) -> Any:
    return OrderedDict if isinstance(holder, OrderedDict) else dict


class ListSnapshot(ObjectSnapshot):
    __slots__ = ()

    def read_content(self, holder: Any) -> list[Any]:
        return list(list.__iter__(holder))

    def write_content(self, content: list[Any]) -> None:
        list.__setitem__(self.holder, slice(None), content)


class SetSnapshot(ObjectSnapshot):
    __slots__ = ()

    def read_content(self, holder: Any) -> list[Any]:
        return sorted(set.__iter__(holder), key=id)

    def write_content(self, content: list[Any]) -> None:
        before = set(map(id, content))
        for x in [x for x in set.__iter__(self.holder) if id(x) not in before]:
            set.discard(self.holder, x)
        for x in content:
            set.add(self.holder, x)


class DequeSnapshot(ObjectSnapshot):
    __slots__ = ()

    def read_content(self, holder: Any) -> list[Any]:
        return list(deque.__iter__(holder))

    def write_content(self, content: list[Any]) -> None:
        while deque.__len__(self.holder) > len(content):
            deque.pop(self.holder)
        for i, x in enumerate(content):
            if i < deque.__len__(self.holder):
                deque.__setitem__(self.holder, i, x)
            else:
                deque.append(self.holder, x)


class SlotsSnapshot(ObjectSnapshot):
    """Values that an object keeps in ``__slots__`` of its classes."""

    __slots__ = ()

    @property
    def names(self) -> list[str]:
        return [slot.__name__ for slot in slots_of(type(self.holder))]

    def read_content(self, holder: Any) -> list[Any]:
        return [_of_slot(slot, holder) for slot in slots_of(type(holder))]

    def write_content(self, content: list[Any]) -> None:
        for slot, x in zip(slots_of(type(self.holder)), content, strict=True):
            if x is MISSING:
                if _of_slot(slot, self.holder) is not MISSING:
                    slot.__delete__(self.holder)
            elif _of_slot(slot, self.holder) is not x:
                slot.__set__(self.holder, x)


def slots_of(kind: type) -> list[Any]:
    """The descriptors of all ``__slots__`` of a class and its bases, without those of built-in classes."""
    if kind not in _slots:
        bases = [base for base in kind.__mro__ if "__slots__" in vars(base)]
        _slots[kind] = [x for base in bases for x in vars(base).values() if type(x) is MemberDescriptorType]
    return _slots[kind]


_slots: dict[type, list[Any]] = {}


def _of_slot(slot: Any, holder: Any) -> Any:
    try:
        return slot.__get__(holder)
    except AttributeError:
        return MISSING


class CellSnapshot(ObjectSnapshot):
    """Value of a variable that a function shares with an enclosing function."""

    __slots__ = ()

    def read_content(self, holder: Any) -> list[Any]:
        try:
            return [holder.cell_contents]
        except ValueError:
            return []

    def write_content(self, content: list[Any]) -> None:
        if content:
            self.holder.cell_contents = content[0]
        else:
            del self.holder.cell_contents


class TensorSnapshot(ObjectSnapshot):
    """Gradient of a leaf tensor, and whether it requires one."""

    __slots__ = ()

    def read_content(self, holder: Any) -> list[Any]:
        return [holder.requires_grad, holder.grad] if holder.is_leaf else []

    def children(self) -> list[Any]:
        return []

    def write_content(self, content: list[Any]) -> None:
        if not content:
            return
        tensor, (requires_grad, grad) = self.holder, content
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if tensor.grad is not grad:
            tensor.grad = grad


_KINDS: list[tuple[type, type[ObjectSnapshot]]] = [
    (dict, DictSnapshot),
    (list, ListSnapshot),
    (set, SetSnapshot),
    (deque, DequeSnapshot),
    (CellType, CellSnapshot),
    (Tensor, TensorSnapshot),
]


def snapshots_of(target: Any, owner: tuple[Any, str]) -> Iterator[ObjectSnapshot]:
    """Snapshots of one object: of what it holds as a container, in its ``__dict__``, and in its slots."""
    kind = type(target)
    for base, how in _KINDS:
        if issubclass(kind, base):
            yield how(target, owner)
    attributes = attributes_of(target)
    if attributes is not None:
        yield DictSnapshot(attributes, (target, ""))
    if slots_of(kind):
        yield SlotsSnapshot(target, (target, ""))


def attributes_of(target: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an object, past what its class makes of that; None if it has none."""
    try:
        attributes = object.__getattribute__(target, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


class TracedNumber:
    """Placeholder of a number that is known only in the step. line: the user's line that has made it."""

    __slots__ = ("line",)
    line: str


def is_other_number(before: Any, after: Any) -> bool:
    """Return whether a step has changed a plain number that it keeps in Python."""
    kinds = (int, float, torch.SymFloat, torch.SymInt)
    return isinstance(after, kinds) and before is not after and (type(before) is not type(after) or before != after)
