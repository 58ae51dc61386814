"""Modules, optimizers, dicts and tensors of the user: their hooks, versions, storages and DTensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from types import MethodType
from typing import Any, TypeGuard

import torch
import torch.optim.optimizer as _shared_hooks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """``optimizer.step``, without what torch puts around it for hooks, the profiler and schedulers."""
    step: Any = optimizer.step
    while True:
        function = getattr(step, "__func__", step)
        wraps = getattr(function, "hooked", False) or getattr(function, "_wrapped_by_lr_sched", False)
        if not wraps or not _is_of_torch(function):  # a wrapper of the user's takes over the marks of what it wraps
            return step  # type: ignore[no-any-return]
        step = MethodType(function.__wrapped__, getattr(step, "__self__", optimizer))


def is_torchs_step(step: Any) -> bool:
    """Return whether a method that steps is torch's code, with whatever is wrapped around it."""
    function = getattr(step, "__func__", step)
    while _is_of_torch(function) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return _is_of_torch(function)


def _is_of_torch(function: Any) -> bool:
    return str(getattr(function, "__globals__", {}).get("__name__", "")).startswith("torch.")


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it has any of its own, or all optimizers have some."""
    own = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    everywhere = _shared_hooks._global_optimizer_pre_hooks or _shared_hooks._global_optimizer_post_hooks
    return bool(everywhere) or any(getattr(optimizer, name, None) for name in own)


def gradient_hooks(x: Tensor) -> dict[Any, Any]:
    """Hooks of ``x.register_hook``."""
    return dict(x._backward_hooks or {})


def accumulation_hooks(x: Tensor) -> dict[Any, Any]:
    """Hooks of ``x.register_post_accumulate_grad_hook``."""
    return dict(getattr(x, "_post_accumulate_grad_hooks", None) or {})


def alike(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A fast check that tensors have the class, dtype, device, shape, strides and ``requires_grad`` of these.

    It also says no where autocast is another one than now.
    """
    guards = torch._C._dynamo.guards
    check: Callable[..., bool] = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


# A number for a dict that every write to it changes; no two dicts have the same.
dict_version: Callable[[dict[Any, Any]], int] = torch._C._dynamo.guards.dict_version


def _counts_attributes() -> bool:
    class Probe:
        attribute = 0

    probe = Probe()
    probe.attribute = 1
    before = dict_version(vars(probe))
    probe.attribute = 2
    return dict_version(vars(probe)) != before


# Whether what is assigned to attributes changes the number of an object's ``__dict__``; in Python 3.13.0 it does not.
COUNTS_ATTRIBUTES = _counts_attributes()


local_of_dtensor: Callable[[Any], Tensor] = attrgetter("_local_tensor")


def is_saved(module: torch.nn.Module, name: str) -> bool:
    """Return whether the parameter or buffer ``name`` of a module is in its state dict."""
    return name not in module._non_persistent_buffers_set


def loads_by_code(module: torch.nn.Module) -> bool:
    """Return whether loading it, or a part of it, does more than copy tensors: hooks, or a loader of the user."""
    own = torch.nn.Module._load_from_state_dict
    return any(
        part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        or type(part)._load_from_state_dict is not own
        and not type(part).__module__.startswith("torch.nn.")
        for part in module.modules()
    )


def storage_id(x: Tensor) -> int:
    """A number that tensors share if, and only if, they share storage; fakes have one too."""
    return int(x.untyped_storage()._cdata)


def is_dtensor(x: Any) -> TypeGuard[DTensor]:
    return isinstance(x, DTensor)


def alias(x: DTensor) -> DTensor:
    """A detached DTensor in the same storage, also on ranks that hold nothing of it: ``detach`` makes one of its own
    there."""
    return DTensor(x._local_tensor.detach(), x._spec, requires_grad=False)


def with_local(x: DTensor, local: Tensor) -> DTensor:
    """A DTensor that lies as ``x`` does, with ``local`` as this process' own piece."""
    return DTensor(local, x._spec, requires_grad=False)


def local_tensor(x: Tensor) -> Tensor:
    """This process' own piece of a DTensor, not a view of it; a plain tensor itself."""
    return x._local_tensor if is_dtensor(x) else x


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let ``optimizer`` pass for one that has stepped, else its scheduler warns about their order."""
    vars(optimizer)["_opt_called"] = True


_KINDS = (Tensor, nn.Parameter, DTensor)
_DEFINING = ("__torch_function__", "__torch_dispatch__")


def users_class(x: Tensor) -> type | None:
    """The class of the user's that a parameter or buffer is of; None for one of torch's."""
    kind: type = getattr(type(x), "_users_class", type(x))
    own = kind in _KINDS or issubclass(kind, DTensor) or kind.__module__.startswith("torch.")
    return None if own else kind


def redefines_torch(kind: type) -> bool:
    """Return whether a class of tensors says itself what torch's functions do with it."""
    plain = [inspect.getattr_static(base, name) for base in (Tensor, nn.Parameter) for name in _DEFINING]
    return any(inspect.getattr_static(kind, name) not in plain for name in _DEFINING)


def take_class(x: Tensor, of: Tensor) -> None:
    """Have ``x`` be of the user's class of ``of`` as well, with its methods."""
    kind = users_class(of)
    if kind is not None and not isinstance(x, kind):
        x.__class__ = _joined(type(x), kind)


@cache
def _joined(own: type, kind: type) -> Any:
    bases = (kind,) if issubclass(kind, own) else (own, kind)
    return type(kind.__name__, bases, {"_users_class": kind, "__module__": kind.__module__})
