"""Tensors whose values differ have different fingerprints, however they differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphzero.runtime.tensors.fingerprint import content


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int8])
@pytest.mark.parametrize("shape", [(5, 4), (700, 60), (3,)])
def test_signs_count_also_where_all_of_them_differ(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = draw(*shape).mul(50).to(dtype)
    some = x.clone()
    some[1::2] *= -1
    found = [content(each) for each in (x, -x, some, x.conj().resolve_conj())]
    assert len(set(found)) == 4 - (not dtype.is_complex) and content(x.clone()) == found[0]


def test_the_order_of_elements_counts_and_how_they_lie_does_not() -> None:
    x = draw(300, 120)
    assert content(x.flip(0)) != content(x) != content(x[torch.randperm(300)])
    assert content(x.t().contiguous().t()) == content(x) == content(torch.cat([x, x])[300:])
    assert content(torch.cat([x.view(-1)[:1], x.view(-1)])[1:].view(300, 120)) == content(x)


def test_one_element_of_any_place_counts() -> None:
    x = draw(41, 1000)
    for place in (0, 1, 4095, 4096, 40960, 40999):
        other = x.clone()
        other.view(-1)[place] += 1e-3
        assert content(other) != content(x)
