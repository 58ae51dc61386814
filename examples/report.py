"""The table at the end of train.py: what each ZeRO stage costs, by plan and by measurement, what it buys, and that it
computes what plain PyTorch computes in one process on the whole batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from language import TrainGraph, loss_of, make_optimizer
from torch import Tensor, nn

import graphzero as gz
from graphzero.plan import CATEGORIES, Plan
from graphzero.testing.meter import Measured

SPLITS = {1: "optimizer states", 2: "gradients", 3: "parameters"}  # what each stage adds to the one before it
INSIDE = ("arena", "gradients", "activations", "temporaries")

Batch = Callable[[int], tuple[Tensor, ...]]


@dataclass
class StageReport:
    """One stage's run.  seconds: of every step but the first, which compiles, and the measured one."""

    stage: int
    plan: Plan
    measured: Measured
    losses: list[float]
    seconds: list[float]

    @property
    def step_time(self) -> float:
        return statistics.median(self.seconds)


def run_stage(stage: int, make: Callable[[], nn.Module], batch: Batch, steps: int, clip: float = 1.0) -> StageReport:
    """Train a fresh model for ``steps`` steps; ``batch`` gives this rank's share.  Every rank calls it."""
    graph = TrainGraph(make(), steps, stage, clip)
    losses, seconds = [], []
    for step in range(steps):
        started = time.perf_counter()
        losses.append(graph(*batch(step)).item())
        seconds.append(time.perf_counter() - started)
    measured = gz.testing.measure_step(graph, *batch(steps))
    return StageReport(stage, graph.plan, measured, losses, seconds[1:])


def plain_losses(make: Callable[[], nn.Module], batch: Batch, steps: int, clip: float = 1.0) -> list[float]:
    """The same training by plain PyTorch in this process alone; ``batch`` gives the whole batch."""
    model = make()
    optimizer, schedule = make_optimizer(model, steps)
    losses = []
    for step in range(steps):
        ids, targets = batch(step)
        loss = loss_of(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def table(reports: list[StageReport], reference: list[float], ranks: int) -> str:
    """Rows of figures, a column per stage; of bytes, at the moment of the peak: planned / measured.

    What lies in an arena is measured together with it: that is one block of memory.
    """
    rows = [[f"{ranks} ranks, per rank and step", *(f"stage {r.stage}" for r in reports)]]
    has_arena = any(r.plan.memory["arena"] for r in reports)
    for category in CATEGORIES:
        pairs = [(r.plan.memory.at_peak[category], r.measured.at_peak.get(category, 0)) for r in reports]
        if has_arena and category in INSIDE:
            rows.append([f"{category}, kB", *(f"{planned / 1e3:,.1f}" for planned, _ in pairs)])
        elif category == "gradients" or any(map(any, pairs)):
            rows.append([f"{category}, kB", *(_pair(*pair) for pair in pairs)])
    if has_arena:
        both = [[sum(at.get(name, 0) for name in INSIDE) for at in _at_peak(r)] for r in reports]
        rows.append(["these four, kB", *(_pair(*pair) for pair in both)])
    rows.append(["peak, kB", *(_pair(r.plan.memory.peak, r.measured.peak) for r in reports)])
    rows.append(["model state, kB", *(f"{r.plan.memory.model_state / 1e3:,.0f}" for r in reports)])
    rows.append(["sent, Psi", *(f"{r.plan.comm_volume:.3f}" for r in reports)])
    rows.append(["collectives", *(str(len(r.plan.collectives)) for r in reports)])
    rows.append(["step time, ms", *(f"{r.step_time * 1e3:.0f}" for r in reports)])
    rows.append(["loss, off plain PyTorch", *(f"{_off(r.losses, reference):.1e}" for r in reports)])
    return aligned(rows)


def bought(reports: list[StageReport], reference: list[float]) -> str:
    """A line for each stage with its memory and traffic, then the last beside the first and their losses."""
    lines = []
    for before, after in pairwise(reports):
        old, new = before.measured.peak, after.measured.peak
        lines.append(
            f"stage {after.stage} also splits {SPLITS[after.stage]}: peak {old / 1e6:.1f} to {new / 1e6:.1f} MB "
            f"({new / old - 1:+.0%}), sent {before.plan.comm_volume:.2f} to {after.plan.comm_volume:.2f} Psi"
        )
    first, last = reports[0], reports[-1]
    lines.append(
        f"Stage {last.stage} peaks at {last.measured.peak / first.measured.peak:.2f} of stage {first.stage}; on these "
        f"ranks, which share a machine, a step takes {last.step_time / first.step_time:.2f} of its time."
    )
    apart = max(_off(report.losses, first.losses) for report in reports)
    plain = max(_off(report.losses, reference) for report in reports)
    equal = "equal to the bit" if apart == 0 else f"equal within {apart:.0e}"
    lines.append(
        f"The losses of all stages are {equal}; those of plain PyTorch, alone with the whole batch, within {plain:.0e}."
    )
    return "\n".join(lines)


def aligned(rows: list[list[str]]) -> str:
    """Lines with a rule below the first row; columns as wide as they need to be, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded]))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _at_peak(report: StageReport) -> tuple[dict[str, int], dict[str, int]]:
    return report.plan.memory.at_peak, report.measured.at_peak


def _pair(planned: float, measured: float) -> str:
    return f"{planned / 1e3:,.1f} / {measured / 1e3:,.1f}"


def _off(losses: list[float], reference: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, reference, strict=True))
