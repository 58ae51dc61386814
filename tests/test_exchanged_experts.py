"""Rows of tokens go to the ranks of their experts and back, and give what plain PyTorch gives with all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import TrainGraph
from inside import check_ends
from mixtures import Mixture, TwoLayers
from test_experts import OTHERS, ROUTINGS, ROW_BY_ROW, TOKENS, WIDTH, batch, chain, loss_of, train, virtual
from test_planned_splits import loss_of as language_loss
from test_planned_splits import model_of as language_model
from test_split_routing import Layers, model_of
from torch import Tensor, nn
from toys import lines, lower

import graphzero as gz
from graphzero.errors import CapacityError, CheckError, ConfigError
from graphzero.plugins.experts import row_exchange
from graphzero.plugins.experts.split_routing import SplitRouting
from graphzero.runtime.record import cuda_graph
from graphzero.sbp import B, S
from graphzero.testing import assert_same_step, strict_transfers

pytestmark = pytest.mark.filterwarnings("ignore:no axis of")


def exchanging(capacity: float, *more: Callable[[TrainGraph], Any]) -> Callable[[TrainGraph], None]:
    def configure(graph: TrainGraph) -> None:
        graph.config.set_split_experts("exchange", capacity=capacity)
        for step in more:
            step(graph)

    return configure


def is_exchanged(graph: TrainGraph) -> bool:
    """Whether every mixture sends rows, and no weight of an expert is gathered."""
    gathers = [c for c in graph.plan.collectives if c.kind == "all_gather" and c.what_for == "parameters"]
    whole = any(name.endswith((".up", ".down")) for c in gathers for name in c.names)
    ways = [line.split()[4] for line in graph.plan.decisions if line.startswith("experts split")]
    return bool(ways) and {way.rstrip(",") for way in ways} == {"exchange"} and not whole


LAYOUTS: dict[str, tuple[dict[str, int], tuple[Any, ...], dict[str, Any]]] = {
    "micro-batches, stage 3": ({"dp": 2}, (B,), {"micro_batches": 3, "stage": 3}),
    "four ranks": ({"dp": 4}, (S(0),), {}),
    "stage 1 beside experts": ({"dp": 2}, (S(0),), {"stage": 1}),
    "stage 2 beside experts": ({"dp": 2}, (S(0),), {"stage": 2}),
    "two data axes": ({"dp_replicate": 2, "dp_shard": 2}, (B, B), {"stage": 3, "axis": "dp_shard"}),
    "data ranks outside": ({"dp_shard": 2, "dp_replicate": 2}, (S(0), B), {}),
    "experts split inside": ({"dp": 2, "tp": 2}, (S(0), S(1)), {"micro_batches": 2}),
    "an axis that has no part in it": ({"dp": 2, "ep": 2}, (S(0), B), {}),
    "two axes that split experts": ({"dp": 2, "ep": 2}, (S(0), S(0)), {}),
}


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.slow][: i > 0]) for i, name in
                                    enumerate(LAYOUTS)])  # fmt: skip
def test_exchanged_rows_train_as_plain_pytorch_does_also_where_the_room_was_too_little(layout: str) -> None:
    axes, nd, settings = LAYOUTS[layout]
    graph = train(model_of(), virtual(**axes), *nd, configure=exchanging(1.0), **settings)
    assert graph.config.expert_capacity > 1 and (layout == "two axes that split experts" or is_exchanged(graph))


@pytest.mark.parametrize("routing", [pytest.param(name, marks=[pytest.mark.slow][: i != 1]) for i, name in
                                     enumerate(ROUTINGS)])  # fmt: skip
def test_no_row_is_dropped_whatever_the_router_says(routing: str) -> None:
    graph = train(model_of(**ROUTINGS[routing]), virtual(dp=4), S(0), configure=exchanging(1.0))
    assert is_exchanged(graph)
    if routing == "all tokens to one expert":
        assert graph.config.expert_capacity == 4 and "check(" not in str(graph.program)


@pytest.mark.parametrize("capacity", [1.25, pytest.param(3.0, marks=pytest.mark.slow)])
def test_a_rank_sends_the_room_for_rows_in_both_directions_of_each_phase(capacity: float) -> None:
    """And weights of experts and their gradients not at all."""
    model, place = model_of(shared=False), virtual(dp=4)
    gz.to_global(model, place, {"*.up": S(0), "*.down": S(0)})
    graph = TrainGraph(model, loss_of, torch.optim.AdamW(model.parameters()), placement=place)
    exchanging(capacity)(graph)
    graph.compile(batch(0))
    room = -(-capacity * (TOKENS // 4 * 2) // 4)
    sent = [c for c in graph.plan.collectives if c.kind == "all_to_all" and c.bytes > 100]
    assert [c.bytes for c in sent] == [3 * room * WIDTH * 8] * 8
    assert [c.phase for c in sent] == ["forward"] * 4 + ["backward"] * 4
    products = lines(graph.program, "= grouped_mm(")
    assert len(products) == 12 and all(f"{4 * room:g}" in line or "f64[1, " in line for line in products)


def test_a_step_that_is_recorded_has_room_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording stops at no check."""
    monkeypatch.setattr(cuda_graph, "check", lambda placement: None)
    graphs = [TrainGraph(model_of(shared=False), loss_of, placement=virtual(dp=4)) for _ in range(2)]
    for graph, capacity in zip(graphs, (1.0, 4.0), strict=True):
        gz.to_global(graph.model, graph.placement, {"*.up": S(0), "*.down": S(0)})
        exchanging(capacity)(graph)
    graphs[0].config.set_cuda_graph()
    recorded, wide = (str(graph.compile(batch(0)).program) for graph in graphs)
    assert recorded == wide and "all_to_all" in wide and "check(" not in wide


def test_the_plan_of_an_exchange_equals_what_a_call_does() -> None:
    graph = train(model_of(), virtual(dp=4), S(0), configure=exchanging(2.0), stage=1)
    sent = [(entry.kind, entry.axis, entry.nbytes) for entry in gz.testing.trace_step(graph, batch(0))]
    assert sent == [(c.kind, c.axis, c.bytes) for c in graph.plan.collectives] and is_exchanged(graph)
    assert gz.testing.measure_step(graph, batch(1)).peak == graph.plan.memory.peak


def test_a_step_that_is_measured_does_not_run_twice() -> None:
    model = Mixture(top=1, shared=False).double()
    with torch.no_grad():
        model.router.weight.zero_()[0, 0], model.router.weight[2, 0] = 1, -1  # by the sign of a token's first element
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    graph = TrainGraph(model, lambda m, x: m(x).square().mean(), optimizer, placement=virtual(dp=2), stage=3)
    exchanging(1.0)(graph)
    x = batch(0, WIDTH)
    x[:, 0] = torch.tensor([1.0, -1]).repeat(TOKENS // 2)
    graph(x)
    with pytest.raises(CapacityError, match="more rows of tokens go from one rank"):
        gz.testing.measure_step(graph, x.abs())
    assert graph.config.expert_capacity == 1
    graph(x.abs())
    assert graph.config.expert_capacity == 2


class Noisy(Layers):
    """Draws random numbers, and has statistics of batches that it has seen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm, self.dropout = nn.BatchNorm1d(24), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(self.dropout(self.norm(x)))
        return y


def test_a_step_that_runs_again_is_the_same_step() -> None:
    """A router that overflows in every step: the room is taken away again each time."""
    results = []
    for capacity in (4.0, 1.0):
        model = model_of(Noisy)
        place = virtual(dp=4)
        gz.to_global(model, place, {"*.up": S(0), "*.down": S(0)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        graph = TrainGraph(model, loss_of, optimizer, placement=place, scheduler=scheduler)
        torch.manual_seed(5)
        losses = []
        for step in range(3):
            exchanging(capacity)(graph)
            losses.append(graph(batch(step)))
            assert graph.config.expert_capacity > 1
        results.append((losses, graph.full_state_dict()))
    (losses, state), (other_losses, other) = results
    for one in (state, other):
        del one["optimizers"][0]["param_groups"][0]["params"]
    torch.testing.assert_close((losses, state), (other_losses, other), rtol=1e-12, atol=1e-12)


def test_gz_check_takes_more_room_as_a_call_does() -> None:
    torch.manual_seed(0)
    model = Mixture(top=1, bias=torch.tensor([0.0, 9, 0, 0]), shared=False).double()
    optimizer = torch.optim.SGD(model.parameters())
    graph = TrainGraph(model, lambda m, x: m(x).square().mean(), optimizer, placement=virtual(dp=2), stage=3)
    exchanging(1.0)(graph)
    report = gz.check(graph, batch(0, WIDTH), dtype=torch.float64, rtol=1e-9)
    assert report and graph.config.expert_capacity == 2, str(report)


def test_a_step_that_only_evaluates_exchanges_rows_too() -> None:
    model = model_of()
    with torch.no_grad():
        expected = model(batch(1))
    graph = TrainGraph(model, loss_of, placement=virtual(dp=2))
    gz.to_global(model, graph.placement, {"*.up": S(0), "*.down": S(0)})
    exchanging(0.5)(graph)
    torch.testing.assert_close(graph(batch(1)), expected, rtol=1e-12, atol=1e-12)
    assert is_exchanged(graph)


@pytest.mark.slow
def test_masters_and_a_memory_budget_go_with_it() -> None:
    model = model_of().float()
    optimizer = torch.optim.AdamW(model.parameters())
    graph = TrainGraph(model, loss_of, optimizer, placement=virtual(dp=2), stage=3, dtype=torch.bfloat16)
    exchanging(2.0)(graph)
    assert is_exchanged(graph.compile(batch(0).float()))
    train(model_of(), virtual(dp=2), S(0), stage=3,
          configure=exchanging(2.0, lambda g: g.config.set_memory_budget(50_000)))  # fmt: skip


@pytest.mark.slow
def test_rows_of_experts_wait_on_the_host_with_the_same_bits(tmp_path: Path) -> None:
    """Also in a step that runs again, and where an exchange of rows takes as long as it may."""
    results = []
    for activations in (None, 3200):
        model, place = model_of(), virtual(dp=2)
        gz.to_global(model, place, {"*.up": S(0), "*.down": S(0)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        graph = TrainGraph(model, loss_of, optimizer, placement=place, stage=3, micro_batches=3, clip=0.05)
        graph.config.bucket_bytes = 200
        if activations is not None:
            graph.config.enable_offload(activations=activations, path=tmp_path)
        losses = []
        for step in range(2):
            exchanging(1.0)(graph)
            with strict_transfers():
                losses.append(graph(batch(step)))
            assert graph.config.expert_capacity > 1 and is_exchanged(graph)
        results.append([*losses, *graph.full_state_dict()["modules"]["model"].values()])
    waiting = str(lines(graph.program, "to_host_launch("))
    assert all(map(torch.equal, *results)) and all(name in waiting for name in ("grouped_mm", "argsort", "index_put"))
    assert gz.testing.measure_step(graph, batch(2)).peak == graph.plan.memory.peak


# ---- what each rank's experts may do with rows


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 4, 31, 45, 267])
def test_any_ops_between_the_products_give_what_they_give_on_one_device(seed: int) -> None:
    """In the first two an op mixes rows, so that none are exchanged; the others have every op of rows by themselves."""
    model = model_of(between=chain(seed, ROW_BY_ROW + OTHERS))
    graph = train(model, virtual(dp=2), B, stage=3, configure=exchanging(1.0))
    assert is_exchanged(graph) == (seed > 1)


def test_rows_that_nobody_has_sent_count_in_nothing() -> None:
    """Between the products, where empty room may hold anything, is an op without a finite slope at 0."""
    train(model_of(between=lambda h: h.abs().sqrt(), bias=torch.tensor([0.0, 9, 0, 9])), virtual(dp=2), S(0),
          configure=exchanging(1.0))  # fmt: skip


@pytest.mark.parametrize("fault", ["_slot_of_row", *(pytest.param(fault, marks=pytest.mark.slow) for fault in
                                                     ("_order", "_rows_sent"))])  # fmt: skip
def test_a_wrong_map_of_rows_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is moved by one."""
    write = row_exchange.RowExchange._plan_receipt

    def wrong(self: Any, w: Any, counts: Any) -> None:
        write(self, w, counts)
        setattr(self, fault, w(torch.ops.aten.roll.default, getattr(self, fault), [1], [0]))

    monkeypatch.setattr(row_exchange.RowExchange, "_plan_receipt", wrong)
    with pytest.raises(AssertionError, match="not close"):
        train(model_of(), virtual(dp=2), S(0), configure=exchanging(2.0))


TEXT = """
graph experts(dp={ranks})
  x = batch() : f64[8, 4]     {rows}!
  r = batch() : f64[8, 4]     {rows}!
  w = param() : f64[4, 4, 4]  {rows}!
forward:
  u    = use(w)                                : f64[4, 4, 4]  B!
  k    = argmax(r, 1)                          : i64[8]
  s    = sort.default(k)                       : (i64[8], i64[8])
  keys = s[0]                                  : i64[8]
  o    = s[1]                                  : i64[8]
  f    = _to_copy(keys, dtype=torch.float32)   : f32[8]
  n    = histc(f, 4, 0, 3)                     : f32[4]
  ends = cumsum(n, 0, dtype=torch.int32)       : i32[4]
  rows = index(x, [o])                         : f64[8, 4]
{ops}
  zero = zeros([8, 4], dtype=torch.float64)    : f64[8, 4]
  back = index_put(zero, [o], y, True)         : f64[8, 4]
  return back{more}
"""
OPS = {
    "rows": ("y = grouped_mm(rows, u, ends) : f64[8, 4]", ""),
    "columns": ("t = t(rows) : f64[4, 8]\nc = grouped_mm(u, t, ends) : f64[4, 8]\ny = t(c) : f64[8, 4]", ""),
    "weight gradients": (
        "y = grouped_mm(rows, u, ends) : f64[8, 4]\nt = t(y) : f64[4, 8]\n"
        "g = grouped_mm(t, rows, ends) : f64[4, 4, 4]", ", g"),
    "a sum of rows between": (
        "h = grouped_mm(rows, u, ends) : f64[8, 4]\nd = sum.dim_IntList(h, [0]) : f64[4]\n"
        "y = grouped_mm(h, u, ends) : f64[8, 4]", ", d"),
    "rows from outside between": (
        "h = grouped_mm(rows, u, ends) : f64[8, 4]\na = add(h, rows) : f64[8, 4]\n"
        "y = grouped_mm(a, u, ends) : f64[8, 4]", ""),
}  # fmt: skip


@pytest.mark.parametrize("ops", OPS)
def test_products_of_every_form_are_those_of_one_rank(ops: str) -> None:
    steps, more = OPS[ops]
    steps = "\n".join(f"  {line}" for line in steps.splitlines())
    one, two = (TEXT.format(ranks=ranks, rows=rows, ops=steps, more=more) for ranks, rows in ((1, "B"), (2, "S(0)")))
    exchanged = SplitRouting("exchange", 2.0)(gz.parse(two))
    assert lines(exchanged, "= searchsorted(") and not lines(exchanged, "check(")
    assert_same_step(lower(one), lower(str(exchanged)), rtol=1e-12, atol=1e-12)


# ---- models of transformers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "count"), [("Mixtral", 2), ("Qwen3", 1), ("DeepSeek", 2), ("gpt-oss", 1)])
def test_mixtures_of_transformers_exchange_rows(name: str, count: int) -> None:
    model = language_model(name, **({} if name == "DeepSeek" else {"output_router_logits": count == 1}))
    optimizer = torch.optim.AdamW(model.parameters())
    place = virtual(dp=2)
    graph = TrainGraph(model, language_loss, optimizer, placement=place, micro_batches=count, stage=3)
    exchanging(2.0)(graph)  # all the room that two ranks can need
    report = check_ends(graph, torch.randint(0, 32, (8, 8)), dtype=torch.float64, rtol=1e-9)
    assert report, str(report)
    sent = [c.phase for c in graph.plan.collectives if c.kind == "all_to_all" and c.bytes > 100]
    assert sent == ["forward"] * 2 + ["backward"] * 2 or (name == "gpt-oss" and len(sent) > 4) or count > 1


# ---- what is said


def test_each_way_can_be_asked_for_and_is_explained_with_the_bytes_of_all() -> None:
    sent = {}
    for way in ("exchange", "tokens", "weights"):

        def configure(graph: TrainGraph, way: str = way) -> None:
            graph.config.set_split_experts(way)
            graph.config.set_links({"dp": gz.Link(1e-6, 1e9)})

        graph = train(model_of(shared=False), virtual(dp=4), B, configure=configure, stage=3)
        (line,) = graph.plan.decisions
        assert line.startswith(f"experts split over dp: {way}") and line.endswith("model.first and 1 more, each")
        words = next(word for word in str(gz.explain(graph, "grouped_mm")).splitlines() if "experts split" in word)
        assert line.startswith(words.strip())
        sent[way] = {name: float(words.split(f"{name} ")[1].split(" B")[0].replace(",", "")) for name in
                     ("exchange", "tokens", "weights") if name != way}  # fmt: skip
    assert sent["exchange"]["tokens"] == sent["weights"]["tokens"] == 4 * TOKENS * WIDTH * 8 * 3 / 4
    assert sent["tokens"]["exchange"] == sent["weights"]["exchange"]


WRONG: dict[str, tuple[Callable[[gz.GraphConfig], Any], str]] = {
    "a way that is not there": (lambda c: c.set_split_experts("drop"), "exchange"),
    "no room": (lambda c: c.set_split_experts("exchange", capacity=0), "above 0"),
    "room without end": (lambda c: c.set_split_experts("exchange", capacity=float("inf")), "above 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_without_a_meaning_are_refused(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises(ConfigError, match=words):
        call(TrainGraph(Mixture(), loss_of, placement=virtual(dp=2)).config)


def close_loss(model: Any, x: Tensor, wanted: Tensor) -> Tensor:
    """A loss, with a check between two mixtures that only their true results meet."""
    h = model.stem(x)
    h = h + model.first(h)
    assert (h - wanted).abs().max() < 1e-9
    loss: Tensor = model.head((h + model.second(h)).tanh()).square().mean()
    return loss


@pytest.mark.parametrize(("schedule", "micro_batches", "stage"), [
    ("", 1, 3), ("1f1b", 2, 3), pytest.param("zb1p", 3, 2, marks=pytest.mark.slow),
    pytest.param("zbv", 2, 0, marks=pytest.mark.slow),
])  # fmt: skip
def test_all_stages_make_a_step_without_room_again_and_what_build_checks_waits(
    schedule: str, micro_batches: int, stage: int
) -> None:
    """Room is taken away before each step; one mixture alone may lack it."""
    model: Any = model_of(shared=False, bias=torch.tensor([0.0, 9, 0, 9]))
    model.second.bias = None
    twin = copy.deepcopy(model)
    place = virtual(pp=2, dp=2) if schedule else virtual(dp=2)
    gz.to_global(model, place, {"*.up": (*(B,) * bool(schedule), S(0)), "*.down": (*(B,) * bool(schedule), S(0))})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    graph = TrainGraph(model, close_loss, optimizer, placement=place, stage=stage, micro_batches=micro_batches)
    if schedule:
        parts = [model.stem, model.first, model.second, model.head]
        count = len(parts) if schedule == "zbv" else 2
        for i, part in enumerate(parts):
            graph.config.set_stage(part, i * count // len(parts))
        graph.config.set_pipeline(schedule)
    other = torch.optim.AdamW(twin.parameters(), lr=0.01)
    for step, room in enumerate((0.5, 1.0)):  # of which the second is enough for the first mixture
        exchanging(room)(graph)
        h = twin.stem(batch(step))
        wanted = (h + twin.first(h)).detach()
        other.zero_grad()
        loss = close_loss(twin, batch(step), wanted)
        loss.backward()
        other.step()
        torch.testing.assert_close(graph(batch(step), wanted), loss.detach(), rtol=1e-9, atol=1e-9)
        assert graph.config.expert_capacity > room and is_exchanged(graph)
        before = graph.full_state_dict()["modules"]["model"]
        torch.testing.assert_close(before, twin.state_dict(), rtol=1e-9, atol=1e-9)
        exchanging(0.5)(graph)
        with pytest.raises(CheckError, match="wanted"):
            graph(batch(step), wanted)  # which are not the new ones
        torch.testing.assert_close(graph.full_state_dict()["modules"]["model"], before, rtol=0, atol=0)
    exchanging(0.5)(graph)
    h = twin.stem(batch(5))
    assert gz.check(graph, batch(5), (h + twin.first(h)).detach(), dtype=torch.float64, rtol=1e-9)


def test_auto_exchanges_rows_while_that_sends_least() -> None:
    """And goes on with tokens where an exchange needs more room than these would send."""
    model, place = model_of(shared=False, bias=torch.tensor([0.0, 9, 0, 9])), virtual(dp=4)
    graph = TrainGraph(model, loss_of, torch.optim.SGD(model.parameters()), placement=place, stage=3).compile(batch(0))
    (line,) = graph.plan.decisions
    assert line.startswith("experts split over dp: exchange with room for 1.25 even shares") and is_exchanged(graph)
    graph(batch(0))
    (line,) = graph.plan.decisions
    assert line.startswith("experts split over dp: tokens") and graph.config.expert_capacity == 2.5
    assert gz.check(graph, batch(1), dtype=torch.float64, rtol=1e-9)


def test_an_axis_whose_ranks_have_the_same_tokens_is_explained_too() -> None:
    graph = train(model_of(shared=False), virtual(ep=2), S(0))
    (line,) = graph.plan.decisions
    sent = [c.bytes for c in graph.plan.collectives if c.kind == "all_reduce" and c.bytes >= TOKENS * WIDTH * 8]
    assert line.startswith(f"experts split over ep: sums, {sum(sent) / 2:,.0f} B sent a rank (weights ")
    assert len(sent) == 4


def test_an_exchange_that_no_mixture_can_make_is_told() -> None:
    graph = TrainGraph(TwoLayers().double(), loss_of, placement=virtual(dp=2))
    exchanging(1.0)(graph)
    with pytest.warns(UserWarning, match='set_split_experts."exchange".: no rows are exchanged in'):
        graph.compile(batch(0))
