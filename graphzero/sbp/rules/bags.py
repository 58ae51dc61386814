"""Sums, means and maxima of rows of an embedding.  Bags are cut by offsets, so only the width may be split."""

from __future__ import annotations

from graphzero.sbp.call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._write import overloads

MAX = 2  # the mode of ``embedding_bag``


@rule(overloads("_embedding_bag", "_embedding_bag_forward_only"), nonempty=True)
def embedding_bag(call: Call) -> str:
    """Results: the bags, the bag of each index, the sizes of bags, and where in mode "max" each value comes from."""
    places = "_e" if call["mode"] == MAX else "_" * len(call.outputs[3].shape) if call.outputs[3] else ""
    mark = "~" if call["mode"] == MAX else ""
    return f"{mark}_e,~_,~_,~_->_e,_:123,_:123,{places}:{'0123' if call['mode'] == MAX else '123'}"


@rule(overloads("_embedding_bag_backward"), nonempty=True)
def embedding_bag_backward(call: Call) -> str:
    places = "_e" if call["mode"] == MAX else "_" * len(call["maximum_indices"].shape)
    return f"_e,~_,~_,~_,~_,~{places},~_->_e"


@rule(overloads("_embedding_bag_dense_backward"), nonempty=True)
def embedding_bag_dense_backward(call: Call) -> str:
    places = "_e" if call["mode"] == MAX else "_" * len(call["maximum_indices"].shape)
    return f"_e,~_,~_,~_,~{places},~_->_e"


@rule(overloads("_embedding_bag_per_sample_weights_backward"), nonempty=True)
def embedding_bag_weights_backward(call: Call) -> str:
    return "_e,_e,~_,~_,~_->_"
