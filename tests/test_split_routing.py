"""Tokens of a mixture of experts in parts: each data rank, and each micro-batch, sorts its own by expert."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import TrainGraph
from mixtures import Mixture, TwoLayers
from test_experts import CHAINS, OTHERS, ROUTINGS, ROW_BY_ROW, TOKENS, WIDTH, chain, loss_of, train, virtual
from torch import Tensor
from toys import history, lines, lower

import graphzero as gz
from graphzero.errors import ConfigError
from graphzero.passes.place.forward_sweep import AxisPropagation
from graphzero.plugins.experts.split_routing import SplitRouting
from graphzero.sbp import B, S
from graphzero.testing import assert_same_step

pytestmark = pytest.mark.filterwarnings("ignore:no axis of")


class Layers(TwoLayers):
    """Two mixtures without a balance loss, which is a statistic of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        h = x + self.first(x)
        y: Tensor = self.head((h + self.second(h)).tanh()).square().mean()
        return y


def model_of(kind: type[TwoLayers] = Layers, **options: Any) -> TwoLayers:
    torch.manual_seed(0)
    return kind(**options).double()


LAYOUTS: dict[str, tuple[dict[str, int], tuple[Any, ...], dict[str, Any]]] = {
    "micro-batches": ({"dp": 1}, (B,), {"micro_batches": 4}),
    "data ranks": ({"dp": 2}, (B,), {}),
    "both, stage 2": ({"dp": 2}, (B,), {"micro_batches": 2, "stage": 2}),
    "both, stage 3": ({"dp": 2}, (B,), {"micro_batches": 3, "stage": 3}),
    "experts over ranks of another axis": ({"ep": 2}, (), {"micro_batches": 3}),
    "experts over ranks, data ranks": ({"dp": 2, "ep": 2}, (), {"stage": 1}),
    "experts over ranks, both": ({"dp": 2, "ep": 2}, (), {"micro_batches": 2, "stage": 3}),
    "data ranks inside": ({"ep": 2, "dp": 2}, (S(0), B), {"micro_batches": 2}),
    "two data axes": ({"dp_replicate": 2, "dp_shard": 2}, (B, B), {"stage": 3, "axis": "dp_shard"}),
    "experts split over the data axis": ({"dp": 2}, (S(0),), {"micro_batches": 2}),
    "experts split inside": ({"dp": 2, "tp": 2}, (B, S(1)), {"micro_batches": 2}),
}


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.slow][: i not in (1, 3)]) for i, name in
                                    enumerate(LAYOUTS)])  # fmt: skip
def test_tokens_in_parts_train_as_plain_pytorch_does_on_the_whole_batch(layout: str) -> None:
    axes, nd, settings = LAYOUTS[layout]
    train(model_of(), virtual(**axes), *nd, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_routing_is_that_of_the_whole_batch(routing: str) -> None:
    train(model_of(**ROUTINGS[routing]), virtual(dp=2, ep=2), micro_batches=2)


def test_no_token_is_sent_along_a_data_axis_beside_experts() -> None:
    graph = train(model_of(TwoLayers), virtual(dp=2, ep=2))  # with the balance loss of the global batch
    along = [(c.kind, c.what_for) for c in graph.plan.collectives if c.axis == "dp" and c.bytes > 32]
    assert along == [("all_reduce", "gradients")]


def test_each_rank_multiplies_its_own_rows_alone() -> None:
    graph = train(
        model_of(), virtual(dp=2), configure=lambda graph: graph.config.set_split_experts("weights"), micro_batches=3
    )
    products = lines(graph.program, "= grouped_mm(")
    rows = TOKENS * 2 // 2 // 3
    assert len(products) == 24 and all(f"[{rows}, " in line or f", {rows}]" in line or "f64[4, " in line
                                       for line in products)  # fmt: skip


def test_stage_3_gathers_weights_where_that_sends_less_than_tokens() -> None:
    """Tokens send 4 T D, in both directions of each phase; weights 3 E F D, of two gathers and a reduction."""
    model, gathers = model_of(), {}
    for tokens in (12, 96):
        optimizer = torch.optim.AdamW(model.parameters())
        graph = TrainGraph(model, loss_of, optimizer, placement=virtual(dp=4), stage=3)
        graph.compile(torch.randn(tokens, 24, dtype=torch.float64))
        gathered = [c.names for c in graph.plan.collectives if c.kind == "all_gather" and c.what_for == "parameters"]
        gathers[tokens] = any(name.endswith(".up") for names in gathered for name in names)
    weights = 3 * (model.first.up.numel() + model.first.down.numel())
    assert gathers == {tokens: 4 * tokens * WIDTH > weights for tokens in gathers} == {12: False, 96: True}


def test_mixtures_whose_rows_come_split_take_one_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    graph = TrainGraph(model, loss_of, torch.optim.SGD(model.parameters()), placement=virtual(dp=2))
    graph.compile(torch.randn(TOKENS, 24, dtype=torch.float64))
    record = next(record for record in graph.history if record.name == "split_routing")
    sweep, sweeps = AxisPropagation.sweep, list[int]()
    monkeypatch.setattr(AxisPropagation, "sweep", lambda self: (sweeps.append(self.axis), sweep(self)))
    after = SplitRouting()(record.before.clone())
    assert sweeps == [0] and str(after).count("= sort.default(as_local") == 2


# ---- what a rank may not do by itself


def step_of(between: Callable[[Tensor], Tensor], **settings: Any) -> TrainGraph:
    torch.manual_seed(0)
    return train(model_of(between=between), virtual(dp=2), B, **settings)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in CHAINS)])
def test_any_ops_between_the_products_give_what_they_give_on_one_device(seed: int) -> None:
    step_of(chain(seed, ROW_BY_ROW + OTHERS))


@pytest.mark.parametrize("number", [0, 4, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3, 5, 6, 7, 8, 9))])
def test_micro_batches_refuse_ops_that_mix_rows_or_read_their_order(number: int) -> None:
    graph = TrainGraph(Mixture(between=OTHERS[number]).double(), lambda model, x: model(x).square().mean(),
                       placement=virtual(dp=1), micro_batches=2)  # fmt: skip
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    try:
        graph.compile(x)
    except ConfigError as error:
        assert "whole batch at once" in str(error)
    else:
        report = gz.check(graph, x, dtype=torch.float64, rtol=1e-9)
        assert report, str(report)


TEXT = """
graph experts(dp={ranks})
  x = batch() : f64[8, 4]     S(0)!
  r = batch() : f64[8, 3]     S(0)!
  w = param() : f64[3, 4, 4]  B!
forward:
  u    = use(w)                                : f64[3, 4, 4]  B!
  k    = argmax(r, 1)                          : i64[8]
  s    = sort.default(k)                       : (i64[8], i64[8])
  keys = s[0]                                  : i64[8]
  o    = s[1]                                  : i64[8]
  f    = _to_copy(keys, dtype=torch.float32)   : f32[8]
  n    = histc(f, 3, 0, 2)                     : f32[3]
  ends = cumsum(n, 0, dtype=torch.int32)       : i32[3]
  rows = index(x, [o])                         : f64[8, 4]
  y    = grouped_mm(rows, u, ends)             : f64[8, 4]
  zero = zeros([8, 4], dtype=torch.float64)    : f64[8, 4]
  back = index_put(zero, [o], y, True)         : f64[8, 4]
  return back
"""
REWRITES: dict[str, tuple[tuple[str, str], ...]] = {
    "groups end at the ends of a sort from high to low": (("sort.default(k)", "sort.default(k, 0, True)"),),
    "keys below the first group": (
        ("  s    =", "  j    = sub.Tensor(k, 1) : i64[8]\n  s    ="),
        ("sort.default(k)", "sort.default(j)"),
    ),
    "groups begin above the least key": (("histc(f, 3, 0, 2)", "histc(f, 3, 1, 2)"),),
    "rows of others are read": (("  y    =", "  q    = flip(rows, [0]) : f64[8, 4]\n  y    ="), ("(rows, u", "(q, u")),
    "places in the order are read": (
        ("  y    =", "  p    = _to_copy(o, dtype=torch.float64) : f64[8]\n  c    = unsqueeze(p, 1) : f64[8, 1]\n"
         "  q    = mul(rows, c) : f64[8, 4]\n  y    ="),
        ("(rows, u", "(q, u"),
    ),
    "rows are read by numbers of a table": (
        ("  y    =", "  t    = arange(8) : i64[8]\n  q    = index_select(rows, 0, t) : f64[8, 4]\n  y    ="),
        ("(rows, u", "(q, u"),
    ),
    "the order is returned": (("return back", "return back, keys"),),
    "ends that are not of the sort": (("ends, ", "ends"), ("(rows, u, ends)", "(rows, u, e2)"), (
        "  rows =", "  e2   = mul(ends, 1) : i32[3]\n  rows ="),),
    "rows are written over each other": (("[o], y, True)", "[h], y)"), (
        "  rows =", "  h    = floor_divide(o, 2) : i64[8]\n  rows ="),),
}  # fmt: skip


def text_of(case: str, ranks: int) -> str:
    text = TEXT.format(ranks=ranks)
    for old, new in REWRITES.get(case, ()):
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("case", REWRITES)
def test_a_sort_whose_order_matters_is_left_to_all_rows(case: str) -> None:
    assert text_of(case, 2) != TEXT.format(ranks=2)
    record = history(text_of(case, 2))["split_routing"]
    assert "as_local" not in str(record.after)
    if "over each other" not in case:  # which row is left is not said
        one, two = (lower(re.sub(r"S\(0\)!", "B!", text) if ranks == 1 else text)
                    for ranks in (1, 2) for text in [text_of(case, ranks)])  # fmt: skip
        assert_same_step(one, two, rtol=1e-12, atol=1e-12)


def test_other_counts_of_choices_stay_those_of_all_rows() -> None:
    """A count that gives no ends of groups may leave choices out; one that does is summed over the ranks."""
    more = "  d    = _to_copy(k, dtype=torch.float32) : f32[8]\n  m    = histc(d, 3, 1, 2) : f32[3]\n  s    ="
    texts = [text_of("", ranks).replace("  s    =", more).replace("return back", "return back, m, n")
             for ranks in (1, 2)]  # fmt: skip
    after = str(history(texts[1])["split_routing"].after)
    assert "m    " in after and "= histc(d, 3, 1, 2)" in after and "n_own" in after
    assert_same_step(lower(texts[0]), lower(texts[1]), rtol=1e-12, atol=1e-12)


def test_rows_of_each_rank_in_text_are_those_of_one_rank() -> None:
    assert "as_local" in str(history(text_of("", 2))["split_routing"].after)
    assert_same_step(lower(text_of("", 1)), lower(text_of("", 2)), rtol=1e-12, atol=1e-12)
