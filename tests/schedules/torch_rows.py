"""Rows of torch.distributed.pipelining, which tests compare with; where torch has them no more, those are skipped."""

from __future__ import annotations

import inspect
from typing import Any

import pytest


def torch_rows(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None, **options: bool) -> Any:
    """The rows of a schedule of torch's: its actions, None where a rank is idle."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    if not inspect.signature(visualizer.get_schedule_ops).parameters.keys() >= options.keys():
        pytest.skip(f"this torch has no {', '.join(options)} in get_schedule_ops")
    return visualizer.get_schedule_ops(name, ranks, micro_batches, stages_per_rank, **options)


def texts(row: Any) -> list[str]:
    """The actions of a row that compute, as text."""
    return [str(action) for action in row if action and action.is_compute_op]
