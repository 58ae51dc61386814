"""Whether somebody has changed modules, or put other tensors into optimizer states, since a program was bound.

Every call asks, and nothing that a user may do between two calls announces itself, so everything is looked at: here in
loops that run in C, some 0.3 microseconds a parameter.  What a change leads to is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from graphzero import _compat
from graphzero.runtime.modules import Found, hooks, mode, storage, walk

_DICT, _VERSION = map(attrgetter, ("__dict__", "_version"))
_TRAINING, _PARAMETERS, _BUFFERS, _CHILDREN = map(itemgetter, ("training", "_parameters", "_buffers", "_modules"))
_HOOKS = tuple(map(itemgetter, ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")))


class ModulesWatch:
    """Modules and their parameters and buffers, as they are when this is made.

    Of a module: its class, mode and hooks, a ``forward`` of its own, and what stands under which name in it.  Of a
    tensor: its class and dtype, where and how its values lie, ``requires_grad`` and hooks.  What the values are does
    not count.

    Raises CaptureError for tensors of a lazy module, which have no shape yet.
    """

    def __init__(self, modules: Mapping[str, nn.Module], found: Mapping[str, Found]) -> None:
        every = [module for _, module in walk(modules)]
        self._plain = [module for module in every if _is_plain(module)]
        self._others = [module for module in every if not _is_plain(module)]
        tensors = [entry.tensor for entry in found.values()]
        for tensor in tensors:
            storage(tensor)
        self._tensors = tensors
        self._storages, self._layouts, self._hooks = Storages(tensors), Layouts(tensors), TensorHooks(tensors)
        self._facts = [[dict(x) if isinstance(x, dict) else x for x in facts] for facts in self._look()]

    def holds(self) -> bool:
        """Whether all is as it was."""
        return (
            same_tensors(self._look(), self._facts)
            and self._storages.hold()
            and self._layouts.hold()
            and self._hooks.hold()
        )

    def _look(self) -> list[list[Any]]:
        dicts = list(map(_DICT, self._plain))
        children = list(map(_CHILDREN, dicts))
        return [
            list(map(type, self._plain)),
            list(map(_TRAINING, dicts)),
            list(map(_PARAMETERS, dicts)),
            list(map(_BUFFERS, dicts)),
            children,
            list(chain.from_iterable(filter(None, children))),  # their order counts too
            [[*map(tuple, map(kind, dicts))] if any(map(kind, dicts)) else () for kind in _HOOKS],
            list(map(dict.get, dicts, repeat("forward"))),
            list(map(_slowly, self._others)),
        ]


def _is_plain(module: nn.Module) -> bool:
    """Whether what a module holds stands in dicts of its own, as it does but in TorchScript."""
    held = vars(module)
    return "training" in held and all(isinstance(part(held), dict) for part in (_PARAMETERS, _BUFFERS, _CHILDREN))


def _slowly(module: nn.Module) -> tuple[Any, ...]:
    named = module.named_parameters(recurse=False), module.named_buffers(recurse=False), module.named_children()
    return type(module), mode(module), *map(list, named)


class _NoTwoTensors(TorchFunctionMode):
    """Within, a comparison of two tensors raises; containers do not compare what is the same object."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LookupError("two tensors are compared")


def same_tensors(a: Any, b: Any) -> bool:
    """``a == b`` for containers, in which a tensor equals itself alone, whatever its values."""
    with _NoTwoTensors():
        try:
            return bool(a == b)
        except Exception:  # two tensors, or others that cannot be compared
            return False


class Storages:
    """Where the values of tensors begin, of DTensors those of this process' pieces."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self._plain = [x for x in tensors if not _compat.is_dtensor(x)]
        self._sharded = [x for x in tensors if _compat.is_dtensor(x)]
        self._begin = self._look()

    def hold(self) -> bool:
        return self._begin == self._look()

    def _look(self) -> list[int]:
        return list(map(Tensor.data_ptr, chain(self._plain, map(_compat.local_of_dtensor, self._sharded))))


class Layouts:
    """Class, dtype, shape and strides of tensors, and ``requires_grad``."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._known = tensors, self._look(tensors)
        self._are_alike = _compat.alike(tensors)

    def hold(self) -> bool:
        if self._are_alike(*self._tensors):
            return True
        if self._look(self._tensors) != self._known:
            return False
        self._are_alike = _compat.alike(self._tensors)  # autocast has been turned on or off
        return True

    @staticmethod
    def _look(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
        return [(type(x), x.dtype, x.shape, x.stride(), x.requires_grad) for x in tensors]


class TensorHooks:
    """Hooks of tensors.  torch numbers the hooks of everything in one sequence: while that stands, none has come."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._known = tensors, list(map(hooks, tensors))
        self._hooked = [(x, held) for x, held in zip(tensors, self._known, strict=True) if held]
        self._next = RemovableHandle.next_id

    def hold(self) -> bool:
        if self._next != RemovableHandle.next_id:
            if list(map(hooks, self._tensors)) != self._known:
                return False
            self._next = RemovableHandle.next_id
        return all(hooks(x) == held for x, held in self._hooked)


class StatesWatch:
    """The tensors that a program has bound in ``optimizer.state``, and the counters whose values it keeps beside.

    states: of (optimizer, path), the parameter, its dict in ``optimizer.state``, and which keys of it are bound.
    counters: tensors that change whenever one of them is written to.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        states: Mapping[tuple[int, str], tuple[Tensor, dict[str, Any], Sequence[str]]],
        counters: Sequence[Tensor],
    ) -> None:
        self._optimizers = [(optimizer, dict(optimizer.state)) for optimizer in optimizers]
        by_keys: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for _, held, keys in states.values():
            by_keys.setdefault(tuple(keys), []).append(held)
        self._bound = [(itemgetter(*keys), dicts) for keys, dicts in by_keys.items()]
        self._held = self._now()
        self._storages = Storages([held[key] for _, held, keys in states.values() for key in keys])
        self._counters = counters
        self.settle()

    def settle(self) -> None:
        """The counters' values are as they should be."""
        self._versions = sum(map(_VERSION, self._counters))  # of the same tensors it only grows

    def hold(self) -> bool:
        """Whether the same tensors are there, their values where they were, and nobody has written to a counter."""
        for optimizer, known in self._optimizers:
            state = optimizer.state
            if not (same_tensors(list(state), list(known)) and all(map(is_, state.values(), known.values()))):
                return False
        try:
            now = self._now()
        except KeyError:
            return False
        return (
            same_tensors(now, self._held)
            and self._storages.hold()
            and self._versions == sum(map(_VERSION, self._counters))
        )

    def _now(self) -> list[list[Any]]:
        return [list(map(held, dicts)) for held, dicts in self._bound]
