"""Calls of ops with their values: of PyTorch's own operator samples, forward and backward, and of those of rules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal import common_utils
from torch.testing._internal.common_utils import set_rng_seed
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "sbp"))
from samples import samples  # noqa: E402

from graphzero.sbp.op_call import op_name  # noqa: E402

UNSPECIFIED = ("empty", "new_empty", "resize", "_resize")  # memory as it is
LARGEST = 20_000  # elements of an operand
FAILURES = (RuntimeError, TypeError, NotImplementedError, AssertionError, IndexError, ValueError)

Wanted = Callable[[Any], bool]


@dataclass(frozen=True)
class Call:
    """One call of an op, with its values; they lie row by row."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]

    def key(self) -> str:
        shown = pytree.tree_map_only(Tensor, lambda x: (x.dtype, tuple(x.shape)), (self.args, self.kwargs))
        return f"{op_name(self.op)} {shown}"

    def run(self, change: Callable[[Tensor], Tensor]) -> Any:
        """The op's result of other tensors in the places of these."""
        args, kwargs = self.with_tensors(change)
        return self.op(*args, **kwargs)

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, change, (self.args, self.kwargs))
        return made


@cache
def operators() -> list[Any]:
    """PyTorch's own operators with their samples, which take seconds to import."""
    from torch.testing._internal import common_methods_invocations as invocations
    from torch.testing._internal.opinfo import core

    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)  # a step sets no seed
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None  # it looks for a unittest in the stack: slow
    return invocations.op_db


def op_samples(
    dtype: torch.dtype, most: int, every: int = 1, is_differentiated: bool = True
) -> Iterator[tuple[Any, Any]]:
    """PyTorch's operators that take ``dtype``, every n-th, each with up to ``most`` of its samples."""
    for info in [info for info in operators() if dtype in info.supported_dtypes("cpu")][::every]:
        differs = is_differentiated and info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
        set_rng_seed(0)  # once: PyTorch would do it before each sample, on devices that are not there too
        samples = list(info.sample_inputs("cpu", dtype, requires_grad=differs, set_seed=False))
        for sample in samples[:: max(len(samples) // most, 1)][:most]:
            yield info, sample


def calls(dtype: torch.dtype, wanted: Wanted, most: int = 4, every: int = 1) -> dict[str, Call]:
    """Calls with values of ``dtype`` of the ops that are ``wanted``, each once for the same shapes.

    every: take every n-th operator; most: samples of one.
    """
    found: dict[str, Call] = {}
    for info, sample in op_samples(dtype, most, every):
        try:
            with _Recorder(found, wanted):
                made = pytree.tree_leaves(info(sample.input, *sample.args, **sample.kwargs))
                made = [x for x in made if isinstance(x, Tensor) and x.requires_grad]
                if made:
                    torch.autograd.backward(made, [torch.rand_like(x) for x in made])
        except FAILURES:
            continue
    for sample in samples()[::every]:
        if isinstance(sample.op, torch._ops.OpOverload):
            given = pytree.tree_map_only(Tensor, lambda x: _cast(x, dtype), (sample.args, sample.kwargs))
            _keep(found, wanted, sample.op, *given)
    return found


def dense(x: Tensor) -> Tensor:
    """The same values, row by row."""
    return x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


class _Recorder(TorchDispatchMode):
    """Keeps the calls of ops that are ``wanted``."""

    def __init__(self, found: dict[str, Call], wanted: Wanted) -> None:
        super().__init__()
        self.found, self.wanted = found, wanted

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _keep(self.found, self.wanted, op, args, kwargs or {})
        return op(*args, **(kwargs or {}))


def _keep(found: dict[str, Call], wanted: Wanted, op: Any, args: Any, kwargs: Any) -> None:
    if op._schema.is_mutable or not wanted(op) or op_name(op).split(".")[1].startswith(UNSPECIFIED):
        return
    call = Call(op, tuple(args), dict(kwargs))
    if all(map(_is_plain, call.tensors)) and call.key() not in found:
        found[call.key()] = Call(op, *call.with_tensors(dense))


def _is_plain(x: Tensor) -> bool:
    """Dense, not too large, of a dtype that kernels of the CPU know."""
    special = x.layout != torch.strided or x.is_quantized or x.is_nested or x.dtype == torch.complex32
    return not special and x.numel() <= LARGEST


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 values as ``dtype``; as whole numbers four times as large, for many are between 0 and 1."""
    if x.dtype != torch.float64:
        return x
    return x.to(dtype) if dtype.is_floating_point or dtype.is_complex else (x * 4).round().to(dtype)
