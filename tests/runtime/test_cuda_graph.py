"""What torch asks of whoever captures is done, in its order: torch.cuda stood in for, on a machine without a GPU."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import graphzero as gz
from graphzero.runtime.cuda_graph import CudaGraphs, recorder_of
from graphzero.runtime.virtual import VirtualWorld

DEVICE = torch.device("cuda", 0)


class FakeCuda:
    """Streams by name, and what was done on which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: Any = FakeStream(self, "user's")
        self.log: list[str] = []
        self.count = 0
        self.invalid = False
        for name in ("Stream", "CUDAGraph", "graph", "graph_pool_handle", "stream", "set_stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def Stream(self, device: torch.device) -> FakeStream:
        self.count += 1
        return FakeStream(self, f"side {self.count}")

    def CUDAGraph(self) -> Any:
        return FakeGraph(self)

    def graph_pool_handle(self) -> str:
        return f"pool {self.count}"

    def current_stream(self, device: Any = None) -> Any:
        return self.current

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Any:
        self.log.append(f"capture on {stream.name} into {pool}, {capture_error_mode}")
        before, self.current = self.current, stream
        try:
            yield
        finally:
            if self.invalid:  # as torch: an error here hides the first one and leaves its stream
                raise RuntimeError("operation failed due to a previous error during capture")
            self.current = before


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def replay(self) -> None:
        self.cuda.log.append(f"replay on {self.cuda.current.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_step_warms_up_and_is_captured_on_one_side_stream_and_replayed_on_the_users(cuda: FakeCuda) -> None:
    recorder = CudaGraphs(DEVICE)

    def step() -> str:
        cuda.log.append(f"step on {cuda.current.name}")
        return "results"

    assert recorder.warm_up(step) == "results"
    replay, results = recorder.record(step)
    replay()
    assert results == "results" and cuda.current.name == "user's"
    assert cuda.log == [
        "side 1 waits for user's",
        "step on side 1",
        "user's waits for side 1",
        "capture on side 1 into pool 1, thread_local",
        "step on side 1",
        "replay on user's",
    ]


@pytest.mark.parametrize("invalid", [False, True])
def test_a_capture_that_fails_leaves_the_users_stream_and_nothing_to_the_next(cuda: FakeCuda, invalid: bool) -> None:
    recorder, cuda.invalid = CudaGraphs(DEVICE), invalid

    def step() -> None:
        raise ValueError("an op waits")

    with pytest.raises((ValueError, RuntimeError)) as failure:
        recorder.record(step)
    assert isinstance(failure.value, ValueError) or isinstance(failure.value.__context__, ValueError)
    assert cuda.current.name == "user's"
    cuda.invalid = False
    recorder.record(lambda: None)
    assert cuda.log[-1] == "capture on side 2 into pool 2, thread_local"


def test_programs_of_one_world_share_a_recorder_and_its_pool() -> None:
    world, other = (VirtualWorld(gz.placement("cuda", [0], virtual=True), DEVICE) for _ in range(2))
    assert recorder_of(world) is recorder_of(world) is not recorder_of(other)


def test_a_copy_of_a_recorder_has_a_stream_and_a_pool_of_its_own(cuda: FakeCuda) -> None:
    recorder = CudaGraphs(DEVICE)
    recorder.record(lambda: None)
    copy.deepcopy(recorder).record(lambda: None)
    assert cuda.log == [f"capture on side {n} into pool {n}, thread_local" for n in (1, 2)]


def test_this_torch_takes_what_is_given_to_it() -> None:
    assert {"pool", "stream", "capture_error_mode"} <= {*inspect.signature(torch.cuda.graph).parameters}
    assert callable(torch.cuda.CUDAGraph.replay) and callable(torch.cuda.graph_pool_handle)
