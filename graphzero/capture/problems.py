"""The text of capture's errors: what is wrong, where, the facts, the next step."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from graphzero import _compat
from graphzero.errors import CaptureError
from graphzero.ir.source_location import line_of, user_frames

SHOWN = 8
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
_REFUSED = {  # class of a module, or of a base of it -> what it is, and what to give instead
    **{name: (
        f"wrapped in {name}, which does part of a Graph's work",
        "give the module before wrapping (.module), and say config.enable_zero(stage=...) to split its state",
    ) for name in _WRAPPERS},
    "FSDPModule": (
        "split by fully_shard, which does part of a Graph's work",
        "give modules on which fully_shard was not called, and say config.enable_zero(stage=3) to split them",
    ),
    "ScriptModule": (
        "TorchScript, whose parameters and code cannot be read",
        "give the Python module that it was made from, without torch.jit.script or torch.jit.trace",
    ),
}  # fmt: skip
_traced: ContextVar[CodeType | None] = ContextVar("graphzero_traced", default=None)
_met: ContextVar[list[CaptureError] | None] = ContextVar("graphzero_problems", default=None)


def problem(what: str, hint: str, where: list[str] | None = None, facts: Iterable[str] = ()) -> CaptureError:
    """A CaptureError: the problem, the user's lines (innermost first), facts, and what to do."""
    lines = [what]
    if where:
        lines += ["", *(f"  at {line}" if i == 0 else f"  called from {line}" for i, line in enumerate(where))]
    shown = list(facts)
    if shown:
        lines += ["", *(f"  {line}" for line in shown[:SHOWN])]
        if len(shown) > SHOWN:
            lines.append(f"  ... and {len(shown) - SHOWN} more")
    lines += ["", f"  {hint}"]
    return CaptureError("\n".join(lines))


def tracing(function: Callable[..., Any]) -> AbstractContextManager[None]:
    """While this is open, ``function`` of the user's is being traced: lines of problems end there."""
    return _compat.assigned(_traced, getattr(function, "__code__", None))


def traced_code() -> CodeType | None:
    """The code of the function that is being traced."""
    return _traced.get()


def user_lines() -> list[str]:
    """The user's lines that are running now, innermost first."""
    return user_frames(limit=3, until=traced_code())


def problem_here(what: str, hint: str) -> CaptureError:
    """A CaptureError about the line that is running now."""
    return record_problem(problem(what, hint, user_lines()))


def record_problem(error: CaptureError) -> CaptureError:
    """``error``, recorded as a problem even if user code catches it."""
    met = _met.get()
    if met is not None and error not in met:
        met.append(error)
    return error


@_compat.contextmanager
def raising_recorded_problems() -> Iterator[None]:
    """Raise at the end a problem that was met inside and caught there by other code (``except Exception``, a logger):
    the traced step would differ from the one that plain PyTorch takes."""
    met: list[CaptureError] = []
    with _compat.assigned(_met, met):
        yield
    if met:
        raise met[0]


def withdraw_problem(error: CaptureError) -> None:
    """Drop a recorded problem that has turned out to be none."""
    met = _met.get()
    if met is not None and error in met:
        met.remove(error)


def warn_of_lost_writes(written: Sequence[str]) -> None:
    """Warn of what build sets for later, if it does: it does so once, while it is traced."""
    if written:
        shown = ", ".join(written[:4]) + (" ..." if len(written) > 4 else "")
        warnings.warn(
            f"build sets {shown}, which has no effect: build runs only once, while it is traced. Return the "
            "value, or keep it in a buffer (register_buffer) and change it in place",
            stacklevel=2,
        )


def form_of(x: Tensor) -> str:
    """Dtype and shape in words: float32[2, 3]."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def first_line(error: BaseException) -> str:
    """An error of torch's in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def place_of(function: Callable[..., Any]) -> str:
    """File and line of ``function``."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return line_of(code, code.co_firstlineno) if code is not None else ""


def find_refusal(module: nn.Module) -> tuple[str, str] | None:
    """For a wrapper that trains by itself or code that is not Python: what it is, and what to give instead."""
    return next((_REFUSED[base.__name__] for base in type(module).__mro__ if base.__name__ in _REFUSED), None)


def check_modules(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse modules that are not what they seem."""
    for path, module in modules:
        if refusal := find_refusal(module):
            what, hint = refusal
            raise problem(f"{path} is {what}", hint)


def check_classes(tensors: Mapping[str, Tensor]) -> None:
    """Refuse parameters and buffers of classes that change what torch's functions do, as quantised weights are."""
    for path, x in tensors.items():
        kind = _compat.users_class(x)
        if kind is not None and _compat.redefines_torch(kind):
            raise problem(
                f"{path} is a {kind.__name__}, a tensor subclass that defines torch's functions on it "
                "(__torch_function__, __torch_dispatch__); a graph computes with plain tensors",
                "hold a plain nn.Parameter in its place, or what it is made of as buffers, and compute with these in "
                "forward",
            )


def check_parameters(params: Mapping[str, Tensor]) -> None:
    """Refuse parameters that are not dense real numbers of a known shape."""
    for path, param in params.items():
        if isinstance(param, (UninitializedParameter, UninitializedBuffer)):
            raise problem(f"parameter {path} has no shape yet", "run the lazy module once on an example first")
        if param.is_complex():
            raise problem(
                f"parameter {path} is complex ({param.dtype}), and reductions and optimizers here are for real numbers",
                "hold the real and the imaginary part as two parameters, and join them in forward by torch.complex",
            )
        if _compat.accumulation_hooks(param):
            raise problem(
                f"parameter {path} has a hook that runs after its gradient is accumulated, which a graph does not do",
                "use p.register_hook(fn), which becomes part of the graph, or run the code after the Graph's call",
            )
        if param.layout is not torch.strided:
            raise problem(f"parameter {path} is sparse ({param.layout})", "use a dense parameter: p.to_dense()")
