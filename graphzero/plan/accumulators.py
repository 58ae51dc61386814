"""How the gradients of micro-batches are added up from stage 2 on: each rank its part, or all of them.

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
    if options.micro_batches == 1 or options.stage < 2 or not _held(parts):
        return parts
    held, sent = _held(parts), _sent(parts)
    if budget is None:
        return parts.decided(
            f"gradients of {options.micro_batches} micro-batches are added up in parts, {mega(held)}, and reduced once "
            f"each, {mega(sent)} sent; a memory budget (config.set_memory_budget) may have them added up whole, "
            f"{mega(_whole(parts))}, and reduced once a step, {mega(sent / options.micro_batches)}"
        )
    whole = best(replace(options, whole_accumulators=True))
    found = min((one for one in (parts, whole) if one.peak <= budget.nbytes), key=lambda one: one.cost, default=parts)
    how = "whole, and reduced once a step" if found is whole else "in parts, and reduced once a micro-batch"
    return found.decided(
        f"gradients of {options.micro_batches} micro-batches are added up {how}: whole they are {mega(_held(whole))} "
        f"for {mega(_sent(whole))} sent, a peak of {mega(whole.peak)}; in parts {mega(held)} for {mega(sent)}, a peak "
        f"of {mega(parts.peak)}, within {mega(budget.nbytes)} per rank"
    )


def _held(one: Candidate) -> int:
    """Bytes of the accumulators."""
    return sum(life.nbytes for life in liveness(one.graph).lives() if life.category == "accumulators")


def _sent(one: Candidate) -> float:
    """Bytes on the wire for gradients that are reduced to parts."""
    return sum(c.bytes for c in one.plan.collectives if c.what_for == "gradients" and c.kind == "reduce_scatter")


def _whole(one: Candidate) -> int:
    """What accumulators would be that no rank has split; of a tensor that its user has split, all of it."""
    rooms = (node for node in one.graph.nodes if node.target is ops.accumulator)
    return sum(value.tensor_type(node).nbytes for node in rooms if value.role_of(node) is not None)
