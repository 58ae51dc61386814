"""Loss functions.  Sums add up over the batch; a mean taken inside the op divides by what one rank sees, so its
dims stay whole (capture writes mean-reduced losses as a sum and a division by the global count).  Classes may be split
where a rank knows which it has: each picks the scores of targets in its piece."""

from __future__ import annotations

from functools import partial

import torch

import graphzero.ops  # noqa: F401
from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import Offset, rule
from graphzero.sbp.rules._factor_lines import broadcast, letters, overloads

NONE, MEAN, SUM = 0, 1, 2


def _scores(shape: tuple[int, ...], classes: str) -> tuple[str, str]:
    """(dims of the scores, dims of the target): class is dim 1, or dim 0 of a single sample."""
    space = "yxwvu"[: max(len(shape) - 2, 0)]
    return (f"n{classes}{space}", "n" + space) if len(shape) > 1 else (classes, "")


def _nll(call: Call, classes: str = "C") -> str:
    scores, target = _scores(call.shape, classes)
    if call["reduction"] == NONE:
        return f"{scores},~{target},~{classes}->{target},:"
    if call["reduction"] == MEAN:
        scores, target = scores.upper(), target.upper()
    return f"{scores},~{target},~{classes}->,:12"


def _nll_of_pieces(call: Call) -> str | None:
    """The rule of a loss that may be computed on pieces, else None: a mean may not, nor a single unbatched sample,
    whose weight the kernel counts though nothing is summed."""
    return _nll(call, "c") if call["reduction"] == SUM or (call["reduction"] == NONE and len(call.shape) > 1) else None


def _nll_backward(call: Call, classes: str = "C") -> str:
    scores, target = _scores(call.tensors[1].shape, classes)
    grad = target if call["reduction"] == NONE else ""
    return f"{grad},?{scores},~{target},~{classes},~->{scores}"


for _name in ("nll_loss", "nll_loss2d"):
    _own = getattr(torch.ops.graphzero, f"{_name}_forward_from"), getattr(torch.ops.graphzero, f"{_name}_backward_from")
    _split = Offset(_own[0].default, _nll_of_pieces, 0, 1)
    rule(overloads(f"{_name}_forward"), _nll, offset=_split)
    _split = Offset(_own[1].default, partial(_nll_backward, classes="c"), -1, 1)
    rule(overloads(f"{_name}_backward"), _nll_backward, offset=_split)


@rule(torch.ops.graphzero.cross_entropy_backward.default)
def cross_entropy_backward(call: Call) -> str:
    """The rule follows from the two ops of which it consists; it is linear in the gradient."""
    return _nll_backward(call).replace("?", "~")


# The number of the operand that scores are, and the line; {n} stands for the dim of a loss that is not reduced.
MARGINS = {
    "multi_margin_loss": (0, "~n_,~n,~_->{n}"),
    "multi_margin_loss_backward": (1, "{n},~n_,~n,~_->n_"),
    "multilabel_margin_loss_forward": (0, "~n_,~n_->{n},n_"),
    "multilabel_margin_loss_backward": (1, "{n},~n_,~n_,~n_->n_"),
}


def _margin(call: Call, scores: int, line: str) -> str | None:
    if len(call.tensors[scores].shape) < 2 or call["reduction"] == MEAN:
        return None
    return line.format(n="n" if call["reduction"] == NONE else "")


for _name, (_scored, _line) in MARGINS.items():
    rule(overloads(_name), partial(_margin, scores=_scored, line=_line), nonempty=True)


LOSSES = """
    mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits
"""
BACKWARDS = """
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward
    binary_cross_entropy_backward
"""


@rule(overloads(LOSSES))
def loss(call: Call) -> str:
    operands = len(call.tensors)
    if call["reduction"] == NONE:
        return ",".join(["~..."] * operands) + "->..."
    dims = "".join(letters(len(call.shape)))
    names = dims.upper() if call["reduction"] == MEAN else dims
    return ",".join("~" + broadcast(names, m.shape) for m in call.tensors) + "->"


@rule(overloads(BACKWARDS))
def loss_backward(call: Call) -> str:
    others = len(call.tensors) - 1
    if call["reduction"] == MEAN:
        names = "".join(letters(len(call.tensors[1].shape))).upper()
        return "" + ",".join(["_" * len(call.shape)] + ["~" + names] * others) + f"->{names}"
    return ",".join(["..."] + ["~..."] * others) + "->..."
