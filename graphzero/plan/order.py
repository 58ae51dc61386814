"""The order of backward: that of ``Order``, where the program that comes out then peaks lower.

What ``Order`` counts by leaves out slots and transfers under way, so the plan decides; the order that the user wrote
stays where it saves less than a hundredth.
"""

from __future__ import annotations

from dataclasses import replace

from graphzero.ir.storage.liveness import liveness
from graphzero.passes import Options, Order
from graphzero.plan.plan import memory_of
from graphzero.plan.variants import Candidate, Variants

LEAST = 0.01  # of the peak, that another order has to save


def in_best_order(variants: Variants, options: Options) -> Candidate:
    """The program of these options; ``Order`` is among its passes only if it was worth it.

    The user's passes behind it, which may print or count, have no part in the choice, and so run once.
    """
    if options.micro_batches > 1:
        return variants.candidate(options)
    given = variants.before("order", options)
    if Order().saves(given) < LEAST:
        return variants.candidate(options, given=given)
    moved = replace(options, order=True)
    enough = (1 - LEAST) * int(liveness(variants.draft(options, own_until="order")).total().max())
    if variants.has_own(moved, since="order"):
        lower = memory_of(variants.draft(moved, own_until="order")).peak
        return variants.candidate(moved if lower <= enough else options, given=given)
    found = variants.candidate(moved, given=given)  # most often it is taken, and then need not be made once more
    return found if found.peak <= enough else variants.candidate(options)
