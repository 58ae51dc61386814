"""Snapshots of iterators: how far they are, which cannot be put back."""

from __future__ import annotations

import gc
import io
import operator
import warnings
from collections.abc import Iterator
from types import GeneratorType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from graphzero.capture.objects.object_snapshot import ObjectSnapshot, attributes_of

_MEMBERS = (MemberDescriptorType, GetSetDescriptorType)


class IteratorSnapshot(ObjectSnapshot):
    """The position of an iterator of Python's or of a library's, as far as it says.

    A generator says it by its variables, those of itertools as they say it to pickle, those over a container by the
    number of items that are left, a file by ``tell``, and one of a library, such as a DataLoader's or csv's, by the
    integers among its attributes.
    """

    __slots__ = ()

    def read_content(self, holder: Any) -> list[Any]:
        if isinstance(holder, GeneratorType):
            frame = holder.gi_frame
            return [] if frame is None else [frame.f_lasti, *frame.f_locals.values()]
        numbers: list[Any] = _integers_in(holder)
        if type(holder).__module__ == "itertools":
            numbers += _positions_in(_state_for_pickle(holder))
        return [*numbers, _position_of_file(holder)] if isinstance(holder, io.IOBase) else numbers

    def children(self) -> list[Any]:
        """The iterators that it takes items from, alone: its containers agree with how far it is."""
        referents = gc.get_referents(self.holder) if attributes_of(self.holder) is None else []
        flat = (x for referent in referents for x in (referent if type(referent) is tuple else (referent,)))
        return [x for x in flat if isinstance(x, Iterator)]

    def write_content(self, content: list[Any]) -> None:
        pass


def _integers_in(iterator: Any) -> list[int]:
    """The integers among the attributes of an object, or of one that is written in C."""
    attributes = attributes_of(iterator)
    if attributes is not None:
        return [x for x in attributes.values() if type(x) is int]
    numbers = [operator.length_hint(iterator, -1)]
    for member in vars(type(iterator)).values():
        if type(member) in _MEMBERS:
            try:
                numbers.append(member.__get__(iterator))
            except Exception:  # noqa: BLE001, S112 - it has none, or none yet
                continue
    return [x for x in numbers if type(x) is int]


def _state_for_pickle(iterator: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 says that 3.14 has it no more
        try:
            return iterator.__reduce__()
        except TypeError:
            return ()


def _positions_in(state: Any) -> Iterator[int]:
    """The integers of an iterator's state, and how far iterators are that are made for it."""
    if isinstance(state, tuple):
        for x in state:
            yield from _positions_in(x)
    elif type(state) is int:
        yield state
    elif isinstance(state, Iterator):
        yield operator.length_hint(state, -1)


def _position_of_file(file: Any) -> int | None:
    """The position in a file that is only read; in one that can be written to, a step may leave messages."""
    try:
        return None if file.writable() else int(file.tell())
    except (OSError, ValueError):  # while lines are taken from it, or it is closed
        buffer = getattr(file, "buffer", None)
        return None if buffer is None or file.closed else _position_of_file(buffer)
