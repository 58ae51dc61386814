"""Ops that take the sum, the maximum or another summary over dims, and those that run along one dim."""

from __future__ import annotations

from functools import partial

from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._factor_lines import dims_of, letters, letters_except, overloads


def reduction(call: Call, *, adds: bool, linear: bool, word: str = "", dim: object = "dim") -> str:
    """Dims named by the argument ``dim`` go.  ``adds``: pieces of them combine by ``word``; else they stay whole."""
    ndim = len(call.shape)
    gone = dims_of(call[dim] if isinstance(dim, str) else dim, ndim)
    dims = letters(ndim, () if adds else gone)
    keeps_dims = len(call.out) == ndim
    out = "".join("1" if i in gone else name for i, name in enumerate(dims) if keeps_dims or i not in gone)
    return f"{word}{'' if linear else '~'}{''.join(dims)}->{','.join([out] * len(call.outputs))}"


total, mean = partial(reduction, adds=True, linear=True), partial(reduction, adds=False, linear=True)
rule(overloads("sum.dim_IntList"), total)
rule(overloads("sum.default"), partial(total, dim=None))
rule(overloads("mean.dim"), mean)
rule(overloads("mean.default"), partial(mean, dim=None))
rule(overloads("amax", "any.dim", "any.dims"), partial(total, word="max: "))
rule(overloads("max.default", "any.default"), partial(total, word="max: ", dim=None))
rule(overloads("amin", "all.dim", "all.dims"), partial(total, word="min: "))
rule(overloads("min.default", "all.default"), partial(total, word="min: ", dim=None))
rule(overloads("nansum", "count_nonzero.dim_IntList", "count_nonzero.default"), partial(total, linear=False))


@rule(overloads("linalg_vector_norm"))
def vector_norm(call: Call) -> str:
    """The 1-norm adds up, and so does the count of what is not 0; the largest and the smallest combine."""
    word = {0: "", 1: "", float("inf"): "max: ", float("-inf"): "min: "}.get(call["ord"])
    return reduction(call, adds=word is not None, linear=False, word=word or "")


WHOLE = """
    prod.dim_int var.dim var.correction std.dim std.correction var_mean.dim var_mean.correction std_mean.dim
    std_mean.correction logsumexp argmax argmin max.dim min.dim median.dim nanmedian.dim mode kthvalue
    norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype aminmax hash_tensor
"""
WHOLE_ALL = """
    prod.default var.default std.default var_mean.default std_mean.default median.default nanmedian.default
    norm.Scalar norm.ScalarOpt_dtype
"""


rule(overloads(WHOLE), partial(reduction, adds=False, linear=False))
rule(overloads(WHOLE_ALL), partial(reduction, adds=False, linear=False, dim=None))


def along(call: Call, mark: str = "~", operands: int = 1) -> str:
    """An op that runs along one dim and keeps it; the first operand is marked ``mark``, the others are nonlinear."""
    dims = letters_except(call.shape, call["dim"])
    return mark + dims + f",~{dims}" * (operands - 1) + "->" + ",".join([dims] * len(call.outputs))


ALONG = """
    cumprod cummax cummin logcumsumexp sort.default sort.stable argsort.default topk _softmax _log_softmax _safe_softmax
"""
rule(overloads(ALONG), along)
rule(overloads("cumsum"), partial(along, mark=""))
rule(overloads("_softmax_backward_data", "_log_softmax_backward_data"), partial(along, mark="", operands=2))


@rule(overloads("searchsorted.Tensor"))
def searchsorted(call: Call) -> str:
    rows = "" if len(call.shape) == 1 else "..."
    sorter = "" if call["sorter"] is None else f",~{rows}_"
    return f"~{rows}_,~...{'_' if rows else ''}{sorter}->...{'_' if rows else ''}"


@rule(overloads("histc"))
def histc(call: Call) -> str | None:
    """Counts add up where the bins are given and not taken from the data."""
    return f"~{''.join(letters(len(call.shape)))}->_" if call["min"] != call["max"] else None
