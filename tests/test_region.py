"""gz.local_region: per-rank code inside a build that is written for one device."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from inside import check_ends
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphzero as gz
from graphzero.sbp import B, P, S, partial

D, ROWS = torch.float64, S(0)
SHAPES = {"2": ((2,), ("dp",)), "2x2": ((2, 2), ("dp", "tp")), "2x2x2": ((2, 2, 2), ("dp_a", "dp_b", "tp"))}


def place(shape: tuple[int, ...] = (2,), names: tuple[str, ...] = ("dp",), virtual: bool = True) -> gz.Placement:
    return gz.placement("cpu", torch.arange(prod(shape)).reshape(shape).tolist(), names=names, virtual=virtual)


class Experts(nn.Module):
    """Each rank routes its own tokens to two experts that take the first ``capacity`` of them."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(4, 2), capacity
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.region = gz.local_region(self.dispatch, {"dp": S(0)}, [{"dp": S(0)}, {"dp": P}])

    def dispatch(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.gate(tokens).softmax(-1)
        chosen = F.one_hot(weights.argmax(-1), 2)
        kept = chosen * (chosen.cumsum(0) <= self.capacity)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            out = out + (kept * weights)[:, i, None] * expert(tokens).tanh()
        return out, kept.sum(0)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.region(tokens)  # type: ignore[no-any-return]


class Step(gz.Graph):
    def __init__(self, model: nn.Module, placement: gz.Placement, stage: int = 0) -> None:
        super().__init__(placement)
        self.model = model.to(D)
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x: Tensor) -> Any:
        made = self.model(x)
        out, *rest = made if isinstance(made, tuple) else (made,)
        loss = out.square().mean() + sum(y.sum() for y in rest if y.requires_grad)
        loss.backward()
        return loss, rest


class Body(nn.Module):
    """A layer before a region and one in it; ``fn`` is given what the first has made, and the second."""

    def __init__(self, fn: Callable[[Tensor, nn.Module], Any], in_sbp: Any, out_sbp: Any) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 8), nn.Linear(8, 8)
        self.region = gz.local_region(lambda h: fn(h, self.inner), in_sbp, out_sbp)

    def forward(self, x: Tensor) -> Any:
        return self.region(self.first(x))


def model_of(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().to(D)


def x_of(rows: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(rows, 4, dtype=D, generator=torch.Generator().manual_seed(seed))


# ---- what a region computes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_route_their_own_tokens(stage: int) -> None:
    """The twin cuts the batch by hand: a capacity per rank keeps other tokens than one for the whole batch."""
    twin = model_of(lambda: Experts(2))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    graph = Step(model_of(lambda: Experts(2)), place(), stage)
    for seed in range(3):
        x = x_of(seed=seed)
        halves = [twin.dispatch(half) for half in x.chunk(2)]  # type: ignore[operator]
        optimizer.zero_grad()
        loss = torch.cat([out for out, _ in halves]).square().mean()
        loss.backward()
        optimizer.step()
        found, (counts,) = graph(x)
        torch.testing.assert_close(found, loss.detach())
        assert counts.tolist() == (halves[0][1] + halves[1][1]).tolist()
        assert counts.tolist() != twin.dispatch(x)[1].tolist()  # type: ignore[operator]
    for ours, theirs in zip(graph.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def centred(h: Tensor, inner: nn.Module) -> Tensor:
    h = inner(h).tanh()
    return h - h.mean(0, keepdim=True)


REGIONS: dict[str, tuple[Any, Any, Callable[[Tensor, nn.Module], Any]]] = {
    "split to split": (S(0), S(0), centred),
    "split to columns": (S(0), S(1), centred),
    "columns to columns": (S(1), S(1), lambda h, inner: h - h.mean(0)),
    "split to a sum": (S(0), P, lambda h, inner: inner(h).tanh().sum(0)),
    "whole to whole": (B, B, centred),
    "whole to a sum": (B, P, lambda h, inner: inner(h).tanh()),
    "whole to pieces": (B, S(0), lambda h, inner: inner(h)[:3].sigmoid()),
    "sums to sums": (P, P, lambda h, inner: h @ inner.weight),
    "numbers of a rank": (S(0), S(0), lambda h, inner: inner(h).tanh().norm(dim=0, keepdim=True)),
    "two results": (S(0), [S(0), P], lambda h, inner: (inner(h), inner(h).tanh().sum())),
}


@pytest.mark.parametrize("shape", ["2x2", pytest.param("2x2x2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", REGIONS)
def test_a_region_and_its_gradients_are_what_calling_it_for_each_rank_gives(name: str, shape: str) -> None:
    """A check calls the function once for each rank, on what it holds, in plain PyTorch."""
    in_sbp, out_sbp, fn = REGIONS[name]
    hierarchy, names = SHAPES[shape]
    data = [axis for axis in names if axis.startswith("dp")]

    def on_data(sbp: Any) -> Any:
        return [on_data(one) for one in sbp] if isinstance(sbp, list) else dict.fromkeys(data, sbp)

    model = model_of(lambda: Body(fn, on_data(in_sbp), on_data(out_sbp)))
    graph = Step(model, place(hierarchy, names), 3)
    report = check_ends(graph, x_of(), dtype=D)
    assert report, str(report)
    assert str(gz.parse(str(graph.program))) == str(graph.program)


def test_the_check_sees_a_region_that_says_the_wrong_thing() -> None:
    """A sum that is said to be whole: each rank has another."""
    graph = Step(model_of(lambda: Body(lambda h, inner: inner(h).sum(0), S(0), P)), place())
    assert gz.check(graph, x_of(), dtype=D)

    def lie(program: gz.StepGraph) -> gz.StepGraph:
        for node in program.nodes:
            if str(node.target) == "graphzero.as_global.default" and node.meta["phase"] == "forward":
                node.args = (node.args[0], ["B"], node.args[2])
        return program

    graph.config.add_pass(lie, after="pin")
    assert not gz.check(graph, x_of(), dtype=D)


def test_maxima_of_the_ranks_come_without_a_gradient() -> None:
    model = model_of(lambda: Body(lambda h, inner: (h, h.detach().amax(0)), S(0), [S(0), partial("max")]))
    graph = Step(model, place())
    _, (top,) = graph(x_of())
    graph = Step(model_of(lambda: Body(lambda h, inner: (h, h.amax(0)), S(0), [S(0), partial("max")])), place())
    torch.testing.assert_close(top, model_of(lambda: nn.Linear(4, 8))(x_of()).amax(0).detach())
    with pytest.raises(gz.SbpError, match=r"no gradient through P\(max\)"):
        graph(x_of())


def test_arguments_have_an_sbp_each_and_structure() -> None:
    def fn(pair: dict[str, Tensor], scale: float, table: Tensor) -> dict[str, Any]:
        assert pair["a"].shape == (4, 4) and pair["b"].shape == (8, 2) and table.shape == (8, 4)
        return {"sum": pair["a"] * scale + table[:4], "none": None, "b": [pair["b"]]}

    class Forward(gz.Graph):
        def build(self, x: Tensor) -> Any:
            return gz.local_region(fn, [S(0), S(1), B], [S(0), S(1)])({"a": x, "b": x}, 2.0, table=x)

    x = x_of()
    found = Forward(place())(x)
    torch.testing.assert_close(found["sum"], x * 2 + torch.cat([x[:4], x[:4]]))
    assert found["none"] is None and torch.equal(found["b"][0], x)


def test_outside_of_a_graph_it_is_the_function() -> None:
    seen = []

    def fn(x: Tensor) -> Tensor:
        """Its text."""
        seen.append(x.shape)
        return x + 1

    region = gz.local_region(fn, S(0), S(0))
    assert torch.equal(region(torch.zeros(3, 2)), torch.ones(3, 2)) and seen == [(3, 2)]
    assert region.__doc__ == "Its text."


# ---- with the rest of the system


def test_a_checkpoint_around_a_region_changes_nothing() -> None:
    class Checked(Body):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(lambda h: self.region(h).sin(), self.first(x), use_reentrant=False)

    def fn(h: Tensor, inner: nn.Module) -> Tensor:
        return F.dropout(centred(h, inner), 0.4)

    made = []
    for kind in (Checked, Body):
        torch.manual_seed(3)
        model = model_of(lambda kind=kind: kind(fn, S(0), S(0)))  # type: ignore[misc]
        if kind is Body:
            region = model.region
            model.region = lambda h, region=region: region(h).sin()  # type: ignore[misc]
        torch.manual_seed(5)
        graph = Step(model, place(), 2)
        made.append((graph(x_of())[0], [p.detach().clone() for p in graph.model.parameters()]))
    torch.testing.assert_close(made[0], made[1])


def test_ranks_draw_numbers_of_their_own_where_they_do_other_work() -> None:
    class Forward(gz.Graph):
        def build(self, x: Tensor) -> Any:
            apart = gz.local_region(lambda h: F.dropout(h, 0.5), {"dp": S(0)}, {"dp": S(0)})
            same = gz.local_region(lambda h: torch.rand(4) + 0 * h.sum(), B2, {"dp": S(0)})
            equal = gz.local_region(lambda h: torch.rand_like(h), B2, B2)
            return apart(x), same(x), equal(x)

    B2 = {"dp": B}
    found = {}
    for shape, names in (((2,), ("dp",)), ((2, 2), ("dp", "tp"))):
        torch.manual_seed(4)
        graph = Forward(place(shape, names))
        found[shape] = graph(torch.ones(64, 4))
        again = graph(torch.ones(64, 4))
        assert not torch.equal(again[0], found[shape][0])
    for one, two in zip(*found.values(), strict=True):  # a tensor axis along which all is B changes nothing
        assert torch.equal(one, two)
    apart, same, _ = found[2,]
    assert not torch.equal(apart[:32], apart[32:]) and 0.3 < (apart == 0).float().mean() < 0.7
    assert same.shape == (8,) and same.unique().numel() == 8


def test_an_autocast_region_and_attention_work_inside() -> None:
    def fn(h: Tensor, inner: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            q = inner(h.float()).view(1, 2, h.shape[0], 4)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(h.shape).to(h.dtype)

    class Half(Step):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model, place(), 3)
            self.model.inner.float()

    graph = Half(model_of(lambda: Body(fn, S(0), S(0))))
    report = gz.check(graph, x_of(), rtol=2e-2)
    assert report, str(report)


def test_nothing_of_a_parameter_that_a_region_reads_is_kept_from_forward_to_backward() -> None:
    graph = Step(model_of(lambda: Body(centred, S(0), S(0))), place(), 3)
    graph.compile(x_of())
    gathers = [(c.phase, names) for c in graph.plan.collectives for names in c.names if c.kind == "all_gather"]
    assert {("forward", "model.inner.weight"), ("backward", "model.inner.weight")} <= set(gathers)


def test_a_plan_counts_the_values_of_a_region_as_a_rank_holds_them() -> None:
    with gz.testing.fake_world(4):
        graph = Step(model_of(lambda: Body(centred, S(0), S(0))), gz.placement("cpu", range(4)), 2)
        graph(x_of(2))
        measured = gz.testing.measure_step(graph, x_of(2))
        assert measured.peak == graph.plan.memory.peak


def test_a_parameter_given_back_is_a_copy() -> None:
    class Forward(gz.Graph):
        def __init__(self) -> None:
            super().__init__(place())
            self.model = nn.Linear(4, 8)

        def build(self, x: Tensor) -> Any:
            w = gz.local_region(lambda h: self.model.weight, S(0), B)(x)
            return w, gz.to_global(self.model.weight, sbp=B), x.sum()

    graph = Forward()
    for found in graph(torch.ones(4, 4))[:2]:
        found.detach().zero_()
    assert bool(graph.model.weight.detach().any())


# ---- what is wrong


def failing(
    fn: Callable[..., Any], in_sbp: Any = ROWS, out_sbp: Any = ROWS, x: Tensor | None = None,
    where: gz.Placement | None = None,
) -> Exception:  # fmt: skip
    class Wrong(gz.Graph):
        def __init__(self) -> None:
            super().__init__(where or place())
            self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build(self, x: Tensor) -> Any:
            h = self.model[0](x)
            region = gz.local_region(lambda h: fn(h, self.model), in_sbp, out_sbp)
            loss = torch.stack([y.float().mean() for y in torch.utils._pytree.tree_leaves(region(h))]).sum() + h.mean()
            loss.backward()
            return loss

    with pytest.raises(gz.GraphZeroError) as caught:
        Wrong().compile(torch.randn(8, 4) if x is None else x)
    return caught.value


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("in_sbp is a list of 2 for 1 tensor arguments: (S(0), B)", {"in_sbp": [S(0), B]}),
        ("out_sbp is a list of 2 for 1 tensors that the function returns", {"out_sbp": [S(0), B]}),
        ("in_sbp names the axis 'tp'; the placement's are dp", {"in_sbp": {"tp": S(0)}}),
        ("in_sbp is (S(0)), and the placement has 2 axes (dp, tp)", {"where": place((2, 2), ("dp", "tp"))}),
        ("tensor argument 0 of shape [8, 4] has no dim 2", {"in_sbp": S(2)}),
        ("result 0 of shape [4, 4] has no dim 3", {"out_sbp": S(3)}),
        ("tensor argument 0 of shape [8, 4] cannot be (S(1)): dim 1 is 4 = 1 x 3 + 1",
         {"in_sbp": S(1), "where": place((3,)), "x": torch.randn(9, 4)[:6].repeat(2, 1)[:8]}),
    ],
)  # fmt: skip
def test_sbps_that_do_not_fit_say_how_many_or_which_dim(words: str, given: dict[str, Any]) -> None:
    if "where" in given and given["where"].size == 3:
        given = {**given, "x": torch.randn(9, 4)}
        words = words.replace("[8, 4]", "[9, 4]")
    error = failing(lambda h, model: h * 2, **given)
    assert isinstance(error, gz.SbpError)
    assert words in str(error) and "test_region.py" in str(error)


@pytest.mark.parametrize("shape", ["2", "2x2"])
def test_a_check_of_one_rank_stops_the_step_on_all(shape: str) -> None:
    def factor(h: Tensor, inner: nn.Module) -> Tensor:
        assert h.isfinite().all(), "not finite"
        torch.linalg.cholesky(torch.eye(2, dtype=D) * (1e3 - h.abs().max()))
        return h

    graph = Step(model_of(lambda: Body(factor, *[{"dp": S(0)}] * 2)), place(*SHAPES[shape]))
    graph(x_of())
    for bad, words in ((1e6, "LinAlgError: linalg.cholesky"), (float("nan"), "AssertionError: not finite")):
        for row in (0, 7):
            x = x_of()
            x[row] *= bad
            before = [p.clone() for p in graph.model.parameters()]
            with pytest.raises(gz.CheckError, match=f"{words}[\\s\\S]*test_region.py"):
                graph(x)
            assert all(map(torch.equal, before, graph.model.parameters()))
    graph(x_of())


@pytest.mark.parametrize(
    ("words", "fn"),
    [
        ("returns int 4; it returns tensors", lambda h, model: h.shape[0]),
        ("returns str 'text'", lambda h, model: {"a": h, "b": "text"}),
        ("writes in place to tensor argument 0", lambda h, model: h.mul_(2)),
        ("writes in place to tensor argument 0", lambda h, model: model[2](h)),
        ("writes in place to a tensor of shape [] from outside", lambda h, model: model[1](h)),
        ("a local_region is nested in a local_region", lambda h, model: gz.local_region(F.relu, S(0), S(0))(h)),
        ("the shape of a result depends on data", lambda h, model: h[h > 0]),
        ("collective of torch.distributed", lambda h, model: torch.ops._c10d_functional.all_reduce(h, "sum", "0")),
        ("build reads a value", lambda h, model: h if h.sum() > 0 else -h),
        ("pins a value inside of a local_region", lambda h, model: gz.to_global(h, sbp=S(0))),
        ("backward() is called inside of a local_region", lambda h, model: h.sum().backward() or h),
        ("torch.utils.checkpoint inside", lambda h, model: checkpoint(model[0], h.tanh(), use_reentrant=False).tanh()),
    ],
)  # fmt: skip
def test_what_per_rank_code_must_not_do_is_refused_with_its_line(words: str, fn: Callable[..., Any]) -> None:
    error = failing(fn)
    assert words in str(error) and "test_region.py" in str(error), error


def test_a_value_that_leaves_its_region_by_the_back_door_is_refused() -> None:
    kept: list[Tensor] = []

    class Leak(gz.Graph):
        def build(self, x: Tensor) -> Any:
            gz.local_region(lambda h: kept.append(h * 2) or h, S(0), S(0))(x)  # type: ignore[func-returns-value]
            return self.use(x)

        def use(self, x: Tensor) -> Any:
            return kept[-1]

    class Mixed(Leak):
        def use(self, x: Tensor) -> Any:
            return kept[-1].sum() + x.sum()

    class Again(Leak):
        def use(self, x: Tensor) -> Any:
            return gz.local_region(lambda h: h + kept[-1], S(0), S(0))(x)

    for kind in (Leak, Mixed, Again):
        with pytest.raises(gz.CaptureError, match=r"(?s)a rank made in a local_region.*is used outside.*Return it"):
            kind(place()).compile(torch.randn(8, 4))


@pytest.mark.parametrize("given", ["S(0)", [S(0), 1], (S(0), None), {"dp": "B"}, None])
def test_what_is_no_sbp_is_refused_where_the_region_is_made(given: Any) -> None:
    with pytest.raises(gz.SbpError, match=r"local_region: in_sbp=.*an SBP is gz.sbp.B"):
        gz.local_region(F.relu, given, B)
    with pytest.raises(gz.SbpError, match="takes a function, not Tensor"):
        gz.local_region(torch.ones(2), B, B)  # type: ignore[arg-type]
