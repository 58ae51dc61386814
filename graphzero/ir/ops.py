"""The ops that passes put into a graph: uses of parameters, boxes, and what boxes are lowered to.

They are names with a fixed meaning; the runtime executes them.  ``axis`` is the name of a placement axis.

===================================== ==================================================================
op                                    meaning
===================================== ==================================================================
use(p)                                how one phase reads a parameter, or its cast; the phase is the node's
box(x)                                x, boxed to the SBP in the node's type
relabel(x)                            x itself, where both SBPs mean the same (one rank, or ``alike``)
slice_shard(x, dim, axis)             this rank's piece of a value that every rank holds whole, as a view
all_gather(x, dim, axis)              the pieces of all ranks, joined along dim: section by section, if x has several;
                                      with a narrower dtype, cast to it on the way
reduce_scatter(x, dim, axis)          this rank's piece, along dim, of the sum of all ranks' values; likewise
all_reduce(x, axis, reduction)        the sum, max or min of all ranks' values
all_to_all(x, src, dst, axis)         split along src -> split along dst
shift(x, dim, axis)                   the piece of the rank before, and on the first that of the last: pieces go round
keep_first(x, axis)                   x on the first rank of the axis, zeros elsewhere (B -> P)
place_shard(x, dim, axis)             this rank's piece in its place, zeros elsewhere (S -> P)
bucket_all_gather(xs, dims, axis)     several at once, over one flat buffer; likewise
bucket_reduce_scatter(xs, dims, axis) ``bucket_reduce_scatter`` and ``bucket_all_reduce``
bucket_all_reduce(xs, axis, reduction)
bucket_shift(xs, dims, axis)
launch(collective, slot, *args)       begin a bucketed collective in communication slot ``slot``; None: a bucket of
                                      one, straight from its storage into the result's (see ``ir.transfer``)
wait(h)                               its results
assign(p, x)                          write x into the storage of placeholder p; every reader of p ran before
host_room(x)                          room in host memory for a value of x's form, not filled
to_device_launch(p)                   begin to copy p, a state or a to_host_wait, from host memory to the device
to_device_wait(l, p)                  the copy, when it has arrived; p may not change until then
to_host_launch(p, x)                  begin to write x into the storage of p, a state or a host_room, in host memory
to_host_wait(l, x)                    p, when x is there; x may not change until then
micro_batch(k)                        which of the k micro-batches runs: 0 to k - 2 in what is repeated; k - 1 after it
take(x, dim, i, k)                    the i-th of k equal parts of this rank's x along dim, as a view
accumulator(shape, dtype)             room for what micro-batches add up or return, not filled
accumulate(a, x, i, k, how)           x added to what a holds, in its storage; for i = 0 x alone.  how: sum, max, min,
                                      or mean, of k values
accumulate_mm(a, x, y, i, k)          the matrix product of x and y added to what a holds, in its storage; likewise
put(a, x, dim, i, k)                  x as the i-th of k equal parts of a along dim, in its storage
carry(a, x)                           x written over a, for the next micro-batch
===================================== ==================================================================

The functions are only ever names of nodes; calling one is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

Op = Callable[..., Any]


def _op(name: str) -> Op:
    def op(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{name} is an op of graphzero's graphs; a runtime executes it, Python does not call it")

    op.__name__ = op.__qualname__ = name
    return op


use = _op("use")
box = _op("box")
relabel = _op("relabel")
slice_shard = _op("slice_shard")
all_gather = _op("all_gather")
reduce_scatter = _op("reduce_scatter")
all_reduce = _op("all_reduce")
all_to_all = _op("all_to_all")
shift = _op("shift")
keep_first = _op("keep_first")
place_shard = _op("place_shard")
bucket_all_gather = _op("bucket_all_gather")
bucket_reduce_scatter = _op("bucket_reduce_scatter")
bucket_all_reduce = _op("bucket_all_reduce")
bucket_shift = _op("bucket_shift")
launch = _op("launch")
wait = _op("wait")
assign = _op("assign")
host_room = _op("host_room")
to_device_launch = _op("to_device_launch")
to_device_wait = _op("to_device_wait")
to_host_launch = _op("to_host_launch")
to_host_wait = _op("to_host_wait")
micro_batch = _op("micro_batch")
take = _op("take")
accumulator = _op("accumulator")
accumulate = _op("accumulate")
accumulate_mm = _op("accumulate_mm")
put = _op("put")
carry = _op("carry")

COLLECTIVES: tuple[Op, ...] = (all_gather, reduce_scatter, all_reduce, all_to_all, shift)
BUCKETS: tuple[Op, ...] = (bucket_all_gather, bucket_reduce_scatter, bucket_all_reduce, bucket_shift)
# In how many sections of a dim a piece falls, the SBPs of operand and result say; so does ``ir.layout``.
IN_SECTIONS = tuple(op.__name__ for op in (all_gather, reduce_scatter, all_reduce, shift))
MOVES: tuple[Op, ...] = (*COLLECTIVES, relabel, slice_shard, keep_first, place_shard)
COMMUNICATING: tuple[Op, ...] = (*COLLECTIVES, *BUCKETS, launch, wait)  # where ranks meet
IN_TURN: tuple[Op, ...] = (take, accumulator, accumulate, accumulate_mm, put, carry)  # micro-batches
HOST_LAUNCHES: tuple[Op, ...] = (to_device_launch, to_host_launch)
HOST_WAITS: tuple[Op, ...] = (to_device_wait, to_host_wait)
HOST_COPIES: tuple[Op, ...] = (*HOST_LAUNCHES, *HOST_WAITS)
ASSIGNING: tuple[Op, ...] = (assign, to_host_launch)  # of which the first operand is not read
# Into the storage of their first operand.
WRITING: tuple[Op, ...] = (*ASSIGNING, *HOST_WAITS, accumulate, accumulate_mm, put, carry)
ACCUMULATIONS = ("sum", "max", "min", "mean")

_ALL: tuple[Op, ...] = (
    use, box, *MOVES, *BUCKETS, launch, wait, assign, host_room, *HOST_COPIES, micro_batch, *IN_TURN,
)  # fmt: skip
BY_NAME: dict[str, Op] = {op.__name__: op for op in _ALL}
OF_PASSES = frozenset(_ALL)
