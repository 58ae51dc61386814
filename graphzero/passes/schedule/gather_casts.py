"""GatherCasts: a cast that is before a gather is done where the gather lays a rank's piece down.

That copy is made anyway, so the cast costs nothing besides it, and there is no second piece.  What is gathered is then
there when the step begins, so gathers of small parameters may join (``Bucket``), as those of parameters that are not
cast do.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.aliases import is_narrowing
from graphzero.ir.graph import StepGraph
from graphzero.passes.base import BuiltinPass


@dataclass(frozen=True)
class GatherCasts(BuiltinPass):
    """Moves casts of values that exist at the step's beginning into gathers that alone read them; changes no value.

    Requires: collectives that are not in buckets yet.
    Ensures: such a gather has the dtype as an argument, and reads the uncast value.

    Example::

        gather_casts

         graph step(dp=2) local
           v = param() : f32[4, 2]  S(0)
           w = param() : f32[4, 2]  S(0)
         forward:
        -  vc = _to_copy(v, dtype=torch.bfloat16) : bf16[4, 2]  S(0)
        -  vb = all_gather(vc, 0, 'dp') : bf16[4, 2]  B
        +  vb = all_gather(v, 0, 'dp', dtype=torch.bfloat16) : bf16[4, 2]  B
           wc = _to_copy(w, dtype=torch.bfloat16) : bf16[4, 2]  S(0)
           wb = all_gather(wc, 0, 'dp') : bf16[4, 2]  B
           return vb, wb, wc
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        for node in list(graph.graph.find_nodes(op="call_function", target=ops.all_gather)):
            cast = value.operand(node)
            if _is_plain(cast) and set(cast.users) == {node}:
                node.args = (cast.args[0], *node.args[1:])
                node.kwargs = dict(cast.kwargs)
                graph.graph.erase_node(cast)
        return graph


def _is_plain(node: fx.Node) -> bool:
    """Return whether a node casts what is there when the step begins to a narrower float, and does nothing else."""
    if not is_narrowing(node):
        return False
    read = value.operand(node)
    return read.op == "placeholder" and all(value.tensor_type(x).dtype.is_floating_point for x in (read, node))
