"""Parameters, buffers and optimizer states that lie in one memory: what a step may not tell apart is refused, the rest
trains as in plain PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import TrainGraph, mean_square
from torch import Tensor, nn

import graphzero as gz
from graphzero.errors import CaptureError, ConfigError

STAGES = pytest.mark.parametrize("stage", [0, 1, 3])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(4)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.words(ids)))


def square_graph(model: nn.Module, optimizer: torch.optim.Optimizer, stage: int) -> TrainGraph:
    return TrainGraph(model, mean_square, optimizer, stage=stage)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01)


def data_of_another(model: Words) -> None:
    model.head.weight.data = model.words.weight.data


def parameter_over_another(model: Words) -> None:
    model.head.weight = nn.Parameter(model.words.weight.detach())


def frozen_over_a_trained_one(model: Words) -> None:
    model.head.weight = nn.Parameter(model.words.weight.detach(), requires_grad=False)


def assigned(model: Words) -> None:
    model.head.weight = model.words.weight
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def overlapping_rows(model: Words) -> None:
    rows = torch.randn(12, 4, dtype=torch.float64)
    model.words.weight, model.head.weight = nn.Parameter(rows[:8]), nn.Parameter(rows[4:])


def buffer_over_another(model: Words) -> None:
    model.norm.running_var = model.norm.running_mean.add_(1)[:]


def expanded(model: Words) -> None:
    model.head.bias = nn.Parameter(torch.ones(1, dtype=torch.float64).expand(8))


REFUSED = {
    data_of_another: "parameter model.words.weight and the parameter model.head.weight share memory",
    parameter_over_another: "parameter model.words.weight and the parameter model.head.weight share memory",
    frozen_over_a_trained_one: "parameter model.words.weight and the parameter model.head.weight share memory",
    assigned: "make them one object",
    overlapping_rows: "parameter model.words.weight and the parameter model.head.weight share memory",
    buffer_over_another: "buffer model.norm.running_mean and the buffer model.norm.running_var share memory",
    expanded: r"parameter model.head.bias of shape \[8\] and strides \[0\] has elements that share memory",
}


@STAGES
@pytest.mark.parametrize("share", REFUSED, ids=lambda share: share.__name__)
def test_tensors_that_share_memory_and_are_not_one_are_refused_where_one_is_written(
    share: Callable[[Words], None], stage: int
) -> None:
    model = Words()
    share(model)
    known = copy.deepcopy(model.state_dict())
    graph = square_graph(model, adam(model), stage)
    for _ in range(2):
        with pytest.raises(ConfigError, match=REFUSED[share]):
            graph(torch.arange(8))
    torch.testing.assert_close(model.state_dict(), known, rtol=0, atol=0)


def slices(model: Words) -> None:
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model.words.weight, model.head.weight = nn.Parameter(rows[:8]), nn.Parameter(rows[8:])


def columns(model: Words) -> None:
    both = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model.words.weight, model.head.weight = nn.Parameter(both[:, :4]), nn.Parameter(both[:, 4:])


def frozen_over_a_frozen_one(model: Words) -> None:
    frozen_over_a_trained_one(model)
    model.words.weight.requires_grad_(False)


def frozen_and_expanded(model: Words) -> None:
    expanded(model)
    model.head.bias.requires_grad_(False)


@STAGES
@pytest.mark.parametrize(
    "share", [slices, columns, frozen_over_a_frozen_one, frozen_and_expanded], ids=lambda share: share.__name__
)
def test_tensors_that_share_a_storage_or_are_only_read_train_as_in_plain_pytorch(
    share: Callable[[Words], None], stage: int
) -> None:
    model, plain = Words(), Words()
    share(model)
    share(plain)
    optimizer, ids = adam(plain), torch.arange(8)
    graph = square_graph(model, adam(model), stage)
    for _ in range(3):
        optimizer.zero_grad()
        loss = plain(ids).square().mean()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(graph(ids), loss.detach())
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@STAGES
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_parameter_in_memory_that_can_only_be_read_is_refused_and_a_frozen_one_is_read(
    stage: int, tmp_path: Path
) -> None:
    np.save(tmp_path / "weight.npy", np.ones((8, 4)))
    model = Words()
    model.head.weight = nn.Parameter(torch.from_numpy(np.load(tmp_path / "weight.npy", mmap_mode="r")))
    graph = square_graph(model, adam(model), stage)
    with pytest.raises(ConfigError, match="parameter model.head.weight is in read-only memory"):
        graph(torch.arange(8))
    model.head.weight.requires_grad_(False)
    square_graph(model, adam(model), stage)(torch.arange(8))
    assert bool((model.head.weight == 1).all())


def test_memory_that_tensors_come_to_share_between_two_calls_is_noticed() -> None:
    model = Words()
    graph = square_graph(model, adam(model), 0)
    graph(torch.arange(8))
    data_of_another(model)
    with pytest.raises(ConfigError, match="share memory"):
        graph(torch.arange(8))


def test_an_optimizer_state_that_is_the_parameter_itself_is_refused() -> None:
    model = Words()
    optimizer = adam(model)
    graph = square_graph(model, optimizer, 0)
    graph(torch.arange(8))
    weight = model.head.weight
    optimizer.state[weight]["exp_avg"] = weight.detach()
    with pytest.raises(ConfigError, match="parameter model.head.weight and the state model.head.weight/exp_avg share"):
        graph(torch.arange(8))


def test_a_module_whose_parameters_share_memory_is_not_placed() -> None:
    model = Words()
    data_of_another(model)
    with pytest.raises(ConfigError, match="parameter words.weight and the parameter head.weight share memory"):
        gz.to_global(model, gz.placement("cpu", range(2), virtual=True), gz.sbp.B)


def test_parameters_on_the_meta_device_that_share_memory_do_not_come_to_life_apart() -> None:
    with torch.device("meta"):
        model = Words()
        data_of_another(model)
    graph = square_graph(model, adam(model), 0)
    with pytest.raises(ConfigError, match="share memory"):
        gz.materialize(graph)


@pytest.mark.filterwarnings("ignore:.*no gradient reaches")
def test_a_constant_beside_a_parameter_in_one_storage_is_a_constant() -> None:
    rows = torch.randn(10, 4, dtype=torch.float64)

    class Scaled(TrainGraph):
        def __init__(self, model: Words):
            super().__init__(model, mean_square, adam(model))
            self.scale, self.alias = rows[8], rows[7]
            self.aliased = False

        def build(self, ids: Tensor) -> Tensor:
            loss = (self.model.words(ids) * (self.alias if self.aliased else self.scale)).sum()
            loss.backward()
            return loss

    model = Words()
    model.words.weight = nn.Parameter(rows[:8])
    graph = Scaled(model)
    expected = (rows[:8] * rows[8]).sum()
    torch.testing.assert_close(graph(torch.arange(8)), expected)
    graph.aliased = True
    with pytest.raises(CaptureError, match="shares memory with model.words.weight"):
        graph(torch.arange(8))


class Keeping(torch.optim.Optimizer):
    """keeps: what it keeps in the state of a parameter, of the parameter and of what it has kept so far."""

    def __init__(self, params: list[nn.Parameter], keeps: Callable[[Tensor, list[Tensor]], Tensor]):
        super().__init__(params, {"lr": 0.1})
        self.keeps = keeps

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        kept: list[Tensor] = []
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "kept" not in state:
                state["kept"] = self.keeps(p, kept)
            kept.append(state["kept"])
            p.sub_(p.grad + 0.5 * (p - state["kept"]), alpha=0.1)


@pytest.mark.parametrize(
    "keeps",
    [lambda p, kept: p.detach(), lambda p, kept: p, lambda p, kept: kept[0] if kept else torch.zeros_like(p)],
    ids=["a view of the parameter", "the parameter", "the state of another"],
)
def test_optimizer_states_that_share_memory_are_refused(keeps: Callable[[Tensor, list[Tensor]], Tensor]) -> None:
    model = Words()
    graph = square_graph(model, Keeping([model.words.weight, model.head.weight], keeps), 0)
    with pytest.raises(CaptureError, match=r"Keeping keeps in state\['kept'\] a tensor that shares memory"):
        graph(torch.arange(8))


def test_optimizer_states_that_begin_as_copies_of_parameters_train_as_in_plain_pytorch() -> None:
    def keeps(p: Tensor, kept: list[Tensor]) -> Tensor:
        return p.detach().clone()

    model, plain, ids = Words(), Words(), torch.arange(8)
    graph = square_graph(model, Keeping([model.words.weight, model.head.weight], keeps), 0)
    optimizer = Keeping([plain.words.weight, plain.head.weight], keeps)
    for _ in range(4):
        optimizer.zero_grad()
        plain(ids).square().mean().backward()
        optimizer.step()
        graph(ids)
    torch.testing.assert_close(model.words.weight, plain.words.weight)
