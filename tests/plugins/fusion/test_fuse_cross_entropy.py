"""Backward of a cross entropy is one op, which needs no second tensor of the logits' size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import TrainGraph, on_output
from torch import Tensor, nn
from torch.nn import functional as F
from toys import lines, lower, run

import graphzero as gz
from graphzero.ir.text.parser import parse
from graphzero.ops import cross_entropy
from graphzero.passes import Fuse, Pipeline
from graphzero.plan import plan_of
from graphzero.testing import assert_same_step

aten = torch.ops.aten
CLASSES = 7
Loss = Callable[[Tensor, Tensor], Tensor]
WEIGHTS = torch.linspace(0.5, 2.0, CLASSES)

FUSED: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "sum": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "none": lambda z, y: (F.cross_entropy(z, y, reduction="none") * torch.arange(1.0, 13.0)).mean(),
    "ignored": lambda z, y: F.cross_entropy(z, y, ignore_index=3),
    "weights": lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS),
    "both by hand": lambda z, y: F.nll_loss(F.log_softmax(z, -1), y),
    "sequences": lambda z, y: F.cross_entropy(z.view(4, 3, CLASSES).transpose(1, 2), y.view(4, 3)),
    "images": lambda z, y: F.cross_entropy(z.view(4, 3, 1, CLASSES).permute(0, 3, 1, 2), y.view(4, 3, 1)),
}
LEFT: dict[str, Loss] = {
    "smoothing": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "one sample": lambda z, y: F.cross_entropy(z.sum(0), y[0]),
    "two readers": lambda z, y: _twice(F.log_softmax(z, -1), y),
    "other rows": lambda z, y: F.nll_loss(F.log_softmax(z, 0), y),
}


def _twice(logs: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(logs, y) + logs.square().mean()


def head_graph(loss: Loss, ranks: int = 2, stage: int = 0, dtype: torch.dtype = torch.float32) -> TrainGraph:
    torch.manual_seed(0)
    head = nn.Linear(5, CLASSES).to(dtype)
    return TrainGraph(head, on_output(loss), torch.optim.SGD(head.parameters(), lr=0.1), placement=ranks, stage=stage)


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(12, 5, generator=generator).to(dtype), torch.randint(CLASSES, (12,), generator=generator)


def compiled(loss: Loss) -> gz.Graph:
    return head_graph(loss).compile(*data())


@pytest.mark.parametrize("name", FUSED)
def test_backward_of_a_cross_entropy_is_one_op(name: str) -> None:
    program = compiled(FUSED[name]).program
    assert lines(program, "cross_entropy_backward(")
    assert not lines(program, "nll_loss_backward(") + lines(program, "_log_softmax_backward_data(")


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_plain_cross_entropy_stays_as_it_is(name: str) -> None:
    assert not lines(compiled(LEFT[name]).program, "cross_entropy_backward(")


@pytest.mark.same_kernels
@pytest.mark.parametrize("name", FUSED)
def test_the_pass_keeps_the_step_to_the_bit_and_its_text_can_be_read(name: str) -> None:
    record = next(record for record in compiled(FUSED[name]).history if record.name == "fuse_cross_entropy")
    assert_same_step(record.before, record.after, rtol=0, atol=0)
    assert str(gz.parse(str(record.after))) == str(record.after)


def test_it_is_written_over_the_log_probabilities() -> None:
    (line,) = lines(compiled(F.cross_entropy).program, "cross_entropy_backward(")
    assert "out=_log_softmax" in line


def test_log_probabilities_that_the_step_returns_are_not_written_over() -> None:
    def loss_and_logs(z: Tensor, y: Tensor) -> Any:
        logs = F.log_softmax(z, -1)
        return F.nll_loss(logs, y), logs

    graph, (x, y) = head_graph(loss_and_logs), data()
    wanted = F.log_softmax(graph.model(x), -1).detach()
    torch.testing.assert_close(graph(x, y)[1], wanted)
    assert all("out=_log_softmax" not in line for line in lines(graph.program, "cross_entropy_backward("))


STEP = """
graph step(dp=2)
  x   = batch()  : f32[64, 2]   S(0)!
  y   = batch()  : i64[64]      S(0)!
  w   = param()  : f32[2, 100]  B!
forward:
  wf  = use(w)                                  : f32[2, 100]
  z   = mm(x, wf)                               : f32[64, 100]
  lp  = _log_softmax(z, 1, False)               : f32[64, 100]
  nll = nll_loss_forward(lp, y, None, 2, -100)  : (f32[], f32[])
  l   = nll[0]                                  : f32[]
  n   = nll[1]                                  : f32[]
backward:
  one = ones_like(l)                            : f32[]
  dlp = nll_loss_backward(one, lp, y, None, 2, -100, n)    : f32[64, 100]
  dz  = _log_softmax_backward_data(dlp, lp, 1, torch.float32) : f32[64, 100]
  xt  = t(x)                                    : f32[2, 64]
  g   = mm(xt, dz)                              : f32[2, 100]  ; gradient(w)
update:
  wu  = use(w)                                  : f32[2, 100]
  w1  = sub(wu, g)                              : f32[2, 100]
  return l; update(w=w1)
"""


@pytest.mark.same_kernels
def test_at_the_peak_there_is_one_tensor_of_the_logits_size() -> None:
    fused = lower(STEP)
    apart = lower(
        STEP.replace("dlp, lp, 1", "two, lp, 1").replace(
            "  dz  =", "  two = mul.Scalar(dlp, 1.0) : f32[64, 100]\n  dz  ="
        )
    )
    logits = 32 * 100 * 4
    assert plan_of(fused).memory.peak < 2 * logits < plan_of(apart).memory.peak
    for name, wanted in run(apart).items():
        assert all(map(torch.equal, run(fused)[name], wanted)), name


@pytest.mark.parametrize("name", FUSED)
def test_stages_agree_to_the_bit_and_with_one_rank(name: str) -> None:
    found = {}
    for ranks, stage in ((1, 0), (4, 0), (4, 1), (4, 2), (4, 3)):
        graph = head_graph(FUSED[name], ranks, stage)
        for _ in range(3):
            graph(*data())
        found[ranks, stage] = graph.full_state_dict()["modules"]["model"]["weight"]
    assert all(torch.equal(found[4, stage], found[4, 0]) for stage in (1, 2, 3))
    torch.testing.assert_close(found[4, 0], found[1, 0])


def test_split_classes_keep_the_definition() -> None:
    text = STEP.replace("B!", "S(1)!").replace("S(0)!", "B!")
    program = lower(
        text.replace("use(w)                                  : f32[2, 100]", "use(w) : f32[2, 100]  S(1)!")
    )
    assert lines(program, "exp(")
    assert not lines(program, "cross_entropy_backward(")


def test_the_pass_alone_takes_a_program_that_was_read() -> None:
    record = next(record for record in compiled(F.cross_entropy).history if record.name == "fuse_cross_entropy")
    assert lines(Pipeline([Fuse()])(parse(str(record.before))), "cross_entropy_backward(")


# ---- the kernel


SHAPES = [(37, 131), (5, 3), (1, 1000), (4, 7, 6, 5), (3, 13, 1, 9), (0, 4)]


@pytest.mark.parametrize("elements", [1, 300, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_torchs_composition_to_the_bit_however_many_rows_go_at_once(
    shape: tuple[int, ...], dtype: torch.dtype, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cross_entropy.ELEMENTS, "cpu", elements)
    generator = torch.Generator().manual_seed(0)
    logs = torch.randn(shape, generator=generator).to(dtype).log_softmax(1)
    target = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)
    weight = torch.rand(shape[1], generator=generator).to(dtype)
    each = torch.rand(target.shape, generator=generator).to(dtype)
    loss = aten.nll_loss2d_backward if len(shape) == 4 else aten.nll_loss_backward
    for reduction, grad in ((0, each), (1, torch.tensor(0.3, dtype=dtype)), (2, torch.tensor(0.3, dtype=dtype))):
        for weights in (None, weight):
            given = (grad, logs, target, weights, reduction, 2, torch.tensor(1.7, dtype=dtype))
            wanted = aten._log_softmax_backward_data(loss(*given), logs, 1, dtype)
            assert torch.equal(cross_entropy.backward(*given), wanted)
            over = logs.clone()
            cross_entropy.backward_out(*given[:1], over, *given[2:], out=over)
            assert torch.equal(over, wanted)


def test_samples_that_are_ignored_have_no_gradient() -> None:
    logs, target = torch.randn(6, 4).log_softmax(1), torch.tensor([0, -100, 3, -100, 1, 2])
    found = cross_entropy.backward(torch.tensor(1.0), logs, target, None, 2, -100, torch.tensor(4.0))
    assert torch.equal(found[target == -100], torch.zeros(2, 4)) and bool((found[target >= 0] != 0).all())


def test_columns_and_rooms_with_gaps_do() -> None:
    logs, target = torch.randn(6, 4).log_softmax(1), torch.tensor([0, 1, 3, 3, 1, 2])
    given = (None, 2, -100, torch.tensor(6.0))
    wanted = cross_entropy.backward(torch.tensor(1.0), logs, target, *given)
    wide = torch.zeros(6, 8)
    columns = logs.t().contiguous().t()
    cross_entropy.backward_out(torch.tensor(1.0), columns, target, *given, out=wide[:, ::2])
    assert torch.equal(wide[:, ::2], wanted) and not wide[:, 1::2].any()
