"""Gradients of pieces of a tensor are put side by side, not each among zeros and summed up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import lines, run

import graphzero as gz
from graphzero.passes import Fuse, Pipeline, default_passes
from graphzero.plan import plan_of
from graphzero.runtime import kernels
from graphzero.testing import assert_same_step

WIDTH = 12
Mix = Callable[[Tensor], Tensor]


def heads(h: Tensor) -> Tensor:
    q, k, v = h.view(4, 5, 3, 2, 2).permute(2, 0, 3, 1, 4)
    return (q * 2 - k.sin() * v).transpose(1, 2).flatten(2)


def halves(h: Tensor) -> Tensor:
    return h * 3 + torch.cat([-h[..., WIDTH // 2 :], h[..., : WIDTH // 2].sin()], -1)


def thirds(h: Tensor) -> Tensor:
    a, b, c = h[..., :4], h[..., 4:7], h[..., 7:]
    return torch.cat([c.sin(), a * a, b], -1)


def one_piece_twice(h: Tensor) -> Tensor:
    p = h.view(4, 5, 2, 6)
    return p[:, :, 0].sin() * p[:, :, 1] + p[:, :, 0].square()


def rows_from_the_end(h: Tensor) -> Tensor:
    p = h.view(4, 5, 2, 6)
    return p[:, :, -1] * p[:, :, -2].cos()


SIDE_BY_SIDE: dict[str, Mix] = {
    "heads": heads, "halves": halves, "thirds": thirds, "one piece twice": one_piece_twice,
    "rows from the end": rows_from_the_end,
}  # fmt: skip
LEFT: dict[str, Mix] = {
    "a gap": lambda h: h[..., :4].sin() * h[..., 8:],
    "overlapping": lambda h: h[..., :8].sin().sum() + h[..., 4:].cos(),
    "every other": lambda h: h[..., ::2].sin() * h[..., 1::2],
    "one": lambda h: h[..., :8].sin(),
    "two dims": lambda h: h[:, 0].sin().sum() * h[:, :, 0].cos(),
}


class MixGraph(gz.Graph):
    def __init__(self, mix: Mix, stage: int = 0, split: int | None = None, ranks: int = 2):
        super().__init__(gz.placement("cpu", range(ranks), virtual=True))
        torch.manual_seed(0)
        self.inner, self.mix, self.split = nn.Linear(4, WIDTH), mix, split
        self.add_optimizer(torch.optim.SGD(self.inner.parameters(), lr=1e-3))
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if self.split is not None:
            h = gz.to_global(h, sbp=gz.sbp.S(self.split))
        loss = self.mix(h).square().sum()
        loss.backward()
        return loss


def data() -> Tensor:
    return torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(0))


def compiled(mix: Mix, **options: Any) -> gz.Graph:
    return MixGraph(mix, **options).compile(data())


def spread(graph: gz.Graph) -> list[str]:
    return lines(graph.program, "select_backward(") + lines(graph.program, "slice_backward(")


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_pieces_that_cover_a_dim_are_put_side_by_side(name: str) -> None:
    graph = compiled(SIDE_BY_SIDE[name])
    assert not spread(graph)
    (record,) = (record for record in graph.history if record.name == "fuse_pieces")
    assert_same_step(record.before, record.after, rtol=0, atol=0)
    assert str(gz.parse(str(record.after))) == str(record.after)


@pytest.mark.parametrize("name", LEFT)
def test_pieces_that_do_not_stay_among_zeros(name: str) -> None:
    graph = compiled(LEFT[name])
    assert spread(graph)
    x = data()
    twin = MixGraph(LEFT[name])
    LEFT[name](twin.inner(x)).square().sum().backward()
    wanted = twin.inner.weight.detach() - 1e-3 * twin.inner.weight.grad
    graph(x)
    torch.testing.assert_close(graph.inner.weight.detach(), wanted)


@pytest.mark.parametrize("split", [0, 1, 2])
@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_the_step_is_that_of_one_rank_however_the_whole_is_split(name: str, split: int) -> None:
    """A dim that ranks have cut is not covered by what one of them holds."""
    graph, plain = MixGraph(SIDE_BY_SIDE[name], split=split), MixGraph(SIDE_BY_SIDE[name], ranks=1)
    for _ in range(2):
        torch.testing.assert_close(graph(data()), plain(data()))
    torch.testing.assert_close(graph.inner.weight, plain.inner.weight)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_agree_to_the_bit(stage: int) -> None:
    graph, plain = MixGraph(heads, stage), MixGraph(heads)
    for _ in range(3):
        assert torch.equal(graph(data()), plain(data()))


def test_what_is_shown_in_other_dims_is_not_copied_again() -> None:
    """Heads come as [3, batch, heads, length, dim] and go as [batch, length, 3, heads, dim], by one op."""
    backward = str(compiled(heads).program).split("backward:")[1]
    assert "clone(" not in backward and backward.count("stack(") == 1


STEP = """
graph step(dp=2)
  x   = batch()  : f32[64, 8]  S(0)!
  w   = param()  : f32[8, 8]   B!
forward:
  wf  = use(w)                                  : f32[8, 8]
  y   = mm(x, wf)                               : f32[64, 8]
  l   = sum(y)                                  : f32[]
backward:
  a   = slice(y, 1, 0, 4)                       : f32[64, 4]
  b   = slice(y, 1, 4, 8)                       : f32[64, 4]
  da  = sin(a)                                  : f32[64, 4]
  db  = cos(b)                                  : f32[64, 4]
  sa  = slice_backward(da, [64, 8], 1, 0, 4, 1) : f32[64, 8]
  sb  = slice_backward(db, [64, 8], 1, 4, 8, 1) : f32[64, 8]
  dy  = add(sa, sb)                             : f32[64, 8]
  xt  = t(x)                                    : f32[8, 64]
  g   = mm(xt, dy)                              : f32[8, 8]  ; gradient(w)
update:
  wu  = use(w)                                  : f32[8, 8]
  w1  = sub(wu, g)                              : f32[8, 8]
  return l; update(w=w1)
"""


def test_zeros_of_the_size_of_the_whole_are_not_made() -> None:
    passes = default_passes()
    apart = Pipeline([pass_ for pass_ in passes if pass_ not in Fuse().passes])(gz.parse(STEP))
    together = Pipeline(passes)(gz.parse(STEP))
    assert lines(together, "cat(")
    whole = 32 * 8 * 4
    assert plan_of(apart).memory.peak - plan_of(together).memory.peak >= whole / 2
    for name, wanted in run(apart).items():
        assert all(map(torch.equal, run(together)[name], wanted)), name


@pytest.mark.parametrize("dims", [[0, 2, 3, 1], [0, 1, 2, 3]])
def test_what_is_joined_is_dense_whatever_its_parts_are(dims: list[int]) -> None:
    """torch lays a cat of channels-last tensors out so; the plan, and a view, take it to be dense."""
    parts = [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).permute(dims) for _ in range(2)]
    for op, plain in ((torch.ops.aten.cat.default, torch.cat), (torch.ops.aten.stack.default, torch.stack)):
        found = kernels.kernel(op)(parts, 1)
        assert found.is_contiguous() and torch.equal(found, plain(parts, 1))
