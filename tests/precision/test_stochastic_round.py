"""The op ``stochastic_round``: which values it gives, how often, and that pieces are rounded as the whole."""

import math

import pytest
import torch

from graphzero.ops import ADAM, ADAM_ROUNDED, ADAM_ROUNDED_, STOCHASTIC_ROUND
from graphzero.ops import stochastic_round as op
from graphzero.ops.random import hashed

BF16 = torch.bfloat16
WAYS = 1 << 16  # in which the bits that are cut off can be drawn


def rounded(x, key=7, number=0, start=None, total=None):
    return STOCHASTIC_ROUND(x, torch.tensor(key), number, start or [0] * x.dim(), total or list(x.shape))


def of_bits(*bits):
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


@pytest.fixture
def every_way(monkeypatch):
    """Each of 65536 elements is drawn another number."""
    monkeypatch.setattr(op, "sixteen_bits", lambda x, *rest: torch.arange(WAYS, dtype=torch.int32))
    monkeypatch.setattr(op, "BLOCK", WAYS)


def test_what_is_a_bfloat16_stays_to_the_bit():
    every = torch.arange(WAYS, dtype=torch.int32).to(torch.int16).view(BF16)
    for key in range(3):
        found = rounded(every.float(), key)
        assert torch.equal(found.isnan(), every.isnan())
        assert torch.equal(found[~every.isnan()].view(torch.int16), every[~every.isnan()].view(torch.int16))


@pytest.mark.parametrize(
    "below",  # a bfloat16, by its upper half: 1, the last below 2, small, subnormal, 0, the last before the largest
    [0x3F80, 0x3FFF, 0x0123, 0x0001, 0x0000, 0x7F7E, 0xBF80, 0xBFFF, 0x8123, 0x8000, 0xFF7E],
)
@pytest.mark.parametrize("share", [1, 2, 77, 1 << 15, 65535])
def test_the_neighbour_farther_from_zero_is_taken_exactly_as_often_as_its_share_of_the_way(every_way, below, share):
    found = rounded(of_bits((below << 16) + share).expand(WAYS)).view(torch.int16).int() & 0xFFFF
    assert int((found == below + 1).sum()) == share
    assert int((found == below).sum()) == WAYS - share


def test_the_draws_of_a_step_are_that_often_within_the_binomial_bound():
    count = 1 << 18
    for number, share in enumerate((0.01, 0.25, 0.5, 0.9)):
        x = torch.full((512, count // 512), 1 + share * 2**-7)
        up = int((rounded(x, number=number) == 1 + 2**-7).sum())
        exact = round(share * WAYS) / WAYS
        assert abs(up - count * exact) < 4 * math.sqrt(count * exact * (1 - exact))


def test_infinities_and_nan_stay_and_what_is_finite_stays_finite(every_way):
    inf = float("inf")
    for x in (inf, -inf):
        assert (rounded(torch.tensor(x).expand(WAYS)) == x).all()
    for bits in (0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF):
        assert rounded(of_bits(bits).expand(WAYS)).isnan().all()
    largest = torch.finfo(BF16).max
    for bits in (0x7F7F0000, 0x7F7F0001, 0x7F7F8000, 0x7F7FFFFF):
        assert (rounded(of_bits(bits).expand(WAYS)) == largest).all()
        assert (rounded(-of_bits(bits).expand(WAYS)) == -largest).all()


@pytest.mark.parametrize("shape", [(24,), (5, 8), (3, 6), (2, 3, 4), (1,), ()])
def test_bits_are_quarters_of_the_hash_of_four_neighbours(shape):
    x, key, count = torch.empty(shape), torch.tensor(5), math.prod(shape)
    hashes = hashed(torch.arange((count + 3) // 4), key, 2)
    parts = torch.stack([(hashes >> (16 * i)) & 0xFFFF for i in range(4)], 1).flatten()[:count]
    found = op.sixteen_bits(x, key, 2, [0] * x.dim(), list(shape))
    assert found.dtype == torch.int32 and torch.equal(found, parts.view(shape).int())


@pytest.mark.parametrize("block", [1, 7, 1 << 15])
@pytest.mark.parametrize("size", [(11, 6, 5), (11, 6, 8)])  # rows of no whole fours, and of two
def test_pieces_are_rounded_as_the_whole_however_it_is_cut_and_lies(monkeypatch, block, size):
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    whole = rounded(x)
    monkeypatch.setattr(op, "BLOCK", block)
    assert torch.equal(rounded(x), whole)
    assert torch.equal(rounded(x[3:, :, 2:], start=[3, 0, 2], total=list(size)), whole[3:, :, 2:])
    assert torch.equal(rounded(x.permute(2, 0, 1).contiguous().permute(1, 2, 0)), whole)
    assert torch.equal(rounded(x.flatten()), whole.flatten())
    apart = rounded(x.view(11, 2, 3, -1)[:, 1:], start=[0, 1, 0, 0], total=[11, 2, 3, size[2]])
    assert torch.equal(apart, whole.view(11, 2, 3, -1)[:, 1:])


def test_each_step_tensor_and_element_has_bits_of_its_own():
    x = torch.full((1 << 12,), 1 + 2**-8)  # half of the way
    first = rounded(x)
    for other in (rounded(x, key=8), rounded(x, number=1), first.roll(1)):
        assert 0.45 < (other == first).float().mean() < 0.55


def test_no_element_and_one_without_dims():
    assert rounded(torch.empty(0, 3)).shape == (0, 3)
    assert rounded(torch.tensor(-3.0)) == -3.0
    assert STOCHASTIC_ROUND(torch.empty(4, device="meta"), torch.empty((), device="meta"), 0, [0], [4]).dtype == BF16


@pytest.mark.parametrize("block", [10, 1 << 17])
@pytest.mark.parametrize("largest", [False, True])
def test_adam_that_rounds_is_adam_of_casts_whose_results_are_rounded(monkeypatch, block, largest):
    monkeypatch.setattr(op, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    grad, *held = (torch.randn(5, 7, generator=generator).square() for _ in range(4 + largest))
    held = [x.to(BF16) for x in held]
    step, key, rates = torch.tensor(3.0, dtype=torch.float64), torch.tensor(7), (0.1, 0.9, 0.99, 1e-8, 0.1)

    def lists(x):
        return [x[0]], [grad], [x[1]], [x[2]], x[3:], [step]

    wide = ADAM(*lists([x.float() for x in held]), *rates)
    numbers = list(range(4, 4 + len(held)))
    wanted = [STOCHASTIC_ROUND(x, key, n, [2, 0], [9, 7]) for x, n in zip(wide, numbers, strict=True)]
    told = {"numbers": numbers, "start": [2, 0], "total": [9, 7]}
    found = ADAM_ROUNDED(*lists(held), *rates, key, **told)
    ADAM_ROUNDED_(*lists(held), *rates, key, **told)
    for x, y, z in zip(found, wanted, held, strict=True):
        assert torch.equal(x, y) and torch.equal(z, y)
