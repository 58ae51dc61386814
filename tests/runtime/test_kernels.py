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

from graphzero.ir import inplace
from graphzero.runtime import kernels
from graphzero.runtime.kernels import kernel
from graphzero.sbp.call import op_name

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


@pytest.mark.parametrize("op", inplace.WRITES_ROWS, ids=op_name)
def test_a_kernel_that_writes_row_by_row_writes_right_where_rows_do_not_lie(op: Any) -> None:
    graph = fx.Graph()
    node, x = graph.call_function(op), torch.rand(5, 6, 7)
    call, keyword = kernels.into(node)
    args = (x, 1, False) if "backward" not in str(op) else (x, x.flip(0), 1, torch.float32)
    for room in (torch.empty(5, 6, 7), turned(torch.empty(5, 6, 7)), cut(torch.empty(5, 6, 7))):
        assert call(*args, **{keyword: room}) is room
        assert torch.equal(room, op(*args))


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
