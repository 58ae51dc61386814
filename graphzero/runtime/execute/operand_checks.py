"""Checks of operands before kernels that would access memory out of bounds: for programs read from a text.

In a captured program an index comes from the op that chose it, and a gradient has the shape of its value.  ATen's
backward kernels rely on that without a check, so an index in a text that lies outside of its tensor, or a gradient of
another shape, would read and write foreign memory.  ``KernelGuard`` checks before each of these kernels, and before
graphzero's own ops that call them, and raises.  Programs that were captured run without it.

What must hold of the operands is in ``conditions``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from graphzero.errors import VerifyError
from graphzero.runtime.execute.conditions import CONDITIONS, UnmetCondition


class KernelGuard(TorchDispatchMode):
    """Within it ops raise VerifyError for operands that their kernels would trust and must not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        condition = CONDITIONS.get(func._schema.name)
        if condition is not None:
            try:
                condition(_by_name(func, args, kwargs or {}))
            except UnmetCondition as error:
                op = func._schema.name.replace("::", ".")
                raise VerifyError(
                    f"{op} is given {error}; its kernel does not check that, so a program read from text must not "
                    "use it"
                ) from None
        return func(*args, **(kwargs or {}))


def guarded() -> AbstractContextManager[Any]:
    return KernelGuard()  # type: ignore[no-untyped-call]


def _by_name(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    given = zip(func._schema.arguments, args, strict=False)
    defaults = {one.name: one.default_value for one in func._schema.arguments if one.has_default_value()}
    return SimpleNamespace(**{**defaults, **{one.name: x for one, x in given}, **kwargs})
