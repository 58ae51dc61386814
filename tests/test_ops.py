"""The tensor ops that graphzero adds."""

import pytest
import torch
import torch.nn.functional as F

from graphzero.ops import ATTENTION, ATTENTION_BACKWARD, attention_backward_by_definition, attention_by_definition

CASES = [(None, False), (None, True), ("whole", False), ("rows", True), ("masked row", False)]


def sample(bias, dtype=torch.float64):
    q, k, v = (torch.randn(2, 3, n, 4, dtype=dtype) for n in (5, 7, 7))
    mask = {
        None: None,
        "whole": torch.randn(2, 3, 5, 7),
        "rows": torch.randn(1, 1, 5, 7),
        "masked row": torch.zeros(5, 7),
    }[bias]
    if bias == "masked row":
        mask[2] = float("-inf")
        mask = mask[None, None]
    return q, k, v, None if mask is None else mask.to(dtype)


@pytest.mark.parametrize(("bias", "causal"), CASES)
def test_attention_by_definition_is_the_kernel_of_the_cpu(bias, causal):
    q, k, v, mask = sample(bias)
    for found, expected in zip(
        attention_by_definition(q, k, v, mask, causal, 0.3), ATTENTION(q, k, v, mask, causal, 0.3), strict=True
    ):
        rows = [0, 1, 3, 4] if bias == "masked row" else slice(None)  # what a kernel gives for such a row is its own
        torch.testing.assert_close(found[:, :, rows], expected[:, :, rows])


@pytest.mark.parametrize(("bias", "causal"), CASES[:4])
def test_its_backward_is_autograds_and_the_kernels(bias, causal):
    q, k, v, mask = sample(bias)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    merged = mask
    if mask is not None and causal:
        merged = mask.masked_fill(~torch.ones(5, 7, dtype=torch.bool).tril(), float("-inf"))
    out = F.scaled_dot_product_attention(*leaves, attn_mask=merged, is_causal=causal and merged is None, scale=0.3)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, grad)
    made, logsumexp = attention_by_definition(q, k, v, mask, causal, 0.3)
    found = attention_backward_by_definition(grad, q, k, v, made, logsumexp, mask, causal, 0.3)
    kernel = ATTENTION_BACKWARD(grad, q, k, v, *ATTENTION(q, k, v, mask, causal, 0.3), mask, causal, 0.3)
    for one, other, own in zip(found, expected, kernel, strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one, own)
        assert one.stride() == own.stride()


def test_half_precision_is_computed_in_float32():
    q, k, v, _ = sample(None)
    half = [x.bfloat16() for x in (q, k, v)]
    out, logsumexp = attention_by_definition(*half, None, True, 0.3)
    assert (out.dtype, logsumexp.dtype) == (torch.bfloat16, torch.float32)
    exact, _ = attention_by_definition(*[x.double() for x in half], None, True, 0.3)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
