"""A rank's piece need not lie in memory as the whole would: kernels compute the same of it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from graphzero.ir.storage import inplace, kernel_forms
from graphzero.ir.storage.dense import ROW_MAJOR
from graphzero.runtime import kernels
from graphzero.runtime.kernels import kernel
from graphzero.sbp.op_call import op_name

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "sbp")]
from samples import NO_CPU_KERNEL, UNCHECKED_VALUES, by_op  # noqa: E402

ABOUT_STRIDES = ("stride", "resize", "view", "as_complex", "_reshape_alias")  # what they do is said in strides
REFUSED = ("_pdist", "aten._embedding_bag_", "flash_attention_for_cpu")  # torch itself wants them dense and says so


def cut(x: Tensor) -> Tensor:
    """The same values as a piece of a larger tensor, cut along the last dim."""
    return torch.cat([x, x.flip(-1)], -1).narrow(-1, 0, x.shape[-1])


def turned(x: Tensor) -> Tensor:
    """The same values with the first dim innermost."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def odd(leaves: list[Any]) -> Iterator[tuple[int, list[Any]]]:
    """The arguments with one of its tensors in another memory format.  What has one dim is always dense."""
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.dim() > 1]
    for i, moved in itertools.product(tensors, (cut, turned)):
        yield i, [moved(x) if i == k else x for k, x in enumerate(leaves)]


def run(call: Callable[..., Any], leaves: list[Any], spec: Any) -> list[Tensor]:
    torch.manual_seed(0)
    args, kwargs = tree_unflatten(leaves, spec) if spec else (leaves, {})
    return [x for x in tree_flatten(call(*args, **kwargs))[0] if isinstance(x, Tensor)]


OPS = [
    (op, group)
    for op, group in by_op()
    if op_name(op) not in (*UNCHECKED_VALUES, *NO_CPU_KERNEL)
    and not any(word in op_name(op) for word in (*ABOUT_STRIDES, *REFUSED))
    and not op_name(op).startswith("graphzero.uniform")
]


@pytest.mark.filterwarnings("ignore")
def test_every_op_computes_the_same_of_operands_that_are_not_dense() -> None:
    wrong = set()
    for op, group in OPS:
        for sample in group:
            leaves, spec = tree_flatten((sample.args, sample.kwargs))
            whole = run(kernel(op), leaves, spec)
            for i, given in odd(leaves):
                try:
                    found = run(kernel(op), given, spec)
                except RuntimeError as error:
                    wrong.add(f"{op_name(op)}, argument {i}: {error}")
                    continue
                if not all(torch.allclose(a, b, atol=1e-9, equal_nan=True) for a, b in zip(whole, found, strict=True)):
                    wrong.add(f"{op_name(op)}, argument {i}")
    assert not wrong, "\n".join(sorted(wrong))


# ---- results that are written into given memory

UNSAMPLED = {"nonzero", "masked_select", "linalg_cross"}  # of sizes that are data; one that capture writes as others
LATEST = {"_upsample_lanczos2d_aa", "_upsample_lanczos2d_aa_backward"}  # that torch has from 2.13 on
REMOVED = {"cholesky"} if torch.__version__ >= "2.14" else set()  # from what users can call
ROUNDING = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.bfloat16: 3e-2}
COARSE = 1e-4  # of other dtypes


class Room:
    """A copy of a tensor in memory full of marks, with the strides of another one of its shape."""

    def __init__(self, x: Tensor, like: Tensor) -> None:
        size = like.untyped_storage().nbytes() // like.itemsize + 8
        self.memory = x.new_full((3 * size,), 3)
        self.tensor = self.memory.as_strided(x.shape, like.stride(), size)
        self.strides = self.tensor.stride()
        self.tensor.copy_(x)

    def problem(self, wanted: Tensor) -> str:
        """What is wrong with what was written here, if anything; overwrites it."""
        if self.tensor.shape != wanted.shape or self.tensor.stride() != self.strides:
            return f"resized from strides {self.strides}"
        limit = 0.0
        if wanted.is_floating_point() or wanted.is_complex():
            largest = wanted.abs().nan_to_num(0.0, 0.0, 0.0).max() if wanted.numel() else 0.0
            limit = ROUNDING.get(wanted.dtype, COARSE) * max(1.0, float(largest))
        if not torch.allclose(self.tensor, wanted, rtol=0, atol=limit, equal_nan=True):
            return f"wrong in strides {self.strides}"
        self.tensor.fill_(3)
        return "" if bool((self.memory == self.memory.new_full((), 3)).all()) else f"beside strides {self.strides}"


def rooms_for(x: Tensor) -> Iterator[Room]:
    for moved in (torch.clone, turned, cut) if x.dim() > 1 else (torch.clone,):
        yield Room(x, moved(x))


def problems_beside(op: Any, leaves: list[Any], spec: Any, whole: Tensor) -> Iterator[str]:
    """What goes wrong where the result has a place beside the operands, which lie in every way."""
    call, keyword = kernels.into(fx.Graph().call_function(op))
    for given in [leaves, *(given for _, given in odd(leaves))]:
        for room in rooms_for(torch.full_like(whole, 3)):
            run(lambda *args, room=room, **kwargs: call(*args, **kwargs, **{keyword: room.tensor}), given, spec)
            yield room.problem(whole)


def problems_over(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Tensor) -> Iterator[str]:
    """What goes wrong over each operand that the op may write over, and over one that stands for all of these."""
    alike = [at for at, x in enumerate(args) if isinstance(x, Tensor) and x.shape == whole.shape]
    alike = [at for at in alike if args[at].dtype == whole.dtype]
    over_first, told = kernel_forms.over_first(op), kernel_forms.writing(op) is not None
    places = [(at,) for at in alike if inplace.works_over(op, at, "cpu") or (over_first and at == 0)]
    for together in [*places, *([tuple(at for (at,) in places)] if len(places) > 1 else [])]:
        one = args[together[0]]

        def given(x: Tensor, together: Any = together) -> list[Any]:
            return [x if at in together else other for at, other in enumerate(args)]

        (wanted,) = run(lambda *args: kernel(op)(*args, **kwargs), given(one), None)
        for room in rooms_for(one) if over_first and together[0] == 0 else ():
            over_first(*given(room.tensor), **kwargs)
            yield f"over {together}: {said}" if (said := room.problem(wanted)) else ""
        for room in rooms_for(one) if told and all(inplace.works_over(op, at, "cpu") for at in together) else ():
            call, keyword = kernels.into(fx.Graph().call_function(op))
            call(*given(room.tensor), **kwargs, **{keyword: room.tensor})
            yield f"over {together}: {said}" if (said := room.problem(wanted)) else ""


def problems_of_rows(op: Any, leaves: list[Any], spec: Any, whole: Tensor) -> Iterator[str]:
    """Where a result does not lie row by row though that is said."""
    if kernel_forms.makes_rows(op) and not whole.is_contiguous():
        yield "does not lie row by row"
    first = next((i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.shape == whole.shape), len(leaves))
    begin = 0 if op in ROW_MAJOR else first + 1 if kernel_forms.follows_first(op) else len(leaves)
    moved = [turned(x) if i >= begin and isinstance(x, Tensor) and x.dim() else x for i, x in enumerate(leaves)]
    yield "" if run(kernel(op), moved, spec)[0].is_contiguous() or begin == len(leaves) else "does not follow the first"


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_every_op_that_is_told_where_to_write_writes_the_same_there_and_nothing_beside(dtype: torch.dtype) -> None:
    wrong, tried = set(), set()
    for op, group in OPS:
        forms = kernel_forms.writing(op), kernel_forms.over_first(op)
        if not any(forms) and op not in ROW_MAJOR:
            continue
        for sample in group:
            leaves, spec = tree_flatten((sample.args, sample.kwargs))
            leaves = [x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float64 else x for x in leaves]
            try:
                whole, *_ = run(kernel(op), leaves, spec)
            except (RuntimeError, NotImplementedError):  # has no kernel for the dtype
                assert dtype != torch.float64
                continue
            said = [*problems_of_rows(op, leaves, spec, whole)]
            said += problems_beside(op, leaves, spec, whole) if forms[0] else []
            said += problems_over(op, *tree_unflatten(leaves, spec), whole) if any(forms) else []
            tried.add(kernel_forms.name_of(op))
            wrong |= {f"{op_name(op)}: {text}" for text in said if text}
    assert not wrong, "\n".join(sorted(wrong))
    told = kernel_forms.ANY_STRIDES | kernel_forms.ROWS_ONLY | kernel_forms.OVER_FIRST
    absent = {name for name in LATEST if not hasattr(torch.ops.aten, name)}
    assert tried >= told - UNSAMPLED - REMOVED - absent if dtype == torch.float64 else len(tried) > 200
