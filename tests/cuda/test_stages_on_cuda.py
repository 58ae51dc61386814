"""Pipeline stages on GPUs: on virtual ranks of one, and in two processes with one each, whose messages NCCL carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import start
from steps import Language, adamw, batches
from torch import Tensor, nn

import graphzero as gz

SLOW = 20_000_000  # cycles
SHAPE = [[0], [1]]
SCHEDULES = ("1f1b", "zbv")


class StagedGraph(gz.Graph):
    def __init__(self, model: nn.Module, where: Any, schedule: str) -> None:
        super().__init__(where)
        self.model = model
        self.add_optimizer(adamw(model), clip_grad_norm=1.0)
        self.config.enable_zero(stage=2)
        self.config.set_gradient_accumulation_steps(4)
        if "pp" in where.names:
            self.config.set_stage("auto")
            self.config.set_pipeline(schedule)

    def build(self, ids: Tensor) -> Tensor:
        loss = self.model(ids)
        loss.backward()
        return loss


def train(where: Any, schedule: str, delay: Any = None) -> list[Tensor]:
    """Losses and states of three steps.  delay: called before each part."""
    torch.manual_seed(0)
    graph = StagedGraph(Language(layers=4), where, schedule)
    graph.compile(batches()[0])
    if delay is not None:
        executor: Any = graph._selection.last.executor(graph._source.world)  # type: ignore[union-attr]
        for part in executor.executors.values():
            part.run_step = delayed(part.run_step, delay)
    losses = [graph(ids).cpu() for ids in batches()]
    state = graph.full_state_dict()["modules"]["model"]
    return [*losses, *(x.detach().cpu() for x in state.values())]


def delayed(run: Any, delay: Any) -> Any:
    def run_late(*args: Any) -> Any:
        delay()
        return run(*args)

    return run_late


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_virtual_stages_of_a_gpu_train_as_without_stages(schedule: str) -> None:
    staged = train(gz.placement("cuda", SHAPE, names=("pp", "dp"), virtual=True), schedule)
    plain = train(gz.placement("cuda", range(1), virtual=True), schedule)
    for x, y in zip(staged, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL wants one for each rank")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_of_two_gpus_train_as_on_virtual_ranks_however_late_one_is(schedule: str, tmp_path: Path) -> None:
    start(work, (str(tmp_path), schedule), 2)
    wanted = train(gz.placement("cuda", SHAPE, names=("pp", "dp"), virtual=True), schedule)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for result in results:
        for late in (None, 0, 1):
            for x, y in zip(result[late], wanted, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
            assert all(map(torch.equal, result[late], results[0][None]))


def work(rank: int, folder: str, schedule: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    where = gz.placement("cuda", SHAPE, names=("pp", "dp"))
    results = {}
    for late in (None, 0, 1):
        results[late] = train(where, schedule, (lambda: torch.cuda._sleep(SLOW)) if rank == late else None)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
