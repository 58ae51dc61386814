"""Several ranks on one GPU, by NCCL 2.30 or newer, else by gloo; on two CPU ranks only to see that the checks run."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "runtime"), str(TESTS / "pipelines")]
import failure_toys  # noqa: E402
import processes  # noqa: E402
from steps import Language, RecordableGraph, batches  # noqa: E402

import graphzero as gz  # noqa: E402

pytestmark = pytest.mark.timeout(900)

RANKS = [("cpu", 2), ("cuda", 2), ("cuda", 4)]
SETS = {(device, ranks): processes.Checks(("shared_gpu_checks",), ranks, device) for device, ranks in RANKS}


@pytest.mark.parametrize("name", SETS["cpu", 2].names)
@pytest.mark.parametrize(("device", "ranks"), RANKS)
def test_ranks_that_share_a_gpu(name: str, device: str, ranks: int, tmp_path_factory: Any) -> None:
    if name == "pipeline_stages" and device == "cuda" and not processes.uses_nccl(ranks, device):
        pytest.skip("messages between stages on GPUs go through NCCL, which takes several ranks on one from 2.30 on")
    SETS[device, ranks].assert_passed(name, tmp_path_factory)


def end_after_a_step(rank: int, ranks: int) -> Any:
    graph = RecordableGraph(Language(layers=1), gz.placement(processes.device_type, range(ranks)), stage=2)
    mine = [ids.chunk(ranks)[rank] for ids in batches(2)]
    graph(mine[0])
    if rank == 1:
        if processes.device_type == "cuda":
            torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        return [float(graph(mine[1]))]
    except gz.RankError as error:
        return [error.ranks, str(error)]


@pytest.mark.parametrize(("device", "ranks"), RANKS)
def test_a_rank_that_is_killed_is_named_by_the_others(device: str, ranks: int, tmp_path: Path) -> None:
    work = partial(end_after_a_step, ranks=ranks)
    results = failure_toys.run(work, ranks, tmp_path, "auto", limit=240.0, stops=[1], device_type=device)
    assert sorted(results) == [rank for rank in range(ranks) if rank != 1], results
    for killed, text in results.values():
        assert killed == [1] and "rank 1" in text, text
