"""Chooses how the gradients of micro-batches are added up from stage 2 on: each rank its part, or all of them.

A part is reduced once a micro-batch, as stage 2 reduces a gradient as soon as it is made; a whole accumulator is
reduced once a step, for more memory.  A memory budget decides; without one it is parts, and the plan says the price.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from graphzero.ir import ops, value
from graphzero.ir.storage.liveness import liveness
from graphzero.passes import Options
from graphzero.plan.budget import Budget
from graphzero.plan.plan import mega
from graphzero.plan.variants import Candidate


def with_accumulators(best: Callable[[Options], Candidate], options: Options, budget: Budget | None) -> Candidate:
    """The best program of a stage, its gradients added up in the one way or the other.  best: finds one."""
    parts = best(options)
    if options.micro_batches == 1 or options.stage < 2 or not _accumulator_bytes(parts):
        return parts
    in_parts, sent = mega(_accumulator_bytes(parts)), _sent(parts)
    if budget is None:
        return parts.decided(
            f"gradients of {options.micro_batches} micro-batches are added up in parts, {in_parts}, and reduced once "
            f"each, {mega(sent)} sent; a memory budget (config.set_memory_budget) may have them added up whole, "
            f"{mega(_whole(parts))}, and reduced once a step, {mega(sent / options.micro_batches)}"
        )
    whole = best(replace(options, whole_accumulators=True))
    fitting = (program for program in (parts, whole) if program.peak <= budget.nbytes)
    chosen = min(fitting, key=lambda program: program.cost, default=parts)
    how = "whole, and reduced once a step" if chosen is whole else "in parts, and reduced once a micro-batch"
    return chosen.decided(
        f"gradients of {options.micro_batches} micro-batches are added up {how}: whole they are "
        f"{mega(_accumulator_bytes(whole))} for {mega(_sent(whole))} sent, a peak of {mega(whole.peak)}; in parts "
        f"{in_parts} for {mega(sent)}, a peak of {mega(parts.peak)}, within {mega(budget.nbytes)} per rank"
    )


def _accumulator_bytes(one: Candidate) -> int:
    """Bytes of the accumulators."""
    return sum(span.nbytes for span in liveness(one.graph).spans() if span.category == "accumulators")


def _sent(one: Candidate) -> float:
    """Bytes on the wire for gradients that are reduced to parts."""
    return sum(c.bytes for c in one.plan.collectives if c.what_for == "gradients" and c.kind == "reduce_scatter")


def _whole(one: Candidate) -> int:
    """The bytes of accumulators if no rank splits them; of a tensor that its user has split, those of the whole."""
    rooms = (node for node in one.graph.nodes if node.target is ops.accumulator)
    return sum(value.tensor_type(node).nbytes for node in rooms if value.role_of(node) is not None)
