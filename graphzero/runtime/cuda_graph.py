"""Recording a step on a GPU: torch.cuda.CUDAGraph.

What is recorded when, and with what in which memory, is ``replay``'s to say; here is what torch asks of whoever
captures: runs on a side stream before, and a pool of memory that lives as long as the graph.  The graphs of one world
share a pool: they run one after the other, and leave nothing in it but their results, which stay allocated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from graphzero.errors import ConfigError
from graphzero.runtime.world import World
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
    """A ``replay.Recorder`` for one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        self._pool: Any = None

    def __deepcopy__(self, memo: object) -> CudaGraphs:
        return CudaGraphs(self.device)

    def warm_up(self, step: Callable[[], T]) -> T:
        """On the stream on which it will be recorded; the caller's stream waits for it."""
        stream, current = self._side_stream(), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            results = step()
        current.wait_stream(stream)
        return results

    def record(self, step: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Other threads may go on meanwhile: a data loader's pins memory."""
        stream, current = self._side_stream(), torch.cuda.current_stream(self.device)
        graph: Any = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                results = step()
        except BaseException:
            torch.cuda.set_stream(current)  # torch leaves its own
            self._stream = self._pool = None  # what such a capture leaves behind is nobody's
            raise
        return graph.replay, results

    def _side_stream(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        return self._stream


_recorders: weakref.WeakKeyDictionary[World, CudaGraphs] = weakref.WeakKeyDictionary()


def recorder_of(world: World) -> CudaGraphs:
    """The recorder of a world's programs."""
    if world not in _recorders:
        _recorders[world] = CudaGraphs(world.device)
    return _recorders[world]
