"""Values that the backward of a captured step computes again, as ``torch.utils.checkpoint`` has it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from graphzero.ir import value
from graphzero.ir.aliases import is_view


def recomputed_values(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Value of backward -> the value of forward that is computed by the same op of the same operands.

    A view of what forward has computed is not among them, as backward makes views for itself; one of a value that is
    computed again is.  What has no operands, as a range, has no stage.
    """
    by_call: dict[tuple[object, str], fx.Node] = {}  # of forward
    equal: dict[fx.Node, fx.Node] = {}  # values of backward, those that are not recomputed among them
    recomputed: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        phase, operands = value.phase_of(node), node.all_input_nodes
        if phase not in ("forward", "backward"):
            continue
        key = node.target, repr(fx.map_arg((node.args, node.kwargs), lambda x: equal.get(x, x)))
        if phase == "forward":
            by_call.setdefault(key, node)
        elif key in by_call:
            equal[node] = by_call[key]
            is_computed = any(x in recomputed for x in operands) or (operands and not is_view(node.target))
            if is_computed and not value.has_role(node, "gradient"):
                recomputed[node] = by_call[key]
    return recomputed
