"""Mixed precision while build is traced: ops of forward read the 16-bit cast of a wide parameter.

The parameters themselves, the masters, stay what modules hold: ``p.dtype`` and ``p.grad`` are theirs, and gradients
come back to them through the casts.  Which ops compute in which dtype is then for ``torch.autocast``, and for the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from types import GetSetDescriptorType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from graphzero.capture.problems import withdraw_problem
from graphzero.errors import CaptureError

Function = TypeVar("Function", bound=Callable[..., Any])
_LAYER_NORMS = frozenset({F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.rms_norm, torch.rms_norm})
_BATCH_NORMS = frozenset({F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm})
_VIEWS: Any = (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH)  # attributes that are read in forward
_ABOUT = frozenset(
    {
        Tensor.register_hook, Tensor.requires_grad_, Tensor.retain_grad, Tensor.__deepcopy__, Tensor.__hash__,
        Tensor.__repr__, Tensor.untyped_storage, Tensor.data_ptr, Tensor.element_size, Tensor.backward,
    }
)  # fmt: skip


_APART = "graphzero_reads_masters"


def of_masters(func: Function) -> Function:
    """Mark a function of ours that torch is given, and that reads the parameters themselves."""
    setattr(func, _APART, True)
    return func


class ParameterCasts:
    """Casts of parameters in one trace.

    dtype: of the casts; None where there is no mixed precision.  begun: whether backward has been called: what is read
    after it without wanting a gradient, by code that clips, is the parameter itself.
    """

    def __init__(self, dtype: torch.dtype | None, params: Iterable[Tensor] = ()) -> None:
        self.dtype, self.begun = dtype, False
        self.masters = {id(p): p for p in params if is_master(p)} if dtype is not None else {}
        self._made: dict[tuple[int, int, bool], Tensor] = {}

    def call(self, func: Any, args: Any, kwargs: dict[str, Any], run: Callable[..., Any] | None = None) -> Any:
        """``func`` of the arguments, with casts in the place of masters.  run: what does it, ``func`` itself if None.

        Where torch does not take the dtypes together, of casts in their masters' dtype: what one whose parameters are
        wide gets under autocast, of rounded parameters.
        """
        run = run or func
        if not self._reads(func, args, kwargs):
            return run(*args, **kwargs)
        first = 1 if _writes(func) else 0
        narrow, wide = (self._with_parameters(args, kwargs, first, how) for how in (self._cast, self._wide))
        if _refuses(func, *narrow, self.dtype):
            return run(*wide[0], **wide[1])
        try:
            return run(*narrow[0], **narrow[1])
        except (RuntimeError, CaptureError) as error:
            if "type" not in str(error):
                raise
            if isinstance(error, CaptureError):
                withdraw_problem(error)
            return run(*wide[0], **wide[1])

    def _with_parameters(
        self, args: Any, kwargs: dict[str, Any], first: int, how: Callable[[Tensor], Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with ``how`` of each master in its place, from number ``first`` on."""
        named = zip(kwargs, replace_known_tensors(kwargs.values(), self.masters, how), strict=True)
        return (*args[:first], *replace_known_tensors(args[first:], self.masters, how)), dict(named)

    def _reads(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        if not self.masters or func in _ABOUT or hasattr(func, _APART) or (_is_attribute(func) and func not in _READ):
            return False
        if self.begun and not torch.is_grad_enabled():
            return False
        given = args[1:] if _writes(func) else args
        return any(id(x) in self.masters for x in _flat((*given, *kwargs.values())))

    def _cast(self, x: Tensor) -> Tensor:
        key = id(x), x._version, torch.is_grad_enabled()
        if key not in self._made:
            self._made[key] = x.to(self.dtype)
        return self._made[key]

    def _wide(self, x: Tensor) -> Tensor:
        return self._cast(x).to(x.dtype)


def replace_known_tensors(
    args: Iterable[Any], known: Container[int], how: Callable[[Tensor], Tensor]
) -> tuple[Any, ...]:
    """Arguments, lists of tensors among them, with ``how`` of each tensor whose id is known in its place."""
    return tuple(
        (how(arg) if id(arg) in known else arg)
        if isinstance(arg, Tensor)
        else type(arg)(replace_known_tensors(arg, known, how))
        if type(arg) in (list, tuple) and any(id(x) in known for x in arg)
        else arg
        for arg in args
    )


def is_master(x: Tensor) -> bool:
    """Return whether a parameter is wider than 16 bit, so that forward reads its cast."""
    return x.is_floating_point() and x.dtype.itemsize > 2


def _is_attribute(func: Any) -> bool:
    """Return whether a call reads or sets an attribute of a tensor, as ``p.grad``."""
    return isinstance(getattr(func, "__self__", None), (GetSetDescriptorType, property))


_READ = frozenset(view.__get__ for view in _VIEWS)


def _writes(func: Any) -> bool:
    """Return whether a call writes to its first argument."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")


def _refuses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None) -> bool:
    """Return whether a norm refuses 16-bit weights when it runs, with wide input or wide statistics."""
    if func in _LAYER_NORMS:
        x = args[0] if args else kwargs.get("input")
        return isinstance(x, Tensor) and x.dtype != dtype
    return func in _BATCH_NORMS


def _flat(args: Iterable[Any]) -> Iterable[Any]:
    for arg in args:
        if type(arg) in (list, tuple):
            yield from arg
        else:
            yield arg
