"""Products of groups of rows, as mixtures of experts make them.  A group's end is a place in the whole, so the grouped
dim stays whole, as do the groups; the inner dim and the columns of the weights may be split."""

from __future__ import annotations

import torch

import graphzero.ops  # noqa: F401
from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import rule

FORMS = {
    (2, 3): "_k,_kn,~_->_n",
    (2, 2): "m_,_n,~_->_mn",
    (3, 2): "_mk,k_,~_->m_",
}


@rule(torch.ops.graphzero.grouped_mm.default)
def grouped_mm(call: Call) -> str:
    line = FORMS[len(call.tensors[0].shape), len(call.tensors[1].shape)]
    return line if call["first"] is None else line.replace("->", ",~->")
