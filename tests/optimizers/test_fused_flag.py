"""``fused=True``: a graph steps by the kernel that the user asked for, so with the bits that eager PyTorch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import TrainGraph
from torch import Tensor, nn

from graphzero.ir import ops
from graphzero.ops import ADAM

WIDTH = 32  # elements of a vector of the narrowest type: eager rounds those after the last full one differently


def float_mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def square_graph(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int = 1, stage: int = 0) -> TrainGraph:
    return TrainGraph(model, float_mean_square, optimizer, placement=ranks, stage=stage)


def made(kind: Any, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(dtype)
    return model, kind(model.parameters(), **{"lr": 1e-2, **settings})


def batches(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, WIDTH, generator=generator).to(dtype) for _ in range(3)]


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, given: list[Tensor]) -> dict[str, Tensor]:
    for x in given:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def stepped(graph: TrainGraph, given: list[Tensor]) -> dict[str, Tensor]:
    for x in given:
        graph(x)
    return graph.full_state_dict()["modules"]["model"]  # type: ignore[no-any-return]


def differing(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    return [name for name, x in wanted.items() if not torch.equal(found[name], x)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"amsgrad": True},
        {"maximize": True, "weight_decay": 0.1},
        {"lr": torch.tensor(1e-2), "weight_decay": 0.0},
        {"betas": (0.5, 0.6), "eps": 1e-3},
    ],
    ids=["plain", "amsgrad", "maximize", "tensor lr", "numbers"],
)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_16_bit_model_steps_as_eager_to_the_bit(kind: Any, settings: dict[str, Any]) -> None:
    graph = square_graph(*made(kind, fused=True, **settings))
    assert not differing(stepped(graph, batches()), eager(*made(kind, fused=True, **settings), batches()))


@pytest.mark.same_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_so_does_a_model_of_another_type(dtype: torch.dtype) -> None:
    settings = {"fused": True, "weight_decay": 0.1, "dtype": dtype}
    graph = square_graph(*made(torch.optim.Adam, **settings))
    assert not differing(stepped(graph, batches(dtype)), eager(*made(torch.optim.Adam, **settings), batches(dtype)))


@pytest.mark.same_kernels
def test_masters_in_float32_beside_16_bit_parameters_step_each_in_their_own_type() -> None:
    def mixed() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = made(torch.optim.AdamW)
        model[2].float()  # type: ignore[index,operator]
        model[1] = Widened()  # type: ignore[index,operator]
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    graph = square_graph(*mixed())
    assert not differing(stepped(graph, batches()), eager(*mixed(), batches()))
    dtypes = [{x.meta["type"].dtype for x in node.args[0]} for node in graph.program.nodes if node.target is ADAM]  # type: ignore[union-attr]
    assert dtypes == [{torch.bfloat16}, {torch.float32}]


class Widened(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float().tanh()


@pytest.mark.parametrize("fused", [None, False])
def test_who_does_not_ask_for_it_gets_op_by_op(fused: bool | None) -> None:
    graph = square_graph(*made(torch.optim.AdamW, fused=fused))
    found = stepped(graph, batches())
    assert all(node.target is not ADAM for node in graph.program.nodes)
    for name, x in eager(*made(torch.optim.AdamW, fused=fused), batches()).items():
        torch.testing.assert_close(found[name], x, rtol=2**-7, atol=2e-3)


@pytest.mark.parametrize("settings", [{}, {"amsgrad": True}], ids=["plain", "amsgrad"])
def test_pieces_step_as_the_whole_to_the_bit(settings: dict[str, Any]) -> None:
    """With one row a rank, each gradient is a sum of two whose order no stage changes."""
    given = [x[:2] for x in batches()]
    states = [
        stepped(square_graph(*made(torch.optim.AdamW, fused=True, **settings), ranks=2, stage=stage), given)
        for stage in range(4)
    ]
    for state in states[1:]:
        assert not differing(state, states[0])


def test_a_rate_may_change_and_eager_goes_on_from_the_graphs_state() -> None:
    first, second, third = batches()
    model, optimizer = made(torch.optim.AdamW, fused=True, amsgrad=True)
    twin, other = made(torch.optim.AdamW, fused=True, amsgrad=True)
    graph = square_graph(model, optimizer)
    graph(first)
    program = str(graph.program)
    eager(twin, other, [first])
    for one in (optimizer, other):
        one.param_groups[0]["lr"] = 3e-3
    graph(second)
    assert str(graph.program) == program
    state = graph.full_state_dict()
    resumed, its_optimizer = made(torch.optim.AdamW, fused=True, amsgrad=True)
    resumed.load_state_dict(state["modules"]["model"])
    its_optimizer.load_state_dict(state["optimizers"][0])
    assert not differing(eager(resumed, its_optimizer, [third]), eager(twin, other, [second, third]))


def test_the_flag_is_part_of_what_a_program_is_made_for() -> None:
    model, optimizer = made(torch.optim.AdamW)
    graph, (given, *_) = square_graph(model, optimizer), batches()
    graph(given)
    assert all(node.target is not ADAM for node in graph.program.nodes)
    optimizer.param_groups[0]["fused"] = True
    graph(given)
    assert any(node.target is ADAM for node in graph.program.nodes)


def test_updated_parameters_arrive_in_their_own_storage_as_without_the_flag() -> None:
    assigned = {}
    for fused in (None, True):
        model = nn.Sequential(nn.Linear(WIDTH, 4096), nn.Tanh(), nn.Linear(4096, WIDTH))
        graph = square_graph(model, torch.optim.AdamW(model.parameters(), fused=fused), ranks=2, stage=1)
        program = graph.compile(batches(torch.float32)[0]).program
        assigned[fused] = {node.args[0].name for node in program.nodes if node.target is ops.assign}
        assert "model_0_weight" not in assigned[fused]
    assert assigned[None] == assigned[True]
