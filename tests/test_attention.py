"""Attention: which kernel computes it, and that each one gives what the op promises."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from graphs import TrainGraph
from torch import nn

import graphzero as gz
from graphzero import _compat
from graphzero.ops import ATTENTION, ATTENTION_BACKWARD, attention_cuda, attention_definition, attention_kernels
from graphzero.ops.attention_contract import AttentionCase, wide
from graphzero.ops.attention_definition import backward_by_definition, by_definition
from graphzero.ops.attention_kernels import KERNELS, choose

MASKS = [(None, False), (None, True), ("whole", False), ("rows", True), ("masked row", False)]
CUDA = {kernel.name: kernel for kernel in KERNELS["cuda"]}


def sample(bias, dtype=torch.float64, dim=4, queries=5, keys=7):
    q, k, v = (torch.randn(2, 3, n, dim, dtype=dtype) for n in (queries, keys, keys))
    mask = {
        None: None,
        "whole": torch.randn(2, 3, queries, keys),
        "rows": torch.randn(1, 1, queries, keys),
        "keys": torch.randn(2, 1, 1, keys),
        "one": torch.randn(2, 3, queries, 1),
        "masked row": torch.zeros(queries, keys),
    }[bias]
    if bias == "masked row":
        mask[2] = float("-inf")
        mask = mask[None, None]
    return q, k, v, None if mask is None else mask.to(dtype)


def test_the_logsumexp_is_dense_as_the_op_says():
    q, k, v, _ = sample(None)
    assert ATTENTION(q, k, v, None, True, 0.3)[1].is_contiguous()


# ---- by definition


@pytest.mark.parametrize(("bias", "causal"), MASKS)
def test_attention_by_definition_is_the_kernel_of_the_cpu(bias, causal):
    q, k, v, mask = sample(bias)
    for found, expected in zip(
        by_definition(q, k, v, mask, causal, 0.3), ATTENTION(q, k, v, mask, causal, 0.3), strict=True
    ):
        rows = [0, 1, 3, 4] if bias == "masked row" else slice(None)  # what a kernel gives for such a row is its own
        torch.testing.assert_close(found[:, :, rows], expected[:, :, rows])


@pytest.mark.parametrize(("bias", "causal"), MASKS[:4])
def test_its_backward_is_autograds_and_the_kernels(bias, causal):
    q, k, v, mask = sample(bias)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    merged = mask
    if mask is not None and causal:
        merged = mask.masked_fill(~torch.ones(5, 7, dtype=torch.bool).tril(), float("-inf"))
    out = F.scaled_dot_product_attention(*leaves, attn_mask=merged, is_causal=causal and merged is None, scale=0.3)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, grad)
    made, logsumexp = by_definition(q, k, v, mask, causal, 0.3)
    found = backward_by_definition(grad, q, k, v, made, logsumexp, mask, causal, 0.3)
    kernel = ATTENTION_BACKWARD(grad, q, k, v, *ATTENTION(q, k, v, mask, causal, 0.3), mask, causal, 0.3)
    for one, other, own in zip(found, expected, kernel, strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one, own)
        assert one.stride() == own.stride()


def test_half_precision_is_computed_in_float32():
    q, k, v, _ = sample(None)
    half = [x.bfloat16() for x in (q, k, v)]
    out, logsumexp = by_definition(*half, None, True, 0.3)
    assert (out.dtype, logsumexp.dtype) == (torch.bfloat16, torch.float32)
    exact, _ = by_definition(*[x.double() for x in half], None, True, 0.3)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [None, "whole", "rows", "keys", "one"])
def test_the_cpus_backward_of_16_bit_values_is_that_of_float32_rounded_once(monkeypatch, dtype, bias):
    q, k, v, mask = sample(bias, dtype)
    out, logsumexp = ATTENTION(q, k, v, mask, bias is None, 0.3)
    grad = torch.randn_like(out)
    wide_ones = [x.float() for x in (grad, q, k, v, out)]
    wide_mask = None if mask is None else mask.float()
    exact = ATTENTION_BACKWARD(*wide_ones, logsumexp, wide_mask, bias is None, 0.3)
    monkeypatch.setattr(_compat, "has_tiles", lambda: False)
    for elements in (1, 2 * 5 * 4 * 3, 2**15):  # a head at a time, some, all samples at once
        monkeypatch.setattr(attention_kernels, "ELEMENTS", elements)
        found = ATTENTION_BACKWARD(grad, q, k, v, out, logsumexp, mask, bias is None, 0.3)
        for one, other in zip(found, exact, strict=True):
            assert torch.equal(one, other.to(dtype))
            assert one.stride() == other.stride()


def test_a_cpu_with_a_unit_for_16_bit_products_keeps_torchs_backward(monkeypatch):
    def chosen(tiles, dtype=torch.bfloat16, backward=True):
        monkeypatch.setattr(_compat, "has_tiles", lambda: tiles)
        return choose(AttentionCase("cpu", (0, 0), dtype, 64, 8, 8, True, True, backward)).name

    assert chosen(False) == chosen(False, torch.float16) == "flash_cpu_in_float32"
    assert chosen(True) == chosen(False, torch.float32) == chosen(False, backward=False) == "flash_cpu"


# ---- pieces of queries


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("keys", [5, 8, 11])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("step", [1, 2, 3, 8])
def test_causal_attention_of_pieces_of_queries_is_that_of_the_whole(dtype, most, keys, dropped, step):
    (q, k, v, _), draws = sample(None, dtype, queries=8, keys=keys), rows_of(2, 3, 8)
    grad = torch.randn_like(q)

    def both(rows, **place):
        more = (draws[:, :, rows], 0.3) if dropped else ()
        operands = q[:, :, rows], k, v
        out, sums = ATTENTION(*operands, None, True, 0.5, *more, **place)
        return out, sums, *ATTENTION_BACKWARD(
            grad[:, :, rows], *operands, out, sums, None, True, 0.5, *more, **place
        )  # fmt: skip

    if step == 1:
        pieces = [both(slice(start, start + 3), start=start, total=8) for start in (0, 3, 6)]
    else:
        pieces = [both(slice(start, None, step), start=start, step=step, total=8) for start in range(step)]
    places = torch.cat([torch.arange(8)[start::step] for start in range(step)])
    whole = both(slice(None))
    for i, expected in enumerate(whole):
        found = [piece[i].double() for piece in pieces]
        joined = torch.cat(found, 2)[:, :, places.argsort()] if i < 3 else torch.stack(found).sum(0)
        torch.testing.assert_close(joined, expected.double(), rtol=most, atol=most)
        assert all(torch.empty_like(piece[i]).stride() == piece[i].stride() for piece in pieces)
    assert {x.transpose(1, 2).is_contiguous() for piece in pieces for x in (piece[0], *piece[2:])} == {True}


def test_a_row_that_a_mask_blinds_in_one_block_of_keys_reads_the_other():
    q, k, v, _ = sample(None, queries=4, keys=8)
    mask = torch.zeros(1, 1, 4, 8, dtype=torch.float64)
    mask[..., 1, :4] = mask[..., 2, 4:] = mask[..., 3, :] = float("-inf")
    out, sums = ATTENTION(q, k, v, mask, True, 0.3, start=4, total=8)
    hidden = torch.ones(4, 8, dtype=torch.bool).triu(5)
    expected, expected_sums = by_definition(q, k, v, mask.masked_fill(hidden, float("-inf")), False, 0.3)
    torch.testing.assert_close(out[:, :, :3], expected[:, :, :3])
    torch.testing.assert_close(sums[:, :, :3], expected_sums[:, :, :3])
    assert not out.isnan().any()


def test_results_are_laid_out_alike_however_queries_are():
    for q in (torch.randn(2, 3, 5, 4), torch.randn(2, 5, 3, 4).transpose(1, 2), torch.randn(2, 3, 9, 4)[:, :, 2:7]):
        assert ATTENTION(q, q, q, None, True, 0.3)[0].transpose(1, 2).is_contiguous()


# ---- dropout


def dropped_by(draws, keys, p):
    """Which weights the op drops: with equal scores and a unit vector for each key they are its result."""
    q, k = (torch.zeros(*draws.shape[:2], n, 1, dtype=torch.float64) for n in (draws.shape[2], keys))
    v = torch.eye(keys, dtype=torch.float64).expand(*draws.shape[:2], -1, -1)
    return ATTENTION(q, k, v, None, False, 1.0, draws, p)[0] == 0


def rows_of(*shape):
    return torch.randint(0, 2**48, shape)


@pytest.mark.parametrize("elements", [1, 40, 2**17])
@pytest.mark.parametrize(("bias", "causal"), MASKS)
def test_attention_with_dropout_is_plain_attention_with_the_mask_that_it_draws(monkeypatch, elements, bias, causal):
    monkeypatch.setitem(attention_definition.ELEMENTS, "cpu", elements)
    (q, k, v, mask), draws, p = sample(bias, queries=6), rows_of(2, 3, 6), 0.4
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * 0.3 + (0.0 if mask is None else mask)
    if causal:
        scores = scores.masked_fill(~torch.ones(6, 7, dtype=torch.bool).tril(), float("-inf"))
    blind = scores.isneginf().all(-1, keepdim=True)  # a row that sees nothing attends to nothing
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind | dropped_by(draws, 7, p), 0.0)
    expected = weights / (1 - p) @ leaves[2]
    out, logsumexp = ATTENTION(q, k, v, mask, causal, 0.3, draws, p)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1))
    grad = torch.randn_like(out)
    found = ATTENTION_BACKWARD(grad, q, k, v, out, logsumexp, mask, causal, 0.3, draws, p)
    for one, other in zip(found, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.5, 0.9, 1.0])
def test_weights_are_dropped_as_often_as_said_and_apart_from_one_another(p):
    torch.manual_seed(0)
    dropped = dropped_by(rows_of(1, 2, 300), 512, p).double().flatten(0, 2)
    if p in (0.0, 1.0):
        assert (dropped == p).all()
        return
    spread = (p * (1 - p)) ** 0.5
    z = (dropped - p) / spread
    assert abs(z.mean()) * z.numel() ** 0.5 < 4
    for ones in (z, z.mT):
        of_lines, between = ones.mean(1) ** 2 * ones.shape[1], (ones @ ones.mT / ones.shape[1] ** 0.5).fill_diagonal_(0)
        assert 0.7 < of_lines.mean() < 1.3 and 0.9 < between.square().mean() < 1.1


def test_rows_and_keys_of_other_numbers_are_dropped_otherwise():
    one = dropped_by(torch.arange(64).view(1, 1, 64), 64, 0.5)[0, 0]
    assert len({tuple(row.tolist()) for row in (*one, *one.mT)}) == 128


def test_dropout_in_16_bit_is_that_of_float32_rounded():
    (q, k, v, _), draws = sample(None, torch.bfloat16), rows_of(2, 3, 5)
    exact = ATTENTION(*(x.float() for x in (q, k, v)), None, True, 0.3, draws, 0.3)
    found = ATTENTION(q, k, v, None, True, 0.3, draws, 0.3)
    torch.testing.assert_close(found[0], exact[0].bfloat16(), rtol=1e-2, atol=1e-2)
    grad = torch.randn_like(q)
    wide_ones = [x.float() for x in (grad, q, k, v, found[0])]
    exact = ATTENTION_BACKWARD(*wide_ones, found[1], None, True, 0.3, draws, 0.3)
    found = ATTENTION_BACKWARD(grad, q, k, v, *found, None, True, 0.3, draws, 0.3)
    for one, other in zip(found, exact, strict=True):
        assert torch.equal(one, other.bfloat16()) and one.stride() == other.stride()


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3).transpose(1, 2).flatten(2)
        )


def loss_and_output(model, x):
    y = model(x)
    return y.square().mean(), y


def attention_graph(ranks, names, stage=0, parts=1, memory=None, heads=None) -> TrainGraph:
    placed = gz.placement("cpu", ranks, names=names, virtual=True)
    model = Attends().double()
    if heads is not None:
        gz.to_global(model.qkv, placement=placed, sbp=dict.fromkeys(("weight", "bias"), heads))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    graph = TrainGraph(model, loss_and_output, optimizer, placement=placed, stage=stage, micro_batches=parts)
    graph.config.set_activation_memory(memory)
    return graph


def test_dropout_in_attention_is_one_op_and_the_same_on_any_layout():
    S, B = gz.sbp.S, gz.sbp.B
    x = torch.randn(8, 6, 8, dtype=torch.float64)

    def run(*args, **settings):
        torch.manual_seed(5)
        graph = attention_graph(*args, **settings)
        found = torch.stack([graph(x)[1] for _ in range(2)])
        assert {ATTENTION, ATTENTION_BACKWARD} <= {node.target for node in graph.program.nodes}
        assert not any("softmax" in str(node.target) for node in graph.program.nodes)
        assert str(gz.parse(str(graph.program))) == str(graph.program)
        return found

    wanted = run(range(1), ("dp",))
    assert not torch.equal(*wanted)
    for found in (
        run(range(4), ("dp",), stage=3), run(range(2), ("dp",), stage=2, parts=4),
        run(range(2), ("dp",), memory="checkpoint"),
        run(np.arange(4).reshape(2, 2), ("dp", "tp"), stage=3, heads=(B, S(0, 3)), parts=2),
    ):  # fmt: skip
        torch.testing.assert_close(found, wanted)


# ---- choosing


def case(dtype=torch.bfloat16, capability=(9, 0), dim=64, queries=128, keys=128, bias=False, causal=True, **more):
    return AttentionCase("cuda", capability, dtype, dim, queries, keys, bias, causal, **more)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (case(), "flash"),
        (case(dtype=torch.float16, capability=(8, 0)), "flash"),
        (case(dim=80), "flash"),
        (case(dim=61), "flash"),  # padded to 64
        (case(dim=249), "flash"),
        (case(dim=257), "efficient"),
        (case(bias=True), "efficient"),
        (case(queries=64, causal=True), "efficient"),  # flash would align the mask to the last key
        (case(queries=64, causal=False), "flash"),
        (case(dtype=torch.float32), "efficient"),
        (case(dtype=torch.float64), "definition"),
        (case(capability=(7, 5), dtype=torch.float16), "efficient"),
        (case(capability=(7, 5)), "definition"),  # bfloat16 came with 8.0
        (case(capability=(8, 6), dim=200), "flash"),
        (case(capability=(8, 6), dim=200, backward=True), "efficient"),
        (case(capability=(8, 6), dim=225, backward=True), "flash"),
        (case(capability=(9, 0), dim=200, backward=True), "flash"),
        (case(capability=(12, 0), dim=200, backward=True), "efficient"),
        (case(capability=(13, 0)), "definition"),
        (case(keys=0, causal=False), "definition"),
        (AttentionCase("cpu", (0, 0), torch.float32, 64, 8, 8, True, True), "flash_cpu"),
        (AttentionCase("mps", (0, 0), torch.float32, 64, 8, 8, True, True), "definition"),
    ],
)
def test_the_first_kernel_that_fits_is_chosen(monkeypatch, wanted, expected):
    monkeypatch.setattr(_compat, "attention_order", lambda: [1, 2, 0, 3])  # as torch has it on most GPUs
    assert choose(wanted).name == expected


def test_kernels_that_torch_has_switched_off_are_passed_over(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.CUDNN_ATTENTION]):
        assert choose(case()).name == "cudnn"
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
        assert choose(case()).name == "efficient"
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        assert choose(case()).name == "definition"


def test_torchs_order_of_kernels_is_kept(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    both = [torch.nn.attention.SDPBackend.CUDNN_ATTENTION, torch.nn.attention.SDPBackend.FLASH_ATTENTION]
    for order in (both, both[::-1]):
        with torch.nn.attention.sdpa_kernel(order, set_priority=True):
            assert choose(case()).name == order[0].name.split("_")[0].lower()
            assert choose(case(dim=200)).name == "flash"  # cuDNN's does not fit


# ---- kernels that are not here: stand-ins that refuse what the real ones refuse


def _check_rows(*tensors, multiple=8):
    for x in tensors:
        step = 16 // x.element_size()
        assert x.shape[-1] % multiple == 0, "a head dim that the kernel does not know"
        assert x.stride(-1) == 1 and not any(s % step for s in (x.storage_offset(), *x.stride()[:-1]))


def _check_bias(bias, q, k):
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.stride(-1) == 1 and bias.dtype == q.dtype
        assert not any(s % 16 for s in (bias.storage_offset(), *bias.stride()[:-1]))


def _exact(*args):
    out, logsumexp = by_definition(*args)
    return out, logsumexp.to(wide(out.dtype))


def _efficient(q, k, v, bias, compute, dropout, causal, *, scale):
    _check_rows(q, k, v)
    _check_bias(bias, q, k)
    out, logsumexp = _exact(q, k, v, bias, causal, scale)
    return out, F.pad(logsumexp, (0, -q.shape[2] % 32), value=float("inf")), torch.empty(()), torch.empty(())


def _efficient_backward(grad, q, k, v, bias, out, logsumexp, seed, offset, dropout, wanted, causal, *, scale):
    _check_rows(grad, q, k, v, out)
    _check_bias(bias, q, k)
    assert logsumexp.stride(0) % 8 == logsumexp.stride(1) % 8 == 0, "LSE is not correctly aligned"
    assert logsumexp.shape[-1] % 32 == 0 and bool(logsumexp[..., q.shape[2] :].isposinf().all())
    return (*backward_by_definition(grad, q, k, v, out, logsumexp[..., : q.shape[2]], bias, causal, scale), None)


def _flash(q, k, v, dropout, causal, *, scale):
    _check_rows(q, k, v)
    out, logsumexp = _exact(q, k, v, None, causal, scale)
    return out, logsumexp, None, None, q.shape[2], k.shape[2], torch.empty(2), torch.empty(()), torch.empty(0)


def _flash_backward(grad, q, k, v, out, logsumexp, cq, ck, mq, mk, dropout, causal, seed, offset, *, scale):
    _check_rows(grad, q, k, v, out)
    assert logsumexp.is_contiguous() and logsumexp.shape == q.shape[:3] and (mq, mk) == (q.shape[2], k.shape[2])
    return backward_by_definition(grad, q, k, v, out, logsumexp, None, causal, scale)


def _cudnn(q, k, v, bias, compute, dropout, causal, *, scale):
    out, logsumexp, *rest = _flash(q, k, v, dropout, causal, scale=scale)
    return out.contiguous(), logsumexp.transpose(1, 2).contiguous().transpose(1, 2).unsqueeze(-1), *rest


def _cudnn_backward(grad, q, k, v, out, stats, seed, offset, bias, cq, ck, mq, mk, dropout, causal, *, scale):
    assert stats.dim() == 4 and stats.stride(1) == 1, "not the statistics that forward gave"
    return _flash_backward(grad, q, k, v, out, stats[..., 0].contiguous(), cq, ck, mq, mk, 0, causal, 0, 0, scale=scale)


@pytest.fixture
def stand_ins(monkeypatch):
    made = SimpleNamespace(
        _scaled_dot_product_efficient_attention=_efficient,
        _scaled_dot_product_efficient_attention_backward=_efficient_backward,
        _scaled_dot_product_flash_attention=_flash,
        _scaled_dot_product_flash_attention_backward=_flash_backward,
        _scaled_dot_product_cudnn_attention=_cudnn,
        _scaled_dot_product_cudnn_attention_backward=_cudnn_backward,
    )
    monkeypatch.setattr(attention_cuda, "aten", made)


@pytest.mark.parametrize("dim", [4, 8, 13])
@pytest.mark.parametrize(
    ("name", "bias", "causal"),
    [
        ("flash", None, False),
        ("cudnn", None, False),
        ("efficient", None, True),
        ("efficient", "whole", False),
        ("efficient", "rows", True),
        ("efficient", "keys", False),
        ("efficient", "one", False),
    ],
)
@pytest.mark.usefixtures("stand_ins")
def test_what_a_kernel_pads_is_not_seen_outside(name, bias, causal, dim):
    q, k, v, mask = sample(bias, dim=dim)
    grad = torch.randn_like(q)
    expected, sums = by_definition(q, k, v, mask, causal, 0.3)
    out, logsumexp = CUDA[name].forward(q, k, v, mask, causal, 0.3)
    found = CUDA[name].backward(grad, q, k, v, out, logsumexp, mask, causal, 0.3)
    torch.testing.assert_close((out, logsumexp), (expected, sums))
    assert out.stride() == expected.stride() and logsumexp.is_contiguous()
    wanted = backward_by_definition(grad, q, k, v, expected, sums, mask, causal, 0.3)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()
        assert one.untyped_storage().nbytes() == one.numel() * one.element_size()


@pytest.mark.parametrize("queries", [31, 32, 33])
@pytest.mark.usefixtures("stand_ins")
def test_logsumexp_of_the_efficient_kernel_is_cut_and_padded(queries):
    q, k, v, _ = sample(None, dtype=torch.float32, dim=8, queries=queries)
    out, logsumexp = CUDA["efficient"].forward(q, k, v, None, False, 0.3)
    assert logsumexp.shape == (2, 3, queries) and logsumexp.untyped_storage().nbytes() == 2 * 3 * queries * 4
    CUDA["efficient"].backward(out, q, k, v, out, logsumexp, None, False, 0.3)


@pytest.mark.usefixtures("stand_ins")
def test_inputs_that_lie_unaligned_are_copied():
    wide = torch.randn(3, 2, 3, 5, 9)
    q, k, v = wide[..., 1:].unbind()
    out, _ = CUDA["flash"].forward(q, k, v, None, False, 0.3)
    torch.testing.assert_close(out, by_definition(q, k, v, None, False, 0.3)[0])


def test_cudnn_reads_pieces_of_one_projection_where_they_are(stand_ins, monkeypatch):
    given = []

    def forward(*args, **kwargs):
        given.extend(args[:3])
        return _cudnn(*args, **kwargs)

    def backward(*args, **kwargs):
        given.extend(args[1:4])
        return _cudnn_backward(*args, **kwargs)

    monkeypatch.setattr(attention_cuda.aten, "_scaled_dot_product_cudnn_attention", forward)
    monkeypatch.setattr(attention_cuda.aten, "_scaled_dot_product_cudnn_attention_backward", backward)
    q, k, v = torch.randn(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind()
    out, sums = CUDA["cudnn"].forward(q, k, v, None, False, 0.3)
    found = CUDA["cudnn"].backward(out, q, k, v, out, sums, None, False, 0.3)
    assert [x.data_ptr() for x in given] == [x.data_ptr() for x in (q, k, v)] * 2
    torch.testing.assert_close(found, backward_by_definition(out, q, k, v, out, sums, None, False, 0.3))


@pytest.mark.usefixtures("stand_ins")
def test_kernels_keep_one_contract_so_that_backward_may_be_another_one():
    q, k, v, _ = sample(None, dtype=torch.float32)
    expected = backward_by_definition(q, q, k, v, *by_definition(q, k, v, None, False, 0.3), None, False, 0.3)
    out, logsumexp = CUDA["cudnn"].forward(q, k, v, None, False, 0.3)
    for name in ("flash", "efficient", "cudnn"):
        found = CUDA[name].backward(q, q, k, v, out, logsumexp, None, False, 0.3)
        torch.testing.assert_close(found, expected)
