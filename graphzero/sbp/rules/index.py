"""Ops that read or write where an index tensor says.  The index may be split; or the dim that is indexed, where the op
has an offset form: then each rank reads zeros outside of its piece, or writes its piece alone."""

from __future__ import annotations

from functools import partial

import torch

import graphzero.ops  # noqa: F401
from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import Offset, Rule, rule
from graphzero.sbp.rules._factor_lines import (
    GROWING,
    MOVE,
    broadcast,
    dim_of,
    is_zero,
    letters,
    letters_except,
    overloads,
    put,
)
from graphzero.sbp.signature import TensorMeta

PLACE = "q"  # the dim that is indexed, where it is split; other dims have letters from a on, an index has z


def _offset(name: str, line: Rule, tensor: int = 0, dim: int | str = "dim") -> Offset:
    return Offset(getattr(torch.ops.graphzero, f"{name}_from").default, line, tensor, dim)


rule(overloads("embedding.default"), "Ve,~...->...e", offset=_offset("embedding", "ve,~...->...e", 0, 0))


def _split_rows(call: Call) -> str | None:
    return None if call["scale_grad_by_freq"] else "...e,~...->ve"


@rule(overloads("embedding_dense_backward"), sizes={"num_weights": lambda i, o: o[0][0]},
      offset=_offset("embedding_dense_backward", _split_rows, -1, 0))  # fmt: skip
def embedding_backward(call: Call) -> str:
    """Rows add up over positions, but not where each is divided by how often it occurs."""
    if not call["scale_grad_by_freq"]:
        return "...e,~...->Ve"
    dims = "".join(letters(len(call.tensors[1].shape))).upper()
    return f"{dims}e,~{dims}->_e"


def _select(call: Call, name: str = "_") -> str | None:
    if not call.shape:
        return None
    dims, at = letters(len(call.shape)), dim_of(call["dim"], len(call.shape))
    index = "z" if call.tensors[1].shape else ""
    word = MOVE if name == "_" else ""  # the offset form reads zeros elsewhere, which only a sum leaves out
    return f"{word}{put(dims, at, name)},~{index}->{put(dims, at, index or '1')}"


rule(overloads("index_select"), _select, offset=_offset("index_select", partial(_select, name=PLACE)))


def _aligned(call: Call) -> bool:
    """Return whether all operands have the same number of dims, at least one; a 0-d tensor may replace one of one
    element."""
    return bool(call.shape) and all(len(m.shape) == len(call.shape) for m in call.tensors)


def _pointed(call: Call, *others: tuple[int, ...], name: str = "_") -> tuple[str, str]:
    """(dims of self, dims of index) where both have as many: other dims than ``dim`` are shared if of equal size."""
    shape, index = call.shape, call.tensors[1].shape
    at = dim_of(call["dim"], len(shape))
    same = [all(s[i] == size for s in (index, *others)) for i, size in enumerate(shape)]
    dims = [name if same[i] else "_" for i, name in enumerate(letters(len(shape)))]
    return put(dims, at, name), put(dims, at, "z")


def _gathered(call: Call, name: str = "_", word: str = MOVE) -> str | None:
    if not _aligned(call):
        return None
    own, index = _pointed(call, name=name)
    return f"{word}{own},~{index}->{index}"


rule(overloads("gather"), _gathered, offset=_offset("gather", partial(_gathered, name=PLACE, word="")))


def _written(call: Call, name: str = "_") -> tuple[str, str] | None:
    return _pointed(call, *(m.shape for m in call.tensors[2:]), name=name) if _aligned(call) else None


@rule(overloads("scatter.src"))
def scatter(call: Call) -> str | None:
    """The value at a place is the source's or the old one: both must be partial for the result to be."""
    if (dims := _written(call)) is None:
        return None
    own, index = dims
    index = index.replace("z", "_")
    return f"{MOVE}{own}+~{index},{index}->{own}"


def _scattered(call: Call, name: str = "_") -> str | None:
    if (dims := _written(call, name)) is None:
        return None
    own, index = dims
    mark = "" if is_zero(call["value"]) else "~"
    return f"{mark}{own},~{index.replace('z', '_')}->{own}"


rule(overloads("scatter.value"), _scattered, offset=_offset("scatter_value", partial(_scattered, name=PLACE)))


def _added(call: Call, name: str = "_") -> str | None:
    if (dims := _written(call, name)) is None:
        return None
    own, index = dims
    source = call.tensors[2].shape
    at = dim_of(call["dim"], len(call.shape))
    if source[at] != call.tensors[1].shape[at]:
        index = index.replace("z", "_")
    return f"{own}+~{index},{index}->{own}"


rule(overloads("scatter_add"), _added, offset=_offset("scatter_add", partial(_added, name=PLACE)))


@rule(overloads("scatter.value_reduce", "scatter.reduce", "scatter_reduce.two"))
def scatter_reduce(call: Call) -> str | None:
    if (dims := _written(call)) is None:
        return None
    own, index = dims
    others = f",~{index.replace('z', '_')}" * (len(call.tensors) - 1)
    return f"~{own}{others}->{own}"


def _rows_added(call: Call, name: str = "_") -> str | None:
    if not call.shape:
        return None
    dims, at = letters(len(call.shape)), dim_of(call["dim"], len(call.shape))
    if len(call.tensors[1].shape) != 1 or len(call.tensors[2].shape) != len(call.shape):
        return None
    return f"{put(dims, at, name)}+~z,{put(dims, at, 'z')}->{put(dims, at, name)}"


rule(overloads("index_add"), _rows_added, offset=_offset("index_add", partial(_rows_added, name=PLACE)))


@rule(overloads("index_copy"))
def index_copy(call: Call) -> str | None:
    line = letters_except(call.shape, call["dim"])
    if not call.shape or len(call.tensors[1].shape) != 1 or len(call.tensors[2].shape) != len(call.shape):
        return None
    return f"{MOVE}{line}+~_,{line}->{line}"


@rule(overloads("index_fill.int_Scalar", "index_fill.int_Tensor"))
def index_fill(call: Call) -> str | None:
    if not call.shape:
        return None
    line, is_tensor = letters_except(call.shape, call["dim"]), isinstance(call["value"], TensorMeta)
    word = MOVE if is_tensor or is_zero(call["value"]) else GROWING
    return f"{word}{line},~{'_' * len(call.tensors[1].shape)}{'+' * is_tensor}->{line}"


def _indexed(call: Call) -> tuple[str, list[str], str] | None:
    """(dims of self, of each index, of self[indices]); None for masks, whose count is not known beforehand."""
    indices = list(call["indices"])
    metas = [m for m in indices if isinstance(m, TensorMeta)]
    if not metas or any(m.dtype in (torch.bool, torch.uint8) for m in metas):
        return None
    ndim = len(call.shape)
    indices += [None] * (ndim - len(indices))
    dims = letters(ndim)
    at = [i for i, m in enumerate(indices) if m is not None]
    shape = torch.broadcast_shapes(*(m.shape for m in metas))
    points = letters(len(shape), skip=ndim)
    own = "".join("_" if i in at else name for i, name in enumerate(dims))
    untouched = [name for i, name in enumerate(dims) if i not in at]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0  # indices that are not side by side go to the front
    shown = ["1" if size == 1 else name for name, size in zip(points, shape, strict=True)]
    return own, [broadcast(points, m.shape) for m in metas], "".join((*untouched[:first], *shown, *untouched[first:]))


@rule(overloads("index.Tensor", "_unsafe_index.Tensor"))
def index(call: Call) -> str | None:
    dims = _indexed(call)
    if dims is None:
        return None
    own, points, out = dims
    return f"{own},{','.join('~' + p for p in points)}->{out}"


@rule(overloads("index_put", "_unsafe_index_put"))
def index_put(call: Call) -> str | None:
    """With accumulate the values add up over the index; without, a place is old or new."""
    dims = _indexed(call)
    if dims is None:
        return None
    own, points, out = dims
    if not call["accumulate"]:
        named = set("".join(points)) - {"1"}
        points = ["".join("_" if c in named else c for c in p) for p in points]
        out = "".join("_" if c in named else c for c in out)
    values = call.tensors[-1].shape
    return f"{own}+{','.join('~' + p for p in points)},{broadcast(out, values)}->{own}"


@rule(overloads("take"))
def take(call: Call) -> str:
    return f"{'_' * len(call.shape)},~...->..."
