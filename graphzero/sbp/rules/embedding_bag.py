"""Sums, means and maxima of rows of an embedding.  Bags that are cut by offsets stay whole, and only the width may be
split; bags of one length may be split as well."""

from __future__ import annotations

from functools import partial

import torch

import graphzero.ops  # noqa: F401
from graphzero.ops.embedding_bag import MAX
from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._factor_lines import overloads


@rule(overloads("_embedding_bag", "_embedding_bag_forward_only"), nonempty=True)
def embedding_bag(call: Call) -> str:
    """Results: the bags, the bag of each index, the sizes of bags, and where in mode "max" each value comes from."""
    places = "_e" if call["mode"] == MAX else "_" * len(call.outputs[3].shape) if call.outputs[3] else ""
    mark = "~" if call["mode"] == MAX else ""
    return f"{mark}_e,~_,~_,~_->_e,_:123,_:123,{places}:{'0123' if call['mode'] == MAX else '123'}"


def _backward(call: Call, line: str) -> str:
    return line.format(places="_e" if call["mode"] == MAX else "_" * len(call["maximum_indices"].shape))


_of_offsets = partial(_backward, line="_e,~_,~_,~_,~_,~{places},~_->_e")
rule(overloads("_embedding_bag_backward"), _of_offsets, nonempty=True)
rule(overloads("_embedding_bag_dense_backward"), partial(_backward, line="_e,~_,~_,~_,~{places},~_->_e"), nonempty=True)
rule(overloads("_embedding_bag_per_sample_weights_backward"), "_e,_e,~_,~_,~_->_", nonempty=True)


@rule(torch.ops.graphzero.bag.default)
def bag(call: Call) -> str:
    return "~_e,~n_,~n_->ne,ne" if call["mode"] == MAX else "_e,~n_,n_->ne,_:"


@rule(torch.ops.graphzero.bag_backward.default)
def bag_backward(call: Call) -> str:
    return f"ne,~n_,n_,~{'ne' if call['mode'] == MAX else '_'}->_e"


rule(torch.ops.graphzero.bag_scales_backward.default, "ne,_e,~n_->n_")
