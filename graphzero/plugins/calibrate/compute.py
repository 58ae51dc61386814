"""Measures what a rank of this machine computes: peaks by products and copies, and what share of them each op reaches.

All ranks compute at once, as they do in a step: those of one host share its memory and perhaps its cores.  Shares are
those of the ops of a real step, timed line by line; on a device that works asynchronously the host's clock sees starts
alone, so there only peaks are measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from graphzero.graph import Graph
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import DTYPE_NAMES
from graphzero.plan.device import FLOPS, MEMORY, Device
from graphzero.plan.seconds import COPY
from graphzero.plan.timeline import COMPUTE, timeline
from graphzero.runtime.world.accelerators import ACCELERATORS, synchronize
from graphzero.sbp.link_costs import Link
from graphzero.testing import profile_step
from graphzero.testing.timer import StepTimes

PRODUCT = 512, 8192  # rows and columns of the matrices on a CPU, on an accelerator
COPIED = 1 << 24, 1 << 30  # bytes, likewise
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHARES = 1e-3, 10.0  # of the peak that an op is believed to reach; small operands stay in caches


def measured_device(graph: Graph, args: Sequence[Any], links: Mapping[str, Link], repeat: int) -> Device:
    """This rank's device, by the links that were measured and the step of ``graph``, which is called for it.

    Every rank calls it.  repeat: how often each thing is timed; medians count.
    """
    kind = graph.placement.device_type
    where = torch.device(kind)
    hosts = int(os.environ.get("LOCAL_WORLD_SIZE", graph.placement.size))
    base = Device(
        name=f"{kind} of {graph.placement.size} ranks, measured",
        type=kind,
        flops={DTYPE_NAMES[dtype]: _product(dtype, where, repeat) for dtype in DTYPES},
        memory=_copy(where, repeat),
        capacity=_capacity(kind) // (hosts if kind == "cpu" else 1),
        call=_call(where, repeat),
        links=links,
        host=hosts,
        runs_ahead=kind != "cpu",
        overlaps=kind != "cpu",
        sources={
            "flops, memory, call": "measured by calibrate: products, copies and short ops, on all ranks at once",
            "links": "measured by calibrate: the runtime's own collectives",
        },
    )
    if kind != "cpu" or _is_meta(graph):
        return base
    return _with_shares(base, graph, args, repeat)


def shares(base: Device, program: StepGraph, times: Sequence[StepTimes]) -> Device:
    """``base`` with the share of its peaks that each op of a program reaches, by timed calls of it on a CPU.

    Views and names, which run no kernel, count as part of the start of an op; waits of ranks for each other, beyond
    what links take, as part of the time around a step.
    """
    at_peak = timeline(program, replace(base, reached={}, call=0.0))
    events = [event for event in at_peak.events if event.stream == COMPUTE]
    spent = _by_op(times)
    ideal: dict[str, list[float]] = {}
    for event in events:
        ideal.setdefault(event.kind, []).append(event.seconds)
    least, most = SHARES
    reached = {}
    for op, seconds in ideal.items():
        own = spent.get(op, 0.0) - len(seconds) * base.call
        if sum(seconds) and op in spent:
            reached[op] = min(max(sum(seconds) / own if own > 0 else most, least), most)
    typical = {
        bound: median(fractions)
        for bound in (FLOPS, MEMORY)
        if (fractions := [reached[e.kind] for e in events if e.kind in reached and (e.flops > 0) == (bound == FLOPS)])
    }
    unmodeled = sum(seconds for op, seconds in spent.items() if op not in ideal)
    around, met = (median(one.seconds_for(what) for one in times) for what in ("overhead", "communication"))
    late = max(met - at_peak.exposed, 0.0)
    said = f"measured by calibrate: {len(times)} steps of {program.name}, line by line"
    return replace(
        base,
        reached=typical | reached,
        call=base.call + unmodeled / max(len(events), 1),
        step=around + late,
        sources={**base.sources, "reached, step": said},
    )


def _with_shares(base: Device, graph: Graph, args: Sequence[Any], repeat: int) -> Device:
    for _ in range(2):
        graph(*args)
    times = [profile_step(graph, *args) for _ in range(repeat)]
    return shares(base, graph.program, times)


def _by_op(times: Sequence[StepTimes]) -> dict[str, float]:
    """Seconds of one call by op, the median of the calls."""
    each = []
    for one in times:
        seconds_by_op = {COPY: one.seconds_for("copies")}
        for (_, op), seconds in one.ops.items():
            seconds_by_op[op] = seconds_by_op.get(op, 0.0) + seconds
        each.append(seconds_by_op)
    return {op: median(seconds_by_op[op] for seconds_by_op in each) for op in each[0]}


def _product(dtype: torch.dtype, where: torch.device, repeat: int) -> float:
    """Operations a second of a matrix product."""
    n = PRODUCT[where.type != "cpu"]
    a, b = (torch.ones(n, n, dtype=dtype, device=where) for _ in range(2))
    return 2.0 * n**3 / _seconds(lambda: torch.mm(a, b), where, repeat)


def _copy(where: torch.device, repeat: int) -> float:
    """Bytes a second, read and written."""
    source = torch.ones(COPIED[where.type != "cpu"], dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / _seconds(lambda: target.copy_(source), where, repeat)


def _call(where: torch.device, repeat: int, many: int = 1000) -> float:
    """Seconds of starting an op on next to nothing."""
    x = torch.ones(1, device=where)

    def calls() -> None:
        for _ in range(many):
            torch.add(x, x)

    return _seconds(calls, where, repeat) / many


def _seconds(work: Callable[[], Any], where: torch.device, repeat: int) -> float:
    seconds = []
    for _ in range(repeat + 1):
        synchronize(where)
        began = time.perf_counter()
        work()
        synchronize(where)
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def _capacity(kind: str) -> int:
    """Bytes of memory of this machine, or of this rank's GPU."""
    if kind == "cpu":
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return int(ACCELERATORS[kind].module.mem_get_info()[1])


def _is_meta(graph: Graph) -> bool:
    modules = (x for x in vars(graph).values() if isinstance(x, torch.nn.Module))
    return any(p.is_meta for module in modules for p in module.parameters())
