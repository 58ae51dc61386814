"""Whether somebody has changed modules, or put other tensors into optimizer states, since a program was bound.

Every call asks, and nothing that a user may do between two calls announces itself, so everything is looked at: here in
loops that run in C, some 0.4 microseconds a parameter.  What a change leads to is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from graphzero import _compat
from graphzero.runtime.modules import Found, hooks, storage, walk

_DICT, _TRAINING = attrgetter("__dict__"), attrgetter("training")
_PARAMETERS, _BUFFERS, _CHILDREN = map(itemgetter, ("_parameters", "_buffers", "_modules"))
_HOOKS = tuple(map(itemgetter, ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")))
_KEYS, _VALUES = methodcaller("keys"), methodcaller("values")  # of a dict, or of what a ScriptModule has in its place
_REQUIRES_GRAD, _TENSOR_HOOKS, _VERSION = map(attrgetter, ("requires_grad", "_backward_hooks", "_version"))


class ModulesWatch:
    """Modules and their parameters and buffers, as they are when this is made.

    Of a module: its class, mode and hooks, a ``forward`` of its own, and what stands under which name in it.  Of a
    tensor: its class, where its values begin, ``requires_grad`` and hooks.  What the values are does not count.

    Raises CaptureError for tensors of a lazy module, which have no shape yet.
    """

    def __init__(self, modules: Mapping[str, nn.Module], found: Mapping[str, Found]) -> None:
        self._modules = [module for _, module in walk(modules)]
        self._tensors = [entry.tensor for entry in found.values()]
        for tensor in self._tensors:
            storage(tensor)
        self._storages = Storages(self._tensors)
        self._facts, self._objects = self._look()

    def holds(self) -> bool:
        """Whether all is as it was."""
        facts, objects = self._look()
        return (
            facts == self._facts
            and len(objects) == len(self._objects)
            and all(map(is_, objects, self._objects))
            and self._storages.hold()
        )

    def _look(self) -> tuple[tuple[Any, ...], list[Any]]:
        """What is to be equal, and what is to be identical: compared as equal, tensors would compare their values."""
        modules, tensors = self._modules, self._tensors
        dicts = list(map(_DICT, modules))
        held = [*map(_PARAMETERS, dicts), *map(_BUFFERS, dicts), *map(_CHILDREN, dicts)]
        filled = list(filter(None, held))
        objects = list(chain.from_iterable(map(_VALUES, filled)))
        objects += map(dict.get, dicts, repeat("forward"))
        facts = (
            list(map(type, modules)),
            list(map(_TRAINING, modules)),
            list(map(len, held)),
            list(chain.from_iterable(map(_KEYS, filled))),
            [[*map(tuple, map(kind, dicts))] if any(map(kind, dicts)) else () for kind in _HOOKS],
            list(map(_REQUIRES_GRAD, tensors)),
            [*map(hooks, tensors)] if any(map(_TENSOR_HOOKS, tensors)) else (),
        )
        return facts, objects


class Storages:
    """Where the values of tensors begin, of DTensors those of this process' pieces; and their classes."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self._plain = [x for x in tensors if not _compat.is_dtensor(x)]
        self._sharded = [x for x in tensors if _compat.is_dtensor(x)]
        self._types, self._begin = self._kinds(), self._look()

    def hold(self) -> bool:
        return self._types == self._kinds() and self._begin == self._look()

    def _kinds(self) -> list[type]:
        return list(map(type, chain(self._plain, self._sharded)))

    def _look(self) -> list[int]:
        return list(map(Tensor.data_ptr, chain(self._plain, map(_compat.local_of_dtensor, self._sharded))))


class StatesWatch:
    """The tensors that a program has bound in ``optimizer.state``, and the counters whose values it keeps beside."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        states: Mapping[tuple[int, str], tuple[Tensor, dict[str, Any], Sequence[str]]],
        counters: Sequence[Tensor],
    ) -> None:
        self._owners: list[tuple[Optimizer, list[Tensor], list[dict[str, Any]]]] = []
        self._keys: dict[str, list[dict[str, Any]]] = {}
        for i, optimizer in enumerate(optimizers):
            here = [entry for (j, _), entry in states.items() if i == j]
            self._owners.append((optimizer, [param for param, *_ in here], [held for _, held, _ in here]))
        for _, held, keys in states.values():
            for key in keys:
                self._keys.setdefault(key, []).append(held)
        self._tensors = self._now()
        self._storages = Storages(self._tensors)
        self._counters = counters
        self.settle()

    def settle(self) -> None:
        """The counters' values are as they should be."""
        self._versions = sum(map(_VERSION, self._counters))  # of the same tensors it only grows

    def hold(self) -> bool:
        """Whether the same tensors are there, their values where they were, and nobody has written to a counter."""
        for optimizer, params, held in self._owners:
            if not all(map(is_, map(optimizer.state.get, params), held)):
                return False
        return (
            all(map(is_, self._now(), self._tensors))
            and self._storages.hold()
            and self._versions == sum(map(_VERSION, self._counters))
        )

    def _now(self) -> list[Any]:
        return [x for key, dicts in self._keys.items() for x in map(dict.get, dicts, repeat(key))]
