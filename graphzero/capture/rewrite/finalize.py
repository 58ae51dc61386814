"""The last touch: roles of losses and gradients, outputs that are results of ops, no meta but what the IR knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.aliases import AliasKind, alias_kind, is_plain_view
from graphzero.ir.ops import use
from graphzero.ir.value import Role, is_tensor
from graphzero.ops import AS_GLOBAL, AS_LOCAL, PIN

aten = torch.ops.aten
_KNOWN = ("type", "sbp", "pins", "role", "phase", "source", "module")


def origin(node: fx.Node) -> fx.Node:
    """The value of which ``node`` is a plain copy."""
    while alias_kind(node.target) is AliasKind.NAME or node.target is aten.clone.default:
        node = value.operand(node)
    return node


def finalize(graph: fx.Graph) -> None:
    """Turn the output ``(outputs, aux, updates, losses, gradients)`` into the IR's, and clean up."""
    output = graph.output_node()
    results: Any = output.args[0]
    outputs, aux, updates, losses, ended = results
    for loss in losses:
        if loss.op != "placeholder":
            loss.meta["role"] = Role("loss")
    output.args = ((outputs, aux, updates),)
    taken: set[fx.Node] = set(losses)
    for path, grad in ended.items():
        own = _own_node(graph, grad, taken)
        taken.add(own)
        if own.users and own.op != "placeholder":
            own.meta["role"] = Role("gradient", path)
    results = output.args[0]
    outputs, aux, updates = results
    copied = [_copied(graph, x) if isinstance(x, fx.Node) and _is_held(x) else x for x in outputs]
    output.args = ((tuple(copied), dict(aux), dict(updates)),)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    for node in graph.find_nodes(op="placeholder"):
        if not node.users and node.name not in updates:
            graph.erase_node(node)
    for node in graph.nodes:
        node.meta = {key: node.meta[key] for key in _KNOWN if key in node.meta}
    graph.lint()


def _own_node(graph: fx.Graph, grad: fx.Node, taken: set[fx.Node]) -> fx.Node:
    """The node that is this gradient and nothing else."""
    if not grad.meta.get("keep"):
        return grad
    source = value.operand(grad)
    if source in taken or source.op == "placeholder" or source.target is use or "role" in source.meta:
        return grad
    grad.replace_all_uses_with(source)
    graph.erase_node(grad)
    return source


def _is_held(node: fx.Node) -> bool:
    """Return whether the value is storage that the runtime holds, so that build's output must be a copy."""
    while is_plain_view(node.target) or node.target in (PIN, AS_LOCAL, AS_GLOBAL):
        node = value.operand(node)
    return is_tensor(node) and (node.op == "placeholder" or node.target is use)


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    with graph.inserting_before(graph.output_node()):
        clone = graph.create_node("call_function", aten.clone.default, (node,), name="clone")
    clone.meta = {key: x for key, x in node.meta.items() if key not in ("role", "pins")}
    clone.meta["phase"] = "forward" if node.op == "placeholder" else node.meta["phase"]
    return clone
