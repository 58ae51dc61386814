"""An SBP that a value cannot have, or that is meant for other ranks, is refused where it is said.

Each case is tried on placements of one, two and three axes, on two axes with virtual ranks and in a world of real ones.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import graphzero as gz
from graphzero.sbp import B, P, S, partial

GRIDS = {"one axis": ((4,), ("dp",)), "two axes": ((2, 2), ("dp", "tp")), "three axes": ((2, 1, 2), ("dp", "cp", "tp"))}


@contextlib.contextmanager
def ranks(grid: str, virtual: bool) -> Iterator[gz.Placement]:
    hierarchy, names = GRIDS[grid]
    array = torch.arange(prod(hierarchy)).reshape(hierarchy).tolist()
    with contextlib.nullcontext() if virtual else gz.testing.fake_world(4):
        yield gz.placement("cpu", array, names=names, virtual=virtual)


@pytest.fixture(params=[("one axis", False), ("two axes", True), ("two axes", False), ("three axes", True)],
                ids=lambda p: f"{p[0]}, {'virtual' if p[1] else 'real'}")  # fmt: skip
def place(request: pytest.FixtureRequest) -> Iterator[gz.Placement]:
    with ranks(*request.param) as found:
        yield found


def last(place: gz.Placement, sbp: gz.sbp.Sbp) -> tuple[gz.sbp.Sbp, ...]:
    """``sbp`` on the innermost axis, B on the others."""
    return (*[B] * (len(place.names) - 1), sbp)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.last = nn.LayerNorm(8)


class Step(gz.Graph):
    def __init__(
        self, place: gz.Placement, pin: Callable[[Tensor], Tensor] | None = None, model: nn.Module | None = None
    ) -> None:
        super().__init__(place)
        self.model, self.pin = model or Net(), pin or (lambda h: h)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()))

    def build(self, x: Tensor) -> Tensor:
        h = self.pin(self.model.last(self.model.norm(self.model.up(x))))
        loss = self.model.down(h).square().mean()
        loss.backward()
        return loss


X = torch.randn(8, 6)


def refused(kind: type[Exception], words: str, run: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(kind) as caught:
        run(*args)
    text = str(caught.value)
    assert words in text, text
    return text


def refused_pass(place: gz.Placement, kind: type[Exception], words: str, change: Callable[[gz.StepGraph], Any]) -> None:
    def own(graph: gz.StepGraph) -> gz.StepGraph:
        change(graph)
        return graph

    step = Step(place)
    step.config.add_pass(own, after="pin")
    refused(kind, words, step.compile, X)


# ---- how many, and which dim


def test_as_many_sbps_as_axes(place: gz.Placement) -> None:
    many, axes = (B,) * (len(place.names) + 1), ", ".join(place.names)
    for x in (torch.ones(4, 4), nn.Linear(4, 4)):
        refused(gz.SbpError, f"needs sbp= with one SBP per axis ({axes}), not {many}", gz.to_global, x, place, many)
    words = f"takes one SBP per placement axis ({axes})"
    assert "test_bad_sbp.py" in refused(gz.SbpError, words, Step(place, lambda h: gz.to_global(h, sbp=many)).compile, X)
    words = f"has {len(place.names)} axes ({axes}); give one SBP for each"
    refused(gz.ConfigError, words, lambda: Step(place).config.set_input("x", sbp=many))


@pytest.mark.parametrize("wrong", ["S(0)", 0, "B", [1]])
def test_words_and_numbers_are_no_sbp(place: gz.Placement, wrong: Any) -> None:
    refused(gz.SbpError, "needs sbp= with one SBP per axis", gz.to_global, torch.ones(4, 4), place, wrong)
    refused(gz.SbpError, "takes one SBP per", Step(place, lambda h: gz.to_global(h, sbp=wrong)).compile, X)
    refused(gz.ConfigError, "gz.sbp.B, gz.sbp.S(0) or gz.sbp.P", lambda: Step(place).config.set_input("x", sbp=wrong))
    refused_pass(place, gz.SbpError, f"to {wrong!r}: write gz.sbp.B", lambda g: g.pin("addmm", "dp", wrong))


def test_a_dim_that_is_not_there(place: gz.Placement) -> None:
    two = last(place, S(2))
    refused(gz.SbpError, "(8, 6) has no dim 2; choose another split, or B", gz.to_global, torch.ones(8, 6), place, two)
    one = last(place, S(1))
    refused(gz.SbpError, "module's up.bias: a tensor of shape (8,) has no dim 1", gz.to_global, Net(), place, one)
    text = refused(gz.SbpError, "has no dim 2", Step(place, lambda h: gz.to_global(h, sbp=two)).compile, X)
    assert "test_bad_sbp.py" in text
    step = Step(place)
    step.config.set_input("x", sbp=two)
    refused(gz.ConfigError, "it has no dim 2", step.compile, X)
    axis = place.names[-1]
    refused_pass(place, gz.SbpError, "has 2 dims; split one of 0..1", lambda g: g.pin("addmm", axis, S(2)))


def test_sections_that_are_uneven(place: gz.Placement) -> None:
    five = last(place, S(0, 5))
    refused(gz.SbpError, "cannot be", gz.to_global, torch.ones(8, 6), place, five)
    text = refused(gz.SbpError, "module's up.weight: shape", gz.to_global, Net(), place, five)
    assert "S(0, 5)" in text and "choose sections that divide" in text
    refused(gz.SbpError, "cannot be", Step(place, lambda h: gz.to_global(h, sbp=five)).compile, X)


def test_a_negative_dim() -> None:
    refused(gz.SbpError, "names a tensor dim by a number from 0 up", S, -1)


# ---- what stays from step to step


@pytest.mark.parametrize("sbp", [P, partial("max")], ids=str)
def test_no_parameter_is_partial(place: gz.Placement, sbp: gz.sbp.Sbp) -> None:
    nd = last(place, sbp)
    shown = f"({', '.join(map(str, nd))})"
    refused(gz.SbpError, f"a module, Net, cannot be {shown}", gz.to_global, Net(), place, nd)
    model = Net()
    if place.virtual:
        refused(gz.SbpError, f"a parameter cannot be {shown}", gz.to_global, model.up.weight, place, nd)
        gz.to_global(model.norm.running_mean, place, nd)
        words = f"buffer model.norm.running_mean cannot be {shown}"
    else:
        kinds = [*[Replicate()] * (len(nd) - 1), Partial(sbp.reduction)]
        model.up.weight = nn.Parameter(DTensor.from_local(model.up.weight.detach(), place.mesh(), kinds))
        words = f"parameter model.up.weight cannot be {shown}"
    refused(gz.SbpError, words, Step(place, model=model).compile, X)


@pytest.mark.parametrize("name", ["model_up_weight", "model_norm_running_mean", "model_up_weight_exp_avg"])
def test_no_pass_makes_what_stays_partial(place: gz.Placement, name: str) -> None:
    refused_pass(
        place, gz.SbpError, "values that a step keeps cannot be partial sums", lambda g: g.pin(name, place.names[-1], P)
    )


# ---- other ranks


def test_a_parameter_on_other_ranks(place: gz.Placement) -> None:
    model = Net()
    if place.virtual:
        other = gz.placement("cpu", range(3), virtual=True)
        gz.to_global(model, other, S(0))
        text = refused(gz.PlacementError, "model.up.weight was placed on", Step(place, model=model).compile, X)
        assert repr(other) in text and repr(place) in text
        gz.to_global(model, place, last(place, B))
        Step(place, model=model).compile(X)
    else:
        other = gz.placement("cpu", [[0], [1], [2], [3]], names=("a", "b"))
        weight = distribute_tensor(model.up.weight.detach(), other.mesh(), [Shard(0), Replicate()])
        model.up.weight = nn.Parameter(weight)
        words = "model.up.weight is a DTensor on ranks [[0], [1], [2], [3]]"
        refused(gz.PlacementError, words, Step(place, model=model).compile, X)


def test_an_input_on_other_ranks(place: gz.Placement) -> None:
    if place.virtual:
        x = gz.to_global(X.clone(), gz.placement("cpu", range(2), virtual=True), S(0))
        refused(gz.PlacementError, "input x was placed on", Step(place), x)
    else:
        other = gz.placement("cpu", [[0], [1], [2], [3]], names=("a", "b"))
        x = distribute_tensor(X, other.mesh(), [Shard(0), Replicate()])
        refused(gz.PlacementError, "input x is a DTensor on ranks [[0], [1], [2], [3]]", Step(place), x)


def test_a_pin_on_other_ranks(place: gz.Placement) -> None:
    other = gz.placement("cpu", range(3), virtual=True)
    step = Step(place, lambda h: gz.to_global(h, placement=other, sbp=S(0)))
    text = refused(gz.PlacementError, "to_global inside build: the step runs on", step.compile, X)
    assert "leave placement out" in text and "test_bad_sbp.py" in text
    Step(place, lambda h: gz.to_global(h, placement=place, sbp=last(place, S(0)))).compile(X)


@pytest.mark.parametrize("grid", GRIDS)
def test_dtensors_do_not_meet_virtual_ranks(grid: str) -> None:
    with ranks(grid, virtual=False) as real:
        hierarchy, names = GRIDS[grid]
        virtual = gz.placement("cpu", torch.arange(4).reshape(hierarchy).tolist(), names=names, virtual=True)
        model = gz.to_global(Net(), real, last(real, B))
        refused(gz.PlacementError, "is a DTensor, but", Step(virtual, model=model).compile, X)
        x = distribute_tensor(X, real.mesh(), [Replicate()] * len(names))
        refused(gz.PlacementError, "input x is a DTensor, but", Step(virtual).compile, x)
        refused(gz.PlacementError, "the value given to to_global is a DTensor, but", gz.to_global, x, virtual)
        model = gz.to_global(Net(), virtual, last(virtual, B))
        refused(gz.PlacementError, "was placed on", Step(real, model=model).compile, X)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_dtensor_goes_to_its_own_ranks_and_never_to_a_partial(grid: str) -> None:
    with ranks(grid, virtual=False) as place:
        x = distribute_tensor(X, place.mesh(), [Replicate()] * len(place.names))
        refused(gz.PlacementError, "is a DTensor on ranks", gz.to_global, x, gz.placement("cpu", [0, 1]), B)
        anew = gz.to_global(x, gz.placement("cpu", [[0], [1], [2], [3]], names=("a", "b")), (B, B))
        assert anew.device_mesh.mesh_dim_names == ("a", "b")
        text = refused(gz.SbpError, "no summands that could become", gz.to_global, x, None, last(place, P))
        assert "gz.to_global(local, placement, sbp)" in text
        refused(gz.SbpError, "has no dim 2", gz.to_global, x, None, last(place, S(2)))
        assert gz.sbp.of(gz.to_global(x, None, last(place, S(1)))) == last(place, S(1))


# ---- names


def test_an_axis_that_is_not_there(place: gz.Placement) -> None:
    words = f"enable_zero(axis='pp'): choose one of {place.names[0]!r}"
    refused(gz.ConfigError, words, lambda: Step(place).config.enable_zero(axis="pp"))
    words = f"no axis is called 'pp' in {place!r}; its axes are {', '.join(place.names)}"
    refused_pass(place, gz.PlacementError, words, lambda g: g.pin("addmm", "pp", B))
    refused_pass(place, gz.PlacementError, words, gz.passes.Zero(2, axis=("pp",)))
    step = Step(place)
    step.config.set_input("y", sbp=last(place, S(0)))
    refused(gz.ConfigError, "build has no such input; its inputs in this call are x", step.compile, X)


# ---- what is not a tensor, and when


@pytest.mark.parametrize("x", [3.0, {"a": X}, [X], None, "x"], ids=["number", "dict", "list", "None", "text"])
def test_to_global_takes_tensors_and_modules(place: gz.Placement, x: Any) -> None:
    words = f"to_global takes a tensor or a module, not {type(x).__name__}; call it for each tensor"
    refused(gz.SbpError, words, gz.to_global, x, place, last(place, B))
    step = Step(place, lambda h: gz.to_global(x, sbp=last(place, B)) or h)
    assert "test_bad_sbp.py" in refused(gz.SbpError, words, step.compile, X)


def test_modules_are_placed_before_the_first_call(place: gz.Placement) -> None:
    step = Step(place)
    step.pin = lambda h: gz.to_global(step.model, place, last(place, B)) and h
    text = refused(gz.SbpError, "to_global of a Net inside build", step.compile, X)
    assert "Place it in __init__" in text and "test_bad_sbp.py" in text


def test_a_value_with_several_results_is_pinned_where_one_is_picked(place: gz.Placement) -> None:
    def pin(graph: gz.StepGraph) -> None:
        node = next(node for node in graph.nodes if isinstance(node.meta.get("type"), tuple))
        graph.pin(node, place.names[-1], B)

    refused_pass(place, gz.SbpError, "results; pin the value that picks one: getitem", pin)


# ---- even and uneven


@pytest.mark.parametrize("grid", GRIDS)
def test_an_input_divides_and_the_way_out_fits_the_placement(grid: str) -> None:
    with ranks(grid, virtual=True) as place:
        ours = "gz.sbp.B" if len(place.names) == 1 else f"({', '.join(['gz.sbp.B'] * len(place.names))})"
        text = refused(gz.CaptureError, "input x of shape [7, 6] cannot be split over", Step(place).compile, X[:7])
        assert "Pad it or drop the last batch" in text and f"sbp={ours})" in text
        step = Step(place)
        step.config.set_input("x", sbp=(S(1),) * len(place.names))
        text = refused(gz.CaptureError, "dim 1 is 6 = 1 x 4 + 2", step.compile, X)
        assert "drop" not in text
        x = gz.to_global(X[:7].clone(), place, (S(0), *[B] * (len(place.names) - 1)))
        refused(gz.CaptureError, "dim 0 is 7", Step(place).compile, x)


@pytest.mark.parametrize("grid", GRIDS)
def test_every_pin_of_a_value_can_be_met_and_changes_no_number(grid: str) -> None:
    """There is a way from every SBP to every other, so these are no errors."""

    def pins(h: Tensor) -> Tensor:
        few = gz.to_global(h[:, :1] * 2, sbp=last(place, S(1))).sin()  # fewer columns than ranks
        uneven = gz.to_global(h[:, :5] * 2, sbp=last(place, S(1))).cos() @ torch.ones(5, 8)
        summed = gz.to_global(h.relu(), sbp=last(place, P)).sigmoid()
        greatest = gz.to_global(h.relu(), sbp=last(place, partial("max"))).sigmoid()
        twice = gz.to_global(gz.to_global(h.relu(), sbp=last(place, S(0))), sbp=last(place, S(1))).sin()
        return few + uneven + summed + greatest + twice

    with ranks(grid, virtual=True) as place:
        step = Step(place, pins)
        twin = copy.deepcopy(step.model)
        plain = twin.down(pins(twin.last(twin.norm(twin.up(X))))).square().mean()
        plain.backward()
        torch.testing.assert_close(step(X), plain.detach())
        torch.optim.AdamW(twin.parameters()).step()
        for (name, ours), theirs in zip(step.model.named_parameters(), twin.parameters(), strict=True):
            if name != "up.bias":  # its gradient before a batch norm is rounding noise
                torch.testing.assert_close(ours, theirs)
