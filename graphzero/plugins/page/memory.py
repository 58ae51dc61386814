"""Bytes over the step, and what is held at each moment: of ``ir.storage.liveness`` and the plan, none computed here."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.arena import Arena
from graphzero.ir.storage.liveness import Bytes, liveness
from graphzero.plan.plan import CATEGORIES
from graphzero.plan.program_costs import memory_over_time, total_over_time


def memory_data(graph: StepGraph, arena: Arena | None) -> dict[str, Any]:
    """Memory of the fullest rank.

    peak: number of the value that runs at the worst moment.  series: category -> ``[position, bytes, ...]`` where the
    bytes change.  lives: ``[value, first, last, bytes, category, in the arena]``, positions from -1 for what is there
    before the step; positions are numbers of values.  slots: bytes of each slot that collectives share.  buffers:
    ``[value, bytes]`` of the collectives that pack into a buffer of their own.  The lives at a position, the slots,
    its buffer and what of the arena is free are, in all, the bytes of the series there.
    """
    at, over = liveness(graph), memory_over_time(graph, arena)
    inside = arena.offsets if arena is not None else {}
    spans = [
        [
            at.position[span.storage[0]],
            span.begin,
            span.end,
            span.nbytes,
            CATEGORIES.index(span.category),
            int(in_arena),
        ]
        for span in at.spans()
        if span.category and span.nbytes
        for in_arena in [span.storage in inside]
    ]
    return {
        "peak": int(total_over_time(over).argmax()),
        "categories": list(CATEGORIES),
        "series": {name: change_bytes(nbytes) for name, nbytes in over.items() if nbytes.any()},
        "lives": spans,
        "slots": [at.slots[slot] for slot in sorted(at.slots)],
        "buffers": [[int(i), int(at.transient[i])] for i in at.transient.nonzero()[0]],
        "arena": arena.nbytes if arena is not None else 0,
    }


def change_bytes(nbytes: Bytes) -> list[int]:
    """``[position, bytes, ...]`` where the bytes change."""
    where = np.flatnonzero(np.diff(nbytes, prepend=nbytes[0] - 1))
    return [int(x) for pair in zip(where, nbytes[where], strict=True) for x in pair]
