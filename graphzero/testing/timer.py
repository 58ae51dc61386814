"""Seconds of a run by kind: compute by phase, copies in and out of buffers, waiting for other ranks.

``Executor.run_step`` takes it in place of a ``MemoryMeter``.  It times the first local rank line by line, which itself
costs some 0.2 microseconds a line.  On a device that works asynchronously it times the launches, not the kernels.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.transfer import awaited, transfer_of
from graphzero.plan.seconds import op_name
from graphzero.runtime.execute.steps import Meter

AROUND = ("overhead", "around the program")
AGREEING = ("overhead", "waiting for all ranks to agree")


@dataclass
class StepTimes:
    """Seconds by (what, detail), over ``calls`` calls.

    what is "compute" (detail: the phase), "copies" (into and out of communication buffers, and write-backs),
    "communication" (starting a collective, or waiting for one, by kind) or "overhead".
    ops: seconds of compute by (phase, op).
    """

    calls: int = 0
    seconds: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    ops: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    @property
    def total(self) -> float:
        """Seconds of one call."""
        return sum(self.seconds.values()) / max(self.calls, 1)

    def seconds_for(self, what: str) -> float:
        """Seconds of one call that went for ``what``."""
        return sum(spent for (kind, _), spent in self.seconds.items() if kind == what) / max(self.calls, 1)

    def __str__(self) -> str:
        rows = sorted(self.seconds.items(), key=lambda item: -item[1])
        lines = [f"{self.total * 1e3:8.2f} ms a call, {self.calls} calls"]
        for (what, detail), spent in rows:
            share = spent / self.calls / self.total if self.total else 0.0
            lines.append(f"{spent / self.calls * 1e3:8.2f} ms {share:5.1%}  {what}: {detail}")
        return "\n".join(lines)


class Timer(Meter):
    """Adds up a program's seconds into ``times``; see ``StepTimes``."""

    def __init__(self, graph: StepGraph, times: StepTimes | None = None):
        self.times = times or StepTimes()
        self._kinds = {node.name: _kind(node) for node in graph.nodes}
        self._began = 0.0
        self._node = ""

    def start(self) -> None:
        """A call begins."""
        self._began, self._node = time.perf_counter(), ""

    def stop(self) -> None:
        """End the measurement."""
        self.enter("", "")
        self.times.calls += 1

    def agreed(self, seconds: float) -> None:
        """Add seconds that passed around the program until all ranks had agreed on it."""
        if seconds:
            self.times.seconds[AROUND] -= seconds
            self.times.seconds[AGREEING] += seconds

    # ---- what the executor calls

    def watches(self, local: int) -> bool:
        """The first one only."""
        return local == 0

    def enter(self, node: str, kind: str) -> None:
        """Attribute the time since the last call to the node entered then."""
        now = time.perf_counter()
        what = self._kinds.get(self._node)
        if what is None:
            self.times.seconds[AROUND] += now - self._began
        else:
            self.times.seconds[what[:2]] += now - self._began
            if what[0] == "compute":
                self.times.ops[what[1:]] += now - self._began
        self._began, self._node = now, node

    def meet(self, node: fx.Node) -> None:
        """The ranks meet at ``node``."""
        self.enter(f"{node.name} (meeting)", "")
        self._kinds.setdefault(self._node, _meeting(node, self._kinds))


def _kind(node: fx.Node) -> tuple[str, str, str]:
    """(what, detail, op) of a node's lines."""
    op = op_name(node.target)
    if node.target is ops.assign or node.op == "output":
        return "copies", "write back", op
    if node.target in ops.HOST_COPIES:
        return "copies", "between host and device", op
    if (over := awaited(node)) is not None:
        return "copies", f"out of {over.kind}", over.kind
    if (begun := transfer_of(node)) is not None:
        return "copies", f"into {begun.kind}", begun.kind
    return "compute", value.phase_of(node), op


def _meeting(node: fx.Node, kinds: dict[str, tuple[str, str, str]]) -> tuple[str, str, str]:
    what, detail, op = kinds[node.name]
    if detail == "write back":
        return what, detail, op
    return "communication", f"{'waiting for' if node.target is ops.wait else 'starting'} {op}", op
