"""Bytes over time of a program whose ops were elsewhere, or ran twice: the model that searches over memory count by.

``Liveness`` says what a program holds.  ``StorageSpans`` has the same storages as arrays, and counts them for spans
other than their own, in a fraction of a millisecond and with no node moved.  It leaves out communication slots and
transfers under way, which later passes add, so the plan of the program that comes out has the last word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import inplace, kernel_forms
from graphzero.ir.storage.liveness import Bytes, bytes_held, liveness

Positions = Bytes  # of nodes of a program


class StorageSpans:
    """Storages that the ops of a local program make, by number.

    storages, nbytes: of each one.  begin, end: positions of the op that makes it and of its last reader.
    overwriting: positions of ops whose result may be put into an operand's storage; overwritten: those storages.
    resident: bytes that are there before the step.
    """

    def __init__(self, graph: StepGraph):
        at = liveness(graph)
        of_step = (span for span in at.spans() if span.begin >= 0)
        self.storages = [span for span in of_step if span.storage[0].target not in inplace.OVER_OPERANDS]
        self.index = {span.storage: k for k, span in enumerate(self.storages)}
        self.nbytes = int_array(span.nbytes for span in self.storages)
        self.begin, self.end = int_array(x.begin for x in self.storages), int_array(x.end for x in self.storages)
        self.resident = sum(at.resident().values())
        operands = ((at.position[node], at.roots[x][0]) for node in at.nodes for x in _overwritable(graph, node))
        self.overwritten_by_op = {i: self.index[s] for i, s in operands if s is not None and s in self.index}
        self.overwriting = int_array(self.overwritten_by_op)
        self.overwritten = int_array(self.overwritten_by_op.values())

    def bytes_over_time(self, begins: Positions, ends: Positions, position: Positions, count: int) -> Bytes:
        """Bytes at each of ``count`` positions, but for ``resident``.

        begins, ends: of each storage.  position: of each node, where it then is.
        """
        total = bytes_held(begins, ends, self.nbytes, count)
        is_free = ends[self.overwritten] == position[self.overwriting]  # nothing reads it after the op
        total[position[self.overwriting[is_free]]] -= self.nbytes[self.overwritten[is_free]]
        return total


def int_array(numbers: Iterable[int]) -> Bytes:
    """Whole numbers as an array."""
    return np.array(list(numbers), dtype=np.int64)


def _overwritable(graph: StepGraph, node: fx.Node) -> Iterator[fx.Node]:
    """The operand in whose storage the result of ``node`` may be put, if nothing reads it afterwards."""
    if node.target is ops.all_reduce:
        yield value.operand(node)
    elif node.op == "call_function" and value.is_tensor(node):
        device = graph.placement.device_type
        if kernel_forms.writing(node.target, device) is None and kernel_forms.over_first(node.target, device) is None:
            return
        operands = value.tensor_operands(node)
        fitting = (x for x in operands if inplace.same_form(node, x) and inplace.may_overwrite(node, x, device))
        yield from islice(fitting, 1)
