"""Mixed precision trains as plain PyTorch does with fp32 masters, 16-bit casts and autocast."""

import pytest
import torch
from precision_toys import BF16, F16, Plain, amp_graph, batch_of, gpt, losses, mlp, virtual

STEPS = 50


def reference(make, dtype, clip):
    plain = Plain(make(), dtype, clip=clip, init_scale=2.0**10)
    return losses(plain.step, plain.model, STEPS)


@pytest.fixture(scope="module")
def expected():
    return {(make, dtype): reference(make, dtype, clip=1.0) for make in (mlp, gpt) for dtype in (BF16, F16)}


def check(expected, make, dtype, stage, ranks):
    model = make()
    graph = amp_graph(model, stage, virtual(ranks), dtype, clip=1.0, init_scale=2.0**10)
    found, plain = losses(graph, model, STEPS), expected[make, dtype]
    assert plain[-4:].mean() < 0.9 * plain[:4].mean()  # it learns
    assert (found - plain).abs().max() < 0.01 * plain[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert not graph.skipped


@pytest.mark.parametrize(
    "dtype, ranks, stage",
    [(BF16, 1, 0), (BF16, 2, 1), (BF16, 4, 2), (BF16, 4, 3), (F16, 1, 0), (F16, 2, 1), (F16, 4, 2), (F16, 2, 3)],
)  # fmt: skip
def test_an_mlp_learns_as_in_plain_pytorch_at_every_stage(expected, dtype, ranks, stage):
    check(expected, mlp, dtype, stage, ranks)


@pytest.mark.parametrize("dtype, stage", [(BF16, 0), (BF16, 3), (F16, 1)])
def test_a_gpt_with_a_tied_head_learns_as_in_plain_pytorch_at_every_stage(expected, dtype, stage):
    check(expected, gpt, dtype, stage, ranks=2)


def test_the_first_step_on_one_rank_is_plain_pytorchs_to_the_bit_but_for_adams_rounding():
    for dtype in (BF16, F16):
        model, twin = mlp(), mlp()
        graph, plain = amp_graph(model, 0, virtual(1), dtype), Plain(twin, dtype)
        batch = batch_of(model, 0)
        assert torch.equal(graph(*batch), plain.step(*batch))
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
