"""The order of backward: that of ``DelayGradients``, where the program that comes out then peaks lower.

What ``DelayGradients`` counts by leaves out slots and transfers under way, so the plan decides; the order that the user
wrote stays where it saves less than a hundredth.  A step may peak before or after what would move, as in its update:
then no program is made in the other order.
"""

from __future__ import annotations

from dataclasses import replace

from graphzero.ir.storage.liveness import liveness
from graphzero.passes import DelayGradients, Options
from graphzero.plan.program_costs import memory_of
from graphzero.plan.variants import Candidate, Variants

LEAST = 0.01  # of the peak, that another order has to save


def in_best_order(variants: Variants, options: Options) -> Candidate:
    """The program of these options; ``DelayGradients`` is among its passes only if it was worth it.

    The user's passes after it, which may print or count, have no part in the choice, and so run once.
    """
    if options.micro_batches > 1:
        return variants.candidate(options)
    given = variants.before("delay_gradients", options)
    if DelayGradients().saved_share(given) < LEAST:
        return variants.candidate(options, given=given)
    draft = liveness(variants.draft(options, own_until="delay_gradients"))
    total = draft.total()
    enough = (1 - LEAST) * int(total.max())
    positions = {node.name: position for node, position in draft.position.items()}
    first, last = (positions.get(name) for name in DelayGradients().moved_nodes(given))
    if first is not None and last is not None:
        elsewhere = max(total[:first].max(initial=0), total[last + 1 :].max(initial=0))
        if elsewhere > enough:
            return variants.candidate(options, given=given)
    moved = replace(options, delay_gradients=True)
    if variants.has_own(moved, since="delay_gradients"):
        lower = memory_of(variants.draft(moved, own_until="delay_gradients")).peak
        return variants.candidate(moved if lower <= enough else options, given=given)
    program = variants.candidate(moved, given=given)  # most often it is taken, and then need not be made once more
    return program if program.peak <= enough else variants.candidate(options)
