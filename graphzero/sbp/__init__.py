"""SBP: how global tensors are distributed over ranks, what ops allow, and what it costs to change."""

from graphzero.sbp.boxing import Move, cost, move
from graphzero.sbp.dtensor import of
from graphzero.sbp.op_call import SCALAR, Call
from graphzero.sbp.placement import Placement, as_placement, from_mesh, placement
from graphzero.sbp.rank_call import local_args
from graphzero.sbp.registry import GatheredBatchWarning, NoRuleWarning, Offset, has_rule, rule, signatures
from graphzero.sbp.shards import LocalSize, LocalStart, chunk, lifted, nests
from graphzero.sbp.signature import Signature, TensorMeta
from graphzero.sbp.types import B, Nd, P, S, Sbp, parse_sbp, partial

broadcast = B
split = S
partial_sum = P

__all__ = [
    "SCALAR", "B", "Call", "GatheredBatchWarning", "LocalSize", "LocalStart", "Move", "Nd", "NoRuleWarning", "Offset",
    "P", "Placement", "S", "Sbp", "Signature", "TensorMeta", "as_placement", "broadcast", "chunk", "cost", "from_mesh",
    "has_rule", "lifted", "local_args", "move", "nests", "of", "parse_sbp", "partial", "partial_sum", "placement",
    "rule", "signatures", "split",
]  # fmt: skip
