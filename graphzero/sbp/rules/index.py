"""Ops that read or write where an index tensor says.  The dim that is indexed stays whole; the index may be split."""

from __future__ import annotations

import torch

from graphzero.sbp.call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._write import MOVE, broadcast, dim_of, is_zero, letters, overloads, put
from graphzero.sbp.signature import TensorMeta

rule(overloads("embedding.default"), "Ve,~...->...e")


@rule(overloads("embedding_dense_backward"), sizes={"num_weights": lambda i, o: o[0][0]})
def embedding_backward(call: Call) -> str:
    """Rows add up over positions, but not where each is divided by how often it occurs."""
    if not call["scale_grad_by_freq"]:
        return "...e,~...->Ve"
    dims = "".join(letters(len(call.tensors[1].shape))).upper()
    return f"{dims}e,~{dims}->_e"


@rule(overloads("index_select"))
def index_select(call: Call) -> str | None:
    if not call.shape:
        return None
    dims, at = letters(len(call.shape)), dim_of(call["dim"], len(call.shape))
    index = "z" if call.tensors[1].shape else ""
    return f"{put(dims, at, '_')},~{index}->{put(dims, at, index or '1')}"


def _aligned(call: Call) -> bool:
    """Whether all operands have as many dims, and at least one; a 0-d tensor may stand for one of one element."""
    return bool(call.shape) and all(len(m.shape) == len(call.shape) for m in call.tensors)


def _pointed(call: Call, *others: tuple[int, ...]) -> tuple[str, str]:
    """(dims of self, dims of index) where both have as many: other dims than ``dim`` are shared if of equal size."""
    shape, index = call.shape, call.tensors[1].shape
    at = dim_of(call["dim"], len(shape))
    same = [all(s[i] == size for s in (index, *others)) for i, size in enumerate(shape)]
    dims = [name if same[i] else "_" for i, name in enumerate(letters(len(shape)))]
    return put(dims, at, "_"), put(dims, at, "z")


@rule(overloads("gather"))
def gather(call: Call) -> str | None:
    if not _aligned(call):
        return None
    own, index = _pointed(call)
    return f"{MOVE}{own},~{index}->{index}"


def _written(call: Call) -> tuple[str, str] | None:
    return _pointed(call, *(m.shape for m in call.tensors[2:])) if _aligned(call) else None


@rule(overloads("scatter.src"))
def scatter(call: Call) -> str | None:
    """The value at a place is the source's or the old one: both must be partial for the result to be."""
    if (found := _written(call)) is None:
        return None
    own, index = found
    index = index.replace("z", "_")
    return f"{MOVE}{own}+~{index},{index}->{own}"


@rule(overloads("scatter.value"))
def scatter_value(call: Call) -> str | None:
    if (found := _written(call)) is None:
        return None
    own, index = found
    mark = "" if is_zero(call["value"]) else "~"
    return f"{mark}{own},~{index.replace('z', '_')}->{own}"


@rule(overloads("scatter_add"))
def scatter_add(call: Call) -> str | None:
    if (found := _written(call)) is None:
        return None
    own, index = found
    source = call.tensors[2].shape
    at = dim_of(call["dim"], len(call.shape))
    if source[at] != call.tensors[1].shape[at]:
        index = index.replace("z", "_")
    return f"{own}+~{index},{index}->{own}"


@rule(overloads("scatter.reduce", "scatter_reduce.two"))
def scatter_reduce(call: Call) -> str | None:
    if (found := _written(call)) is None:
        return None
    own, index = found
    index = index.replace("z", "_")
    return f"~{own},~{index},~{index}->{own}"


@rule(overloads("index_add"))
def index_add(call: Call) -> str | None:
    if not call.shape:
        return None
    dims, at = letters(len(call.shape)), dim_of(call["dim"], len(call.shape))
    if len(call.tensors[1].shape) != 1 or len(call.tensors[2].shape) != len(call.shape):
        return None
    return f"{put(dims, at, '_')}+~z,{put(dims, at, 'z')}->{put(dims, at, '_')}"


@rule(overloads("index_copy"))
def index_copy(call: Call) -> str | None:
    if not call.shape:
        return None
    line = put(letters(len(call.shape)), dim_of(call["dim"], len(call.shape)), "_")
    if len(call.tensors[1].shape) != 1 or len(call.tensors[2].shape) != len(call.shape):
        return None
    return f"{MOVE}{line}+~_,{line}->{line}"


@rule(overloads("index_fill.int_Scalar"))
def index_fill(call: Call) -> str | None:
    if not call.shape:
        return None
    line = put(letters(len(call.shape)), dim_of(call["dim"], len(call.shape)), "_")
    return f"{'' if is_zero(call['value']) else '~'}{line},~{'_' * len(call.tensors[1].shape)}->{line}"


@rule(overloads("index_fill.int_Tensor"))
def index_fill_tensor(call: Call) -> str | None:
    if not call.shape:
        return None
    line = put(letters(len(call.shape)), dim_of(call["dim"], len(call.shape)), "_")
    return f"{MOVE}{line},~{'_' * len(call.tensors[1].shape)}+->{line}"


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
    shape = torch.broadcast_shapes(*(m.shape for m in metas))  # type: ignore[no-untyped-call]
    points = letters(len(shape), skip=ndim)
    own = "".join("_" if i in at else name for i, name in enumerate(dims))
    kept = [name for i, name in enumerate(dims) if i not in at]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0  # indices that are not side by side go to the front
    shown = ["1" if size == 1 else name for name, size in zip(points, shape, strict=True)]
    return own, [broadcast(points, m.shape) for m in metas], "".join((*kept[:first], *shown, *kept[first:]))


@rule(overloads("index.Tensor", "_unsafe_index.Tensor"))
def index(call: Call) -> str | None:
    found = _indexed(call)
    if found is None:
        return None
    own, points, out = found
    return f"{own},{','.join('~' + p for p in points)}->{out}"


@rule(overloads("index_put", "_unsafe_index_put"))
def index_put(call: Call) -> str | None:
    """With accumulate the values add up over the index; without, a place is old or new."""
    found = _indexed(call)
    if found is None:
        return None
    own, points, out = found
    if not call["accumulate"]:
        named = set("".join(points)) - {"1"}
        points = ["".join("_" if c in named else c for c in p) for p in points]
        out = "".join("_" if c in named else c for c in out)
    values = call.tensors[-1].shape
    return f"{own}+{','.join('~' + p for p in points)},{broadcast(out, values)}->{own}"


@rule(overloads("take"))
def take(call: Call) -> str:
    return f"{'_' * len(call.shape)},~...->..."
