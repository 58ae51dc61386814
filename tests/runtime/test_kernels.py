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

from graphzero.ir.storage import kernel_forms
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
    args, kwargs = tree_unflatten(leaves, spec)
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


@pytest.mark.filterwarnings("ignore")
def test_every_op_that_is_told_where_to_write_writes_the_same_into_tensors_of_any_strides() -> None:
    wrong, told = set(), set()
    for op, group in OPS:
        if kernel_forms.writing(op) is None:
            continue
        call, keyword = kernels.into(fx.Graph().call_function(op))
        for sample in group:
            leaves, spec = tree_flatten((sample.args, sample.kwargs))
            (whole,) = run(kernel(op), leaves, spec)
            rooms = [moved(torch.full_like(whole, 3)) for moved in (torch.clone, turned, cut) if whole.dim() > 1]
            for room, given in itertools.product(rooms, [leaves, *(given for _, given in odd(leaves))]):
                torch.manual_seed(0)
                args, kwargs = tree_unflatten(given, spec)
                call(*args, **kwargs, **{keyword: room})
                told.add(op)
                if not torch.allclose(room, whole, atol=1e-9, equal_nan=True):
                    wrong.add(f"{op_name(op)} into strides {room.stride()}")
    assert not wrong, "\n".join(sorted(wrong))
    assert len(told) > 150
