"""Recording a step on a GPU: torch.cuda.CUDAGraph.

``replay`` decides when to record, and which memory a recording uses.  This module does what torch requires of a
capture: warm-up runs on a side stream, and a memory pool that lives as long as the graph.  The graphs of one world
share a pool, because they run one after the other and leave only their results in it, which stay allocated.

If CUDA invalidates a capture, because an op waited for the GPU, torch's allocator and generators stay in capture mode.
This module ends that mode, so that the step can run without a graph and others can be recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from graphzero import _compat
from graphzero.errors import ConfigError
from graphzero.runtime.record.garbage import collector_at_rest
from graphzero.runtime.world.world import World
from graphzero.sbp.placement import Placement

T = TypeVar("T")


def check(placement: Placement) -> None:
    """Raise ConfigError for a placement on which a step cannot be recorded."""
    if placement.device_type != "cuda":
        raise ConfigError(
            f"set_cuda_graph(): {placement!r} is not on GPUs; a CUDA graph needs one. Leave the call out there, or "
            'place the Graph on one: gz.placement("cuda", ...)'
        )
    if placement.size > 1 and not placement.virtual:
        raise ConfigError(
            f"set_cuda_graph(): {placement!r} has several processes. Their collectives would be part of each one's "
            "recording, and a rank that could not record would leave the others waiting; that has not been tried yet. "
            "Leave the call out, or use one process: a placement of one rank, or virtual=True"
        )


class CudaGraphs:
    """A ``replay.StepRecorder`` for one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # those that can be replayed

    def warm_up(self, step: Callable[[], T]) -> T:
        """Run a step on the stream on which it will be recorded; the caller's stream waits for it."""
        stream, current = self._side_stream(), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            results = step()
        current.wait_stream(stream)
        return results

    def record(self, step: Callable[[], T]) -> tuple[Callable[[], None], T]:
        torch.cuda.synchronize(self.device)
        # The capture finds no workspace of cuBLAS and takes one out of the pool, which stays as long as the graph.  One
        # from outside is gone when anybody clears workspaces, as torch.compile does when it captures.
        _compat.clear_workspaces()
        torch.cuda.empty_cache()  # what the warm-up has left is the pool's to take
        graph, pool = torch.cuda.CUDAGraph(), self._pool()
        with collector_at_rest():  # to destroy another graph, which may be garbage, would spoil the capture
            try:
                results = _capture(graph, pool, self._side_stream(), step)
            except BaseException:
                self._stream = None
                self._lead_out(graph, pool)
                raise
        self._graphs.add(graph)
        return graph.replay, results

    def _pool(self) -> Any:
        """The memory pool of a live graph; torch does not reuse the pool of a deleted one."""
        return next((graph.pool() for graph in self._graphs), None) or torch.cuda.graph_pool_handle()

    def _side_stream(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def _lead_out(self, graph: Any, pool: Any) -> None:
        """End what the end of a failed capture has not."""
        if _compat.end_failed_capture(graph, pool, self.device):
            stream: Any = torch.cuda.Stream(self.device)
            blank: Any = torch.cuda.CUDAGraph()
            # The generator is in a capture until one ends well.
            _capture(blank, torch.cuda.graph_pool_handle(), stream, lambda: torch.zeros((), device=self.device))


def _capture(graph: Any, pool: Any, stream: Any, step: Callable[[], T]) -> T:
    """Other threads may go on meanwhile: a data loader's pins memory."""
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            return step()
        finally:
            graph.capture_end()


_recorders: weakref.WeakKeyDictionary[World, CudaGraphs] = weakref.WeakKeyDictionary()


def recorder_of(world: World) -> CudaGraphs:
    """The recorder of a world's programs."""
    if world not in _recorders:
        _recorders[world] = CudaGraphs(world.device)
    return _recorders[world]
