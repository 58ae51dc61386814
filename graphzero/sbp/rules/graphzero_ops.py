"""graphzero's own ops other than attention."""

from __future__ import annotations

import torch

import graphzero.ops  # noqa: F401
from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._factor_lines import MOVE

rule(torch.ops.graphzero.uniform_like.default, "?...,~->...")  # start and total follow the split: localize's work
rule(torch.ops.graphzero.stochastic_round.default, "~...,~->...")
rule(torch.ops.graphzero.pin.default, MOVE + "...->...")
rule(torch.ops.graphzero.move.default, MOVE + "...->...")
rule(torch.ops.graphzero.check.default, "~...->...")  # every rank knows, and all of them raise


@rule(torch.ops.graphzero.adam.default)
def adam(call: Call) -> str | None:
    """Element by element, of one parameter; of several all-B, for each of them could be split in its own way."""
    count, moments = len(call.args[0]), len(call.outputs)
    return f"{'~...,' * (moments + 1)}~->{','.join(['...'] * moments)}" if count == 1 else None


@rule(torch.ops.graphzero.adam_rounded.default)
def adam_rounded(call: Call) -> str:
    """An update of one parameter; start and total follow the split, as for draws."""
    moments = len(call.outputs)
    return f"{'~...,' * (moments + 1)}~,~->{','.join(['...'] * moments)}"


PRODUCTS = {
    (2, 3): "_k,_kn,~_->_n",
    (2, 2): "m_,_n,~_->_mn",
    (3, 2): "_mk,k_,~_->m_",
}


@rule(torch.ops.graphzero.grouped_mm.default)
def grouped_mm(call: Call) -> str:
    """Products of groups of rows.  The end of a group is a place in the whole, so the grouped dim stays whole, as do
    the groups; the inner dim and the columns of the weights may be split."""
    line = PRODUCTS[len(call.tensors[0].shape), len(call.tensors[1].shape)]
    return line if call["first"] is None else line.replace("->", ",~->")
