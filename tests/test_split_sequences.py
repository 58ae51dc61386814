"""Steps on a split sequence: they are those of plain PyTorch, and little besides heads travels."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import TrainGraph
from inside import executor_of
from storages import Storages
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import graphzero as gz
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.transfer import transfer_of
from graphzero.ops import ATTENTION, ATTENTION_BACKWARD, ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD
from graphzero.plan.seconds import work_of

B, S = gz.sbp.B, gz.sbp.S
VOCABULARY, WIDTH, DIM, LENGTH, ROWS = 24, 16, 2, 16, 4
IGNORED = -100

pytestmark = pytest.mark.filterwarnings("ignore:no axis of placement")  # of one without a data axis


class Block(nn.Module):
    """Attention and a network after it.  heads: of queries, and of keys and values."""

    def __init__(self, heads: tuple[int, int], dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, heads[0] * DIM), nn.Linear(heads[0] * DIM, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, heads[1] * DIM) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout, is_causal=mask is None, enable_gqa=self.heads[0] != self.heads[1]
        )
        x = x + F.dropout(self.o(y.transpose(1, 2).flatten(2)), self.dropout)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, heads: tuple[int, int] = (8, 8), layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, seen: Tensor | None = None) -> Tensor:
        places = torch.arange(ids.shape[1])
        mask = None if seen is None else (places <= places[:, None]) & seen[:, None, None, :]
        x = self.tokens(ids) + self.places(places)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def next_token_loss(model: nn.Module, ids: Tensor, labels: Tensor, seen: Tensor | None = None) -> Tensor:
    """The mean over all labels that count, each one place ahead of the token that predicts it."""
    ahead = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(model(ids, seen).flatten(0, 1), ahead.flatten(), ignore_index=IGNORED)


def batch(padded: bool = False, length: int = LENGTH) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (ROWS, length), generator=generator)
    labels = ids.clone()
    labels[0, :5] = labels[2, 1:] = IGNORED
    seen = torch.arange(length) < torch.tensor([length, 7, 11, length])[:, None]
    return (ids, labels, seen) if padded else (ids, labels)


def placed(**sizes: int) -> gz.Placement:
    ranks = torch.arange(torch.tensor(list(sizes.values())).prod().item()).reshape(*sizes.values())
    return gz.placement("cpu", ranks.numpy(), names=tuple(sizes), virtual=True)


def graph_of(model: nn.Module, placement: gz.Placement, sections: int = 1, **options: Any) -> TrainGraph:
    """A step of ``model`` on pieces of the sequence, each of so many sections, along axes whose name begins with c."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    graph = TrainGraph(model, next_token_loss, optimizer, placement=placement, clip=0.5, **options)
    sbp = tuple({"d": S(0), "c": S(1, sections)}.get(name[0], B) for name in placement.names if name != "pp")
    for name in ("x", "y", "more.0"):
        graph.config.set_input(name, sbp=sbp)
    return graph


def assert_parity(graph: TrainGraph, steps: int = 2, padded: bool = False, length: int = LENGTH) -> None:
    plain = copy.deepcopy(graph.model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        expected = next_token_loss(plain, *batch(padded, length))
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        torch.testing.assert_close(graph(*batch(padded, length)), expected.detach(), rtol=1e-9, atol=1e-12)
    for (name, x), y in zip(
        plain.state_dict().items(), graph.full_state_dict()["modules"]["model"].values(), strict=True
    ):
        torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def transfers(graph: TrainGraph) -> dict[str, float]:
    """Bytes of each kind of collective besides those of gradients and parameters."""
    sent: Counter[str] = Counter()
    for one in graph.plan.collectives:
        if one.what_for == "other":
            sent[one.kind] += one.bytes
    return dict(sent)


FAST = [
    ({"cp": 4}, {"stage": 3, "axis": "cp"}, False),
    ({"dp": 2, "cp": 2}, {"stage": 1, "micro_batches": 2}, True),
    ({"cpa": 2, "cpb": 2}, {}, True),
]
SLOW = [
    ({"cp": 2}, {}, True),
    ({"cp": 8}, {}, False),
    ({"dp": 2, "cp": 2}, {"stage": 2}, False),
    ({"dp": 2, "cp": 2}, {"stage": 3, "axis": ("dp", "cp")}, True),
    ({"cp": 2, "dp": 2}, {"stage": 3}, False),
]
LAYOUTS = [*FAST, *(pytest.param(*layout, marks=pytest.mark.slow) for layout in SLOW)]


@pytest.mark.parametrize(("sizes", "options", "padded"), LAYOUTS)
def test_a_step_on_a_split_sequence_is_that_of_plain_pytorch(sizes, options, padded) -> None:
    graph = graph_of(Gpt().double(), placed(**sizes), **options)
    graph.config.set_split_attention("exchange")
    assert_parity(graph, padded=padded)
    assert splits_of_attention(graph) == ({"S(1)", "S(1, 2)"} if "cpb" in sizes else {"S(1)"})  # within what cpb cuts


@pytest.mark.parametrize(("sizes", "options", "padded"), LAYOUTS)
def test_a_step_that_gathers_keys_is_that_of_plain_pytorch(sizes, options, padded) -> None:
    graph = graph_of(Gpt((4, 2)).double(), placed(**sizes), **options)
    graph.config.set_split_attention("gather")
    assert_parity(graph, padded=padded)
    assert splits_of_attention(graph) == {"S(2)"}


RINGS = [  # placement, options, padded, heads, whether tokens are dealt out in turn
    ({"cp": 4}, {"stage": 3, "axis": "cp"}, False, (8, 4), True),
    ({"dp": 2, "cp": 2}, {"stage": 1, "micro_batches": 2}, True, (8, 2), False),
    *(
        pytest.param(*ring, marks=pytest.mark.slow)
        for ring in (
            ({"cp": 2}, {}, False, (7, 7), False),
            ({"cp": 8}, {}, False, (8, 2), False),
            ({"cp": 8}, {}, True, (4, 1), True),
            ({"dp": 2, "cp": 2}, {"stage": 2}, True, (8, 8), True),
            ({"cp": 2, "dp": 2}, {"stage": 3, "axis": ("cp", "dp")}, False, (3, 3), False),
        )
    ),
]


@pytest.mark.parametrize(("sizes", "options", "padded", "heads", "in_turn"), RINGS)
def test_a_step_of_rings_is_that_of_plain_pytorch(sizes, options, padded, heads, in_turn) -> None:
    sections = LENGTH // sizes["cp"] if in_turn else 1
    graph = graph_of(Gpt(heads).double(), placed(**sizes), sections, **options)
    graph.config.set_split_attention("ring")
    assert_parity(graph, padded=padded)
    assert not splits_of_attention(graph) and block_count(graph) == 2 * sizes["cp"] * options.get("micro_batches", 1)


def heads_graph(model, heads_of) -> TrainGraph:
    """A ring of two ranks in an attention to the keys and values of another one."""

    def loss(model, x):
        q, k, v = heads_of(model, x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(y, v, k).square().mean()

    graph = TrainGraph(model, loss, torch.optim.SGD(model.parameters()), placement=placed(cp=2))
    graph.config.set_input("x", sbp=S(1))
    graph.config.set_split_attention("ring")
    report = gz.check(graph, torch.randn(1, 16, WIDTH), dtype=torch.float64, rtol=1e-9)
    assert report, str(report)
    return graph


def test_the_query_of_an_attention_may_be_the_result_of_another() -> None:
    """Whose backward reads that result too."""
    model = nn.Linear(WIDTH, 3 * WIDTH)
    graph = heads_graph(model, lambda model, x: model(x).unflatten(-1, (3, -1, DIM)).permute(2, 0, 3, 1, 4))
    assert block_count(graph) == 2 * 2 * 2


def test_keys_that_cannot_go_round_are_gathered_and_the_reason_is_given() -> None:
    def heads_of(model, x):
        keys = x.unflatten(-1, (-1, DIM)).transpose(1, 2)  # without gradients
        return model(x).unflatten(-1, (-1, DIM)).transpose(1, 2), keys, keys

    graph = heads_graph(nn.Linear(WIDTH, WIDTH), heads_of)
    assert block_count(graph) == 0
    (line,) = (line for line in graph.plan.decisions if "do not go round" in line)
    assert line.startswith("'attention' (") and "and 1 more: keys are gathered" in line and "gradients of keys" in line


def block_count(graph: TrainGraph) -> int:
    """How many blocks of keys the attention of a program reads, in forward and backward of each micro-batch."""
    return sum(node.target in (ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD) for node in graph.program.nodes)


def test_what_goes_round_travels_while_a_block_is_computed() -> None:
    """Of all shifts but the one that brings gradients home, which nothing is left to compute beside."""
    nodes = list(layer_graph(4, (8, 4), "ring").program.nodes)
    places = {node: i for i, node in enumerate(nodes)}
    blocks = [i for i, node in enumerate(nodes) if node.target in (ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD)]
    shifts = [node for node in nodes if (moves := transfer_of(node)) is not None and moves.kind == "shift"]
    assert len(shifts) == 3 + 3 + 4
    spans = [(places[node], places[transfer_of(node).end]) for node in shifts]
    assert [any(begin < block < end for block in blocks) for begin, end in spans] == [True] * 9 + [False]


def test_a_ring_holds_two_blocks_where_a_gather_holds_all() -> None:
    peaks = {way: layer_graph(8, (8, 8), way, 512).plan.memory.at_peak["activations"] for way in ("gather", "ring")}
    keys_and_values = 2 * 512 * 8 * DIM * 4
    assert peaks["ring"] < keys_and_values < peaks["gather"]


STRIPES = [
    ("gather", {"cp": 4}, {"stage": 3, "axis": "cp"}, False),
    ("exchange", {"cp": 2}, {}, False),
    pytest.param("gather", {"dp": 2, "cp": 2}, {"micro_batches": 2}, True, marks=pytest.mark.slow),
    pytest.param("gather", {"cp": 8}, {}, False, marks=pytest.mark.slow),
    pytest.param("exchange", {"dp": 2, "cp": 2}, {"stage": 1}, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("way", "sizes", "options", "padded"), STRIPES)
def test_a_step_on_tokens_dealt_out_in_turn_is_that_of_plain_pytorch(way, sizes, options, padded) -> None:
    """Each rank holds every n-th token: positions, masks, labels and draws are those of its own tokens."""
    graph = graph_of(Gpt((8, 4)).double(), placed(**sizes), LENGTH // sizes["cp"], **options)
    graph.config.set_split_attention(way)
    assert_parity(graph, padded=padded)
    assert splits_of_attention(graph) == {"S(1)" if way == "exchange" else f"S(2, {LENGTH // sizes['cp']})"}


def splits_of_attention(graph: TrainGraph) -> set[str]:
    """How attention is split on axes other than data axes."""
    names = graph.placement.names
    nds = [gz.sbp.of(node)[0] for node in graph.program.nodes if node.target is ATTENTION]
    return {str(sbp) for nd in nds for name, sbp in zip(names, nd, strict=True) if name[0] == "c"}


@pytest.mark.parametrize(
    "heads", [(6, 2), *(pytest.param(heads, marks=pytest.mark.slow) for heads in ((7, 7), (6, 1)))]
)
def test_any_number_of_heads_is_exact_on_four_ranks(heads) -> None:
    """Uneven pieces of heads; heads that leave a rank none, so that keys are gathered; one head of keys for all."""
    assert_parity(graph_of(Gpt(heads).double(), placed(cp=4)))


@pytest.mark.parametrize(
    "way", ["exchange", *(pytest.param(way, marks=pytest.mark.slow) for way in ("gather", "ring"))]
)
def test_dropout_draws_the_same_however_the_sequence_lies(way) -> None:
    losses = []
    for placement, sections in (
        (placed(dp=1), 1),
        (placed(cp=4), 4 if way == "gather" else 1),
        (placed(dp=2, cp=2), 1),
    ):
        graph = graph_of(Gpt((4, 2), dropout=0.3).double(), placement, sections)
        graph.config.set_split_attention(way)
        losses.append([graph(*batch()).item() for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert losses[2] == pytest.approx(losses[0], rel=1e-10)


@pytest.mark.parametrize("way", ["exchange", pytest.param("ring", marks=pytest.mark.slow)])
def test_beside_a_tensor_axis_heads_travel_along_the_sequences_axis_alone(way) -> None:
    placement, model = placed(cp=2, tp=2), Gpt((8, 4)).double()
    columns, rows = (B, S(0)), (B, S(1))
    splits = {f"*.{name}.*": columns for name in "qkv"} | {"*.up.*": columns, "*.o.weight": rows, "*.down.weight": rows}
    gz.to_global(model, placement=placement, sbp=splits)
    graph = graph_of(model, placement)
    graph.config.set_split_attention(way)
    assert_parity(graph)
    assert {c.axis for c in graph.plan.collectives if c.kind in ("all_to_all", "shift")} == {"cp"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exchange", "ring"])
@pytest.mark.parametrize(("dtype", "most"), [(None, 1e-6), (torch.bfloat16, 1e-3)])
def test_other_precisions_on_a_split_sequence_are_within_their_rounding(dtype, most, way) -> None:
    losses = []
    for placement in (placed(dp=1), placed(cp=4)):
        graph = graph_of(Gpt((8, 4)), placement, dtype=dtype)
        graph.config.set_split_attention(way)
        losses.append([graph(*batch()).item() for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=most)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "ring"])
def test_what_backward_recomputes_is_exact_on_a_split_sequence(way) -> None:
    graph = graph_of(Gpt((8, 4), layers=2).double(), placed(cp=4))
    graph.config.set_split_attention(way)
    graph.config.set_activation_memory("checkpoint")
    assert_parity(graph)


# ---- what travels, and what is held


def layer_graph(ranks: int, heads: tuple[int, int], way: str, length: int = 64, sections: int = 1) -> TrainGraph:
    """Attention and projections without a loss over classes, compiled on meta; a row of a sequence."""
    with torch.device("meta"):
        model = nn.ModuleDict({"block": Block(heads, 0.0)})

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model["block"](x, None).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = TrainGraph(model, loss, optimizer, placement=placed(cp=ranks))
    graph.config.set_input("x", sbp=S(1, sections))
    graph.config.set_split_attention(way)
    return graph.compile(torch.empty(1, length, WIDTH, device="meta"))


@pytest.mark.parametrize(
    ("ranks", "keys"), [(2, 8), (4, 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, 2), (8, 8)))]
)
def test_bytes_are_those_of_the_closed_forms(ranks: int, keys: int) -> None:
    of_queries, of_keys, share = 64 * 8 * DIM * 4, 64 * keys * DIM * 4, (ranks - 1) / ranks
    sent = transfers(layer_graph(ranks, (8, keys), "gather"))
    assert sent.pop("all_reduce", 0) <= 8 * share
    assert sent == {"all_gather": 2 * of_keys * share, "reduce_scatter": 2 * of_keys * share}
    sent = transfers(layer_graph(ranks, (8, keys), "ring"))
    assert sent.pop("all_reduce", 0) <= 8 * share
    assert sent == {"shift": (4 * share + 2) * of_keys}
    if keys % ranks == 0:
        sent = transfers(layer_graph(ranks, (8, keys), "exchange"))
        assert sent.pop("all_reduce", 0) <= 8 * share
        assert sent == {"all_to_all": 4 * (of_queries + of_keys) * share / ranks}


def test_activations_are_held_in_as_many_pieces_as_there_are_ranks() -> None:
    """What attention makes is held twice, as pieces of heads and as pieces of the sequence."""
    one, eight = (layer_graph(ranks, (8, 8), "exchange", 512).plan.memory.at_peak["activations"] for ranks in (1, 8))
    assert eight == pytest.approx((one + 512 * 8 * DIM * 4) / 8, abs=16)


@pytest.mark.parametrize(
    ("way", "heads", "sizes"),
    [
        ("exchange", (8, 4), {"cp": 4}),
        ("gather", (8, 4), {"cp": 4}),
        pytest.param("gather", (3, 3), {"cp": 4}, marks=pytest.mark.slow),
        ("ring", (4, 2), {"cp": 4}),
        ("ring", (4, 2), {"co": 2, "ci": 2}),
    ],
)
def test_a_call_sends_and_holds_what_the_plan_says(way, heads, sizes) -> None:
    with gz.testing.fake_world(4, rank=3):
        ranks = torch.arange(4).reshape(*sizes.values()).tolist()
        placement = gz.placement("cpu", ranks, names=tuple(sizes))
        graph = graph_of(Gpt(heads, dropout=0.1), placement, stage=3, axis=tuple(sizes))
        graph.config.set_split_attention(way)
        if "ci" in sizes:
            graph.config.set_split_attention("exchange", axis="ci")
        inputs = [x[:, :4].contiguous() for x in batch()]
        graph(*inputs)
        graph._source.world.trace = []
        graph(*inputs)
        sent = [(entry.kind, entry.axis, entry.nbytes) for entry in graph._source.world.trace]
        assert sent == [(entry.kind, entry.axis, entry.bytes) for entry in graph.plan.collectives]
        gc.collect()
        known = [x.to_local() if hasattr(x, "to_local") else x for x in tree_leaves(graph.state_dict())]
        slots = [slot for (slot,) in executor_of(graph).slots.values()]
        with Storages([*inputs, *slots, *(x for x in known if isinstance(x, Tensor))]) as mode:
            graph(*inputs)
        memory = graph.plan.memory
        between_calls = sum(memory.resident.values())
        assert 0 <= mode.peak + between_calls - memory.peak <= 16  # the 0-d results that the call hands out


def test_tokens_dealt_out_in_turn_are_equal_work(ranks: int = 8) -> None:
    """Of contiguous pieces the last has (2 n - 1) / n of the mean; "auto" then takes an exchange."""

    def work(way: str, sections: int) -> float:
        program = layer_graph(ranks, (8, 2), way, sections=sections).program
        at = liveness(program)
        nodes = [node for node in program.nodes if node.target in (ATTENTION, ATTENTION_BACKWARD)]
        return sum(work.flops for node in nodes if (work := work_of(at, node)))

    mean = work("exchange", 1)
    assert work("gather", 1) == pytest.approx(mean * (2 * ranks - 1) / ranks)
    assert work("gather", 64 // ranks) == mean
    assert splits_of_attention(layer_graph(ranks, (8, 1), "auto")) == {"S(1)"}
    assert splits_of_attention(layer_graph(ranks, (8, 1), "auto", sections=64 // ranks)) == {f"S(2, {64 // ranks})"}


UNEQUAL = "under a causal mask contiguous pieces of queries are unequal work"


def test_an_explanation_shows_what_each_way_costs_and_why_one_is_taken() -> None:
    graph = layer_graph(4, (8, 4), "auto")
    assert [line.strip() for line in str(gz.explain(graph, "attention")).splitlines()[1:5]] == [
        f"attention over a sequence that cp splits: exchange, {UNEQUAL}",
        "> exchange  sends 4,608 B, holds 4,096 B",
        "gather    sends 6,144 B, holds 10,240 B",
        "ring      sends 10,240 B, holds 6,144 B",
    ]
    (decision,) = graph.plan.decisions
    assert decision.startswith("attention over a sequence that cp splits: exchange, under") and "ring sends" in decision


@pytest.mark.parametrize("way", ["exchange", "gather", "ring"])
def test_an_explanation_has_the_bytes_that_the_plan_has(way) -> None:
    graph = layer_graph(4, (8, 4), way)
    graph.config.set_links({"cp": gz.Link(0.0, 1e6)})
    graph.compile(torch.empty(1, 64, WIDTH, device="meta"))
    sent = sum(nbytes for kind, nbytes in transfers(graph).items() if kind != "all_reduce")
    assert f"> {way:<8}  sends {sent:,.0f} B in {sent / 1e6:.2g} s" in str(gz.explain(graph, "attention"))


def test_an_explanation_has_the_bytes_of_one_micro_batch() -> None:
    graph = graph_of(Gpt((8, 4)), placed(dp=2, cp=2), micro_batches=2)
    text = str(gz.explain(graph.compile(*batch()), "attention"))
    assert "that cp splits, in each of 2 micro-batches: exchange" in text
    assert f"> exchange  sends {transfers(graph)['all_to_all'] / 2:,.0f} B" in text


# ---- two axes


TWO_AXES = [  # ways on the outer axis and on the inner one, ranks, options, padded, heads
    ("ring", {"co": 2, "ci": 2}, {"stage": 3, "axis": ("co", "ci")}, False, (8, 4)),
    ("gather", {"co": 2, "ci": 4}, {"stage": 2, "axis": "ci"}, False, (8, 4)),
    *(
        pytest.param(*one, marks=pytest.mark.slow)
        for one in (
            ("ring", {"co": 2, "ci": 4}, {"stage": 1, "axis": ("co", "ci")}, True, (8, 2)),
            ("ring", {"dp": 2, "co": 2, "ci": 2}, {"stage": 3, "axis": ("dp", "co", "ci")}, False, (4, 2)),
            ("ring", {"dp": 1, "co": 4, "ci": 2}, {"micro_batches": 2}, True, (4, 4)),
            ("gather", {"co": 2, "ci": 2}, {"stage": 3, "axis": ("co", "ci")}, True, (6, 2)),
            ("exchange", {"co": 2, "ci": 4}, {"stage": 3, "axis": ("co", "ci")}, False, (8, 8)),
        )
    ),
]


@pytest.mark.parametrize(("way", "sizes", "options", "padded", "heads"), TWO_AXES)
def test_a_step_that_exchanges_heads_inside_and_goes_another_way_outside_is_that_of_plain_pytorch(
    way, sizes, options, padded, heads
) -> None:
    graph = graph_of(Gpt(heads).double(), placed(**sizes), **options)
    graph.config.set_split_attention("exchange", axis="ci")
    graph.config.set_split_attention(way, axis="co")
    assert_parity(graph, padded=padded)
    kinds = {(c.kind, c.axis) for c in graph.plan.collectives if c.what_for == "other" and c.bytes > 64}
    assert ("all_to_all", "ci") in kinds and (("shift", "co") in kinds) == (way == "ring")
    if way == "ring":
        assert block_count(graph) == 2 * sizes["co"] * options.get("micro_batches", 1)


def test_each_axis_of_two_carries_what_one_alone_would() -> None:
    """What is exchanged inside leaves a rank n_i times fewer heads of the pieces that a ring moves outside."""
    outer, inner, of_queries, of_keys = 2, 4, 64 * 8 * DIM * 4, 64 * 4 * DIM * 4
    with torch.device("meta"):
        model = nn.ModuleDict({"block": Block((8, 4), 0.0)})
    loss = lambda model, x: model["block"](x, None).square().mean()  # noqa: E731
    graph = TrainGraph(model, loss, torch.optim.SGD(model.parameters()), placement=placed(co=outer, ci=inner))
    graph.config.set_input("x", sbp=(S(1), S(1)))
    graph.config.set_split_attention("ring", axis="co")
    graph.config.set_split_attention("exchange", axis="ci")
    graph.compile(torch.empty(1, 64, WIDTH, device="meta"))
    sent: Counter[tuple[str, str]] = Counter()
    for one in graph.plan.collectives:
        if one.what_for == "other" and one.kind != "all_reduce":
            sent[one.kind, one.axis] += one.bytes
    exchanged = 4 * (of_queries + of_keys) * (inner - 1) / inner**2 / outer
    assert sent == {("all_to_all", "ci"): exchanged, ("shift", "co"): (4 / 2 + 2) * of_keys / inner}


# ---- what a memory budget decides


def test_a_memory_budget_takes_the_way_that_fits_and_says_what_others_would_need() -> None:
    """With one head of keys a gather sends least and holds most; a ring sends less than an exchange."""
    length, sections = 512, 64

    def graph_within(budget: int | None) -> TrainGraph:
        graph = layer_graph(8, (8, 1), "auto", length, sections)
        graph.config.set_memory_budget(budget)
        return graph.compile(torch.empty(1, length, WIDTH, device="meta"))

    gathers = graph_within(None)
    assert splits_of_attention(gathers) == {f"S(2, {sections})"}
    ring = graph_within(gathers.plan.memory.peak - 1)
    assert block_count(ring) == 2 * 8 and ring.plan.memory.peak < gathers.plan.memory.peak
    assert any("'ring' fits" in line and "'auto' would peak at" in line for line in ring.plan.decisions)
    said = layer_graph(8, (8, 1), "gather", length, sections)
    said.config.set_memory_budget(gathers.plan.memory.peak - 1)
    said.compile(torch.empty(1, length, WIDTH, device="meta"))
    assert not block_count(said)  # what is said stays: the budget computes values again instead


def test_a_memory_budget_chooses_among_ways_on_pipeline_stages_too() -> None:
    length = 64

    def graph_within(budget: int | None) -> TrainGraph:
        model = Gpt((8, 1), layers=2)
        model.places = nn.Embedding(length, WIDTH)
        graph = graph_of(model, placed(pp=2, cp=4), length // 4, micro_batches=2)
        for stage, paths in enumerate((("tokens", "places", "blocks.0"), ("blocks.1", "norm", "head"))):
            for path in paths:
                graph.config.set_stage(f"model.{path}", stage)
        graph.config.set_memory_budget(budget)
        return graph.compile(*batch(length=length))

    gathers = graph_within(None)
    ring = graph_within(gathers.plan.memory.peak - 1)
    assert ring.plan.memory.peak < gathers.plan.memory.peak
    assert any("'ring' fits" in line and "'auto' would peak at" in line for line in ring.plan.decisions)
    assert [line.split(": ")[1].split(",")[0] for line in ring.plan.decisions if line.startswith("attention")] == [
        "ring"
    ]


# ---- models of transformers


def published(kind: str) -> nn.Module:
    """A tiny GPT-2 or Llama of transformers; the loss is its own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {
            "n_embd": WIDTH,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": LENGTH,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(vocab_size=VOCABULARY, use_cache=False, **sizes, **rates)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def own_loss(model: nn.Module, ids: Tensor, labels: Tensor, seen: Tensor | None = None) -> Tensor:
    mask = None if seen is None else seen.long()
    return model(input_ids=ids, labels=labels, attention_mask=mask).loss


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exchange", "gather"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_transformers_keep_all_but_labels_and_heads_split(kind, padded, way) -> None:
    """To the rounding of float32, in which transformers computes the loss."""
    model = published(kind).double()
    plain = copy.deepcopy(model)
    graph = TrainGraph(model, own_loss, torch.optim.SGD(model.parameters(), lr=0.1), placement=placed(dp=2, cp=2))
    for name in ("x", "y", "more.0"):
        graph.config.set_input(name, sbp=(S(0), S(1)))
    graph.config.set_split_attention(way)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        expected = own_loss(plain, *batch(padded))
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(graph(*batch(padded)), expected.detach(), rtol=1e-6, atol=1e-6)
    for x, y in zip(plain.parameters(), graph.model.parameters(), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-7)
    assert splits_of_attention(graph) == {"S(1)" if way == "exchange" else "S(2)"}
    labels_and_mask = 2 * ROWS // 2 * LENGTH * 8
    assert way == "gather" or transfers(graph).get("all_gather", 0) <= labels_and_mask


@pytest.mark.parametrize("sections", [1, 4])
def test_the_plan_counts_what_stripes_of_a_whole_value_take(sections: int) -> None:
    """Positions and labels are on all ranks, and each copies its stripes out of them."""
    graph = graph_of(Gpt().double(), placed(c=2), sections)
    graph(*batch())
    assert gz.testing.measure_step(graph, *batch()).peak == graph.plan.memory.peak
