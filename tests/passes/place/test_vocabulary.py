"""Language models whose vocabulary is split over ranks: embedding, head and loss never make whole logits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from graphs import TrainGraph, on_output
from torch import Tensor, nn
from torch.nn import functional as F
from toys import history, lines, lower

import graphzero as gz
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.parser import parse
from graphzero.sbp import B, S
from graphzero.testing import assert_graph, assert_same_step

WIDTH, VOCABULARY = 4, 37
D = torch.float64
GRIDS = {"tp=2": (("tp",), (2,)), "tp=3": (("tp",), (3,)), "dp=2, tp=2": (("dp", "tp"), (2, 2))}


class LM(nn.Module):
    def __init__(self, tied: bool):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(VOCABULARY, WIDTH, padding_idx=1), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(x))))


Loss = Callable[[Tensor, Tensor], Tensor]


def flat(**options: Any) -> Loss:
    return lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), **options)


def weights() -> Tensor:
    return torch.linspace(0.5, 2.0, VOCABULARY, dtype=D)


LOSSES: dict[str, Loss] = {
    "mean": flat(),
    "ignored": flat(ignore_index=3),
    "sum": flat(reduction="sum"),
    "weights": lambda logits, y: flat(weight=weights())(logits, y),
    "smoothing": flat(label_smoothing=0.1),
    "both": lambda logits, y: flat(weight=weights(), label_smoothing=0.1, ignore_index=3)(logits, y),
    "none": lambda logits, y: (flat(reduction="none")(logits, y) * weights()[:12].repeat(4)[: y.numel()]).sum(),
    "images": lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y),
    "probabilities": lambda logits, y: F.cross_entropy(logits.flatten(0, 1), F.one_hot(y.flatten(), VOCABULARY).to(D)),
    "picked": lambda logits, y: -logits.log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean(),
    "z-loss": lambda logits, y: flat()(logits, y) + 0.1 * torch.logsumexp(logits, -1).square().mean(),
    "probability": lambda logits, y: logits.softmax(-1).square().sum(),
}


def vocabulary_graph(axes: str, loss: Loss, tied: bool = False) -> TrainGraph:
    names, shape = GRIDS[axes]
    grid = torch.arange(math.prod(shape)).reshape(shape).tolist()
    place = gz.placement("cpu", grid, names=names, virtual=True)
    torch.manual_seed(0)
    lm = LM(tied).to(D)
    for weight in dict.fromkeys((lm.embedding.weight, lm.head.weight)):
        gz.to_global(weight, placement=place, sbp=tuple(S(0) if name == "tp" else B for name in names))
    return TrainGraph(lm, on_output(loss), torch.optim.SGD(lm.parameters(), lr=0.1), placement=place)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Without a data axis every rank takes the whole batch, as is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no axis of placement")
        yield


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, VOCABULARY, (4, 3), generator=generator) for _ in range(2))
    x[0], y[0] = 1, 3  # a row of padding, and one that some losses ignore
    return x, y


def localized(graph: gz.Graph) -> StepGraph:
    return next(record.after for record in graph.history if record.name == "localize")


def moved(graph: gz.Graph, axis: str = "tp", phase: str = "forward") -> list[tuple[str, tuple[int, ...]]]:
    """(collective, shape of what it moves) on one axis."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    return [
        (node.target.__name__, value.tensor_type(node).shape)
        for node in localized(graph).nodes
        if getattr(node.target, "__name__", "") in kinds and axis in node.args and value.phase_of(node) == phase
    ]


STEP = """
graph lm({axes})
  x     = batch()  : i64[4, 3]
  y     = batch()  : i64[4, 3]
  table = param()  : f32[37, 4]  {split}
{params}
  lr    = hyper(optimizer0.group0, lr)                     : float
forward:
  w     = use(table)                                       : f32[37, 4]
  h     = embedding(w, x)                                  : f32[4, 3, 4]
  r     = view(h, [12, 4])                                 : f32[12, 4]
{uses}
  ut    = t({head})                                        : f32[4, 37]
  z     = mm(r, ut)                                        : f32[12, 37]
  t     = view(y, [12])                                    : i64[12]
  lp    = _log_softmax(z, 1, False)                        : f32[12, 37]
  nll   = nll_loss_forward(lp, t, None, 2, -100)           : (f32[], f32[])
  total = nll[0]                                           : f32[]
  count = nll[1]                                           : f32[]
  loss  = div(total, count)                                : f32[]  ; loss()
backward:
  g     = reciprocal(count)                                : f32[]
  dlp   = nll_loss_backward(g, lp, t, None, 2, -100, count) : f32[12, 37]
  dz    = _log_softmax_backward_data(dlp, lp, 1, torch.float32) : f32[12, 37]
  dzt   = t(dz)                                            : f32[37, 12]
  du    = mm(dzt, r)                                       : f32[37, 4]{role}
  dr    = mm(dz, {head})                                   : f32[12, 4]
  dh    = view(dr, [4, 3, 4])                              : f32[4, 3, 4]
  dw    = embedding_dense_backward(dh, x, 37, -1, False)   : f32[37, 4]{role_of_table}
{updates}
"""


def step(axes: str, tied: bool) -> str:
    split = "S(0)!" if axes.count("=") == 1 else "(B!, S(0)!)"
    texts = {
        "params": "" if tied else f"  top   = param() : f32[37, 4]  {split}",
        "uses": "" if tied else "  u     = use(top) : f32[37, 4]",
        "head": "w" if tied else "u",
        "role": "" if tied else "  ; gradient(top)",
        "role_of_table": "" if tied else "  ; gradient(table)",
        "updates": ADDED if tied else APART,
    }
    return STEP.format(axes=axes, split=split, **texts)


APART = """
update:
  tu = use(table)               : f32[37, 4]
  t1 = add(tu, dw, alpha=lr)    : f32[37, 4]
  pu = use(top)                 : f32[37, 4]
  p1 = add(pu, du, alpha=lr)    : f32[37, 4]
  return loss; update(table=t1, top=p1)
"""
ADDED = """
  dt = add(du, dw)              : f32[37, 4]  ; gradient(table)
update:
  tu = use(table)               : f32[37, 4]
  t1 = add(tu, dt, alpha=lr)    : f32[37, 4]
  return loss; update(table=t1)
"""

UNTIED = """
graph lm(dp=2, tp=2) local
  x           = batch()                                                  : i64[4, 3]         (S(0)!, B!)
  y           = batch()                                                  : i64[4, 3]         (S(0)!, B!)
  table       = param()                                                  : f32[37, 4]        (B!, S(0)!)
  top         = param()                                                  : f32[37, 4]        (B!, S(0)!)
  lr          = hyper(optimizer0.group0, lr)                             : float
forward:
  h           = embedding_from(table, x, start=37@tp, total=37)          : f32[4, 3, 4]      (S(0), P)
  h_sb        = all_reduce(h, 'tp', 'sum')                               : f32[4, 3, 4]      (S(0), B)
  r           = view(h_sb, [12/dp, 4])                                   : f32[12, 4]        (S(0), B)
  ut          = t(top)                                                   : f32[4, 37]        (B, S(1))
  z           = mm(r, ut)                                                : f32[12, 37]       (S(0), S(1))
  t           = view(y, [12/dp])                                         : i64[12]           (S(0), B)
  amax        = amax(z, [1], True)                                       : f32[12, 1]        (S(0), P(max))
  amax_sb     = all_reduce(amax, 'tp', 'max')                            : f32[12, 1]        (S(0), B)
  sub         = sub(z, amax_sb)                                          : f32[12, 37]       (S(0), S(1))
  exp         = exp(sub)                                                 : f32[12, 37]       (S(0), S(1))
  sum_1       = sum.dim_IntList(exp, [1], True)                          : f32[12, 1]        (S(0), P)
  sum_1_sb    = all_reduce(sum_1, 'tp', 'sum')                           : f32[12, 1]        (S(0), B)
  log         = log(sum_1_sb)                                            : f32[12, 1]        (S(0), B)
  lp          = sub(sub, log)                                            : f32[12, 37]       (S(0), S(1))
  nll         = nll_loss_forward_from(lp, t, None, 2, -100, start=37@tp, total=37) : (f32[]  (P, P), f32[]  (P, B))
  total       = nll[0]                                                   : f32[]             (P, P)
  all_reduce  = all_reduce(total, 'tp', 'sum')                           : f32[]             (P, B)
  total_bb    = all_reduce(all_reduce, 'dp', 'sum')                      : f32[]             (B, B)
  count       = nll[1]                                                   : f32[]             (P, B)
  count_bb    = all_reduce(count, 'dp', 'sum')                           : f32[]             (B, B)
  loss        = div(total_bb, count_bb)                                  : f32[]             (B, B)  ; loss()
backward:
  g           = reciprocal(count_bb)                                     : f32[]             (B, B)
  dlp         = nll_loss_backward_from(g, lp, t, None, 2, -100, count_bb, start=37@tp, total=37) : f32[12, 37]       (S(0), S(1))
  neg         = neg(g)                                                   : f32[]             (B, B)
  expand      = expand(neg, [12/dp])                                     : f32[12]           (S(0), B)
  eq          = eq.Scalar(t, -100)                                       : bool[12]          (S(0), B)
  masked_fill = masked_fill.Scalar(expand, eq, 0.0)                      : f32[12]           (S(0), B)
  unsqueeze   = unsqueeze(masked_fill, 1)                                : f32[12, 1]        (S(0), B)
  exp_1       = exp(lp)                                                  : f32[12, 37]       (S(0), S(1))
  mul         = mul(exp_1, unsqueeze)                                    : f32[12, 37]       (S(0), S(1))
  dz          = sub(dlp, mul)                                            : f32[12, 37]       (S(0), S(1))
  dzt         = t(dz)                                                    : f32[37, 12]       (S(1), S(0))
  du          = mm(dzt, r)                                               : f32[37, 4]        (P, S(0))  ; gradient(top)
  du_bs       = all_reduce(du, 'dp', 'sum')                              : f32[37, 4]        (B, S(0))  ; gradient(top)
  dr          = mm(dz, top)                                              : f32[12, 4]        (S(0), P)
  dr_sb       = all_reduce(dr, 'tp', 'sum')                              : f32[12, 4]        (S(0), B)
  dh          = view(dr_sb, [4/dp, 3, 4])                                : f32[4, 3, 4]      (S(0), B)
  dw          = embedding_dense_backward_from(dh, x, 37/tp, -1, False, start=37@tp, total=37) : f32[37, 4]        (P, S(0))  ; gradient(table)
  dw_bs       = all_reduce(dw, 'dp', 'sum')                              : f32[37, 4]        (B, S(0))  ; gradient(table)
update:
  t1          = add(table, dw_bs, alpha=lr)                              : f32[37, 4]        (B, S(0))
  p1          = add(top, du_bs, alpha=lr)                                : f32[37, 4]        (B, S(0))
  return loss; update(table=t1, top=p1)
"""  # noqa: E501

TIED = """
graph lm(tp=3) local
  x           = batch()                                                  : i64[4, 3]         B!
  y           = batch()                                                  : i64[4, 3]         B!
  table       = param()                                                  : f32[37, 4]        S(0)!
  lr          = hyper(optimizer0.group0, lr)                             : float
forward:
  h           = embedding_from(table, x, start=37@tp, total=37)          : f32[4, 3, 4]      P
  h_b         = all_reduce(h, 'tp', 'sum')                               : f32[4, 3, 4]      B
  r           = view(h_b, [12, 4])                                       : f32[12, 4]        B
  ut          = t(table)                                                 : f32[4, 37]        S(1)
  z           = mm(r, ut)                                                : f32[12, 37]       S(1)
  t           = view(y, [12])                                            : i64[12]           B
  amax        = amax(z, [1], True)                                       : f32[12, 1]        P(max)
  amax_b      = all_reduce(amax, 'tp', 'max')                            : f32[12, 1]        B
  sub         = sub(z, amax_b)                                           : f32[12, 37]       S(1)
  exp         = exp(sub)                                                 : f32[12, 37]       S(1)
  sum_1       = sum.dim_IntList(exp, [1], True)                          : f32[12, 1]        P
  sum_1_b     = all_reduce(sum_1, 'tp', 'sum')                           : f32[12, 1]        B
  log         = log(sum_1_b)                                             : f32[12, 1]        B
  lp          = sub(sub, log)                                            : f32[12, 37]       S(1)
  nll         = nll_loss_forward_from(lp, t, None, 2, -100, start=37@tp, total=37) : (f32[]  P, f32[]  B)
  total       = nll[0]                                                   : f32[]             P
  total_b     = all_reduce(total, 'tp', 'sum')                           : f32[]             B
  count       = nll[1]                                                   : f32[]             B
  loss        = div(total_b, count)                                      : f32[]             B  ; loss()
backward:
  g           = reciprocal(count)                                        : f32[]             B
  dlp         = nll_loss_backward_from(g, lp, t, None, 2, -100, count, start=37@tp, total=37) : f32[12, 37]       S(1)
  neg         = neg(g)                                                   : f32[]             B
  expand      = expand(neg, [12])                                        : f32[12]           B
  eq          = eq.Scalar(t, -100)                                       : bool[12]          B
  masked_fill = masked_fill.Scalar(expand, eq, 0.0)                      : f32[12]           B
  unsqueeze   = unsqueeze(masked_fill, 1)                                : f32[12, 1]        B
  exp_1       = exp(lp)                                                  : f32[12, 37]       S(1)
  mul         = mul(exp_1, unsqueeze)                                    : f32[12, 37]       S(1)
  dz          = sub(dlp, mul)                                            : f32[12, 37]       S(1)
  dzt         = t(dz)                                                    : f32[37, 12]       S(0)
  du          = mm(dzt, r)                                               : f32[37, 4]        S(0)
  dr          = mm(dz, table)                                            : f32[12, 4]        P
  dr_b        = all_reduce(dr, 'tp', 'sum')                              : f32[12, 4]        B
  dh          = view(dr_b, [4, 3, 4])                                    : f32[4, 3, 4]      B
  dw          = embedding_dense_backward_from(dh, x, 37/tp, -1, False, start=37@tp, total=37) : f32[37, 4]        S(0)
  dt          = add(du, dw)                                              : f32[37, 4]        S(0)  ; gradient(table)
update:
  t1          = add(table, dt, alpha=lr)                                 : f32[37, 4]        S(0)
  return loss; update(table=t1)
"""  # noqa: E501


def test_a_split_embedding_head_and_loss_as_they_are_printed() -> None:
    assert_graph(history(step("dp=2, tp=2", tied=False))["localize"].after, UNTIED)


def test_a_table_that_is_embedding_and_head_as_it_is_printed() -> None:
    assert_graph(history(step("tp=3", tied=True))["localize"].after, TIED)


def test_a_program_with_offset_forms_is_read_back_and_runs_the_same() -> None:
    for tied in (False, True):
        text = step("tp=3", tied)
        local = history(text)["localize"].after
        assert_graph(parse(str(local)), str(local))
        assert_same_step(lower(text.replace("tp=3", "tp=1")), lower(text))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_no_rank_makes_or_moves_whole_logits(loss: str, tied: bool) -> None:
    graph = check("dp=2, tp=2", LOSSES[loss], tied, (0, 0))
    first, *rest = moved(graph)
    assert first == ("all_reduce", (4, 3, WIDTH))
    rows = [(12, 1), (12,), (4, 3), (4, 3, 1), (4, 1, 3), ()]
    assert all(kind == "all_reduce" and shape in rows for kind, shape in rest), rest
    for kind, shape in moved(graph, phase="backward"):
        assert kind == "all_reduce" and (shape in rows or math.prod(shape) == 12 * WIDTH), shape
    for node in localized(graph).nodes:
        type_ = value.type_of(node) if node.op == "call_function" else None
        if isinstance(type_, value.TensorType) and type_.numel >= 12 * VOCABULARY:
            sbp = value.nd_of(node)[1]
            assert sbp.is_split and type_.shape[sbp.dim] == VOCABULARY, node.format_node()


def test_the_backward_of_a_plain_cross_entropy_sums_no_rows_over_ranks() -> None:
    graph = vocabulary_graph("tp=2", LOSSES["ignored"]).compile(*batch())
    assert moved(graph, phase="backward") == [("all_reduce", (12, WIDTH))]


def eager(loss: Loss, tied: bool, steps: int) -> tuple[LM, list[Tensor]]:
    torch.manual_seed(0)
    model, losses = LM(tied).to(D), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x, y = batch()
        optimizer.zero_grad()
        losses.append(loss(model(x), y))
        losses[-1].backward()
        optimizer.step()
    return model, [found.detach() for found in losses]


def check(axes: str, loss: Loss, tied: bool, stages: Sequence[int]) -> TrainGraph:
    """Compare steps of one Graph at these stages with plain PyTorch's."""
    model, losses = eager(loss, tied, len(stages))
    graph = vocabulary_graph(axes, loss, tied)
    for wanted, stage in zip(losses, stages, strict=True):
        graph.config.enable_zero(stage > 0, stage=stage or 2)
        torch.testing.assert_close(graph(*batch()), wanted, rtol=1e-12, atol=1e-12)
    found = graph.full_state_dict()["modules"]["model"]
    for name, wanted in model.state_dict().items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-12, atol=1e-12)
    return graph


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("axes", ["tp=2", "tp=3"])
def test_losses_and_gradients_are_those_of_plain_pytorch(axes: str, loss: str) -> None:
    check(axes, LOSSES[loss], loss in ("mean", "both", "picked"), (0, 0))


@pytest.mark.parametrize("loss", ["mean", "both"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_zero_splits_the_rest_over_the_data_axis(loss: str, tied: bool) -> None:
    check("dp=2, tp=2", LOSSES[loss], tied, (2, 3, 3))


def test_a_batch_of_ignored_targets_has_no_loss_and_no_gradient() -> None:
    graph = vocabulary_graph("tp=3", flat(ignore_index=3, reduction="sum"))
    before = {name: x.clone() for name, x in graph.model.state_dict().items()}
    x, y = batch()
    assert graph(x, torch.full_like(y, 3)) == 0
    assert all(torch.equal(x, before[name]) for name, x in graph.model.state_dict().items())
    assert vocabulary_graph("tp=3", flat(ignore_index=3))(x, torch.full_like(y, 3)).isnan()  # 0 / 0, as torch has it


def test_a_target_outside_of_the_vocabulary_fails_as_in_pytorch() -> None:
    x, y = batch()
    graph = vocabulary_graph("tp=2", LOSSES["mean"])
    with pytest.raises(Exception, match="out of bounds"):
        graph(x, y + VOCABULARY)


GATHERED = """
graph g(tp=2)
  x     = batch()                                          : i64[2, 6]
  dh    = batch()                                          : f32[2, 6, 4]  S(1)!
  table = param()                                          : f32[{rows}, 4]  S(0)!
backward:
  dw    = embedding_dense_backward(dh, x, {rows}, -1, False) : f32[{rows}, 4]  ; gradient(table)
update:
  tu    = use(table)                                       : f32[{rows}, 4]
  t1    = add(tu, dw, alpha=-0.1)                          : f32[{rows}, 4]
  return x; update(table=t1)
"""


def test_a_split_table_has_its_gradient_from_gathered_rows_of_a_split_sequence_where_those_are_fewer() -> None:
    large, small = (GATHERED.format(rows=rows) for rows in (37, 8))
    assert lines(history(large)["localize"].after, "all_gather(dh,")
    assert not lines(history(large)["localize"].after, "reduce_scatter(")
    assert lines(history(small)["localize"].after, "reduce_scatter(dw,")
    data = large.replace("tp=2", "dp=2")
    assert lines(history(data)["localize"].after, "reduce_scatter(dw,"), "along a data axis a rank keeps to its share"
    for text in (large, small):
        on_one = text.replace("S(1)!", "").replace("S(0)!", "").replace("tp=2", "tp=1")
        assert_same_step(lower(on_one), lower(text))


def test_a_maximum_is_reduced_before_it_is_spread_out() -> None:
    text = """
graph g(tp=2)
  x = batch() : f32[6, 8]  S(1)!
forward:
  m = amax(x, [1], True)   : f32[6, 1]
  v = view(m, [6])         : f32[6]
  u = unsqueeze(v, 1)      : f32[6, 1]
  e = expand(u, [6, 5])    : f32[6, 5]
  y = cos(e)               : f32[6, 5]
  return y
"""
    graph = history(text)["localize"].after
    assert len(lines(graph, "all_reduce(")) == 1
    assert not lines(graph, "f32[6, 5] P(max)")
    assert_same_step(lower(text.replace("S(1)!", "").replace("tp=2", "tp=1")), lower(text))
