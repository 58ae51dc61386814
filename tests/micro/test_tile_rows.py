"""Tiles of rows: the logits of a language model are there for some rows at a time, and the step is plain PyTorch's."""

import gc

import pytest
import torch
from inside import executor_of
from test_plan_measured import Storages
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import graphzero as gz

CLASSES, WIDTH = 96, 8
WEIGHTS = torch.linspace(0.5, 1.5, CLASSES, dtype=torch.float64)


class Model(nn.Module):
    def __init__(self, tied=False, bias=False):
        super().__init__()
        self.embed, self.inner = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.inner(self.embed(ids))))


def entropy(logits, labels, **kwargs):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **kwargs)


def masked(logits, labels):
    each, mask = entropy(logits, labels, reduction="none"), (labels.flatten() != 3).double()
    return (each * mask).sum() / mask.sum()


def shifted(logits, labels):
    return entropy(logits[:, :-1], labels[:, 1:])


def with_z(logits, labels):
    return entropy(logits, labels) + 1e-2 * (logits.logsumexp(-1) ** 2).mean()


TILED = {
    "mean": entropy,
    "sum": lambda x, y: entropy(x, y, reduction="sum") / 10,
    "ignored": lambda x, y: entropy(x, y, ignore_index=5),
    "weighted": lambda x, y: entropy(x, y, weight=WEIGHTS, ignore_index=5),
    "smoothed": lambda x, y: entropy(x, y, weight=WEIGHTS, label_smoothing=0.1),
    "masked": masked,
    "shifted": shifted,
    "with_z": with_z,
    "capped": lambda x, y: entropy(30 * torch.tanh(x / 30), y),
    "squares": lambda x, y: ((x - F.one_hot(y, CLASSES)) ** 2).mean(),
}
WHOLE = {
    "squared": lambda x, y: entropy(x, y) ** 2,  # backward of a row needs the loss of all
    "centred": lambda x, y: entropy(x - x.mean((0, 1)), y),
    "dropped": lambda x, y: entropy(F.dropout(x, 0.5), y),
}


class Train(gz.Graph):
    def __init__(self, model, loss, stage=0, tiles=1, placement=None, clip=1.0):
        super().__init__(placement or gz.placement("cpu", range(2), virtual=True))
        self.model, self.loss = model, loss
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), clip_grad_norm=clip)
        if stage:
            self.config.enable_zero(stage=stage)
        self.config.set_row_tiles(tiles)

    def build(self, ids, labels):
        loss = self.loss(self.model(ids), labels)
        loss.backward()
        return loss


def made(tied=False, bias=False, dtype=torch.float64):
    torch.manual_seed(1)
    return Model(tied, bias).to(dtype)


def batches(count=3, rows=8):
    torch.manual_seed(2)
    return [tuple(torch.randint(0, CLASSES, (rows, 5)) for _ in range(2)) for _ in range(count)]


def check_against_plain(graph, plain, loss, rows=8):
    """Three steps of both: the same losses and parameters, but for the rounding of sums."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    for ids, labels in batches(rows=rows):
        optimizer.zero_grad()
        wanted = loss(plain(ids), labels)
        wanted.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        assert torch.allclose(graph(ids, labels), wanted.detach(), rtol=0, atol=1e-9)
    found = graph.full_state_dict()["modules"]["model"]
    assert all(torch.allclose(found[name], one, rtol=0, atol=1e-9) for name, one in plain.state_dict().items())


def logits_of(graph):
    """How many rows of logits an op makes at most."""
    made = [node.meta for node in graph.program.nodes if node.op == "call_function" and "sbp" in node.meta]
    rows = [meta["type"].shape for meta in made if isinstance(meta["sbp"], tuple) and meta["sbp"][0] is gz.sbp.S(0)]
    return max(shape[0] for shape in rows if len(shape) == 2 and shape[1] == CLASSES)


@pytest.mark.parametrize("name", TILED)
def test_a_step_in_tiles_is_plain_pytorchs(name):
    several = [(1, 2, True, False), (3, 4, False, True)] if name == "mean" else [(len(name) % 4, 4, True, True)]
    for stage, tiles, tied, bias in several:
        graph = Train(made(tied, bias), TILED[name], stage, tiles)
        check_against_plain(graph, made(tied, bias), TILED[name])
        assert "tiles of rows: '" in graph.plan.decisions[-1]
        assert logits_of(graph) <= 40 // tiles


@pytest.mark.parametrize("name", WHOLE)
def test_what_needs_all_rows_at_once_stays_as_it_is(name):
    ids, labels = batches(1)[0]
    graph = Train(made(), WHOLE[name], 0, 4)
    graph(ids, labels)
    assert "nothing is computed in 4 tiles of rows" in graph.plan.decisions[-1]
    assert "take(" not in str(graph.program)
    if name != "dropped":  # its draws are other than torch's
        check_against_plain(Train(made(), WHOLE[name], 0, 4), made(), WHOLE[name])


@pytest.mark.filterwarnings("ignore:no axis of")
def test_logits_that_the_step_hands_out_stay_whole():
    class Both(Train):
        def build(self, ids, labels):
            logits = self.model(ids)
            entropy(logits, labels).backward()
            return logits

    for where, sbp in (("dp", gz.sbp.S(0)), ("cp", gz.sbp.S(1))):  # those of a sequence are joined after backward
        graph = Both(made(), None, 0, 4, gz.placement("cpu", range(2), names=(where,), virtual=True))
        for name in ("ids", "labels"):
            graph.config.set_input(name, sbp=sbp)
        graph(*(x[:, :4] for x in batches(1)[0]))
        assert "nothing is computed in 4 tiles of rows" in graph.plan.decisions[-1]


def test_an_evaluation_is_in_tiles_too():
    class Evaluate(gz.Graph):
        def __init__(self):
            super().__init__(gz.placement("cpu", range(2), virtual=True))
            self.model = made()
            self.config.set_row_tiles(4)

        def build(self, ids, labels):
            logits = self.model(ids)
            return entropy(logits, labels), (logits.argmax(-1) == labels).double().mean()

    ids, labels = batches(1)[0]
    graph, logits = Evaluate(), made()(ids)
    loss, right = graph(ids, labels)
    assert torch.allclose(loss, entropy(logits, labels)) and torch.equal(
        right, (logits.argmax(-1) == labels).double().mean()
    )
    assert logits_of(graph) == 10


@pytest.mark.parametrize(("rows", "tiles", "each"), [(6, 2, 10), (6, 4, 6), (14, 16, 10)])
def test_tiles_are_equal_and_so_may_be_other_than_asked_for(rows, tiles, each):
    """Of 15, 15 and 35 rows a rank: 3, 5 and 7."""
    graph = Train(made(), entropy, 2, tiles)
    check_against_plain(graph, made(), entropy, rows)
    assert logits_of(graph) == each


def test_rows_that_no_number_divides_stay_whole():
    graph = Train(made(), lambda x, y: entropy(x[:, :1], y[:, :1]), 0, 2)
    check_against_plain(graph, made(), graph.loss, rows=14)
    assert "not to be cut in equal tiles" in graph.plan.decisions[-1]


def test_micro_batches_cut_logits_already():
    graph = Train(made(), entropy, 2, 2)
    graph.config.set_gradient_accumulation_steps(2)
    check_against_plain(graph, made(), entropy)
    assert "micro-batches" in graph.plan.decisions[-1]


@pytest.mark.parametrize("split", [False, True])
def test_beside_tensor_parallel_ranks_tiles_are_for_a_head_that_is_whole(split):
    placement = gz.placement("cpu", [[0, 1], [2, 3]], virtual=True)
    model = made()
    whole, rows, columns = (gz.sbp.B, gz.sbp.B), (gz.sbp.B, gz.sbp.S(0)), (gz.sbp.B, gz.sbp.S(1))
    gz.to_global(model.inner, placement=placement, sbp={"weight": columns, "bias": whole})
    gz.to_global(model.head, placement=placement, sbp=rows if split else whole)
    graph = Train(model, entropy, 2, 2, placement)
    check_against_plain(graph, made(), entropy)
    assert ("nothing is computed" in graph.plan.decisions[-1]) == split


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_mixed_precision_sums_over_rows_are_kept_in_float32(dtype):
    losses = []
    for tiles in (1, 4):
        graph = Train(made(tied=True, dtype=torch.float32), entropy, 2, tiles)
        graph.config.enable_amp(dtype=dtype)
        losses.append(torch.stack([graph(*batch) for batch in batches()]))
    assert torch.allclose(*losses, atol=2e-2, rtol=0)
    assert logits_of(graph) == 10
    rooms = [node.meta["type"].dtype for node in graph.program.nodes if node.name.endswith("_sum")]
    assert rooms and set(rooms) == {torch.float32}


@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_of_tiles_is_what_a_call_holds(tied):
    def peak(stage, tiles):
        graph = Train(made(tied), entropy, stage, tiles, placement=gz.placement("cpu", range(2)))
        graph.config.set_arena(False)
        batch = tuple(torch.zeros(64, 5, dtype=torch.long) for _ in range(2))
        graph(*batch)
        gc.collect()
        slots = [slot for (slot,) in executor_of(graph).slots.values()]
        known = [t.to_local() if hasattr(t, "to_local") else t for t in tree_leaves(graph.state_dict())]
        with Storages([*batch, *slots, *(t for t in known if isinstance(t, torch.Tensor))]) as mode:
            graph(*batch)
        memory = graph.plan.memory
        assert 0 <= mode.peak + sum(memory.resident.values()) - memory.peak <= 16
        return memory.peak

    with gz.testing.fake_world(2):
        logits = 64 * 5 * CLASSES * 8
        for stage in (0, 3):
            whole, *tiled = [peak(stage, tiles) for tiles in (1, 2, 4)]
            assert whole - tiled[0] > 0.3 * logits
            assert tiled[0] - tiled[1] > 0.2 * logits


def test_a_memory_budget_takes_tiles_before_it_computes_anything_again():
    def planned(budget):
        graph = Train(made(tied=True), entropy, 2)
        graph.config.set_memory_budget(budget)
        batch = batches(1, rows=64)[0]
        graph.compile(*batch)
        return graph.plan

    whole = planned(10**9)
    tiled = planned(whole.memory.peak - 64 * 5 * CLASSES)
    assert tiled.memory.peak < whole.memory.peak and not tiled.recomputed
    assert "in 2 tiles of rows" in tiled.decisions[-1]
    with pytest.raises(gz.ConfigError, match="What it needs is") as found:
        planned(1)
    least = int(str(found.value).split("set_memory_budget(")[1].split(")")[0])
    assert planned(least).memory.peak <= least
