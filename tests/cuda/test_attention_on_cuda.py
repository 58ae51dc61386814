"""Every attention kernel of CUDA gives what the CPU's gives, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphzero.capture.trace.attention import attention
from graphzero.ops import ATTENTION, ATTENTION_BACKWARD
from graphzero.ops.attention_definition import DEFINITION
from graphzero.ops.attention_kernels import KERNELS, case_of, choose

BY_NAME = {kernel.name: kernel for kernel in (*KERNELS["cuda"], DEFINITION)}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def sample(dtype, dim, queries=40, keys=40, bias=None):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, dim, generator=generator).to(dtype) for n in (queries, keys, keys))
    shape = {"whole": (2, 3, queries, keys), "rows": (1, 1, queries, keys), "keys": (2, 1, 1, keys)}.get(bias)
    mask = None if shape is None else torch.randn(shape, generator=generator).to(dtype)
    return q, k, v, mask


def on(device, *tensors):
    return [None if x is None else x.to(device) for x in tensors]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [64, 40, 61, 13, 200])
@pytest.mark.parametrize(
    ("bias", "causal", "keys"),
    [
        (None, False, 40),
        (None, True, 40),
        (None, False, 23),
        ("whole", False, 40),
        ("rows", True, 40),
        ("keys", False, 33),
    ],
)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_kernel_equals_the_cpus(name, bias, causal, keys, dim, dtype):
    q, k, v, mask = sample(dtype, dim, keys=keys, bias=bias)
    kernel, given = BY_NAME[name], on("cuda", q, k, v, mask)
    for backward in (False, True):
        if not kernel.fits(case_of(given[0], given[1], given[3], causal, backward)):
            pytest.skip(f"{name} does not compute this on {torch.cuda.get_device_name()}")
    exact, scale = on(torch.float32, q, k, v, mask), dim**-0.5
    out, logsumexp = ATTENTION(*exact, causal, scale)
    grad = torch.randn_like(out).to(dtype)
    expected = ATTENTION_BACKWARD(grad.float(), *exact[:3], out, logsumexp, exact[3], causal, scale)
    made, sums = kernel.forward(*given, causal, scale)
    found = kernel.backward(grad.cuda(), *given[:3], made, sums, given[3], causal, scale)
    assert made.dtype == dtype and sums.dtype == torch.float32 and sums.is_contiguous()
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(sums.cpu(), logsumexp, **close)
    for one, other in zip((made, *found), (out, *expected), strict=True):
        torch.testing.assert_close(one.cpu().float(), other, **close)
        assert one.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 61, 256])
def test_what_fits_here_fits_by_torchs_own_rules(dim, causal, dtype):
    q, k, v, _ = on("cuda", *sample(dtype, dim))
    padded = [F.pad(x, (0, -dim % 8)) for x in (q, k, v)]
    params = torch.backends.cuda.SDPAParams(*padded, None, 0.0, causal, False)
    case = case_of(q, k, None, causal)
    if BY_NAME["flash"].fits(case):
        assert torch.backends.cuda.can_use_flash_attention(params, True)
    if BY_NAME["efficient"].fits(case):
        assert torch.backends.cuda.can_use_efficient_attention(params, True)
    if BY_NAME["cudnn"].fits(case):
        assert torch.backends.cuda.can_use_cudnn_attention(params, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_that_torch_prefers_is_chosen(dtype):
    q, k, v = torch.randn(2, 64, 3, 4, 64, device="cuda", dtype=dtype).permute(2, 0, 3, 1, 4).unbind()
    number = torch._fused_sdp_choice(q, k, v, is_causal=True)
    assert choose(case_of(q, k, None, True)).backend == number


def test_grouped_heads_equal_torchs():
    q, k, v = (torch.randn(2, heads, 24, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    found = attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_pieces_of_one_projection_need_no_copy():
    whole = torch.randn(2, 16, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2) for x in whole.unbind(2))
    if not BY_NAME["flash"].fits(case_of(q, k, None, True)):
        pytest.skip("there is no flash attention on this GPU")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, sums = BY_NAME["flash"].forward(q, k, v, None, True, 0.125)
    made = out.untyped_storage().nbytes() + sums.untyped_storage().nbytes()
    assert torch.cuda.max_memory_allocated() - before <= made + 4096
