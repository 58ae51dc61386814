"""Ops that turn tensors, put them side by side, or write them into one another, and move every value as it is."""

from __future__ import annotations

import torch

from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._factor_lines import MOVE, dims_of, letters, letters_except, overloads


@rule(overloads("rot90"))
def rot90(call: Call) -> str:
    """A quarter turn swaps two dims and reverses one of them, which then stays whole; a half turn reverses both."""
    turns, (a, b) = call["k"] % 4, dims_of(call["dims"], len(call.shape))
    dims = letters(len(call.shape), whole={0: (), 1: (b,), 2: (a, b), 3: (a,)}[turns])
    turned = list(dims)
    if turns % 2:
        turned[a], turned[b] = dims[b], dims[a]
    return f"{MOVE}{''.join(dims)}->{''.join(turned)}"


@rule(overloads("block_diag"))
def block_diag(call: Call) -> str:
    """Between the blocks are zeros, so that sums pass and maxima do not."""
    return f"{'+'.join('_' * len(m.shape) for m in call.tensors)}->__"


@rule(overloads("as_strided", "as_strided_copy"))
def as_strided(call: Call) -> str:
    """Its strides are of the whole."""
    return f"{MOVE}{'_' * len(call.shape)}->{'_' * len(call.out)}"


@rule(overloads("as_strided_scatter"))
def as_strided_scatter(call: Call) -> str:
    return f"{MOVE}{'_' * len(call.shape)}+{'_' * len(call.tensors[1].shape)}->{'_' * len(call.out)}"


@rule(overloads("put"))
def put(call: Call) -> str:
    """Places are counted in the whole; with accumulate the values add up over the index."""
    own, index = "_" * len(call.shape), letters(len(call.tensors[1].shape))
    if call["accumulate"]:
        return f"{own}+~{''.join(index)},{''.join(index)}->{own}"
    return f"{MOVE}{own}+~{'_' * len(index)},{'_' * len(index)}->{own}"


@rule(overloads("index_reduce"), nonempty=True)
def index_reduce(call: Call) -> str | None:
    """PyTorch's CPU kernel for products fails on a single row of 16-bit numbers, which a piece may be."""
    if not call.shape or (call["reduce"] == "prod" and call.tensors[0].dtype in (torch.bfloat16, torch.float16)):
        return None
    line = letters_except(call.shape, call["dim"])
    return f"~{line},~_,~{line}->{line}"
