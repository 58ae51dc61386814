"""Restores Python objects that build changes while it is traced.

Restored are attributes and containers (dicts, lists, sets, deques, also nested, and arrays up to 16 MB in all) of the
Graph, its modules and the objects reachable from them; gradients and flags of their tensors; globals, closure
variables, defaults and attributes of modules that build and the user's functions called from it name; attributes of
classes of all these objects, and of those that are named; torch's settings, and random streams.
"""

from __future__ import annotations

import io
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from graphzero import _compat
from graphzero.capture.objects.array_snapshot import ArraySnapshot, size_of_array
from graphzero.capture.objects.iterator_snapshot import IteratorSnapshot
from graphzero.capture.objects.object_snapshot import (
    DictSnapshot,
    ObjectSnapshot,
    TensorSnapshot,
    TracedNumber,
    is_other_number,
    restore_all,
    snapshots_of,
)
from graphzero.capture.objects.scope_snapshot import FUNCTIONS, METHODS, ScopeReferences
from graphzero.capture.objects.snapshot_diff import attribute_or_entry, describe_changes
from graphzero.capture.problems import warn_of_lost_writes
from graphzero.capture.spec import Step
from graphzero.ir.source_location import is_library
from graphzero.sbp.placement import DEVICE_TYPES

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.CellType)
_OPEN = (nn.Module, torch.optim.Optimizer, LRScheduler, Tensor, types.SimpleNamespace, *FUNCTIONS, partial)
_CLOSED = (type, types.ModuleType)
_OF_THREADS = frozenset(
    {"threading", "_thread", "queue", "_queue", "multiprocessing.context", "concurrent.futures.thread"}
)
_REGISTERS = ("_parameters", "_buffers")
_MANY = 100_000  # entries of a container which are looked into; a larger one is kept alone
_MAX_BYTES = 16 << 20  # of all arrays that are copied
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    *((partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)) for kind in DEVICE_TYPES),
    *((partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)) for kind in DEVICE_TYPES),
)


def snapshot_all(roots: Iterable[Any], reached: ScopeReferences) -> list[ObjectSnapshot]:
    """The contents of ``roots`` and of all that is reached from them through containers, attributes and functions."""
    snapshots: list[ObjectSnapshot] = []
    seen: set[int] = set()
    bytes_left = _MAX_BYTES
    todo: deque[tuple[Any, tuple[Any, str]]] = deque((root, (None, "")) for root in roots)
    while todo:
        obj, owner = todo.popleft()
        kind = obj if isinstance(obj, type) else type(obj)
        todo.extend((x, (None, "")) for x in reached.attributes_of_class(kind))
        if 0 < (size := size_of_array(obj)) <= bytes_left and id(obj) not in seen:
            seen.add(id(obj))
            bytes_left -= size
            snapshots.append(ArraySnapshot(obj, owner))
        if type(obj) in _ATOMS or id(obj) in seen or not (_is_open(type(obj)) or isinstance(obj, Iterator)):
            continue
        seen.add(id(obj))
        if isinstance(obj, FUNCTIONS):
            todo.extend((x, (None, "")) for x in reached.names_of(obj))
        if isinstance(obj, METHODS):
            todo.append((obj.__func__, owner))
            todo.append((getattr(obj, "__self__", None), (None, "")))
            continue
        if isinstance(obj, partial):
            todo.extend((x, owner) for x in (obj.func, obj.args, obj.keywords))
        if isinstance(obj, (tuple, frozenset)):
            todo.extend((x, owner) for x in obj)
            continue
        of_object = list(snapshots_of(obj, owner)) if _is_open(type(obj)) else []
        if isinstance(obj, Iterator) and (isinstance(obj, io.IOBase) or not of_object):
            of_object.append(IteratorSnapshot(obj, owner))
        if not isinstance(obj, nn.Module) and any(
            _is_of_threads(x) for snapshot in of_object for x in snapshot.content[:_MANY]
        ):
            continue
        for snapshot in of_object:
            snapshots.append(snapshot)
            if isinstance(snapshot, DictSnapshot) and snapshot.holder is not obj:
                todo.extend((x, (obj, name)) for name, x in snapshot.items())
            elif len(snapshot.content) <= _MANY:
                todo.extend((x, owner) for x in snapshot.children())
    return snapshots


def _is_open(kind: type) -> bool:
    """Return whether to look into objects of a class: containers, modules, optimizers, tensors, and classes of no
    library.

    A lock, a logger, a process group or one of our own objects is none of build's business.
    """
    if kind not in _known:
        is_users = not issubclass(kind, _CLOSED) and not is_library(sys.modules.get(kind.__module__))
        _known[kind] = issubclass(kind, (*_CONTAINERS, *_OPEN)) or is_users
    return _known[kind]


_known: dict[type, bool] = {}


def _is_of_threads(x: Any) -> bool:
    """A lock, an event, a queue, a thread: who holds one is shared with threads, whose writes are not build's."""
    return type(x).__module__ in _OF_THREADS


def snapshot_reachable(objects: list[Any], function: Any) -> list[ObjectSnapshot]:
    """The contents of all that a function may reach which is given ``objects``, and of what their classes name."""
    reached = ScopeReferences()
    return [*snapshot_all([*objects, function], reached), *reached.snapshots]


class RandomStates:
    """The states of the random generators that a process has: torch's, Python's, and numpy's if it is in use."""

    def __init__(self) -> None:
        self.torch, self.python, self.numpy = torch.random.get_rng_state(), random.getstate(), _of_numpy()

    def changed_streams(self) -> list[str]:
        """From which of them numbers have been drawn since, of those that a Graph does not draw from itself."""
        numpy, now = self.numpy, _of_numpy()
        drawn = ["random"] if random.getstate() != self.python else []
        if numpy is not None and (numpy[2:] != now[2:] or (numpy[1] != now[1]).any()):
            drawn.append("numpy.random")
        return drawn

    def restore(self) -> None:
        drawn = self.changed_streams()
        if "random" in drawn:
            random.setstate(self.python)
        if "numpy.random" in drawn:
            sys.modules["numpy"].random.set_state(self.numpy)
        if not torch.equal(torch.random.get_rng_state(), self.torch):
            torch.random.set_rng_state(self.torch)


def _of_numpy() -> Any:
    numpy = sys.modules.get("numpy.random")
    return None if numpy is None else numpy.get_state()


@_compat.contextmanager
def restoring_process_state() -> Iterator[RandomStates]:
    """Settings and streams are put back in the end."""
    before, streams = [read() for read, _ in _SETTINGS], RandomStates()

    def put_back() -> None:
        for (read, write), value in zip(_SETTINGS, before, strict=True):
            if read() != value:
                write(value)
        streams.restore()

    with _compat.undoing(put_back):
        yield streams


@_compat.contextmanager
def restoring_side_effects(
    step: Step,
    root: nn.Module,
    line: Callable[[Any, str], str],
    shares_memory: Callable[[Any], bool] = lambda _: False,
) -> Iterator[list[ObjectSnapshot]]:
    """Put back, whatever build does: see above.  Gives what is kept.

    line: the user's line that has bound an attribute of an object, "" if that is not known.
    shares_memory: whether a constant of the step lies in the memory of an array, which stays as build has left it then.
    """
    snapshots = snapshot_reachable([*root.modules(), getattr(step.build, "__self__", None)], step.build)

    def put_back() -> None:
        restore_all(x for x in snapshots if not (isinstance(x, ArraySnapshot) and shares_memory(x.holder)))

    with restoring_process_state() as streams, _compat.undoing(put_back):
        yield snapshots
        changed = (contents for contents in snapshots if contents.differs())
        warn_of_lost_writes(list(dict.fromkeys(name for contents in changed for name in _written(contents, line))))
        _warn_of_modes(snapshots)
        _warn_of_draws(streams)
        _warn_of_iterators(snapshots)


def _warn_of_modes(snapshots: list[ObjectSnapshot]) -> None:
    """Warn of modes that a step changes: each step begins in the modes of its call, in plain PyTorch in those of the
    step before."""
    left = [
        type(contents.owner[0]).__name__
        for contents in snapshots
        if isinstance(contents, DictSnapshot) and isinstance(contents.owner[0], nn.Module) and not contents.owner[1]
        for key, *_ in contents.changed()
        if key == "training"
    ]
    if left:
        shown = ", ".join(dict.fromkeys(left[:4])) + (" ..." if len(left) > 4 else "")
        warnings.warn(
            f"build leaves {shown} in another mode than before (train() or eval()); a Graph restores the "
            "mode after the step, which plain PyTorch does not. Put it back in build, or switch modes between calls",
            stacklevel=2,
        )


def _warn_of_draws(streams: RandomStates) -> None:
    for name in streams.changed_streams():
        warnings.warn(
            f"build draws from Python's module {name}, only once, while it is traced: every step has the same number. "
            "Draw outside of build and pass the number in, or draw a tensor with torch.rand",
            stacklevel=2,
        )


def _warn_of_iterators(snapshots: list[ObjectSnapshot]) -> None:
    used = (x for x in snapshots if isinstance(x, IteratorSnapshot) and x.differs())
    names = list(dict.fromkeys(name for contents in used for name in describe_changes(contents)))
    if names:
        warnings.warn(
            f"build takes items from {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}, only once, while it is "
            "traced: every step has the same ones. Take them outside of build and pass them in",
            stacklevel=2,
        )


def _written(contents: ObjectSnapshot, line: Callable[[Any, str], str]) -> Iterator[str]:
    """The attributes that build has changed to numbers and tensors, or to containers with other ones."""
    owner, name = contents.owner
    if isinstance(contents, DictSnapshot) and not name:
        for key, before, now in contents.changed():
            # build may switch modes; what it traces is in the mode that it set
            if key != "training" and (is_other_number(before, now) or isinstance(now, (Tensor, TracedNumber))):
                yield f"{attribute_or_entry(owner, key)}{_at(line(owner, key) or _line_of([now]))}"
    elif isinstance(contents, DictSnapshot) and name in _REGISTERS and isinstance(owner, nn.Module):
        # another tensor in a buffer's place is the step's update
        for key in [key for key, before, _ in contents.changed() if before is None]:
            yield f"{type(owner).__name__}.{key}{_at(line(owner, key))}"
    elif isinstance(contents, ArraySnapshot):
        yield from describe_changes(contents)
    elif not isinstance(contents, (TensorSnapshot, IteratorSnapshot)):
        news = [x for x in contents.new_content() if isinstance(x, (int, float, Tensor, TracedNumber))]
        names = ", ".join(describe_changes(contents)) if news else ""
        if names:  # else equal numbers have been bound anew
            yield f"{names}{_at(_line_of(news))}"


def _line_of(news: Iterable[Any]) -> str:
    return next((x.line for x in news if isinstance(x, TracedNumber)), "")


def _at(line: str) -> str:
    return f" ({line})" if line else ""
