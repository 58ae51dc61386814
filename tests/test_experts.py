"""Experts over ranks: weights split by expert are used where they are, and give what plain PyTorch gives with all."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import TrainGraph
from mixtures import Mixture, TwoLayers
from torch.utils.checkpoint import checkpoint
from toys import history, lines, lower

import graphzero as gz
from graphzero.plugins.experts import expert_region
from graphzero.sbp import B, S
from graphzero.testing import assert_same_step

pytestmark = [
    pytest.mark.strict,
    pytest.mark.filterwarnings("ignore:no axis of"),
    pytest.mark.filterwarnings("ignore:every rank of dp computes the whole gradient"),
]
TOKENS, INPUTS, WIDTH = 12, 24, 6


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def batch(step: int, width: int = INPUTS) -> torch.Tensor:
    return torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def model_of(**options: Any) -> TwoLayers:
    torch.manual_seed(0)
    return TwoLayers(**options).double()


def train(
    graph_model: torch.nn.Module, place: gz.Placement, *nd: Any, configure: Callable[[TrainGraph], Any] = id,
    loss_fn: Callable[..., torch.Tensor] = loss_of, **settings: Any,
) -> TrainGraph:  # fmt: skip
    """Two steps of a Graph and of plain PyTorch, which must agree in losses and in all that the steps have changed."""
    twin = copy.deepcopy(graph_model)
    nd = nd or (*(B,) * (len(place.names) - 1), S(0))
    gz.to_global(graph_model, place, {"*.up": nd, "*.down": nd})
    graph = TrainGraph(graph_model, loss_fn, torch.optim.AdamW(graph_model.parameters(), lr=0.01), placement=place,
                       **settings)  # fmt: skip
    configure(graph)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_fn(twin, batch(step))
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(graph(batch(step)), loss.detach(), rtol=1e-9, atol=1e-9)
    new = graph.full_state_dict()["modules"]["model"]
    torch.testing.assert_close(new, twin.state_dict(), rtol=1e-9, atol=1e-9)
    return graph


def virtual(**axes: int) -> gz.Placement:
    grid = torch.arange(torch.Size(axes.values()).numel()).reshape(*axes.values()).tolist()
    return gz.placement("cpu", grid, names=tuple(axes), virtual=True)


ROUTINGS: dict[str, dict[str, Any]] = {
    "as the router says": {},
    "all tokens to one expert": {"top": 1, "bias": torch.tensor([0.0, 0, 9, 0])},
    "two experts without tokens": {"bias": torch.tensor([0.0, 9, 0, 9])},
    "all experts for each token": {"top": 4},
    "no shared expert": {"shared": False},
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_experts_on_ranks_train_as_plain_pytorch_does(routing: str, ranks: int) -> None:
    graph = train(model_of(**ROUTINGS[routing]), virtual(ep=ranks))
    assert not any(c.kind == "all_gather" for c in graph.plan.collectives)


def test_one_sum_of_the_tokens_travels_in_each_direction_of_a_layer() -> None:
    graph = train(model_of(), virtual(ep=4))
    tokens, routed, sent = TOKENS * WIDTH * 8, TOKENS * 2 * 8, 2 * 3 / 4  # float64; of an all_reduce over 4
    by_phase = {phase: sum(c.bytes for c in graph.plan.collectives if c.phase == phase) for phase in
                ("forward", "backward", "update")}  # fmt: skip
    # backward: the gradient of the router's weights too, one number for each token and expert of it
    assert by_phase == {"forward": 2 * tokens * sent, "backward": 2 * (tokens + routed) * sent, "update": 0}


def test_a_rank_holds_and_multiplies_its_own_experts_alone() -> None:
    graph = train(model_of(experts=8), virtual(ep=4))
    whole = train(model_of(experts=8), virtual(ep=1))
    products = lines(graph.program, "= grouped_mm(")
    assert len(products) == 12 and all("f64[8," not in line for line in products)
    experts = 2 * (8 * WIDTH * 10 + 8 * 5 * WIDTH) * 8
    held = {kind: (whole.plan.memory[kind] - graph.plan.memory[kind]) for kind in ("parameters", "optimizer_states")}
    assert held == {"parameters": experts * 3 // 4, "optimizer_states": 2 * experts * 3 // 4}


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_data_axes_beside_experts_with_zero(stage: int) -> None:
    train(model_of(), virtual(dp=2, ep=2), stage=stage)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_experts_that_zero_splits_over_a_data_axis_are_used_where_they_are(dtype: torch.dtype | None) -> None:
    """Tokens travel instead of weights: gathered for the products, and reduced and scattered after them."""
    model = model_of()
    if dtype is None:
        graph = train(model, virtual(dp=2), B, stage=3)
    else:
        optimizer = torch.optim.AdamW(model.float().parameters())
        graph = TrainGraph(model, loss_of, optimizer, placement=virtual(dp=2), stage=3, dtype=dtype)
        graph.compile(batch(0).float())
    gathers = [c for c in graph.plan.collectives if c.kind == "all_gather" and c.what_for == "parameters"]
    assert gathers and not any(name.endswith((".up", ".down")) for c in gathers for name in c.names)
    products = lines(graph.program, "= grouped_mm(")
    assert len(products) == 12 and not any("64[4," in line or "16[4," in line for line in products)


def test_bytes_of_experts_on_a_data_axis() -> None:
    graph = train(model_of(shared=False), virtual(dp=4), S(0))
    tokens = TOKENS * WIDTH * 8 * 3 / 4  # float64; of one gather or reduce_scatter over 4 ranks
    assert [c.kind for c in graph.plan.collectives if c.bytes == tokens] == [
        *("all_gather", "reduce_scatter") * 2,  # x and y of each layer
        *("all_gather", "reduce_scatter") * 2,  # their gradients
    ]


def test_experts_that_ranks_do_not_divide_are_gathered_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="4 experts are split over 3 ranks of ep, which does not divide them"):
        graph = train(model_of(), virtual(ep=3))
    assert any(c.kind == "all_gather" for c in graph.plan.collectives)


def recomputed(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The loss with layers that are computed again in backward: that sorts again, and has ends of groups of its own."""
    x = model.stem(x)
    h = x + checkpoint(model.first, x, use_reentrant=False)
    y: torch.Tensor = model.head(h + checkpoint(model.second, h, use_reentrant=False))
    return y.square().mean()


def in_two_stages(graph: TrainGraph) -> None:
    parts: Any = graph.model
    for part, stage in ((parts.stem, 0), (parts.first, 0), (parts.second, 1), (parts.head, 1)):
        graph.config.set_stage(part, stage)


BESIDE: dict[str, tuple[dict[str, int], tuple[Any, ...], dict[str, Any]]] = {
    "torch.utils.checkpoint": ({"ep": 2}, (), {"loss_fn": recomputed}),
    "pipeline stages": ({"pp": 2, "ep": 2}, (), {"configure": in_two_stages}),
    "a budget at stage 3": ({"dp": 2}, (B,), {"stage": 3, "configure": lambda g: g.config.set_memory_budget(60000)}),
    "two data axes": ({"dp_replicate": 2, "dp_shard": 2}, (B, B), {"stage": 3, "axis": "dp_shard"}),
    "two axes that split experts": ({"dp": 2, "ep": 2}, (S(0), S(0)), {}),
    "experts split inside": ({"ep": 2, "tp": 2}, (S(0), S(1)), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BESIDE)
def test_experts_beside_other_splits_and_settings(case: str) -> None:
    axes, nd, settings = BESIDE[case]
    train(model_of(), virtual(**axes), *nd, **settings)


# ---- which rows are whose


def test_a_wrong_map_of_owners_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row of a rank one too late: its product is lost to all ranks."""
    right = expert_region.ExpertRegion._first_row

    def late(self: Any, node: Any) -> Any:
        w = expert_region.DefinitionWriter(self.graph, node)
        return w(torch.ops.aten.add.Tensor, right(self, node), 1)

    monkeypatch.setattr(expert_region.ExpertRegion, "_first_row", late)
    with pytest.raises(AssertionError):
        train(model_of(), virtual(ep=2))


def mixed_rows(h: torch.Tensor) -> torch.Tensor:
    """Rows of other experts are read: the sum over the ranks comes first."""
    return h - h.mean(0)


def to_rows_and_back(h: torch.Tensor) -> torch.Tensor:
    return h.reshape(-1).tanh().view(h.shape)


ROW_BY_ROW: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.tanh,
    lambda h: h.softmax(-1),
    lambda h: F.layer_norm(h, h.shape[-1:]),
    lambda h: h.t().contiguous().exp().t(),
    lambda h: h.clamp(-0.5, 0.5),
    lambda h: torch.where(h > 0, h, h.exp()),
    lambda h: h / h.norm(dim=-1, keepdim=True),
    lambda h: h.flip(-1).cumsum(-1),
    lambda h: h.sort(-1)[0],
    lambda h: h.unsqueeze(1).relu().squeeze(1),
]
OTHERS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    mixed_rows,
    to_rows_and_back,
    lambda h: h.flip(0),
    lambda h: h.cumsum(0) / 8,
    lambda h: h.roll(1, 0),
    lambda h: h.softmax(0),
    lambda h: h[torch.arange(h.shape[0] - 1, -1, -1)],
    lambda h: h.sort(0)[0],
    lambda h: h.t().reshape(h.shape),
    lambda h: h * (h.sum(0) > 0.1),
]


def chain(seed: int, some: list[Callable[[torch.Tensor], torch.Tensor]]) -> Callable[[torch.Tensor], torch.Tensor]:
    picked = random.Random(seed).choices(some, k=3)

    def between(h: torch.Tensor) -> torch.Tensor:
        for one in picked:
            h = one(h)
        return h

    return between


CHAINS = (2, 3, 7, 14, 40, 169)  # with 0 they have every op


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in CHAINS)])
def test_any_ops_between_the_products_give_what_they_give_on_one_device(seed: int) -> None:
    options = {"between": chain(seed, ROW_BY_ROW + OTHERS)}
    train(model_of(**options), virtual(ep=2))


@pytest.mark.parametrize("one", range(len(ROW_BY_ROW)))
def test_nothing_is_summed_between_products_where_rows_do_not_mix(one: int) -> None:
    torch.manual_seed(0)
    model, place = Mixture(between=ROW_BY_ROW[one]).double(), virtual(ep=2)
    gz.to_global(model, place, {"up": S(0), "down": S(0)})
    graph = TrainGraph(model, lambda model, x: model(x).square().mean(), placement=place).compile(batch(0, WIDTH))
    assert [(c.kind, c.bytes) for c in graph.plan.collectives] == [("all_reduce", TOKENS * WIDTH * 8)]


# ---- the pass, in text

TEXT = """
graph experts(ep={ranks})
  x = batch() : f64[6, 4]     B!
  v = batch() : f64[4, 6]     B!
  k = batch() : f64[6]        B!
  w = param() : f64[4, 4, 4]  S(0)!
forward:
  u    = use(w)                          : f64[4, 4, 4]  S(0)!
  n    = histc(k, 4, -99, 99)            : f64[4]
  ends = cumsum(n, 0, dtype=torch.int32) : i32[4]
{ops}
  return {result}
"""
OPS = {
    "rows": ("y = grouped_mm(x, u, ends) : f64[6, 4]\nz = relu(y) : f64[6, 4]", "z"),
    "columns": ("y = grouped_mm(u, v, ends) : f64[4, 6]\nz = relu(y) : f64[4, 6]", "z"),
    "columns of rows": (
        "y = grouped_mm(x, u, ends) : f64[6, 4]\nt = t(y) : f64[4, 6]\nz = grouped_mm(u, t, ends) : f64[4, 6]", "z"),
    "both operands of a weight's gradient": (
        "y = grouped_mm(x, u, ends) : f64[6, 4]\nt = t(y) : f64[4, 6]\nz = grouped_mm(t, y, ends) : f64[4, 4, 4]", "z"),
    "truth values": ("y = grouped_mm(x, u, ends) : f64[6, 4]\nz = gt.Scalar(y, 0.5) : bool[6, 4]", "z"),
    "the shape alone": ("y = grouped_mm(x, u, ends) : f64[6, 4]\nz = ones_like(y) : f64[6, 4]", "z, y"),
}  # fmt: skip


def text_of(ops: str, ranks: int) -> str:
    lines_of, result = OPS[ops]
    return TEXT.format(ops="\n".join(f"  {line}" for line in lines_of.splitlines()), result=result, ranks=ranks)


@pytest.mark.parametrize("ops", OPS)
def test_products_of_every_form_are_those_of_one_rank(ops: str) -> None:
    products = lines(history(text_of(ops, 2))["localize"].after, "= grouped_mm(")
    assert products and all("select" in line for line in products)  # where the first group of a rank begins
    assert_same_step(lower(text_of(ops, 1).replace("S(0)", "B")), lower(text_of(ops, 2)), rtol=1e-12, atol=1e-12)


class JoinedWeights(torch.nn.Module):
    """A mixture whose experts multiply by a concatenation of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Mixture(shared=False)
        self.halves = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
        for half, weight in zip(self.halves, self.mixture.up.detach().chunk(2, -1), strict=True):
            half.up = torch.nn.Parameter(weight.clone())
        del self.mixture.up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mixture.up = torch.cat([half.up for half in self.halves], -1)
        result = self.mixture(x[:, :WIDTH]).square().mean()
        del self.mixture.up
        return result


def test_weights_that_are_computed_of_several_parameters_are_split_too() -> None:
    torch.manual_seed(0)
    graph = train(JoinedWeights().double(), virtual(ep=2), S(0))
    assert graph.plan.decisions[0].startswith("experts split over ep: sums")


def test_an_op_that_only_reads_a_shape_stays_outside() -> None:
    after = history(text_of("the shape alone", 2))["split_experts"].after
    assert [line.split(" ")[2] for line in lines(after, "= ones_like(")] == ["ones_like(y)"]
    assert len(lines(after, "as_global(")) == 1


def test_a_use_of_a_computed_value_is_no_use_of_a_weight():
    text = """
    graph g(dp=2)
      w = param()          : f32[4, 2, 2]
      v = param()          : f32[4, 2, 2]
    forward:
      c = cat([w, v], 1)   : f32[4, 4, 2]
      u = use(c)           : f32[4, 4, 2]
      return u
    """
    before = gz.parse(text)
    assert_same_step(before, before, ranks=2)
