"""``set_shapes``: what it takes, how many programs a run of many shapes needs, and that it is plain PyTorch's run."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lines_of_text import train_on_lines
from torch import nn

import graphzero as gz


class PaddedGraph(gz.Graph):
    def __init__(self, model, ranks=3, **settings):
        super().__init__(gz.placement("cpu", range(ranks), virtual=True))
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters(), 0.01), clip_grad_norm=0.5)
        self.config.enable_zero(stage=settings.pop("stage", 2))
        self.config.set_shapes({"x": {0: "rows"}, "y": {0: "rows"}}, {"rows": settings.pop("rows", 4)})
        for name, given in settings.items():
            getattr(self.config, f"set_{name}")(given)

    def build(self, x, y):
        scores, loss = loss_of(self.model, x, y)
        loss.backward()
        return scores, loss


def loss_of(model, x, y):
    scores, by_itself = model(x), isinstance(model[1], nn.LayerNorm)  # else the batch hangs together
    loss = F.mse_loss(scores, y)
    return scores, loss if by_itself else loss + scores.std() + scores[:, 0].softmax(0).square().sum()


def model_of(norm=True):
    torch.manual_seed(0)
    layers = [nn.Linear(3, 8), nn.BatchNorm1d(8) if norm else nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)]
    return nn.Sequential(*layers).double()


def batches(sizes):
    made = torch.Generator().manual_seed(1)
    return [[torch.randn(n, k, dtype=torch.float64, generator=made) for k in (3, 2)] for n in sizes]


def plainly(model, given):
    optimizer, found = torch.optim.AdamW(model.parameters(), 0.01), []
    for x, y in given:
        optimizer.zero_grad()
        scores, loss = loss_of(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append((scores.detach(), loss.detach()))
    return found


SIZES = (12, 11, 7, 2, 12, 5)


@pytest.mark.parametrize(
    ("norm", "settings", "programs"),
    [
        (True, {"stage": 3, "rows": 12}, 1),
        # for 2, 8 and 16 rows: 3, 9 and 18 on three ranks
        pytest.param(True, {"rows": "powers"}, 3, marks=pytest.mark.slow),
        (False, {"rows": [6, 12], "gradient_accumulation_steps": 2}, 2),
    ],
)
def test_a_run_with_smaller_batches_that_ranks_do_not_divide_is_that_of_plain_torch(norm, settings, programs):
    model, given = model_of(norm), batches(SIZES)
    plain = copy.deepcopy(model)
    graph, wanted = PaddedGraph(model, **settings), plainly(plain, given)
    for (x, y), (scores, loss) in zip(given, wanted, strict=True):
        found = graph(x, y)
        torch.testing.assert_close(found[0], scores, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[1], loss, rtol=1e-9, atol=1e-9)
    full = graph.full_state_dict()["modules"]["model"]
    for name, x in plain.state_dict().items():
        torch.testing.assert_close(full[name], x, rtol=1e-8, atol=1e-8)
    made = {
        tuple(node.meta["type"].shape for node in p.graph.placeholders("batch")) for p in graph._selection.programs.all
    }
    assert len(made) <= programs
    assert gz.check(graph, *given[-1], dtype=torch.float64)


def test_statistics_of_a_micro_batch_are_refused_where_rows_are_padded():
    with pytest.raises(gz.ConfigError, match="padded rows are not spread evenly"):
        PaddedGraph(model_of(), gradient_accumulation_steps=2)(*batches([12])[0])


def test_programs_of_sizes_that_do_not_come_any_more_are_freed():
    graph = PaddedGraph(model_of(False), rows=[6, 12, 24])
    graph.config.max_programs = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph(*batches([5])[0])
        first = weakref.ref(graph._selection.last.graph), weakref.ref(graph._selection.last)
        graph(*batches([20])[0])
    gc.collect()
    assert first[0]() is None and first[1]() is None and len(graph._selection.programs.all) == 1


def test_a_run_of_gpt2_over_real_text_compiles_a_handful_of_programs_and_is_that_of_plain_torch():
    training = train_on_lines(steps=6, ranks=2, rows=4, buckets=(24, 48))
    assert training.programs <= 2 < training.shapes
    assert training.difference <= 1e-9


@pytest.mark.parametrize("rows", ["rows", "r", "places", "number", "b", "batch"])
def test_the_order_of_masks_depends_on_no_hash_of_a_name(rows):
    """An index that is padded along two dims: a set of them would have another order in each process."""

    class Picked(gz.Graph):
        def __init__(self, rows):
            super().__init__(gz.placement("cpu", range(2), virtual=True))
            self.words = nn.Embedding(5, 2)
            self.config.set_shapes({"ids": (rows, "t")}, {rows: 4, "t": 4})

        def build(self, ids):
            return self.words(ids).sum()

    torch.manual_seed(0)
    ids = torch.ones(3, 3, dtype=torch.long)
    text = str(Picked(rows).compile(ids).program)
    for space in "_ ":
        text = text.replace(f"padding{space}of{space}{rows}", f"padding{space}of{space}rows")
    wanted = str(Picked("rows").compile(ids).program)
    assert " ".join(text.split()) == " ".join(wanted.split())


# ---- what is refused


class Names(gz.Graph):
    def __init__(self, *shapes, **fill):
        super().__init__(gz.placement("cpu", [0], virtual=True))
        self.config.set_shapes(*shapes, **fill)

    def build(self, ids, more=None):
        return ids.sum()


IDS = torch.ones(3, 10, dtype=torch.long)
TOKENS = {"tokens": [4, 8]}


@pytest.mark.parametrize(
    ("shapes", "fill", "message"),
    [
        ((["ids"], {}), {}, "say which dims of which inputs are ragged"),
        (({"ids": {1: "tokens"}}, None), {}, "say the sizes of each ragged dim"),
        (({"ids": {1: "tokens"}}, {"rows": 4}), {}, "no sizes for the ragged dim 'tokens'"),
        (({"ids": {1: "tokens"}}, {**TOKENS, "rows": 4}), {}, "sizes for 'rows', but no dim has that name"),
        (({"ids": {-1: "tokens"}}, TOKENS), {}, "give a name for each ragged dim, counted from 0"),
        (({"ids": {1: "tokens"}}, {"tokens": [8, 4]}), {}, r"sizes go up, each once: \[4, 8\]"),
        (({"ids": {1: "tokens"}}, {"tokens": [0, 4]}), {}, "a list of sizes, 1 or more"),
        (({"ids": {1: "tokens"}}, {"tokens": "cubes"}), {}, "powers"),
        (({"ids": {1: "tokens"}}, TOKENS), {"fill": {"ids": "x"}}, "give a number"),
        (({3: {1: "tokens"}}, TOKENS), {}, "give the input's name in build"),
    ],
)
def test_what_is_no_description_of_shapes_is_refused_where_it_is_said(shapes, fill, message):
    with pytest.raises(gz.ConfigError, match=message):
        Names(*shapes, **fill)


@pytest.mark.parametrize(
    ("shapes", "fill", "given", "message"),
    [
        (({"ids": {1: "tokens"}}, TOKENS), {}, IDS, r"dim 1 of ids has 10 places, .* room for 8 at most.*\[4, 8\]"),
        (({"idx": {1: "tokens"}}, TOKENS), {}, IDS, "build has no such input; its inputs in this call are ids"),
        (({"*_mask": {1: "tokens"}}, TOKENS), {}, IDS, "build has no such input"),
        (({"ids": {2: "tokens"}}, TOKENS), {}, IDS, "ids has 2 dims, none is 2"),
        (
            ({"*": ("tokens", "tokens")}, {"tokens": 16}),
            {},
            IDS,
            "dim 0 of ids and dim 1 of ids 'tokens', but .* 3 and 10",
        ),
        (({"ids": {1: "tokens"}}, {"tokens": 16}), {"fill": {"ids": 0.5}}, IDS, "ids is int64.* cannot hold it"),
        (({"ids": {1: "tokens"}}, {"tokens": 16}), {"fill": {"ids": 300}}, IDS.to(torch.uint8), "cannot hold it"),
        (({"ids": {0: "rows"}}, {"rows": 4}), {}, IDS[:0], "no places on any rank"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_their_name_and_dim(shapes, fill, given, message):
    with pytest.raises(gz.ConfigError, match=message):
        Names(*shapes, **fill)(given)


def test_an_input_that_wants_a_gradient_is_refused_as_without_padding():
    with pytest.raises(gz.CaptureError, match="input ids .* requires grad"):
        Names({"ids": {1: "tokens"}}, {"tokens": 16})(torch.ones(3, 10, requires_grad=True))


def test_a_pattern_means_the_dims_that_an_input_has_and_none_pads_nothing():
    graph = Names({"*": ("rows", "tokens")}, {"rows": 4, "tokens": 16})
    assert graph(IDS, torch.ones(3)) == 30
    graph.config.set_shapes(None)
    assert graph.config.shapes is None and graph(IDS) == 30
