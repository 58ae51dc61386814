"""The tool that rounds as an unlike CPU would finds what depends on rounding, and leaves alone what does not."""

from __future__ import annotations

import pytest
import torch
from other_kernels import OURS, THEIRS, other_kernels, round_otherwise_
from torch import Tensor, nn

import graphzero as gz


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_last_bit_is_a_function_of_the_number(dtype: torch.dtype) -> None:
    x = torch.randn(1000, dtype=torch.float64).to(dtype)
    once = x.clone()
    round_otherwise_(once, OURS)
    again, part, other = once.clone(), x[100:200].clone(), x.clone()
    round_otherwise_(again, OURS)
    round_otherwise_(part, OURS)
    round_otherwise_(other, THEIRS)
    assert torch.equal(again, once)
    assert torch.equal(part, once[100:200])
    assert 0.2 < (once != x).double().mean() < 0.8
    assert not torch.equal(other, once)
    assert bool(((once - x).abs() <= torch.finfo(dtype).eps * x.abs()).all())


def test_whole_numbers_and_what_is_not_finite_stay() -> None:
    x = torch.tensor([0.0, -3.0, 1e6, float("inf"), float("-inf"), float("nan")])
    other = x.clone()
    round_otherwise_(other, OURS)
    torch.testing.assert_close(other, x, rtol=0, atol=0, equal_nan=True)


class RoundingGraph(gz.Graph):
    """A step of Adam along ``scale`` times the gradient of a mean over a layer norm, which is zero but for rounding."""

    def __init__(self, scale: float) -> None:
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        torch.manual_seed(1)
        self.model, self.scale = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)).double(), scale
        self.add_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.1))

    def loss(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x)
        return y.mean() * self.scale + y[:, 0].square().mean() * (1 - self.scale % 2)

    def build(self, x: Tensor) -> Tensor:
        loss = self.loss(x)
        loss.backward()
        return loss


def difference(scale: float) -> float:
    """Between the parameters after a step of a Graph and of plain PyTorch."""
    graph, twin = RoundingGraph(scale), RoundingGraph(scale)
    x = torch.randn(4, 6, dtype=torch.float64)
    graph(x)
    twin.loss(x).backward()
    torch.optim.Adam(twin.model.parameters(), lr=0.1).step()
    pairs = zip(graph.model.parameters(), twin.model.parameters(), strict=True)
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)


def test_what_is_determined_stays_close_and_a_step_along_rounding_does_not() -> None:
    with other_kernels():
        assert difference(0.0) < 1e-9
        assert difference(1e9 + 1) > 1e-3
