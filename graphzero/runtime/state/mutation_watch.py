"""Detection of changes to modules, and of other tensors in optimizer states, since a program was bound.

Every call checks this, because changes between two calls are not announced.  Python counts the writes to a dict, so
contents of dicts are compared only where that count has changed, and addresses of tensors in loops that run in C.
Callers decide how to react to a change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, is_, is_not, itemgetter, ne
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from graphzero import _compat
from graphzero.runtime.state.modules import ModuleTensor, data_address, hook_ids, module_mode, walk

_DICT, _VERSION = map(attrgetter, ("__dict__", "_version"))
_TENSOR_DICTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_module_dicts = itemgetter(*_TENSOR_DICTS, *_HOOKS)  # the dicts in a module's own


class ModulesWatch:
    """Modules and their parameters and buffers, as they are when this is made.

    Of a module: its class, mode and hooks, a ``forward`` of its own, and what is under which name in it.  Of a
    tensor: its class and dtype, where and how its values lie, ``requires_grad`` and hooks.  What the values are does
    not count.

    Raises CaptureError for tensors of a lazy module, which have no shape yet.
    """

    def __init__(self, modules: Mapping[str, nn.Module], entries: Mapping[str, ModuleTensor]) -> None:
        every = [module for _, module in walk(modules)]
        self._plain = PlainModulesWatch([module for module in every if _is_plain(module)])
        self._others = [module for module in every if not _is_plain(module)]
        self._facts = list(map(_slowly, self._others))
        tensors = [entry.tensor for entry in entries.values()]
        for tensor in tensors:
            data_address(tensor)
        self._of_tensors = StorageWatch(tensors), TensorTypeWatch(tensors), TensorHooksWatch(tensors)

    def is_unchanged(self) -> bool:
        """Return whether nothing has changed."""
        is_same = self._plain.is_unchanged()
        is_same = is_same and (not self._others or same_tensors(list(map(_slowly, self._others)), self._facts))
        return is_same and all(watch.is_unchanged() for watch in self._of_tensors)


def _is_plain(module: nn.Module) -> bool:
    """Return whether what a module holds is in dicts of its own, as it does but in TorchScript."""
    own = vars(module)
    return "training" in own and all(isinstance(own.get(name), dict) for name in _TENSOR_DICTS)


def _slowly(module: nn.Module) -> tuple[Any, ...]:
    named = module.named_parameters(recurse=False), module.named_buffers(recurse=False), module.named_children()
    return type(module), module_mode(module), *map(list, named)


class PlainModulesWatch:
    """Class, mode, hooks, ``forward`` and entries of modules.  Those written to since the last look are looked into."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules, self._classes = modules, list(map(type, modules))
        self._facts = list(map(self._look, modules))
        self._writes: list[int] = []
        self._note()

    def is_unchanged(self) -> bool:
        if (
            any(self._empty)
            or list(map(type, self._modules)) != self._classes
            or list(map(tuple, self._ordered)) != self._orders
        ):
            return False
        writes, written = self._count(), set(range(len(self._modules)))
        if _compat.COUNTS_ATTRIBUTES:
            if writes == self._writes:
                return True
            written = set(compress(self._owners, map(ne, writes, self._writes)))
        if not same_tensors([self._look(self._modules[i]) for i in written], [self._facts[i] for i in written]):
            return False
        self._writes = writes
        if any(any(map(is_not, _module_dicts(vars(self._modules[i])), self._held[i])) for i in written):
            self._note()  # the same entries in other dicts
        return True

    @staticmethod
    def _look(module: nn.Module) -> list[Any]:
        own = vars(module)
        parameters, buffers, children, *hooks = _module_dicts(own)
        named = dict(parameters), dict(buffers), list(children.items())  # the order of children counts too
        return [own["training"], own.get("forward"), *named, *map(tuple, hooks)]

    def _note(self) -> None:
        """Note the counters of writes to modules, and their values."""
        self._held = [_module_dicts(vars(module)) for module in self._modules]
        dicts = [(i, dict_of_module) for i, several in enumerate(self._held) for dict_of_module in several]
        self._empty = [dict_of_module for _, dict_of_module in dicts if not dict_of_module]
        self._filled = [dict_of_module for _, dict_of_module in dicts if dict_of_module]
        self._owners = [*range(len(self._modules)), *(i for i, dict_of_module in dicts if dict_of_module)]
        self._ordered = [
            dict_of_module for dict_of_module in self._filled if type(dict_of_module) is not dict
        ]  # a new order is not a write to a dict
        self._orders = list(map(tuple, self._ordered))
        self._writes = self._count()

    def _count(self) -> list[int]:
        return list(map(_compat.dict_version, chain(map(_DICT, self._modules), self._filled)))


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


class StorageWatch:
    """Addresses of the values of tensors; of DTensors, those of this process' pieces."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self._plain = [x for x in tensors if not _compat.is_dtensor(x)]
        self._sharded = [x for x in tensors if _compat.is_dtensor(x)]
        self._begin = self._look()

    def is_unchanged(self) -> bool:
        return self._begin == self._look()

    def _look(self) -> list[int]:
        return list(map(Tensor.data_ptr, chain(self._plain, map(_compat.local_of_dtensor, self._sharded))))


class TensorTypeWatch:
    """Class, dtype, shape and strides of tensors, and ``requires_grad``."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._known = tensors, self._look(tensors)
        self._are_alike = _compat.alike(tensors)

    def is_unchanged(self) -> bool:
        if self._are_alike(*self._tensors):
            return True
        if self._look(self._tensors) != self._known:
            return False
        self._are_alike = _compat.alike(self._tensors)  # autocast has been turned on or off
        return True

    @staticmethod
    def _look(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
        return [(type(x), x.dtype, x.shape, x.stride(), x.requires_grad) for x in tensors]


class TensorHooksWatch:
    """Hooks of tensors.  torch numbers the hooks of everything in one sequence: while that stays, none has come."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._known = tensors, list(map(hook_ids, tensors))
        self._hooked = [(x, ids) for x, ids in zip(tensors, self._known, strict=True) if ids]
        self._next = RemovableHandle.next_id

    def is_unchanged(self) -> bool:
        if self._next != RemovableHandle.next_id:
            if list(map(hook_ids, self._tensors)) != self._known:
                return False
            self._next = RemovableHandle.next_id
        return all(hook_ids(x) == ids for x, ids in self._hooked)


class StatesWatch:
    """The tensors that a program has bound in ``optimizer.state``, and the counters whose values it keeps too.

    states: of (optimizer, path), the parameter, its dict in ``optimizer.state``, and which keys of it are bound.
    counters: tensors that change whenever one of them is written to.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer],
        states: Mapping[tuple[int, str], tuple[Tensor, dict[str, Any], Sequence[str]]], counters: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self._optimizers = [(optimizer, dict(optimizer.state)) for optimizer in optimizers]
        by_keys: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for _, state, keys in states.values():
            by_keys.setdefault(tuple(keys), []).append(state)
        self._bound = [(itemgetter(*keys), dicts) for keys, dicts in by_keys.items()]
        self._all_dicts = all(isinstance(state, dict) for _, state, _ in states.values())
        self._held, self._writes = self._now(), self._count()
        self._storages = StorageWatch([state[key] for _, state, keys in states.values() for key in keys])
        self._counters = counters
        self.accept_counters()

    def accept_counters(self) -> None:
        """The counters' values are as they should be."""
        self._versions = sum(map(_VERSION, self._counters))  # of the same tensors it only grows

    def is_unchanged(self) -> bool:
        """Return whether the same tensors are there, at the same addresses, and no counter of writes has changed."""
        return (
            self._same_entries()
            and self._storages.is_unchanged()
            and self._versions == sum(map(_VERSION, self._counters))
        )

    def _same_entries(self) -> bool:
        writes = self._count()
        if writes and writes == self._writes:
            return True
        for optimizer, known in self._optimizers:
            state = optimizer.state
            if not (same_tensors(list(state), list(known)) and all(map(is_, state.values(), known.values()))):
                return False
        try:
            current = self._now()
        except KeyError:
            return False
        if not same_tensors(current, self._held):
            return False
        self._writes = writes
        return True

    def _count(self) -> list[int]:
        """Writes to all dicts of states; empty where some are not dicts."""
        states: list[dict[Any, Any]] = [optimizer.state for optimizer, _ in self._optimizers]
        if not all(isinstance(state, dict) for state in states) or not self._all_dicts:
            return []
        return list(map(_compat.dict_version, chain(states, *(dicts for _, dicts in self._bound))))

    def _now(self) -> list[list[Any]]:
        return [list(map(itemgetter_of_keys, dicts)) for itemgetter_of_keys, dicts in self._bound]
