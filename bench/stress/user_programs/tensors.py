"""Tensor code: views, writes in place, dtypes, complex numbers, no dims and no elements."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stress.user_programs.parts import classes, flags, floats, square, trained
from stress.user_programs.program import Program, built_by, by_loss, by_model, by_step


@built_by(by_loss)
def masked_assignment(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    out = out * 1
    out[x[:, :4] > 0] = 0.0
    return square(out) + F.cross_entropy(out, y)


@built_by(by_loss)
def segments_of_the_batch(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    sums = torch.zeros(4, 4).index_add_(0, y, out)
    counts = torch.zeros(4).index_add_(0, y, torch.ones(len(y)))
    return square(out - (sums / counts.clamp(min=1)[:, None])[y])


@built_by(by_loss)
def reduced_by_scatter(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    largest = torch.full((4, 4), -10.0).scatter_reduce(0, y[:, None].expand(-1, 4), out, "amax")
    return square(largest) + F.cross_entropy(out, y)


@built_by(lambda step: Program(nn.ParameterDict({"w": torch.randn(5, 4, dtype=torch.complex128)}), step))
def complex_parameter(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return trained(F.cross_entropy((x.to(m["w"].dtype) @ m["w"]).abs().to(x.dtype), y))


@built_by(by_model, floats(3, 8))
class SpectralLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 4, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(x.to(self.weight.dtype))[..., :4]
        mixed = torch.einsum("bif,iof->bof", low, torch.view_as_complex(self.weight))
        return F.mse_loss(torch.fft.irfft(mixed, n=8), x)


@built_by(by_step, floats(4, 5))
def strides_set_by_hand(m: nn.Module, x: Tensor) -> Tensor:
    windows = x.unfold(1, 2, 1)
    return trained(square(m(windows.mean(-1))) + square(m(x).as_strided((2, 4), (4, 1))))


@built_by(by_loss)
def integer_arithmetic(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    parity = (y % 2).bool() ^ (y // 2 == 1)
    shifted = (y << 1 | parity.long()) & 3
    return F.cross_entropy(out + parity[:, None] * 0.5, shifted)


@built_by(by_step, floats(5), classes(4), flags())
def boolean_logic(m: nn.Module, x: Tensor, y: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = F.cross_entropy(m(x), y, reduction="none")
    loss = torch.where(keep & (y != 3), rows, torch.zeros_like(rows)).sum() / (keep & (y != 3)).sum()
    return trained(loss), keep.any(), (~keep).all()


@built_by(by_loss)
def sorted_and_cumulated(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    ordered, places = out.sort(dim=1, descending=True)
    return square(ordered.softmax(1).cumsum(1)) + out.gather(1, places)[:, 0].mean() + out.logcumsumexp(1).mean()


@built_by(by_loss)
def order_over_the_batch(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return out.sort(0).values[: len(out) // 2].pow(2).mean() + out.cumsum(0).pow(2).mean() + square(out.roll(1, 0))


@built_by(by_loss)
def quantile_of_the_batch(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.quantile(out, 0.3, dim=0).sum() + out.median(0).values.sum() + out.kthvalue(2, 1)[0].sum()


@built_by(by_loss)
def pairs_over_the_batch(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    gram = (out[:, None] - out[None]).pow(2).sum(-1)
    return (-gram).exp().mean() + torch.triu(gram, 1).mean() + F.pdist(out).mean()


@built_by(by_loss)
def linear_algebra(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    m = out.view(-1, 2, 2)
    spd = m @ m.transpose(1, 2) + torch.eye(2, dtype=m.dtype)
    solved = torch.linalg.solve(spd, m)
    return torch.logdet(spd).mean() + solved.pow(2).mean() + torch.linalg.cholesky(spd).sum()


@built_by(by_step)
def singular_values_of_a_weight(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return trained(F.cross_entropy(m(x), y) + 0.01 * torch.linalg.svdvals(m[0].weight).sum())


@built_by(by_step)
def outputs_of_many_kinds(m: nn.Module, x: Tensor, y: Tensor) -> dict:
    out = m(x)
    loss = trained(F.cross_entropy(out, y))
    return {"loss": loss, "views": [out[:, :2], out.t(), out[0]], "none": None, "count": len(x), "in": x,
            "weight": m[0].weight, "shape": tuple(out.shape[1:])}  # fmt: skip


@built_by(by_step)
def input_written_in_place(m: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(0.5).clamp_(-1, 1)
    return trained(F.cross_entropy(m(x), y)), x


@built_by(by_loss)
def nan_rows_replaced(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    root = torch.where(x[:, :4] > 0, x[:, :4].clamp(min=1e-3).sqrt(), torch.zeros(()))
    return F.cross_entropy(torch.nan_to_num(out / (root + 1)), y)


@built_by(by_loss)
def searched_and_binned(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    edges = torch.linspace(-1, 1, 3)
    return F.cross_entropy(out, torch.bucketize(x[:, 0], edges)) + square(out.diff(dim=1))
