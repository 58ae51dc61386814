"""The law of spaces, at every level: what lies in host memory is read by what brings it back, and by nothing else.

A collective, or a kernel of the device, could not read it there; on a CPU it could, and the program would only be
wrong elsewhere.
"""

from __future__ import annotations

import operator

from torch import fx

from graphzero.ir import memory_space
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.printer import op_name
from graphzero.ir.verifier.violation import violation


def check_spaces(graph: StepGraph, where: str) -> None:
    """Raise VerifyError for the first reader of a value in host memory that does not bring it back."""
    if not memory_space.uses_host(graph.nodes):
        return
    there: set[fx.Node] = set()
    for node in graph.nodes:
        if memory_space.is_offload(node.target):
            there.add(node)
            continue
        read = [operand for operand in node.all_input_nodes if operand in there]
        if node.target is operator.getitem:
            there.update([node] if read else [])
        elif read and not memory_space.is_reload(node.target):
            reader = "the step hands out" if node.op == "output" else f"'{node.name}' = {op_name(node.target)} reads"
            problem = f"{reader} '{read[0].name}', which lies in host memory"
            raise violation(read[0] if node.op == "output" else node, where, problem, "Bring it back first, by reload")
