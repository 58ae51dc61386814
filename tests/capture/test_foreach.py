"""``torch._foreach_*`` in build is the ops it stands for, one for each tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import graphzero as gz

CALLS: dict[str, Callable[[list[Tensor], list[Tensor]], Any]] = {
    "a number": lambda xs, ys: torch._foreach_mul(xs, 2.0),
    "numbers": lambda xs, ys: torch._foreach_add(xs, [1.0, 2.0]),
    "lists with a factor": lambda xs, ys: torch._foreach_sub(xs, ys, alpha=3),
    "a tensor for all": lambda xs, ys: torch._foreach_div(xs, ys[0].sum()),
    "a tensor of numbers": lambda xs, ys: torch._foreach_addcdiv(xs, ys, ys, torch.tensor([2.0, 3.0])),
    "a number that comes last": lambda xs, ys: torch._foreach_addcmul(xs, ys, ys, 0.5),
    "weights": lambda xs, ys: torch._foreach_lerp(xs, ys, ys),
    "one base": lambda xs, ys: torch._foreach_pow(2.0, xs),
    "bounds": lambda xs, ys: torch._foreach_clamp_max(torch._foreach_maximum(xs, 0.1), ys),
    "norms": lambda xs, ys: torch._foreach_norm(xs, 1),
    "largest": lambda xs, ys: torch._foreach_max(xs),
    "products": lambda xs, ys: torch._foreach_mm([xs[0].T], [ys[0]]) if hasattr(torch, "_foreach_mm") else xs,
}


def in_place(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    made = [x.clone() for x in xs]
    torch._foreach_copy_(made, ys)
    torch._foreach_add_(made, xs, alpha=2.0)
    torch._foreach_sqrt_(made)
    return made


CALLS["in place"] = in_place


@pytest.mark.parametrize("name", CALLS)
def test_each_tensor_is_what_plain_pytorch_makes_of_it_and_split_as_it_was(name: str) -> None:
    class Lists(gz.Graph):
        def build(self, *values: Tensor) -> Any:
            return CALLS[name](list(values[:2]), list(values[2:]))

    values = [torch.rand(4, 3, dtype=torch.float64) + 0.5 for _ in range(4)]
    graph = Lists(gz.placement("cpu", range(2), virtual=True))
    expected = CALLS[name](values[:2], values[2:])
    for have, want in zip(graph(*values), expected, strict=True):
        torch.testing.assert_close(have, want)
    assert "_foreach" not in str(graph.program)
