"""Runs passes, and takes the order of ``Order`` where the program that comes out then peaks lower.

What ``Order`` counts by leaves out slots and transfers under way, so the plan decides; the order that the user wrote
stays where it saves less than a hundredth.  Passes of the user's have no part in that choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphzero.ir.graph import StepGraph
from graphzero.passes import Bucket, Order, Pass, Pipeline, Record
from graphzero.passes.base import BuiltinPass
from graphzero.plan import bytes_over_time

LEAST = 0.01  # of the peak, that another order has to save


def run(graph: StepGraph, passes: Sequence[Pass]) -> tuple[StepGraph, list[Record]]:
    """The program, and what each pass did; ``Order`` is among them, before ``Bucket``, only if it was worth it."""
    at = next((i for i, one in enumerate(passes) if isinstance(one, Bucket)), len(passes))
    ahead, behind, order = Pipeline(passes[:at]), passes[at:], Order()
    middle = ahead(graph)
    if behind and order.saves(middle) >= LEAST:
        built_in = [
            one for one in behind if isinstance(one, BuiltinPass)
        ]  # a user's own runs once: it may print, or count
        pipeline = Pipeline([order, *built_in])
        made = pipeline(middle)
        if _peak(made) <= (1 - LEAST) * _peak(_unchecked(middle, built_in)):
            if len(built_in) < len(behind):
                pipeline = Pipeline([order, *behind])
                made = pipeline(middle)
            return made, [*ahead.history, *pipeline.history]
    pipeline = Pipeline(behind)
    made = pipeline(middle)
    return made, [*ahead.history, *pipeline.history]


def _unchecked(graph: StepGraph, passes: Sequence[Pass]) -> StepGraph:
    """What passes make that have just made another program, for its plan alone: verifying takes most of the time."""
    made = graph.clone()
    for pass_ in passes:
        made = pass_(made)
    return made


def _peak(graph: StepGraph) -> int:
    return max(bytes_over_time(graph))
