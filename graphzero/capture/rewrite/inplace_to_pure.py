"""Writes in place to whole values that nothing else shares: each becomes the op that makes a new value.

Most of what layers write is of this form (running statistics, a ReLU in place), and a second trace, as views need it,
costs as much as the first.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from graphzero import _compat


def rewrite_inplace_ops(
    graph: fx.Graph, writes: Sequence[fx.Node], decomposed: Container[Any], mode: _compat.FakeTensorMode
) -> bool:
    """Rewrite ``writes`` of a traced graph as ops that make new values; return False, and change nothing, if one has
    another form."""
    with mode:
        pure = [_pure(node, decomposed) for node in writes]
    if None in pure or not all(_is_alone(nodes, writes) for nodes in _storages(graph, writes)):
        return False
    place = {node: k for k, node in enumerate(graph.nodes)}
    for node, op in zip(writes, pure, strict=True):
        target: Any = node.args[0]
        with graph.inserting_before(node):
            result = graph.call_function(op, node.args, node.kwargs)
        result.meta, place[result] = node.meta, place[node]
        node.replace_all_uses_with(result)
        target.replace_all_uses_with(result, lambda user, at=place[node]: place[user] > at)
        graph.erase_node(node)
    return True


def _storages(graph: fx.Graph, writes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """For each storage that is written to: its tensors' nodes up to the last write, in order."""
    last = {storage: node for node in writes for storage in _lie_in(node)}
    nodes_of: dict[int, list[fx.Node]] = {storage: [] for storage in last}
    for node in graph.nodes:
        for storage in _lie_in(node) & last.keys():
            nodes_of[storage].append(node)
    return [nodes[: nodes.index(last[storage]) + 1] for storage, nodes in nodes_of.items()]


def _lie_in(node: fx.Node) -> set[int]:
    values = node.meta.get("val")
    return {_compat.storage_id(x) for x in (values if isinstance(values, (list, tuple)) else [values]) if _is_tensor(x)}


def _is_tensor(x: Any) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.layout == torch.strided


def _is_alone(nodes: list[fx.Node], writes: Sequence[fx.Node]) -> bool:
    """Return whether, of tensors in one storage, the first was given or made new, and each other one is a write to the
    last."""
    first, *others = nodes
    schema = getattr(first.target, "_schema", None)
    is_new = schema is not None and all(returned.alias_info is None for returned in schema.returns)
    chained = all(node in writes and node.args[0] is last for last, node in zip(nodes, others, strict=False))
    return (first.op == "placeholder" or is_new) and chained


def _pure(node: fx.Node, decomposed: Container[Any]) -> Any:
    """The op that makes what an op in place leaves there, in the same form; None where there is none such."""
    op: Any = node.target
    pure = _that_makes(op)
    if pure is None or pure in decomposed:
        return None
    target = node.args[0] if node.args else None
    before, after = (_val(x) if isinstance(x, fx.Node) else None for x in (target, node))
    if not _is_tensor(before) or not _is_tensor(after):
        return None
    result = pure(*fx.map_arg(node.args, _val), **fx.map_arg(node.kwargs, _val))
    dense = torch.empty_like(before)
    return pure if _form(before) == _form(after) == _form(result) == _form(dense) else None


@cache
def _that_makes(op: Any) -> Any:
    """The op of the same name and arguments that writes to none of them; overloads of one name may differ in both."""
    name = op._schema.name.removeprefix("aten::")
    written = [x for x in op._schema.arguments if x.alias_info is not None]
    if not name.endswith("_") or written != op._schema.arguments[:1] or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    overloads = [getattr(packet, overload) for overload in (packet.overloads() if packet is not None else [])]
    return next((one for one in overloads if _takes(one) == _takes(op) and not one._schema.is_mutable), None)


def _takes(op: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]


def _val(node: fx.Node) -> Any:
    return node.meta.get("val")


def _form(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride(), x.storage_offset()
