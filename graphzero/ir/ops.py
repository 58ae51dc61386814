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
                                      told a narrower dtype, cast to it on the way
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
micro_batch(k)                        which of the k micro-batches runs: 0 to k - 2 in what is repeated; k - 1 behind it
take(x, dim, i, k)                    the i-th of k equal parts of this rank's x along dim, as a view
accumulator(shape, dtype)             room for what micro-batches add up or hand out, not filled
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


def _never(name: str) -> NoReturn:
    raise RuntimeError(f"{name} is an op of graphzero's graphs; a runtime executes it, Python does not call it")


def use(p: Any) -> Any:
    _never("use")


def box(x: Any) -> Any:
    _never("box")


def relabel(x: Any) -> Any:
    _never("relabel")


def slice_shard(x: Any, dim: int, axis: str) -> Any:
    _never("slice_shard")


def all_gather(x: Any, dim: int, axis: str) -> Any:
    _never("all_gather")


def reduce_scatter(x: Any, dim: int, axis: str) -> Any:
    _never("reduce_scatter")


def all_reduce(x: Any, axis: str, reduction: str = "sum") -> Any:
    _never("all_reduce")


def all_to_all(x: Any, src: int, dst: int, axis: str) -> Any:
    _never("all_to_all")


def shift(x: Any, dim: int, axis: str) -> Any:
    _never("shift")


def keep_first(x: Any, axis: str) -> Any:
    _never("keep_first")


def place_shard(x: Any, dim: int, axis: str) -> Any:
    _never("place_shard")


def bucket_all_gather(xs: Any, dims: Any, axis: str) -> Any:
    _never("bucket_all_gather")


def bucket_reduce_scatter(xs: Any, dims: Any, axis: str) -> Any:
    _never("bucket_reduce_scatter")


def bucket_all_reduce(xs: Any, axis: str, reduction: str = "sum") -> Any:
    _never("bucket_all_reduce")


def bucket_shift(xs: Any, dims: Any, axis: str) -> Any:
    _never("bucket_shift")


def launch(collective: str, slot: int, *args: Any) -> Any:
    _never("launch")


def wait(h: Any) -> Any:
    _never("wait")


def assign(p: Any, x: Any) -> Any:
    _never("assign")


def host_room(x: Any) -> Any:
    _never("host_room")


def to_device_launch(p: Any) -> Any:
    _never("to_device_launch")


def to_device_wait(launched: Any, p: Any) -> Any:
    _never("to_device_wait")


def to_host_launch(p: Any, x: Any) -> Any:
    _never("to_host_launch")


def to_host_wait(launched: Any, x: Any) -> Any:
    _never("to_host_wait")


def micro_batch(k: int) -> Any:
    _never("micro_batch")


def take(x: Any, dim: int, i: Any, k: int) -> Any:
    _never("take")


def accumulator(shape: Any, dtype: Any) -> Any:
    _never("accumulator")


def accumulate(a: Any, x: Any, i: Any, k: int, how: str = "sum") -> Any:
    _never("accumulate")


def accumulate_mm(a: Any, x: Any, y: Any, i: Any, k: int) -> Any:
    _never("accumulate_mm")


def put(a: Any, x: Any, dim: int, i: Any, k: int) -> Any:
    _never("put")


def carry(a: Any, x: Any) -> Any:
    _never("carry")


COLLECTIVES: tuple[Callable[..., Any], ...] = (all_gather, reduce_scatter, all_reduce, all_to_all, shift)
BUCKETS: tuple[Callable[..., Any], ...] = (bucket_all_gather, bucket_reduce_scatter, bucket_all_reduce, bucket_shift)
# In how many sections of a dim a piece falls, the SBPs of operand and result say; so does ``ir.layout``.
IN_SECTIONS = tuple(op.__name__ for op in (all_gather, reduce_scatter, all_reduce, shift))
MOVES: tuple[Callable[..., Any], ...] = (*COLLECTIVES, relabel, slice_shard, keep_first, place_shard)


COMMUNICATING: tuple[Callable[..., Any], ...] = (*COLLECTIVES, *BUCKETS, launch, wait)  # where ranks meet

IN_TURN: tuple[Callable[..., Any], ...] = (take, accumulator, accumulate, accumulate_mm, put, carry)  # micro-batches
HOST_LAUNCHES: tuple[Callable[..., Any], ...] = (to_device_launch, to_host_launch)
HOST_WAITS: tuple[Callable[..., Any], ...] = (to_device_wait, to_host_wait)
HOST_COPIES: tuple[Callable[..., Any], ...] = (*HOST_LAUNCHES, *HOST_WAITS)
ASSIGNING: tuple[Callable[..., Any], ...] = (assign, to_host_launch)  # of which the first operand is not read
WRITING: tuple[Callable[..., Any], ...] = (
    *ASSIGNING,
    *HOST_WAITS,
    accumulate,
    accumulate_mm,
    put,
    carry,
)  # into the storage of their first operand
ACCUMULATIONS = ("sum", "max", "min", "mean")

_ALL: tuple[Callable[..., Any], ...] = (
    use, box, *MOVES, *BUCKETS, launch, wait, assign, host_room, *HOST_COPIES, micro_batch, *IN_TURN,
)  # fmt: skip
BY_NAME: dict[str, Callable[..., Any]] = {op.__name__: op for op in _ALL}
