"""What torch asks of whoever captures is done, in its order: torch.cuda stood in for, on a machine without a GPU."""

from __future__ import annotations

import gc
import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import graphzero as gz
from graphzero.runtime.record.cuda_graph import CudaGraphs, recorder_of
from graphzero.runtime.world.virtual import VirtualWorld

DEVICE = torch.device("cuda", 0)


class FakeCuda:
    """Streams by name, what was done on which, and into which pools torch's allocator believes to capture.

    waits: whether an op in a capture waits for the GPU, so that the capture cannot end well.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: Any = FakeStream(self, "user's")
        self.log: list[str] = []
        self.streams = self.pools = 0
        self.waits = False
        self.underway: list[str] = []
        self.users: Counter[str] = Counter()  # of pools
        self.generator_captures = False
        self.workspaces: dict[str, str] = {}  # by stream, where it was taken
        names = ("Stream", "CUDAGraph", "graph_pool_handle", "stream", "current_stream", "synchronize", "empty_cache")
        for name in names:
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear_workspaces, raising=False)
        monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: "zeros")

    def Stream(self, device: torch.device) -> FakeStream:
        self.streams += 1
        return FakeStream(self, f"side {self.streams}")

    def CUDAGraph(self) -> Any:
        return FakeGraph(self)

    def graph_pool_handle(self) -> str:
        self.pools += 1
        return f"pool {self.pools}"

    def current_stream(self, device: Any = None) -> Any:
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, device: torch.device) -> None:
        assert not self.underway

    def empty_cache(self) -> None:
        assert not self.underway, "captures_underway.empty() INTERNAL ASSERT FAILED"

    def clear_workspaces(self) -> None:
        """Theirs go back to the pool, or whatever, they were taken from."""
        assert not self.underway
        self.workspaces.clear()

    def product(self) -> None:
        """cuBLAS takes a workspace for a stream that has none."""
        self.workspaces.setdefault(self.current.name, [*self.underway, "outside"][0])

    def end_allocate(self, device: int, pool: str) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, device: int, pool: str) -> None:
        self.users[pool] -= 1


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    """As torch's own, down to what it leaves behind when a capture fails."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.ended = cuda, False

    def capture_begin(self, pool: str, capture_error_mode: str) -> None:
        assert self.cuda.users[pool] > 0 or pool == f"pool {self.cuda.pools}", "use_count > 0 INTERNAL ASSERT FAILED"
        self.cuda.log.append(f"capture on {self.cuda.current.name} into {pool}, {capture_error_mode}")
        self.cuda.underway.append(pool)
        self.cuda.users[pool] += 1
        self.cuda.generator_captures, self.into = True, pool

    def capture_end(self) -> None:
        if self.cuda.waits:
            self.cuda.waits = False
            raise RuntimeError("operation failed due to a previous error during capture")
        self.cuda.end_allocate(0, self.into)
        self.cuda.generator_captures, self.ended = False, True

    def pool(self) -> str:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.into

    def replay(self) -> None:
        self.cuda.log.append(f"replay on {self.cuda.current.name}")

    def __del__(self) -> None:
        if self.ended:
            self.cuda.release(0, self.into)


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


@pytest.mark.parametrize("waits", [False, True])
def test_a_capture_that_fails_leaves_torch_and_the_user_where_they_were(cuda: FakeCuda, waits: bool) -> None:
    recorder = CudaGraphs(DEVICE)
    kept, _ = recorder.record(lambda: None)

    def step() -> None:
        cuda.waits = waits
        raise ValueError("an op waits")

    with pytest.raises((ValueError, RuntimeError)) as failure:
        recorder.record(step)
    assert isinstance(failure.value, ValueError) or isinstance(failure.value.__context__, ValueError)
    del failure
    assert cuda.current.name == "user's" and gc.isenabled()
    assert not cuda.underway and not cuda.generator_captures
    assert +cuda.users == {"pool 1": 1}
    replay, _ = recorder.record(lambda: None)
    assert cuda.log[-1].endswith("into pool 1, thread_local") and "side 1 " not in cuda.log[-1]


def test_graphs_share_a_pool_while_one_of_them_lives(cuda: FakeCuda) -> None:
    recorder = CudaGraphs(DEVICE)
    first, _ = recorder.record(lambda: None)
    second, _ = recorder.record(lambda: None)
    del first
    third, _ = recorder.record(lambda: None)
    assert +cuda.users == {"pool 1": 2}
    del second, third
    fourth, _ = recorder.record(lambda: None)
    assert +cuda.users == {"pool 2": 1}


def test_a_workspace_of_a_recording_is_its_pools(cuda: FakeCuda) -> None:
    recorder = CudaGraphs(DEVICE)
    recorder.warm_up(cuda.product)
    assert cuda.workspaces == {"side 1": "outside"}
    recorder.record(cuda.product)
    assert cuda.workspaces == {"side 1": "pool 1"}


def test_no_garbage_is_looked_for_during_a_capture(cuda: FakeCuda) -> None:
    CudaGraphs(DEVICE).record(lambda: cuda.log.append(f"collects: {gc.isenabled()}"))
    assert cuda.log[-1] == "collects: False" and gc.isenabled()


def test_programs_of_one_world_share_a_recorder_and_its_pool() -> None:
    world, other = (VirtualWorld(gz.placement("cuda", [0], virtual=True), DEVICE) for _ in range(2))
    assert recorder_of(world) is recorder_of(world) is not recorder_of(other)


def test_this_torch_takes_what_is_given_to_it() -> None:
    assert {"pool", "capture_error_mode"} <= {*inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters}
    assert callable(torch.cuda.CUDAGraph.replay) and callable(torch.cuda.graph_pool_handle)
    if torch.backends.cuda.is_built():
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool", "_cuda_clearCublasWorkspaces"):
            assert callable(getattr(torch._C, name))
