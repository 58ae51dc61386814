"""MicroBatches: the axis ``mb`` becomes time: the step is written once for a micro-batch, and repeated.

Up to here ``mb`` is a placement axis like any other and carries the whole mathematics: which values are split on it,
which are sums over it, where each must be complete.  Its members run one after the other on the same ranks, so a box on
it is not a collective: a sum is added up in place, pieces are concatenated, a slice is taken of a whole value.

``loop_partition`` decides which part each value belongs to, ``loop_carried`` what micro-batches pass on,
``micro_batch_types`` the SBP and sizes of values; ``loop_writer`` writes the program.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphzero.ir.graph import StepGraph
from graphzero.passes.base import BuiltinPass
from graphzero.passes.micro.loop_writer import LoopWriter
from graphzero.sbp.placement import MICRO_BATCHES


@dataclass(frozen=True)
class MicroBatches(BuiltinPass):
    """Splits the step into the repeated work of one micro-batch, the part before it and the part after it.

    The last micro-batch is written with the epilogue, so that its transfers overlap as those of any step do.

    stage: of ZeRO.  From 2 on each micro-batch's gradient is reduced and added to this rank's part; below, what the
        ranks have added up is reduced once.
    whole_accumulators: whether it is reduced once from stage 2 on too: fewer bytes sent, more held.
    whole_on: the pipeline stages on which it is.
    keep_gathered: names and patterns of the parameters that are gathered once, before the first micro-batch.
    Raises ConfigError for an op that needs all rows of the batch at once.

    Requires: boxes wherever a value is read in another SBP than it has, on the axis ``mb`` too.
    Ensures: there is no axis ``mb``; repeated ops are consecutive, and only values that they write over are read
    after them.

    Example::

        micro_batches

        -graph step(dp=2, mb=3) boxed
        -  x = batch() : f32[12, 4]  (S(0)!, S(0)!)
        -  w = param() : f32[4, 2]  (B!, B!)
        +graph step(dp=2) boxed
        +  x = batch() : f32[12, 4]  S(0)!
        +  w = param() : f32[4, 2]  B!
         forward:
        -  u = use(w) : f32[4, 2]  (B!, B!)
        -  y = mm(x, u) : f32[12, 2]  (S(0), S(0))
        -  s = sum.dim_IntList(y, [0, 1]) : f32[]  (P, P)
        -  s_b = box(s) : f32[]  (B, B)
        -  return y, s_b
        +  s_sum = accumulator([], torch.float32) : f32[]  P
        +  y_sum = accumulator([12, 2], torch.float32) : f32[12, 2]  S(0)
        +forward x2:
        +  mb = micro_batch(3) : int
        +  u_mb = use(w) : f32[4, 2]  B!
        +  take = take(x, 0, mb, 3) : f32[4, 4]  S(0)
        +  y_mb = mm(take, u_mb) : f32[4, 2]  S(0)
        +  put = put(y_sum, y_mb, 0, mb, 3) : f32[12, 2]  S(0)
        +  s_mb = sum.dim_IntList(y_mb, [0, 1]) : f32[]  P
        +  accumulate = accumulate(s_sum, s_mb, mb, 3, 'sum') : f32[]  P
        +forward:
        +  u = use(w) : f32[4, 2]  B!
        +  take_1 = take(x, 0, 2, 3) : f32[4, 4]  S(0)
        +  y = mm(take_1, u) : f32[4, 2]  S(0)
        +  put_1 = put(put, y, 0, 2, 3) : f32[12, 2]  S(0)
        +  s = sum.dim_IntList(y, [0, 1]) : f32[]  P
        +  accumulate_1 = accumulate(accumulate, s, 2, 3, 'sum') : f32[]  P
        +  box = box(accumulate_1) : f32[]  B
        +  return put_1, box
    """

    stage: int = 0
    whole_accumulators: bool = False
    whole_on: tuple[int, ...] = ()
    keep_gathered: tuple[str, ...] | None = field(default=None, repr=False)

    def __call__(self, graph: StepGraph) -> StepGraph:
        if MICRO_BATCHES in graph.placement.names:
            reduces_each = self.stage >= 2 and not self.whole_accumulators
            LoopWriter(graph, reduces_each, self.keep_gathered or (), self.whole_on).write_program()
        return graph
