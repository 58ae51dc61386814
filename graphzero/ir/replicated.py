"""Values that each rank computes by itself though all need the same bits: replicas of a state would drift apart.

Sums depend in their last bits on how many threads share them and for which processor they are compiled.  Where a state
is whole on every rank of an axis, and such a sum gets into it without having crossed that axis (a gradient norm at
stage 0, say), the ranks must compute alike.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.aliases import is_view
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import kernel_forms
from graphzero.ir.transfer import is_transfer, transfer_of

aten = torch.ops.aten
# Besides pointwise ops and views: ops that only move, choose or make numbers, and updates, which are pointwise.
_EXACT_NAMES = {
    "cat", "stack", "clone", "copy", "_to_copy", "index_select", "gather", "embedding", "index", "amax", "amin", "max",
    "min", "argmax", "argmin", "any", "all", "sort", "topk", "flip", "roll", "constant_pad_nd", "tril", "triu",
    "repeat", "adam", "adam_", "adam_rounded", "adam_rounded_", "stochastic_round",
}  # fmt: skip


def repeated(graph: StepGraph) -> fx.Node | None:
    """The first op that each rank of some axis computes by itself, in an order of its own, for a state that is whole on
    all of them; None where there is none.  graph: final."""
    placement = graph.placement
    states = {node.name: node for node in graph.placeholders("param", "buffer", "state")}
    alone: set[fx.Node] = set()
    for axis, ranks in enumerate(placement.hierarchy):
        if ranks > 1:
            whole = [new for name, new in graph.updates.items() if _is_whole(states[name], axis)]
            alone.update(_computed_alone(whole, axis, placement.names[axis]))
    return next((node for node in graph.nodes if node in alone), None)


def _computed_alone(results: list[fx.Node], axis: int, name: str) -> Iterator[fx.Node]:
    """Ops after ``results`` that are not exact, down to what has crossed the axis."""
    seen: set[fx.Node] = set()
    rest = list(results)
    while rest:
        node = rest.pop()
        moves = transfer_of(node)
        crosses = moves is not None and moves.axis == name
        if node in seen or node.op != "call_function" or crosses or not _is_whole(node, axis):
            continue
        seen.add(node)
        if not _is_exact(node):
            yield node
        rest += value.flat_nodes((node.args, value.own_kwargs(node)))


def _is_whole(node: fx.Node, axis: int) -> bool:
    """Return whether a value, or one of the results of an op, is whole on every rank of the axis."""
    several = value.sbp_of(node) if value.is_multi(node) else (value.sbp_of(node),)
    return any(nd is None or nd[axis].is_broadcast for nd in several or (None,))


def _is_exact(node: fx.Node) -> bool:
    target = node.target
    if is_transfer(node) or target is operator.getitem or is_view(target):
        return True
    if value.is_scalar(node) or not any(map(value.is_tensor, value.tensor_operands(node))):
        return True  # a host number, or made of nothing
    if kernel_forms.is_pointwise(target):
        return True
    return isinstance(target, torch._ops.OpOverload) and target._opname in _EXACT_NAMES


def arithmetic(device: torch.device) -> str:
    """Settings on which the last bits of this process' sums depend."""
    if device.type != "cpu":
        how = torch.get_device_module(device).get_device_name(device)
    else:
        threads = torch.get_num_threads()
        how = f"{threads} thread{'s' if threads > 1 else ''}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{how}, torch {torch.__version__}, matrix products {torch.get_float32_matmul_precision()}"
