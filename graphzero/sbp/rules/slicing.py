"""Ops that cut along one dim, join along one dim, and their backwards.  That dim stays whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import Shape, rule
from graphzero.sbp.rules._factor_lines import GROWING, MOVE, dim_of, is_zero, letters, letters_except, overloads, put
from graphzero.sbp.signature import TensorMeta

INPUT_SIZES = {"input_sizes": lambda i, o: o[0]}


@rule(overloads("slice.Tensor", "slice_copy.Tensor"))
def slice_(call: Call) -> str:
    """A slice that takes all of its dim may be split along it."""
    everything = call.out == call.shape and call["step"] == 1 and call["start"] in (None, 0)
    line = "".join(letters(len(call.shape))) if everything else letters_except(call.shape, call["dim"])
    return f"{MOVE}{line}->{line}"


def _along(call: Call, line: str, dims: Sequence[str] = ("dim",), of_result: bool = False) -> str:
    """A line, in which {x} stands for the dims of the whole, and {k} for those that no argument names."""
    whole = letters_except(call.out if of_result else call.shape, *(call[name] for name in dims))
    return MOVE + line.format(x=whole, k=whole.replace("_", ""))


_grown, _diagonal = partial(_along, of_result=True), partial(_along, dims=("dim1", "dim2"))
rule(overloads("narrow_copy"), partial(_along, line="{x}->{x}"))
rule(overloads("slice_scatter"), partial(_along, line="{x}+{x}->{x}"))
rule(overloads("slice_backward"), partial(_grown, line="{x}->{x}"), sizes=INPUT_SIZES)
rule(overloads("select.int", "select_copy.int"), partial(_along, line="{x}->{k}"))
rule(overloads("select_scatter"), partial(_along, line="{x}+{k}->{x}"))
rule(overloads("select_backward"), partial(_grown, line="{k}->{x}"), sizes=INPUT_SIZES)
rule(overloads("diagonal", "diagonal_copy"), partial(_diagonal, line="{x}->{k}_"))
rule(overloads("diagonal_scatter"), partial(_diagonal, line="{x}+{k}_->{x}"))
rule(overloads("diagonal_backward"), partial(_diagonal, line="{k}_->{x}", of_result=True), sizes=INPUT_SIZES)


@rule(overloads("unfold_backward"), sizes=INPUT_SIZES)
def unfold_backward(call: Call) -> str | None:
    line = letters_except(call.out, call["dim"])
    return f"{line}_->{line}" if call.out else None


def _cut_dim(whole: Shape, parts: Sequence[Shape]) -> int | None:
    """The dim in which parts are shorter than the whole; None where there is but one."""
    return next((d for part in parts for d, size in enumerate(part) if size != whole[d]), None)


def _part_size(i: Sequence[Shape], o: Sequence[Shape]) -> Any:
    dim = _cut_dim(i[0], o)
    return None if dim is None else o[0][dim]


def _part_sizes(i: Sequence[Shape], o: Sequence[Shape]) -> Any:
    dim = _cut_dim(i[0], o)
    return None if dim is None else [part[dim] for part in o]


def _parts(parts: Sequence[TensorMeta | None], whole: Sequence[int], at: int) -> tuple[str, str]:
    """(dims of the whole, dims of a part): where all parts are of one size, each may be cut, the whole in sections."""
    dims = letters(len(whole))
    even = len(parts) > 1 and len({meta.shape for meta in parts if meta is not None}) == 1
    if not even:
        return (line := put(dims, at, "_")), line
    return put(dims, at, f"(_{dims[at]})"), "".join(dims)


@rule(overloads("split.Tensor", "split_copy.Tensor", "unsafe_split.Tensor"), sizes={"split_size": _part_size})
@rule(overloads("split_with_sizes", "split_with_sizes_copy", "unsafe_split_with_sizes"),
      sizes={"split_sizes": _part_sizes})  # fmt: skip
def split(call: Call) -> str:
    whole, part = _parts(call.outputs, call.shape, dim_of(call["dim"], len(call.shape)))
    return f"{MOVE}{whole}->{','.join([part] * len(call.outputs))}"


@rule(overloads("unbind.int", "unbind_copy.int"))
def unbind(call: Call) -> str:
    line = letters_except(call.shape, call["dim"])
    return f"{MOVE}{line}->{','.join([line.replace('_', '')] * len(call.outputs))}"


@rule(overloads("cat"))
def cat(call: Call) -> str:
    """Its operands add, each in zeros of the whole; an empty one-dim operand is ignored, whatever the others are."""
    ndim = len(call.out)
    ignored = [len(m.shape) != ndim for m in call.tensors]
    whole, line = _parts(call.tensors, call.out, dim_of(call["dim"], ndim))
    operands = "".join(",?_" if skip else f"+{line}" for skip in ignored)
    return f"{MOVE}{operands[1:]}->{whole}"


@rule(overloads("stack"))
def stack(call: Call) -> str:
    dims, at = letters(len(call.shape)), dim_of(call["dim"], len(call.out))
    out = "".join((*dims[:at], "_", *dims[at:]))
    return f"{MOVE}{'+'.join([''.join(dims)] * len(call.tensors))}->{out}"


@rule(overloads("constant_pad_nd"))
def constant_pad(call: Call) -> str:
    """``pad`` holds two numbers per dim, from the last; linear where it pads with zeros."""
    pad, dims = call["pad"], letters(len(call.shape))
    for i in range(len(pad) // 2):
        if tuple(pad[2 * i : 2 * i + 2]) != (0, 0):
            dims[-1 - i] = "_"
    line = "".join(dims)
    return f"{MOVE if is_zero(call['value']) else GROWING}{line}->{line}"
