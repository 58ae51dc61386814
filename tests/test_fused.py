"""The kernel that steps parameters is torch's, but alike wherever an element lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphzero.ops import adam

SHAPES = [(6, 11), (11,), (11, 3), (3,), (16, 16), (0, 3)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NUMBERS = (1e-2, 0.9, 0.99, 1e-8, 0.1)


def rand(shapes: list[Any], dtype: torch.dtype, seed: int = 0) -> list[list[Tensor]]:
    """Parameters, gradients, and three moments, the last of which is not below the second."""
    generator = torch.Generator().manual_seed(seed)
    kinds = [[torch.rand(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(5)]
    kinds[4] = [x + y for x, y in zip(kinds[3], kinds[4], strict=True)]
    return kinds


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 7, 16, 100, 4099])
def test_an_element_steps_alike_wherever_it_lies(count: int, dtype: torch.dtype, amsgrad: bool) -> None:
    kinds = rand([count], dtype, count)
    step, cut = torch.tensor(3.0, dtype=torch.float64), count // 3

    def stepped(part: slice) -> list[Tensor]:
        *kept, largest = [[x[part] for x in group] for group in kinds]
        return adam.adam(*kept, largest if amsgrad else [], [step], *NUMBERS)

    pieces = zip(stepped(slice(0, cut)), stepped(slice(cut, None)), strict=True)
    for whole, both in zip(stepped(slice(None)), pieces, strict=True):
        assert torch.equal(whole, torch.cat(both))


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_at_once_step_as_each_alone(dtype: torch.dtype, amsgrad: bool) -> None:
    kinds = rand(SHAPES, dtype)
    if not amsgrad:
        kinds[4] = []
    steps = [torch.tensor(float(1 + i % 2), dtype=torch.float64) for i in range(len(SHAPES))]
    alone = [
        adam.adam(*([group[i]] if group else [] for group in kinds), [step], *NUMBERS) for i, step in enumerate(steps)
    ]
    adam.adam_(*kinds, steps, *NUMBERS)
    changed = [group for group in (kinds[0], *kinds[2:]) if group]
    for i, made in enumerate(alone):
        assert all(torch.equal(group[i], x) for group, x in zip(changed, made, strict=True)), i


def test_columns_step_in_place_beside_dense_ones() -> None:
    wide = torch.rand(5, 16)
    columns, kept, dense = wide[:, ::2], wide[:, 1::2].clone(), torch.rand(5, 8)
    grads, first, second = ([torch.rand(5, 8) for _ in range(2)] for _ in range(3))
    step = torch.tensor(2.0)
    alone = [
        adam.adam([p], [g], [m], [v], [], [step], *NUMBERS)[0]
        for p, g, m, v in zip((columns, dense), grads, first, second, strict=True)
    ]
    adam.adam_([columns, dense], grads, first, second, [], [step, step], *NUMBERS)
    assert torch.equal(columns, alone[0]) and torch.equal(dense, alone[1]) and torch.equal(wide[:, 1::2], kept)


@pytest.mark.parametrize("settings", [{}, {"amsgrad": True}, {"maximize": True}], ids=lambda s: "".join(s) or "plain")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_it_is_torchs_kernel_to_the_bit_where_vectors_are_full(kind: Any, dtype: torch.dtype, settings: Any) -> None:
    (p,), grads, (m,), (v,), _ = rand([(8, 32)], dtype)
    m, v = m.zero_(), v.zero_()
    largest = [v.clone()] if settings.get("amsgrad") else []
    own = nn.Parameter(p.clone())
    optimizer = kind([own], lr=NUMBERS[0], betas=NUMBERS[1:3], eps=NUMBERS[3], weight_decay=0.1, fused=True, **settings)
    modes = {"decoupled": kind is torch.optim.AdamW, "maximize": "maximize" in settings}
    for step in (1.0, 2.0, 3.0):
        own.grad = grads[0] * step
        optimizer.step()
        adam.adam_([p], [own.grad], [m], [v], largest, [torch.tensor(step)], *NUMBERS, **modes)
        assert torch.equal(p, own.detach())
