"""Warning for an op that gathers the batch, so that every rank computes the whole of a gradient."""

from __future__ import annotations

import warnings
from collections import deque

from torch import fx

from graphzero.ir import value
from graphzero.ir.aliases import ANNOTATIONS
from graphzero.passes.place.forward_sweep import AxisPropagation
from graphzero.sbp.op_call import op_name
from graphzero.sbp.registry import GatheredBatchWarning
from graphzero.sbp.types import B

_warned: set[object] = set()


def warn_of_gathered_batch(state: AxisPropagation) -> None:
    """Warn, once for each op, where a gradient of more than one element is whole on a data axis because of a gather."""
    if not state.is_data or state.ranks == 1:
        return
    for node in filter(value.is_tensor, state.graph.nodes):
        role = value.role_of(node)
        if role is None or role.kind != "gradient" or node.target in ANNOTATIONS:
            continue
        if state.sbp(node) is B and value.tensor_type(node).numel > 1:
            gather = _gather_before(state, node)
            if gather is not None and gather[0].target not in _warned:
                _warned.add(gather[0].target)
                _warn(state, role.of, *gather)


def _gather_before(state: AxisPropagation, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The op nearest before ``node`` that gathers an operand, and that operand; only whole values are looked after."""
    seen, queue = {node}, deque([node])
    while queue:
        at = queue.popleft()
        if at in state.chosen:
            stands = zip(value.tensor_operands(at), state.chosen[at].inputs, strict=True)
            gathered = next((x for x, wants in stands if wants is B and state.sbp(x).is_split), None)
            if gathered is not None:
                return at, gathered
        new = [x for x in at.all_input_nodes if x not in seen and x.op == "call_function" and _is_whole(state, x)]
        seen.update(new)
        queue.extend(new)
    return None


def _is_whole(state: AxisPropagation, node: fx.Node) -> bool:
    return node in state.found and all(sbp is None or sbp is B for sbp in state.found[node])


def _warn(state: AxisPropagation, parameter: str, op: fx.Node, operand: fx.Node) -> None:
    source, axis = value.source_of(op), state.graph.placement.names[state.axis]
    shape, where = list(value.tensor_type(operand).shape), f" ({source})" if source else ""
    name = op_name(op.target)  # type: ignore[arg-type]
    warnings.warn(
        f"every rank of {axis} computes the whole gradient of {parameter}: {name}{where} gathers {operand.name}: it "
        f"does not run on pieces of {shape} split {state.sbp(operand)}. Correct, but slower: write it with ops that "
        "work on each sample separately, or set the SBP of the input, config.set_input(...)",
        GatheredBatchWarning,
        stacklevel=2,
    )
