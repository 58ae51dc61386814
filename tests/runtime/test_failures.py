"""A rank that stops makes the others raise an error that says which, by what and where, over both ways of sending."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import failure_toys  # noqa: E402

import graphzero as gz  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(params=failure_toys.WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Train(gz.Graph):
    """Two embeddings and a product: an index that is out of range fails on the rank that has it alone."""

    def __init__(self, stage: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(10, 6), nn.Linear(6, 6)
        self.add_optimizer(torch.optim.SGD([*self.table.parameters(), *self.layer.parameters()], lr=0.1))
        self.config.enable_zero(stage=stage)

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.layer(self.table(ids)).square().mean()
        loss.backward()
        return loss


def batch(step: int, rank: int) -> torch.Tensor:
    return (torch.arange(8) * (step + 1) + 3 * rank) % 10


def tried(call: Any) -> dict[str, Any]:
    """What came of a call: its result, or kind and text of its error, and the seconds that it took."""
    began = time.monotonic()
    try:
        found = {"value": float(call())}
    except BaseException as error:
        found = {"kind": type(error).__name__, "text": str(error), "ranks": list(getattr(error, "ranks", ()))}
    return found | {"seconds": time.monotonic() - began}


def an_op_fails_on_rank_1(rank: int) -> Any:
    graph = Train()
    found = [tried(lambda: graph(batch(0, rank)))]
    bad = torch.tensor([1, 2, 3, 77, 5, 6, 7, 8])
    found.append(tried(lambda: graph(bad if rank == 1 else batch(1, rank))))
    found += [tried(lambda step=step: graph(batch(step, rank))) for step in (1, 2)]
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_op_that_fails_on_one_rank_is_an_error_on_all_and_the_next_call_works(
    tmp_path: Path, way: str, ranks: int
) -> None:
    found = failure_toys.run(an_op_fails_on_rank_1, ranks, tmp_path, way)
    assert sorted(found) == list(range(ranks))
    for rank, (first, failed, second, third) in found.items():
        assert failed["seconds"] < 10
        if rank == 1:
            assert failed["kind"] == "IndexError"
        else:
            assert failed["kind"] == "RankError" and failed["ranks"] == [1], failed
            assert "rank 1 stopped in this step of Train: IndexError: index out of range" in failed["text"]
            assert "test_failures.py:" in failed["text"] and "in build" in failed["text"]
        assert first["value"] > second["value"] > third["value"]
        assert [first, second, third] == [{**found[0][i], "seconds": x["seconds"]} for i, x in
                                          ((0, first), (2, second), (3, third))]  # fmt: skip


def ends(rank: int, how: Any) -> Any:
    graph = Train()
    graph(batch(0, rank))
    dist.barrier()
    if rank == 1:
        how()
    return [tried(lambda: graph(batch(1, rank)))]


def killed(rank: int) -> Any:
    return ends(rank, lambda: os.kill(os.getpid(), signal.SIGKILL))


def exits(rank: int) -> Any:
    return ends(rank, lambda: os._exit(3))


@pytest.mark.parametrize("how", [killed, exits])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_has_ended_is_named_at_once(tmp_path: Path, way: str, how: Any, ranks: int) -> None:
    found = failure_toys.run(how, ranks, tmp_path, way)
    assert sorted(found) == [rank for rank in range(ranks) if rank != 1]
    for (one,) in found.values():
        assert one["kind"] == "RankError" and one["ranks"] == [1] and one["seconds"] < 10, one
        assert "rank 1 has ended" in one["text"] or "rank 1, which has ended" in one["text"]
