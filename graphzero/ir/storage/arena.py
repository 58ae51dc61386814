"""Plans offsets of a step's large temporaries in one buffer that stays from step to step, from their lives alone.

A block of memory that is asked for and given back in every step costs its pages each time: the kernel maps and clears
them.  In a buffer that stays they are there.  Values whose lives overlap lie apart, others may lie on one another; by
size, each where it fits best (greedy by size: Pisarchyk and Lee, arXiv 2001.03288).

Sizes are those of the fullest rank; every rank uses the same offsets.  An arena holds results of ops that can be told
where to write, if these are known to lie row by row, and what arrives by collectives without a slot.  What leaves the
step, or any value that a state or a result of ``build`` shares storage with, is elsewhere.

Measured on two ranks, for GPTs of 7 and 25 M parameters at stages 0 and 3 (``python bench/peers.py data --systems
graphzero "graphzero without an arena"``, with ``--model B``, and with ``--what memory``): the processor's time is 0.98,
0.98, 0.93 and 0.93 of that without, and the resident peak 0.97, 0.96, 0.95 and 0.86.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from graphzero.ir import value
from graphzero.ir.aliases import is_copy
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import kernel_forms
from graphzero.ir.storage.dense import Orders
from graphzero.ir.storage.liveness import Liveness, StorageSpan, liveness
from graphzero.ir.storage.roots import Storage

LEAST = 128 * 2**10  # bytes of a value: glibc maps blocks from there on, and keeps smaller ones by itself
ALIGNED = 64  # bytes: a line of cache, what torch aligns its own memory to
COST = 20  # the plan's peak may rise by one part in so many, of itself and of twice what is in the arena
PARTS = (8, 7, 6, 4, 2)  # eighths of the buffer that would hold everything, tried one after the other


@dataclass(frozen=True)
class Arena:
    """``nbytes`` in all, and the offset of each storage that lives there."""

    nbytes: int
    offsets: Mapping[Storage, int]


def arena_of(graph: StepGraph, most: int | None = None) -> Arena | None:
    """The arena of a final program; None where nothing is to be had by one.

    most: bytes that a step may peak at, arena included; besides that, the peak rises by at most a part (``COST``).
    """
    at = liveness(graph)
    chosen = eligible(at)
    if not chosen:
        return None
    alone = int(at.total().max())
    whole = pack(chosen)
    for part in PARTS:
        arena = whole if part == PARTS[0] else pack(chosen, whole.nbytes * part // PARTS[0])
        inside = [span for span in at.spans() if span.storage in arena.offsets]
        peak = arena.nbytes + int((at.total() - at.over_time(inside)).max())
        worth = (peak - alone) * COST <= min(alone, 2 * arena.nbytes)
        if arena.offsets and worth and (most is None or peak <= most):
            return arena
    return None


def eligible(at: Liveness) -> list[StorageSpan]:
    """The lives that may be in an arena, as long as their memory must be left alone."""
    last = len(at.nodes) - 1
    large = [span for span in at.spans() if span.begin >= 0 and span.nbytes >= LEAST and span.end < last]
    if not large:
        return []
    orders, ends = Orders(at.nodes), _awaited(at)
    return [
        replace(span, end=max(span.end, ends.get(span.storage, -1)))
        for span in large
        if _can_be_told(at, span.storage[0], orders)
    ]


def _can_be_told(at: Liveness, node: fx.Node, orders: Orders) -> bool:
    if node in at.transfers:
        return at.transfers[node].is_direct
    has_form = kernel_forms.writing(node.target) is not None or is_copy(node.target)
    return has_form and value.is_tensor(node) and orders.is_row_major(node)


def _awaited(at: Liveness) -> dict[Storage, int]:
    """Storages that are sent from without a slot -> where that is over: until then other ranks may read them."""
    ends: dict[Storage, int] = {}
    for moves in at.transfers.values():
        if moves.is_direct:
            for storage in (*at.roots[moves.node], *(root for member in moves.members for root in at.roots[member])):
                if storage is not None:
                    ends[storage] = max(ends.get(storage, -1), at.position[moves.end])
    return ends


def pack(alive: Sequence[StorageSpan], most: int | None = None) -> Arena:
    """Offsets such that no two lives overlap in time and in memory; what does not fit below ``most`` is left out.

    Lives that meet at one node overlap: an op reads its operands while it writes its result.
    """
    by_size = sorted(alive, key=lambda span: (-span.nbytes, span.begin, span.end, span.storage[1]))
    begins, ends, lows, highs = (np.zeros(len(by_size), dtype=np.int64) for _ in range(4))
    offsets: dict[Storage, int] = {}
    for span in by_size:
        size, count = -(-span.nbytes // ALIGNED) * ALIGNED, len(offsets)
        overlapping = (begins[:count] <= span.end) & (ends[:count] >= span.begin)
        low = _best_fit(lows[:count][overlapping], highs[:count][overlapping], size)
        if most is not None and low + size > most:
            continue
        begins[count], ends[count], lows[count], highs[count] = span.begin, span.end, low, low + size
        offsets[span.storage] = low
    return Arena(int(highs.max(initial=0)), offsets)


def _best_fit(lows: np.ndarray, highs: np.ndarray, size: int) -> int:
    """The lowest offset of the smallest gap, between what is taken, that ``size`` fits in; else after all."""
    order = np.argsort(lows, kind="stable")
    tops = np.concatenate([[0], np.maximum.accumulate(highs[order])])
    gaps = lows[order] - tops[:-1]
    fitting = np.flatnonzero(gaps >= size)
    return int(tops[-1] if not len(fitting) else tops[fitting[np.argmin(gaps[fitting])]])
