"""Modes of torch, and what user code is told that asks whether it is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from graphzero._compat.interrupts import contextmanager, patched


def dynamo_runs() -> bool:
    """Return whether this code runs inside of a function that torch.compile has compiled, outside of its graphs."""
    frames = sys.modules.get("torch._C._dynamo.eval_frame")
    return frames is not None and callable(frames.get_eval_frame_callback())


def modes_are_on() -> bool:
    """Return whether a mode of torch functions or of dispatch is on: what ops do then is for it to say."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Tensors are made as they are outside of torch.inference_mode; entering that for nothing costs a microsecond."""
    return torch._C._InferenceMode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


_AS_IT_IS = nullcontext()


def is_compiling() -> AbstractContextManager[Any]:
    """torch's own "a graph is being traced" flag, on which optimizers drop their host reads."""
    return patched(torch.compiler, "_is_compiling_flag", True)


class _NoFake:
    """Replacement of FakeTensor for code that must not see that it is traced."""


@contextmanager
def answers_whether_traced(answer: Callable[[FrameType], bool]) -> Iterator[None]:
    """Let ``answer(its frame)`` answer code in this thread that asks whether a graph is being traced.

    It asks by ``torch.compiler.is_compiling()`` and its other names, or by whether a tensor is a
    ``torch._subclasses.FakeTensor``.  A module that is imported meanwhile gets the class itself.
    """
    thread, compiler, fakes = get_ident(), torch.compiler, torch._subclasses
    original, names = compiler.is_compiling, vars(fakes)

    def is_compiling() -> bool:
        asker: FrameType | None = sys._getframe(1)
        while asker is not None and asker.f_code.co_name in _ASKED_BY and asker.f_globals["__name__"] in _ASKED_IN:
            asker = asker.f_back
        return original() if get_ident() != thread or asker is None else answer(asker)

    def attribute(name: str) -> Any:
        if name != "FakeTensor":
            raise AttributeError(f"module {fakes.__name__!r} has no attribute {name!r}")
        asker = sys._getframe(1)
        if get_ident() != thread or asker.f_code.co_name == "<module>" or answer(asker):
            return FakeTensor
        return _NoFake

    try:
        compiler.is_compiling = is_compiling
        names["__getattr__"] = attribute
        del names["FakeTensor"]
        yield
    finally:  # assignments, between which nothing interrupts
        names["FakeTensor"] = FakeTensor
        names["__getattr__"] = None
        del names["__getattr__"]
        compiler.is_compiling = original


_ASKED_BY = ("is_compiling", "is_dynamo_compiling")


_ASKED_IN = ("torch._utils", "torch._dynamo.external_utils", "torch.compiler")


def flex_attention_check() -> tuple[Any, str] | None:
    """Return the module and name of the function by which ``flex_attention`` checks operands; None if not imported."""
    module, name = sys.modules.get("torch.nn.attention.flex_attention"), "_validate_device"
    return (module, name) if hasattr(module, name) else None


@contextmanager
def compiled_functions_inline() -> Iterator[None]:
    """Trace functions that ``torch.compile`` has wrapped as the plain functions.

    ``config.patch`` would do that too, but each of its objects stays in the thread's context for good.
    """
    config: Any = torch._dynamo.config
    before = config.error_on_nested_fx_trace
    try:
        config.error_on_nested_fx_trace = False
        yield
    finally:
        config.error_on_nested_fx_trace = before


def sequence_number(node: Any = None) -> int:
    """Running number of an autograd node, by default of the one made last."""
    if node is not None:
        return int(node._sequence_nr())
    return int(torch.autograd._get_sequence_nr()) - 1


def device_asked(func: Any, args: Any) -> torch.device | None:
    """Answer of a fake tensor if ``func`` is torch's query for its device; None for any other op.

    torch asks so two or three times an op, by way of all modes, which only pass it on.
    """
    if func is not torch.ops.prim.device.default or not isinstance(args[0], FakeTensor):
        return None
    return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device


def no_modes() -> Any:
    """Context manager: ops run for real, whatever is being traced."""
    return _disable_current_modes()


def autograd_under(mode: TorchFunctionMode) -> AbstractContextManager[Any]:
    """Python code that autograd runs in this thread, what is recomputed among it, runs under ``mode``, as forward does.

    torch leaves a mode for as long as it handles a call of ``backward()``.
    """
    autograd: Any = torch.autograd
    original = autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return original(*args, **kwargs)

    return patched(autograd, "_engine_run_backward", run)


def below_autograd() -> Any:
    """Context manager: ops go straight to their kernels, past the dispatch of autograd."""
    return torch._C._AutoDispatchBelowAutograd()


@contextmanager
def without_modes() -> Iterator[None]:
    """Tensors are real and not traced, whatever goes on around."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
