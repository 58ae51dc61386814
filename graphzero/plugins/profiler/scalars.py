"""Scalars of training for TensorBoard, or for whatever has its ``add_scalar``."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero.errors import ConfigError
from graphzero.graph import Graph
from graphzero.runtime.world import launch
from graphzero.runtime.world.accelerators import ACCELERATORS

_PACKAGE = "tensorboard"


class TensorBoard:
    """Writes the scalars of a Graph's steps, on the first rank of the job alone::

        board = gz.TensorBoard(graph, "runs/first", every=10)
        for x, y in loader:
            loss = graph(x, y)
            board.step(loss, tokens=x.numel() * world_size)
        board.close()

    log_dir: the folder of the run.  every: of how many steps one is written; reading a loss makes the host wait for it,
    so others cost next to nothing.  first: the number of steps taken before the first call, for a run that goes on.
    writer: an object with ``add_scalar(tag, value, step)`` that is used instead, such as a ``SummaryWriter`` of yours.

    Raises ConfigError, on every rank, if the package tensorboard is not installed and there is no ``writer``.
    """

    def __init__(
        self, graph: Graph, log_dir: str | os.PathLike[str] | None = None, *, every: int = 1, first: int = 0,
        writer: Any = None,
    ) -> None:  # fmt: skip
        if type(every) is not int or every < 1:
            raise ConfigError(f"gz.TensorBoard(every={every!r}): it is of how many steps one is written, at least 1")
        if (log_dir is None) == (writer is None):
            raise ConfigError("gz.TensorBoard takes either the folder of the run, log_dir, or a writer of your own")
        if writer is None and importlib.util.find_spec(_PACKAGE) is None:
            raise ConfigError(
                "gz.TensorBoard needs the package tensorboard: pip install tensorboard; or give it a writer, any "
                "object with add_scalar(tag, value, step)"
            )
        self.graph, self.every, self.steps = graph, every, first
        self._writer = (writer or _summary_writer(log_dir)) if launch.own_rank() == 0 else None
        self._owns = writer is None
        self._written_at: tuple[int, float] | None = None  # after which step, when
        self._tokens = 0.0

    def step(self, loss: Any = None, *, tokens: float | None = None, **scalars: Any) -> None:
        """A step has been taken.  Every rank may call it; it talks to none.

        loss, and ``scalars`` by name: numbers or tensors of one element.  tokens: of the global batch, for tokens a
        second.  Beside them: learning rates, the norm of gradients where they are clipped, the loss scale and whether
        the step was skipped where the loss is scaled, seconds of a step (the mean since the last one written), and the
        peak of memory in bytes: on a GPU that of torch's allocator, elsewhere the planned one.

        Raises ConfigError for what is no number.
        """
        self.steps += 1
        if self._writer is None:
            return
        self._tokens += tokens or 0.0
        if self.steps % self.every:
            return
        given = {"loss": loss, **scalars}
        found = {name: number(name, x) for name, x in given.items() if x is not None}
        for tag, x in (*found.items(), *self._of_graph(), *self._of_time(tokens is not None)):
            self._writer.add_scalar(tag, x, self.steps)

    def close(self) -> None:
        """Write what is left, if the writer is not the user's."""
        if self._writer is not None and self._owns:
            self._writer.close()
        self._writer = None

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- what is written

    def _of_graph(self) -> Iterator[tuple[str, float]]:
        graph = self.graph
        yield from learning_rates(graph)
        norms = graph.grad_norm if isinstance(graph.grad_norm, tuple) else (graph.grad_norm,)
        for i, norm in enumerate(norms):
            if norm is not None:
                yield f"grad_norm/{i}" if len(norms) > 1 else "grad_norm", float(norm)
        if graph.loss_scale is not None:
            yield "loss_scale", graph.loss_scale
            yield "skipped", float(graph.skipped)
        if graph.is_compiled:
            yield "peak_bytes", float(_peak(graph))

    def _of_time(self, counts_tokens: bool) -> Iterator[tuple[str, float]]:
        """From the second time on: the first step has compiled."""
        before, self._written_at = self._written_at, (self.steps, time.perf_counter())
        tokens, self._tokens = self._tokens, 0.0
        if before is None:
            return
        seconds = self._written_at[1] - before[1]
        yield "step_seconds", seconds / (self.steps - before[0])
        if counts_tokens:
            yield "tokens_per_second", tokens / seconds


def learning_rates(graph: Graph) -> Iterator[tuple[str, float]]:
    """``lr``; where there are several groups of parameters, ``lr/0`` and so on, in the order of add_optimizer."""
    rates = graph.learning_rates
    for i, rate in enumerate(rates):
        yield f"lr/{i}" if len(rates) > 1 else "lr", float(rate)


def number(name: str, x: Any) -> float:
    """A number as a float.  Raises ConfigError for what is none, and what would need other ranks."""
    if isinstance(x, DTensor):
        if not all(one.is_replicate() for one in x.placements):
            raise ConfigError(f"gz.TensorBoard: {name} is split over ranks ({x.placements}); give x.full_tensor()")
        x = x.to_local()
    if isinstance(x, Tensor) and x.numel() != 1:
        raise ConfigError(f"gz.TensorBoard: {name} has shape {list(x.shape)}; a scalar is one number, as x.mean()")
    try:
        return float(x)
    except (TypeError, ValueError):
        raise ConfigError(f"gz.TensorBoard: {name} is {type(x).__name__}, not a number") from None


def _peak(graph: Graph) -> int:
    accelerator = ACCELERATORS.get(graph.placement.device_type)
    return graph.plan.memory.peak if accelerator is None else int(accelerator.module.max_memory_allocated())


def _summary_writer(log_dir: Any) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(os.fspath(log_dir))
