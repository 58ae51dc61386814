"""How many compiled programs a Graph keeps, which it lets go of, and that nothing of these is left."""

from __future__ import annotations

import contextvars
import gc
import linecache
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from graphs import TrainGraph, mean_square
from torch import Tensor, nn
from torch.fx import graph_module

import graphzero as gz
from graphzero.sbp import registry

D = torch.float64


def leaky_graph(stage: int = 0, bound: int | None = 2) -> TrainGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.1), nn.Linear(8, 2)).to(D)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    graph = TrainGraph(model, mean_square, optimizer, stage=stage)
    graph.config.max_programs = bound
    return graph


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*has compiled.*")
        yield


def x_of(rows: int) -> Tensor:
    return torch.randn(rows, 3, dtype=D, generator=torch.Generator().manual_seed(rows))


def programs(graph: gz.Graph) -> list[object]:
    return graph._selection.programs.all


def eager_losses(sizes: list[int], slopes: list[float] | None = None) -> list[float]:
    plain = leaky_graph()
    losses = []
    for i, rows in enumerate(sizes):
        if slopes:
            plain.model[1].negative_slope = slopes[i]
        plain.optimizer.zero_grad()
        loss = plain.model(x_of(rows)).square().mean()
        loss.backward()
        plain.optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_more_programs_than_the_bound_train_as_in_plain_pytorch(stage: int) -> None:
    sizes = [2, 4, 6, 2, 4, 6, 6, 8, 2]
    graph = leaky_graph(stage, bound=2)
    losses = []
    for rows in sizes:
        losses.append(graph(x_of(rows)).item())
        assert len(programs(graph)) <= 2
    assert losses == pytest.approx(eager_losses(sizes), rel=1e-12)


def test_those_used_longest_ago_go_first() -> None:
    graph, used = leaky_graph(bound=2), []
    for rows in (2, 4, 2, 6, 2, 6, 4):  # with 6, 4 goes
        graph(x_of(rows))
        used.append(graph._selection.last)
    two, four, _, six = used[:4]
    assert used[4:6] == [two, six] and used[2] is two
    assert used[6] is not four


def test_nothing_of_a_program_that_was_let_go_of_is_left() -> None:
    graph = leaky_graph(bound=1)
    graph(x_of(2))
    (first,) = programs(graph)
    held = [weakref.ref(x) for x in (first, first.captured, first.graph, first._executor)]  # type: ignore[attr-defined]
    del first
    graph(x_of(4))
    gc.collect()
    assert [ref() for ref in held] == [None] * 4
    kept = graph._selection.programs
    assert len(kept.captures) == 1 and all(known.programs for known in kept._known.values())


def test_the_same_capture_serves_other_configurations_after_the_others_have_gone() -> None:
    sizes = [2, 2, 4, 2]
    graph, losses = leaky_graph(bound=1), []
    for i, rows in enumerate(sizes):
        graph.config.bucket_bytes = 1024 * (i + 1)
        losses.append(graph(x_of(rows)).item())
    assert losses == pytest.approx(eager_losses(sizes), rel=1e-12)


def test_attributes_that_change_are_seen_by_programs_that_come_and_go() -> None:
    sizes, slopes = [2, 2, 4, 2, 4, 4, 2, 2], [0.1, 0.5, 0.5, 0.1, 0.1, 0.5, 0.5, 0.1]
    graph, losses = leaky_graph(bound=1), []
    for rows, slope in zip(sizes, slopes, strict=True):
        graph.model[1].negative_slope = slope
        losses.append(graph(x_of(rows)).item())
    assert losses == pytest.approx(eager_losses(sizes, slopes), rel=1e-12)


def test_there_is_a_bound_unless_none_is_asked_for() -> None:
    graph = leaky_graph(bound=None)
    assert gz.GraphConfig(graph.placement).max_programs == 64
    for rows in range(2, 12, 2):
        graph(x_of(rows))
    assert len(programs(graph)) == 5
    graph.config.max_programs = 3
    graph(x_of(20))
    assert len(programs(graph)) == 3


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, "all"])
def test_a_bound_that_is_no_number_of_programs_is_refused(wrong: object) -> None:
    with pytest.raises(gz.ConfigError, match="max_programs"):
        leaky_graph().config.max_programs = wrong  # type: ignore[assignment]


def test_the_warning_counts_what_was_compiled_and_says_how_many_are_kept() -> None:
    graph = leaky_graph(bound=2)
    with pytest.warns(
        UserWarning, match=r"compiled 9 programs; 2 are kept, .*max_programs.*changing: input x\."
    ) as seen:
        for rows in range(2, 24, 2):
            graph(x_of(rows))
    assert [one.filename for one in seen] == [__file__]


@pytest.mark.parametrize("after", ["zero", "schedule"])
def test_a_pass_of_the_users_runs_once_for_each_program(after: str) -> None:
    ran = []

    def count(found: gz.StepGraph) -> gz.StepGraph:
        ran.append(found)
        return found

    graph = leaky_graph(stage=3)
    graph.config.add_pass(count, after=after)
    graph(x_of(2))
    assert len(ran) == 1
    graph(x_of(4)), graph(x_of(2))
    assert len(ran) == 2


def left_behind() -> tuple[tuple[int, ...], int]:
    """Texts of code, twice, and settings in the context that the process holds; its objects of ours and of torch."""
    registry._forget()  # it has a bound of its own
    gc.collect()
    texts = len(linecache.cache), len(graph_module._loader.eval_cache)  # type: ignore[attr-defined]
    kinds = Counter(map(type, gc.get_objects()))
    ours = (count for kind, count in kinds.items() if str(kind.__module__).startswith(("graphzero", "torch")))
    return (*texts, len(contextvars.copy_context())), sum(ours)


@pytest.mark.parametrize("what", ["shape", "Graph"])
def test_a_program_that_is_gone_leaves_nothing_behind(what: str) -> None:
    graph, found = leaky_graph(stage=2, bound=1), []
    for rows in (2, 4, 6, 8, 10):
        graph = graph if what == "shape" else leaky_graph(stage=2)
        graph(x_of(rows if what == "shape" else 2))
        if rows in (4, 10):  # what is made once is there
            found.append(left_behind())
    (first, objects), (last, more) = found
    assert last == first and more < objects + 20


def test_calls_of_many_shapes_share_their_signatures() -> None:
    metas = [(gz.sbp.TensorMeta((rows, 3)), gz.sbp.TensorMeta((3, 8)), gz.sbp.TensorMeta((rows, 8))) for rows in (2, 4)]
    few, many = (registry.signatures(torch.ops.aten.mm.default, [a, b], {}, out, 2) for a, b, out in metas)
    assert few is many
