"""Ops that capture writes as others compute what they are, for every dtype that they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import graphzero as gz
from graphzero.errors import CaptureError

OPS: dict[str, Callable[[Tensor], Any]] = {
    "variance": lambda x: torch.var_mean(x, 1),
    "deviation": lambda x: x.std(0),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "largest": lambda x: torch.linalg.vector_norm(x, torch.inf),
    "cubes": lambda x: torch.linalg.vector_norm(x, 3, 0),
    "distance": lambda x: torch.dist(x, x.flip(0)),
    "mean": lambda x: x.mean(0),
}


def run(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    class Once(gz.Graph):
        def build(self, x: Tensor) -> Any:
            return function(x)

    return Once(gz.placement("cpu", range(2), virtual=True))(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", OPS)
def test_real_and_complex_numbers_give_what_pytorch_gives(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, dtype=dtype)
    torch.testing.assert_close(run(OPS[name], x), OPS[name](x))


@pytest.mark.parametrize("x", [torch.tensor([[1, 2, 4], [3, 9, 5]]), torch.tensor([[1.0, 2.0, 4.0]])])
def test_covariance_and_correlation_of_whole_numbers_and_of_one_row(x: Tensor) -> None:
    for function in (torch.cov, torch.corrcoef):
        made = run(lambda twice, f=function: f(twice[: len(x)]), torch.cat([x, x]))
        torch.testing.assert_close(made, function(x))


def test_the_mean_of_whole_numbers_is_refused_as_pytorch_refuses_it() -> None:
    with pytest.raises(CaptureError, match="could not infer output dtype"):
        run(torch.mean, torch.arange(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_exponential_of_a_matrix_in_16_bit_and_its_gradient_are_numbers(dtype: torch.dtype) -> None:
    def exponential(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        made = torch.matrix_exp(x)
        return made.detach(), torch.autograd.grad(made.pow(2).sum(), x)[0]

    x = torch.randn(4, 3, 3, dtype=dtype)
    for ours, exact in zip(run(exponential, x.clone()), exponential(x.float()), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), exact, rtol=0.05, atol=0.05 * float(exact.abs().max()))
