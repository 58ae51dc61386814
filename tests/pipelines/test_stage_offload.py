"""Optimizer states of pipeline stages in host memory: the same bits, and the bytes of the plan."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from staged import Net, batches, largest_difference, placement, staged_graph, stages_of, tensors_of, trained
from storages import Storages
from torch import nn

import graphzero as gz
from graphzero.errors import ConfigError


def offloaded(offload: bool, folder: Path | None = None, stages: int = 2, **options: Any) -> Any:
    tied, average, scale = (options.pop(name, False) for name in ("tied", "average", "scale"))
    torch.manual_seed(0)
    model = Net(tied=tied)
    graph = staged_graph(model, stages_of(4, stages), placement(2, 2), micro_batches=4, **options)
    if average:
        averaged = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        graph.averaged = averaged
        graph.add_average(averaged, model)
    if scale:
        graph.config.enable_amp(dtype=torch.float16)
    graph.config.bucket_bytes = 400
    if offload:
        graph.config.enable_offload(path=folder)
    return graph


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0, "schedule": "gpipe", "tied": True},
        {"stage": 1, "schedule": "zbv", "stages": 4, "clip": 0.1},
        {"stage": 2, "schedule": "1f1b", "clip": 0.1, "average": True, "tied": True},
        {"stage": 3, "schedule": "zb1p", "scale": True},
        {"stage": 3, "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), "clip": 0.1},
    ],
)
def test_steps_have_the_same_bits_in_memory_and_in_files(options: dict[str, Any], tmp_path: Path) -> None:
    wanted = trained(offloaded(False, **options), steps=3)
    for folder in (None, tmp_path):
        assert largest_difference(trained(offloaded(True, folder, **options), steps=3), wanted) == 0


def test_the_plan_says_what_each_stage_has_on_the_host() -> None:
    plain, graph = (offloaded(offload, stage=1) for offload in (False, True))
    trained(plain), trained(graph)
    pairs = zip(plain.plan.pipeline.members, graph.plan.pipeline.members, strict=True)
    for before, after in ((one.memory, other.memory) for one, other in pairs):
        moved = before["optimizer_states"] - after["optimizer_states"]
        assert after.host == after.host_resident == moved > 0 and before.host == 0
        assert after.peak <= before.peak
    assert graph.plan.host_traffic == (graph.plan.memory.host,) * 2 and plain.plan.host_traffic == (0, 0)
    assert "on host" in str(graph.plan) and "on host" not in str(plain.plan)
    assert "over the link to the host" in str(graph.plan)


def test_the_peak_of_an_update_is_the_plans_to_the_byte() -> None:
    """Wide layers and one row: the update holds most, the states of two parameters among it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(4)))
    graph = staged_graph(
        model, {f"model.{i}": i // 2 for i in range(4)}, placement(1, 1), [["0F0", "1F0", "1B0", "0B0"]],
        loss_fn=lambda model, x: model(x).square().mean(),
    )  # fmt: skip
    graph.config.bucket_bytes = 1
    graph.config.enable_offload()
    x = torch.randn(1, 40)
    graph(x)
    gc.collect()
    memory = graph.plan.memory
    assert memory.at_peak["optimizer_states"] == 2 * 2 * model[0].weight.nbytes + 4 and "epilogue@0" in memory.peak_at
    with Storages([x, *tensors_of(graph.state_dict())]) as mode:
        graph(x)
    assert mode.peak + sum(memory.resident.values()) == memory.peak


def test_a_checkpoint_goes_to_a_graph_without_offload_and_stages_and_back(tmp_path: Path) -> None:
    first = offloaded(True, tmp_path / "states", stage=2)
    trained(first)
    gz.save(first, tmp_path / "step")
    torch.manual_seed(7)
    whole = staged_graph(Net(), None, placement(2, 2), stage=2, micro_batches=4)
    gz.load(whole, tmp_path / "step")
    wanted = tensors_of(first.full_state_dict())
    assert all(map(torch.equal, tensors_of(whole.full_state_dict()), wanted))
    trained(whole)
    gz.save(whole, tmp_path / "later")
    gz.load(first, tmp_path / "later")  # into a Graph that has run, whose states are in a file
    assert all(map(torch.equal, tensors_of(first.full_state_dict()), tensors_of(whole.full_state_dict())))
    assert all(map(torch.equal, trained(first), trained(whole)))


def test_activations_on_the_host_are_refused_with_what_works() -> None:
    graph = offloaded(False)
    graph.config.enable_offload(True, activations=100)
    with pytest.raises(ConfigError, match=r"with activations on the host yet\n.*enable_offload\(\).*recomputes"):
        graph(*batches(1)[0])
