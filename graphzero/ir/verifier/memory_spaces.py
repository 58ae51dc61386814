"""The law of memory spaces, at every level: only the ops that copy a value back from host memory read it there.

A collective, or a kernel of the device, could not; on a CPU it could, and the program would fail only on a GPU.  The
result of a copy that has begun is not read before it has been awaited.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from graphzero.ir import memory_space, ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.printer import op_name
from graphzero.ir.verifier.violation import check_unmoved, violation

# The argument of an op between host memory and the device that lies on the host.
_ON_HOST: Mapping[Any, int] = {
    ops.to_device_launch: 0,
    ops.to_device_wait: 1,
    ops.to_host_launch: 0,
    ops.to_host_wait: 0,
}


def check_spaces(graph: StepGraph, where: str) -> None:
    """Raise VerifyError for the first reader of a value in host memory that does not bring it back, and for the first
    reader of a copy that is still under way."""
    if not memory_space.uses_host(graph.nodes):
        return
    on_host: set[fx.Node] = set()
    for node in graph.nodes:
        if memory_space.lies_on_host(node) or node.target in (ops.to_host_launch, ops.to_host_wait):
            on_host.add(node)
        read = _read_on_host(node, on_host)
        if node.target is operator.getitem:
            on_host.update([node] if read else [])
        elif read and not memory_space.is_reload(node.target):
            reader = "the step returns" if node.op == "output" else f"'{node.name}' = {op_name(node.target)} reads"
            problem = f"{reader} '{read[0].name}', which is in host memory"
            hint = "Bring it back first, by to_device_launch and to_device_wait, or by reload"
            raise violation(read[0] if node.op == "output" else node, where, problem, hint)
        if node.target in (ops.host_room, *ops.HOST_COPIES):
            _check_copy(node, where)


def _read_on_host(node: fx.Node, on_host: set[fx.Node]) -> list[fx.Node]:
    """Operands of a node that lie in host memory, where it may not expect that."""
    if node.op == "output":  # new states stay there
        given: Any = node.args[0]
        return [operand for operand in value.flat_nodes(given[:2]) if operand in on_host]
    expected = _ON_HOST.get(node.target)
    operands = [arg for i, arg in enumerate(node.args) if i != expected]
    return [operand for operand in value.flat_nodes((operands, node.kwargs)) if operand in on_host]


def _check_copy(node: fx.Node, where: str) -> None:
    """Check that a launch is read by its wait alone, and that a copy lies on the ranks as what it copies."""
    if node.target in ops.HOST_LAUNCHES:
        waits = [user for user in node.users if user.target in ops.HOST_WAITS and user.args[0] is node]
        if len(waits) != 1 or len(node.users) != 1:
            others = [user.name for user in node.users if user not in waits]
            first = f"'{others[0]}' reads" if others else "no op waits for"
            raise violation(node, where, f"{first} '{node.name}', which is under way", "Read what its one wait returns")
    source = node.args[-1]
    assert isinstance(source, fx.Node)
    check_unmoved(node, source, where, "Box what it copies before it")
