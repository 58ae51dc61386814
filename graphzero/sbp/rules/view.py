"""Ops that show the same values in other dims.  A split passes where its cut is the same cut of the values."""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Iterator, Sequence

from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._factor_lines import MOVE, dim_of, dims_of, letters, letters_except, overloads

SIZE = {"size": lambda i, o: o[0]}
SHAPE = {"shape": lambda i, o: o[0]}


def view_line(before: Sequence[int], after: Sequence[int]) -> str | None:
    """A letter for each factor that dims of both shapes are products of: cutting it cuts both at the same values."""
    if math.prod(before) != math.prod(after):
        return None
    left, right = (["1" if size == 1 else "" for size in shape] for shape in (before, after))
    names = itertools.chain(string.ascii_lowercase, itertools.repeat("_"))
    a, b = ([i for i, size in enumerate(shape) if size != 1] for shape in (before, after))
    _name_ones(before, after, left, right, names)
    while a and b:
        run, other = [a.pop(0)], [b.pop(0)]
        have, want = before[run[0]], after[other[0]]
        while have != want:  # the next dims of equal product
            if want == 0 or 0 < have < want:
                run.append(a.pop(0))
                have *= before[run[-1]]
            else:
                other.append(b.pop(0))
                want *= after[other[-1]]
        _name_run([(i, before[i]) for i in run], [(j, after[j]) for j in other], left, right, names)
    for side, rest in ((left, a), (right, b)):  # of a tensor without elements
        for i in rest:
            side[i] = "_"
    return f"{MOVE}{''.join(map(_merged, left))}->{''.join(map(_merged, right))}"


def _name_ones(
    before: Sequence[int], after: Sequence[int], left: list[str], right: list[str], names: Iterator[str]
) -> None:
    """Give both sides a letter for each dim of size one that is between the same values: one rank has them all."""
    for rest in (itertools.count(), itertools.count(-1, -1)):  # from the left, then from the right
        for i in rest:
            if not (-len(before) <= i < len(before) and -len(after) <= i < len(after)) or before[i] != after[i]:
                break
            if before[i] == 1 and left[i] == right[i] == "1":
                left[i] = right[i] = next(names)


def _name_run(
    run: list[tuple[int, int]], other: list[tuple[int, int]], left: list[str], right: list[str], names: Iterator[str]
) -> None:
    """Give both sides of a run its letters; from where they share but a divisor on, ``_`` stands for the rest."""
    while run and other:
        (i, size), (j, wide) = run[0], other[0]
        shared = math.gcd(size, wide)
        if shared != 1:
            name = next(names)
            left[i] += name
            right[j] += name
        if shared not in (size, wide):
            for k, _ in run:
                left[k] += "_"
            for k, _ in other:
                right[k] += "_"
            return
        run = [(i, size // shared), *run[1:]] if size != shared else run[1:]
        other = [(j, wide // shared), *other[1:]] if wide != shared else other[1:]


def _merged(letters: str) -> str:
    return letters if len(letters) == 1 else f"({letters})"


@rule(overloads("view.default", "_unsafe_view", "view_copy.default"), sizes=SIZE)
@rule(overloads("reshape"), sizes=SHAPE)
def view(call: Call) -> str | None:
    return view_line(call.shape, call.out)


@rule(overloads("_reshape_alias"), sizes=SIZE)
def reshape_alias(call: Call) -> str | None:
    return None  # its strides are of the whole tensor


@rule(overloads("view.dtype", "view_copy.dtype"))
def view_dtype(call: Call) -> str:
    """Other bits of the same storage: the last dim is whole where its size changes."""
    return "~...->..." if call.shape == call.out else "~..._->..._"


@rule(overloads("unsqueeze", "unsqueeze_copy"))
def unsqueeze(call: Call) -> str:
    """The new dim has size one on every rank, whatever is next to it."""
    dims, at = letters(len(call.shape)), dim_of(call["dim"], len(call.out))
    return f"{MOVE}{''.join(dims)}->{''.join((*dims[:at], '1', *dims[at:]))}"


@rule(overloads("squeeze", "squeeze_copy"))
def squeeze(call: Call) -> str:
    """A dim that the op may remove is whole: a rank whose piece of it has size one would remove it."""
    named = call["dim"] if len(call.op._schema.arguments) > 1 else None  # type: ignore[attr-defined]
    may_go = () if named == [] else dims_of(named, len(call.shape))
    dims = letters(len(call.shape), whole=may_go)
    gone = {i for i in may_go if call.shape[i] == 1}
    return f"{MOVE}{''.join(dims)}->{''.join(name for i, name in enumerate(dims) if i not in gone)}"


@rule(overloads("expand", "expand_copy"), sizes=SIZE)
def expand(call: Call) -> str:
    """A dim that is new or had size one is made by each rank, in the size of its argument."""
    dims = letters(len(call.out))
    new = len(call.out) - len(call.shape)
    inner = "".join("1" if size == 1 else name for name, size in zip(dims[new:], call.shape, strict=True))
    return f"{MOVE}{inner}->{''.join(dims)}"


@rule(overloads("t", "t_copy"))
def t(call: Call) -> str:
    dims = "".join(letters(len(call.shape)))
    return f"{MOVE}{dims}->{dims[::-1]}"


@rule(overloads("transpose.int", "transpose_copy.int"))
def transpose(call: Call) -> str:
    ndim = len(call.shape)
    dims = letters(ndim)
    a, b = dim_of(call["dim0"], ndim), dim_of(call["dim1"], ndim)
    moved = list(dims)
    if ndim:
        moved[a], moved[b] = dims[b], dims[a]
    return f"{MOVE}{''.join(dims)}->{''.join(moved)}"


@rule(overloads("permute", "permute_copy"))
def permute(call: Call) -> str:
    dims = letters(len(call.shape))
    order = dims_of(call["dims"], len(dims))
    return f"{MOVE}{''.join(dims)}->{''.join(dims[i] for i in order)}"


@rule(overloads("repeat"))
def repeat(call: Call) -> str:
    """A dim repeated once is only moved; new dims and repeated ones are whole."""
    new = len(call.out) - len(call.shape)
    dims = letters(len(call.shape))
    once = [name if times == 1 else "_" for name, times in zip(dims, call["repeats"][new:], strict=True)]
    inner = [name if once[i] == name else "_" for i, name in enumerate(dims)]
    return f"{MOVE}{''.join(inner)}->{'_' * new}{''.join(once)}"


@rule(overloads("flip"))
def flip(call: Call) -> str:
    flipped = () if not call["dims"] else dims_of(call["dims"], len(call.shape))
    dims = "".join(letters(len(call.shape), whole=flipped))
    return f"{MOVE}{dims}->{dims}"


@rule(overloads("roll"))
def roll(call: Call) -> str:
    """Without dims the tensor is rolled as if it were flat."""
    dims = "".join(letters(len(call.shape), whole=dims_of(call["dims"], len(call.shape))))
    return f"{MOVE}{dims}->{dims}"


@rule(overloads("unfold", "unfold_copy"))
def unfold(call: Call) -> str:
    line = letters_except(call.shape, call["dimension"])
    return f"{MOVE}{line}->{line}_"


rule(overloads("tril", "triu"), "...__->...__")
