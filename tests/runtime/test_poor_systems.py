"""Ranks to which the system refuses something, or that end as connections are made: an error that names it, soon, or it
works by another way."""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import failure_toys  # noqa: E402
from test_failures import LookupGraph, batch, tried  # noqa: E402

import graphzero as gz  # noqa: E402
from graphzero import _compat  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
SOON = 20.0  # seconds, on a machine that has other work


def _fails_then_connects(end: Any) -> Any:
    """Work of which the first step fails on rank 1, and that ends rank 1 as all connect again."""

    def work(rank: int) -> Any:
        graph = LookupGraph()
        graph(batch(0, rank))
        found = [tried(lambda: graph(torch.full((8,), 77) if rank == 1 else batch(1, rank)))]
        if rank == 1:
            _compat.gloo = lambda *args: end()
        return [*found, tried(lambda: graph(batch(1, rank)))]

    return work


KILLED = _fails_then_connects(lambda: os.kill(os.getpid(), signal.SIGKILL))
INTERRUPTED = _fails_then_connects(lambda: (_ for _ in ()).throw(MemoryError("no room to connect")))


def killed_anew(rank: int) -> Any:
    return KILLED(rank)


def stopped_anew(rank: int) -> Any:
    return INTERRUPTED(rank)


@pytest.mark.parametrize(("work", "says"), [(killed_anew, "rank 1"), (stopped_anew, "no room to connect")])
def test_a_rank_that_ends_or_stops_while_ranks_connect_anew_is_named_soon(tmp_path: Path, work: Any, says: str) -> None:
    found = failure_toys.run(work, 2, tmp_path, "memory", stops=(1,) if work is killed_anew else ())
    _, second = found[0]
    assert second["kind"] == "RankError" and says in second["text"] and second["seconds"] < SOON, second


def killed_at_first(rank: int) -> Any:
    if rank == 1:
        _compat.gloo = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    return tried(lambda: LookupGraph()(batch(0, rank)))


def test_a_rank_that_is_killed_while_ranks_connect_for_the_first_time_is_named_soon(tmp_path: Path) -> None:
    found = failure_toys.run(killed_at_first, 2, tmp_path, "memory", stops=(1,))
    assert found[0]["kind"] == "RankError" and "rank 1" in found[0]["text"] and found[0]["seconds"] < SOON, found


class Normed(gz.Graph):
    """At stage 0 each rank computes power iterations for itself, whose bits must be equal."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).square().mean()
        loss.backward()
        return loss


def in_folders_of_their_own(rank: int) -> Any:
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder if rank == 1 else Path(__file__).parent)
    folder.rmdir()  # of rank 1 the working folder is gone
    graph = Normed()
    return [tried(lambda step=step: graph(torch.ones(4, 6) * (step + rank))) for step in range(2)]


def test_ranks_that_work_in_different_folders_agree_also_in_one_that_is_gone(tmp_path: Path) -> None:
    found = failure_toys.run(in_folders_of_their_own, 2, tmp_path, "memory")
    assert isinstance(found[0], list), found[0]["raised"]
    assert [one["value"] for one in found[0]] == [one["value"] for one in found[1]], found


def without_threads(rank: int) -> Any:
    """No thread can be started from the beginning, and then an op of rank 1 fails."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = refuse  # type: ignore[method-assign]
    graph = LookupGraph()
    found = [tried(lambda: graph(batch(0, rank)))]
    return [*found, tried(lambda: graph(torch.full((8,), 77) if rank == 1 else batch(1, rank)))]


def test_without_a_thread_to_start_ranks_work_and_hear_of_an_error(tmp_path: Path, way: str) -> None:
    found = failure_toys.run(without_threads, 2, tmp_path, way)
    for one in (found[0], found[1]):
        assert "value" in one[0] and "index out of range" in one[1]["text"], found
        assert one[1]["seconds"] < SOON


@pytest.fixture(params=failure_toys.WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def with_few_files(rank: int) -> Any:
    used, most = max(map(int, os.listdir("/proc/self/fd"))), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, most))
    found = tried(lambda: LookupGraph()(batch(0, rank)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return found


def test_a_rank_without_files_to_open_is_named_on_all(tmp_path: Path) -> None:
    found = failure_toys.run(with_few_files, 2, tmp_path, "memory")
    assert "see ulimit -n" in found[1]["text"], found
    assert "rank 1 stopped" in found[0]["text"] and "see ulimit -n" in found[0]["text"], found
    assert found[0]["seconds"] < SOON


def behind_a_proxy(rank: int) -> Any:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        os.environ[name] = os.environ[name.upper()] = "http://192.0.2.1:3128"
    return tried(lambda: LookupGraph()(batch(0, rank)))


def test_a_proxy_in_the_environment_changes_nothing(tmp_path: Path, way: str) -> None:
    found = failure_toys.run(behind_a_proxy, 2, tmp_path, way)
    assert found[0]["value"] == found[1]["value"]
