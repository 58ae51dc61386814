"""The compiled executor: what Inductor makes of regions computes what the reference executor does."""

from __future__ import annotations

import os
import subprocess
import sys
from shutil import which

import pytest
import torch
from graphs import TrainGraph, cross_entropy
from processes import assert_passed, run
from torch import Tensor, fx, nn

import graphzero as gz
from graphzero import _compat
from graphzero.plugins.inductor import compiled
from graphzero.plugins.inductor.compiled import CompiledRegion
from graphzero.plugins.inductor.regions import Region, form
from graphzero.runtime.world.virtual import VirtualWorld

aten = torch.ops.aten
needs_compiler = pytest.mark.skipif(which("g++") is None and "CXX" not in os.environ, reason="no C++ compiler here")


def momentum_graph(kind: str, model: nn.Module, placement: gz.Placement | None = None, stage: int = 0) -> TrainGraph:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    graph = TrainGraph(model, cross_entropy, optimizer, placement=placement, stage=stage)
    graph.config.set_executor(kind)
    return graph


class Attends(nn.Module):
    """Attention and an MLP, normed; the second of two blocks compiles nothing new."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])
        return x + self.down(nn.functional.silu(self.up(x)))


class Sequences(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Attends(), Attends(), nn.Linear(8, 5))

    def forward(self, x):
        return super().forward(x).mean(1)


class Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.Dropout(0.1),
            nn.Hardswish(), nn.Flatten(), nn.Linear(72, 5),
        )  # fmt: skip


SHAPES = {Sequences: (12, 6, 8), Images: (12, 3, 8, 8)}


class TwoLengths(gz.Graph):
    """The same ops on four rows and on two, of equal strides."""

    def __init__(self, kind: str) -> None:
        super().__init__(gz.placement("cpu", range(1), virtual=True))
        self.config.set_executor(kind)

    def build(self, x, rows):
        longer = torch.relu(x * 2) + 1
        return longer, torch.relu(nn.functional.embedding(rows, longer) * 2) + 1


@needs_compiler
@pytest.mark.slow
def test_the_same_ops_on_other_shapes_are_another_function():
    x, rows = torch.randn(4, 8), torch.tensor([3, 1])
    for found, expected in zip(TwoLengths("inductor")(x, rows), TwoLengths("eager")(x, rows), strict=True):
        torch.testing.assert_close(found, expected)


def batch(model: type[nn.Module], step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = SHAPES[model]
    return torch.randn(shape, generator=generator, dtype=dtype), torch.randint(5, shape[:1], generator=generator)


def trained(kind: str, model: type[nn.Module], dtype: torch.dtype, stage: int, ranks: int) -> list[Tensor]:
    torch.manual_seed(0)
    graph = momentum_graph(kind, model().to(dtype), gz.placement("cpu", range(ranks), virtual=True), stage)
    graph.load_state_dict({**graph.state_dict(), "random": {"seed": 5, "step": 0}})
    losses = [graph(*batch(model, step, dtype)) for step in range(3)]
    return [*losses, *graph.full_state_dict()["modules"]["model"].values()]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype", "stage", "ranks", "apart"),
    [(Sequences, torch.float64, 3, 3, 1e-12), (Images, torch.float32, 2, 2, 1e-5)],
)
def test_training_is_the_reference_executors_up_to_rounding(
    model: type[nn.Module], dtype: torch.dtype, stage: int, ranks: int, apart: float
) -> None:
    wanted, found = (trained(kind, model, dtype, stage, ranks) for kind in ("eager", "inductor"))
    torch.testing.assert_close(found, wanted, rtol=apart, atol=apart)


@needs_compiler
@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path) -> None:
    results = run(("inductor_checks",), 2, tmp_path)
    assert_passed(results, "two_processes_train_as_the_reference_executor", 2)


# ---- one region


def module_of(write, operands: int) -> fx.GraphModule:
    """``write`` is given a function that adds an op, and the operands; it returns the results."""
    graph = fx.Graph()
    placed = [graph.placeholder(f"x{i}") for i in range(operands)]
    graph.output(write(lambda op, *args: graph.call_function(op, args), *placed))
    return fx.GraphModule(nn.Module(), graph)


def call_of(module: fx.GraphModule, *groups: int) -> CompiledRegion:
    return CompiledRegion(module, "region of a test", str(module.graph), groups)


TWICE = module_of(lambda add, x: [add(aten.mul.Tensor, x, 2.0)], 1)


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(compiled, "_functions", {})


def test_a_region_that_does_not_compile_runs_op_by_op_and_says_so_once(fresh, monkeypatch) -> None:
    def fail(*given: object) -> None:
        raise NotImplementedError("no such thing\nmore")

    monkeypatch.setattr(_compat, "inductor_compile", fail)
    call = call_of(TWICE, 0)
    with pytest.warns(UserWarning, match="a region of a test; it runs op by op: NotImplementedError: no such thing$"):
        (found,) = call([torch.ones(3)])
    assert found.tolist() == [2, 2, 2]
    (found,) = call([torch.ones(3)])  # a second warning would be an error
    assert found.tolist() == [2, 2, 2]


def test_a_result_that_shares_storage_with_an_operand_is_parted(fresh, monkeypatch) -> None:
    monkeypatch.setattr(_compat, "inductor_compile", lambda *given: lambda operands: [operands[0], operands[0] + 1])
    call = call_of(TWICE, 0, 1)
    for _ in range(2):
        x = torch.ones(3)
        same, other = call([x])
        same.zero_()
        assert x.tolist() == [1, 1, 1] and other.tolist() == [2, 2, 2]


def test_results_share_storage_only_where_the_program_says_so(fresh, monkeypatch) -> None:
    def compiled(operands: list[Tensor]) -> list[Tensor]:
        base = operands[0] + 1
        return [base, base[:1], base[1:]]

    monkeypatch.setattr(_compat, "inductor_compile", lambda *given: compiled)
    call = call_of(TWICE, 0, 0, 2)
    for _ in range(2):
        base, view, other = call([torch.ones(3)])
        assert _compat.storage_id(base) == _compat.storage_id(view) != _compat.storage_id(other)


def test_another_layout_compiles_once_more(fresh, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(
        _compat, "inductor_compile", lambda m, operands, s: seen.append(operands[0].stride()) or compiled.op_by_op(m)
    )
    call = call_of(TWICE, 0)
    for x in (torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(2, 3)):
        assert call([x])[0].tolist() == [[2.0] * 3] * 2
    assert seen == [(3, 1), (1, 2)]


@needs_compiler
@pytest.mark.slow
def test_inductor_keeps_to_it_where_it_could_save_a_copy(fresh) -> None:
    """A copy of an operand, a value joined into another, an addition of nothing: all results, none another's."""

    def write(add, x, y):
        a = add(aten.mul.Tensor, x, y)
        return [
            add(aten.clone.default, x),
            a,
            add(aten.cat.default, [a, y]),
            add(aten.add.Tensor, a, 0),
            add(aten.t.default, a),
        ]

    module = module_of(write, 2)
    call, operands = call_of(module, 0, 1, 2, 3, 1), [torch.rand(4, 4), torch.rand(4, 4)]
    for _ in range(2):
        given = list(operands)
        found = call(given)
        assert not given, "operands are handed over"
        torch.testing.assert_close(found, list(module(*operands)))
        places = [_compat.storage_id(x) for x in (*operands, *found[:4])]
        assert len(set(places)) == len(places)


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(_compat, "inductor_lacks", lambda device_type: "Inductor finds no C++ compiler (g++)")
    graph = momentum_graph("inductor", nn.Linear(4, 5), gz.placement("cpu", range(1), virtual=True))
    graph.compile(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(gz.ConfigError, match=r'set_executor\("inductor"\): Inductor finds no C\+\+ .* Install it, or'):
        graph(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))


def test_a_compiler_is_looked_for() -> None:
    program = "from graphzero import _compat; print(_compat.inductor_lacks('cpu'))"
    environment = {**os.environ, "CXX": "no-such-compiler"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "no C++ compiler" in done.stdout


def test_a_compiler_is_given_the_backward_of_a_cross_entropy_as_aten_has_it() -> None:
    """It fuses the two ops, and knows nothing of ours."""
    graph = momentum_graph("eager", Sequences(), gz.placement("cpu", range(2), virtual=True))
    graph.compile(torch.randn(4, 3, 8), torch.randint(5, (4,)))
    regions = [item for item in form(graph.program) if isinstance(item, Region)]
    texts = [str(compiled.written(region, VirtualWorld(graph.placement), 0)[0].graph) for region in regions]
    (found,) = (text for text in texts if "nll_loss_backward" in text)
    assert "_log_softmax_backward_data" in found and "graphzero" not in found
