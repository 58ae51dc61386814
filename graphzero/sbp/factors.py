"""The factor language: an op's mathematics in one line, from which all its signatures follow.

    mm "mk,kn->mn"    add "...+...->..."    div "...,~...->..."    native_layer_norm_backward "...N,~...N, ... N:0"

A letter is a dim and has one size.  Left of ``->`` stand the operands, right of it the outputs:

* ``,`` multiplies operands and ``+`` adds terms; ``~`` marks an operand in which the op is not linear, ``?``
  one of which only the shape is read;
* an UPPER-case letter is a dim that cannot be split; ``_`` is one that also has no name, of any size;
  ``1`` is a dim of size one;
* ``...`` is the rest of the dims, aligned right, with size-one broadcasting seen from the shapes;
* ``a%`` is a letter whose dims differ in size, as a view joins dims: split only where all divide by the ranks;
* ``out:02`` says which operands an output depends on, by default all;
* a word before the line names the sum in question: ``max: ak->a`` takes maxima over k.  ``sum max min:`` is for
  ops that only move values, through which every kind of partial value passes.

A letter that an output shares may be split.  One that is summed away leaves a P, and a term without it must then
be P itself, else it would be added once per rank.  A P in one linear factor of every term passes through.
A lower-case letter that only outputs have is a dim the op makes by itself, of the local size it is told.

What the line cannot say (dims given as arguments) is for rule functions in ``rules``, which write lines.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from graphzero.errors import SbpError
from graphzero.sbp.local import chunk
from graphzero.sbp.signature import Signature, TensorMeta
from graphzero.sbp.types import B, S, Sbp, partial

REST = "..."
_DIM = re.compile(r"\.\.\.|[A-Za-z]%?|[1_]")
_REDUCTIONS = ("sum", "max", "min")


class Number:
    """Stands in an operand's place for a Python number: it has no dims and cannot be partial."""


NUMBER = Number()
Given = TensorMeta | Number | None  # what is passed for an operand; None: an optional one left out


@dataclass(frozen=True)
class Operand:
    dims: tuple[str, ...]
    nonlinear: bool = False
    shape_only: bool = False


@dataclass(frozen=True)
class Output:
    dims: tuple[str, ...]
    depends: frozenset[int]


@dataclass(frozen=True)
class Factors:
    """A parsed line."""

    text: str
    operands: tuple[Operand, ...]
    terms: tuple[tuple[int, ...], ...]  # operands that multiply, by number; terms add
    outputs: tuple[Output, ...]
    reductions: tuple[str, ...]
    uneven: frozenset[str]  # letters written with %


@cache
def parse(text: str) -> Factors:
    """Read a line of factors.  Raises SbpError."""
    line = re.sub(r"\s+", " ", text).strip()
    if line.count("->") != 1:
        raise SbpError(f"factors {text!r}: write operands, one `->`, outputs")
    left, right = line.split("->")
    words, _, left = left.rpartition(":")
    reductions = tuple(words.split()) or ("sum",)
    for word in reductions:
        if word not in _REDUCTIONS:
            raise SbpError(f"factors {text!r}: {word!r} is no reduction; write {', '.join(_REDUCTIONS)}")
    operands: list[Operand] = []
    terms: list[tuple[int, ...]] = []
    for term in left.split("+"):
        first = len(operands)
        operands += [_operand(part.strip(), text) for part in term.split(",")]
        terms.append(tuple(i for i in range(first, len(operands)) if not operands[i].shape_only))
    if left.strip() == "":
        operands, terms = [Operand(())], [(0,)]
    outputs = tuple(_output(part.strip(), operands, text) for part in right.split(","))
    dims = [d for o in operands for d in o.dims] + [d for o in outputs for d in o.dims]
    uneven = frozenset(d[0] for d in dims if d.endswith("%"))
    return Factors(
        text,
        tuple(map(_plain, operands)),
        tuple(t for t in terms if t),
        tuple(Output(_unmarked(o.dims), o.depends) for o in outputs),
        reductions,
        uneven,
    )


def _unmarked(dims: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(d.removesuffix("%") for d in dims)


def _plain(operand: Operand) -> Operand:
    return Operand(_unmarked(operand.dims), operand.nonlinear, operand.shape_only)


def _operand(part: str, text: str) -> Operand:
    mark = part[:1] if part[:1] in ("~", "?") else ""
    return Operand(_dims(part[len(mark) :].strip(), text), mark == "~", mark == "?")


def _output(part: str, operands: list[Operand], text: str) -> Output:
    dims, colon, numbers = part.partition(":")
    if colon and not re.fullmatch(r"\d*", numbers.strip()):
        raise SbpError(f"factors {text!r}: after `:` stand operand numbers, one digit each, not {numbers!r}")
    depends = {int(n) for n in numbers.strip()} if colon else set(range(len(operands)))
    if depends and max(depends) >= len(operands):
        count = len(operands)
        raise SbpError(f"factors {text!r}: output {part!r} depends on operand {max(depends)}, but there are {count}")
    return Output(_dims(dims.strip(), text), frozenset(i for i in depends if not operands[i].shape_only))


def _dims(part: str, text: str) -> tuple[str, ...]:
    dims = tuple(_DIM.findall(part))
    if "".join(dims) != part:
        raise SbpError(f"factors {text!r}: cannot read {part!r}; dims are letters, `1`, `_` and one `...`")
    for dim in dims:
        if dim not in "1_" and _unmarked(dims).count(dim.removesuffix("%")) > 1:
            raise SbpError(f"factors {text!r}: {dim!r} stands twice in {part!r}; give each dim its own letter")
    return dims


@dataclass(frozen=True)
class _Bound:
    """Factors met with shapes: a label per dim, None where nothing can be split."""

    factors: Factors
    given: tuple[Given, ...]
    made: tuple[TensorMeta | None, ...]
    inputs: tuple[tuple[str | None, ...], ...]
    outputs: tuple[tuple[str | None, ...], ...]
    sizes: dict[str, tuple[int, ...]]
    terms: tuple[tuple[int, ...], ...]


def derive(
    factors: Factors,
    given: Sequence[Given],
    made: Sequence[TensorMeta | None],
    ranks: int | None = None,
    nonempty: bool = False,
) -> tuple[Signature, ...]:
    """All one-axis signatures that the line allows for these operands and outputs, all-B first.

    ``made`` are the outputs; absent operands and outputs have no place in a signature.  ``ranks`` leaves out
    splits that do not cut alike; without it sizes are taken to divide.  ``nonempty`` leaves out splits that give a
    rank nothing.  Raises SbpError where shapes and line disagree.
    """
    bound = _bind(factors, tuple(given), tuple(made))
    found: dict[Signature, None] = {}
    for label, reduction, chosen in _candidates(bound, ranks, nonempty):
        signature = _signature(bound, label, reduction, chosen)
        if signature is not None:
            found[signature] = None
    for signature in _unread(bound):
        found[signature] = None
    return tuple(found)


def _bind(factors: Factors, given: tuple[Given, ...], made: tuple[TensorMeta | None, ...]) -> _Bound:
    operands = factors.operands
    if not given and operands == (Operand(()),):
        operands = ()
    if len(given) != len(operands) or len(made) != len(factors.outputs):
        raise SbpError(
            f"factors {factors.text!r} have {len(operands)} operands and {len(factors.outputs)} outputs, "
            f"the call has {len(given)} and {len(made)}"
        )
    inputs = [_label(o.dims, m, factors) for o, m in zip(operands, given, strict=True)]
    outputs = [_label(o.dims, m, factors) for o, m in zip(factors.outputs, made, strict=True)]
    sizes = _sizes(factors, inputs, given, outputs, made)
    keep = frozenset(label for label, found in sizes.items() if _splittable(label) and max(found) > 1)
    present = {i for i, m in enumerate(given) if m is not None}
    terms = [tuple(i for i in term if i in present) for term in factors.terms]
    return _Bound(
        factors, given, made,
        tuple(_kept(labels, m, keep) for labels, m in zip(inputs, given, strict=True)),
        tuple(_kept(labels, m, keep) for labels, m in zip(outputs, made, strict=True)),
        sizes, tuple(term for term in terms if term),
    )  # fmt: skip


def _splittable(label: str) -> bool:
    return label.startswith(".") or label.islower()


def _kept(labels: tuple[str, ...], meta: Given, keep: frozenset[str]) -> tuple[str | None, ...]:
    shape = meta.shape if isinstance(meta, TensorMeta) else ()
    return tuple(label if label in keep and size != 1 else None for label, size in zip(labels, shape, strict=True))


def _label(dims: tuple[str, ...], meta: Given, factors: Factors) -> tuple[str, ...]:
    """One label per dim of the tensor; dims of the rest are ``.0``, ``.1`` ... counted from the right."""
    if not isinstance(meta, TensorMeta):
        return ()
    rest = len(meta.shape) - (len(dims) - 1)
    if rest < 0 or (REST not in dims and rest != 1):
        raise SbpError(f"factors {factors.text!r}: {''.join(dims)!r} does not fit the shape {list(meta.shape)}")
    labels: list[str] = []
    for dim in dims:
        labels += [f".{i}" for i in reversed(range(rest))] if dim == REST else [dim]
    for label, size in zip(labels, meta.shape, strict=True):
        if label == "1" and size != 1:
            raise SbpError(f"factors {factors.text!r}: a dim written 1 has size {size} in {list(meta.shape)}")
    return tuple(labels)


def _sizes(
    factors: Factors,
    inputs: list[tuple[str, ...]],
    given: tuple[Given, ...],
    outputs: list[tuple[str, ...]],
    made: tuple[TensorMeta | None, ...],
) -> dict[str, tuple[int, ...]]:
    """The sizes of each label: one, or several for a letter written with %."""
    seen: dict[str, set[int]] = {}
    for labels, meta, is_input in [(x, m, True) for x, m in zip(inputs, given, strict=True)] + [
        (x, m, False) for x, m in zip(outputs, made, strict=True)
    ]:
        for label, size in zip(labels, meta.shape if isinstance(meta, TensorMeta) else (), strict=True):
            if not (is_input and label.startswith(".") and size == 1):
                seen.setdefault(label, set()).add(size)
    for label, sizes in seen.items():
        if len(sizes) > 1 and label not in factors.uneven and label not in "1_":
            shapes = [list(m.shape) for m in (*given, *made) if isinstance(m, TensorMeta)]
            name = "the rest" if label.startswith(".") else repr(label)
            raise SbpError(f"factors {factors.text!r}: {name} has sizes {sorted(sizes)} in shapes {shapes}; "
                           "a letter has one size")  # fmt: skip
    return {label: tuple(sorted(sizes)) for label, sizes in seen.items()}


Candidate = tuple[str | None, str, tuple[int, ...]]  # the label that is split, the kind of P, operands that are P


def _candidates(bound: _Bound, ranks: int | None, nonempty: bool) -> Iterator[Candidate]:
    yield None, "sum", ()
    reductions = bound.factors.reductions
    for label in dict.fromkeys(x for labels in (*bound.inputs, *bound.outputs) for x in labels if x is not None):
        alone = reductions == ("sum",)
        sizes = bound.sizes[label]
        if ranks is not None and len(sizes) > 1 and any(size % ranks for size in sizes):
            continue
        summed = any(label in labels for labels in bound.inputs) and not all(label in o for o in bound.outputs)
        if ranks is not None and (nonempty or (summed and not alone)) and chunk(sizes[0], ranks, ranks - 1)[1] == 0:
            continue
        lacking = [t for t in bound.terms if not any(label in bound.inputs[i] for i in t)]
        yield label, reductions[0], ()
        if lacking:
            for chosen in itertools.product(*(_linear(bound, t) for t in lacking)):
                yield label, reductions[0], chosen
    for reduction in reductions:
        if bound.terms:
            for chosen in itertools.product(*(_linear(bound, t) for t in bound.terms)):
                yield None, reduction, chosen


def _linear(bound: _Bound, term: tuple[int, ...]) -> list[int]:
    """Operands of a term that may be partial."""
    return [i for i in term if not bound.factors.operands[i].nonlinear and isinstance(bound.given[i], TensorMeta)]


def _signature(bound: _Bound, label: str | None, reduction: str, chosen: tuple[int, ...]) -> Signature | None:
    inputs = []
    for i, (labels, meta) in enumerate(zip(bound.inputs, bound.given, strict=True)):
        if isinstance(meta, TensorMeta):
            split = label is not None and label in labels
            inputs.append(partial(reduction) if i in chosen else S(labels.index(label)) if split else B)
    outputs = []
    for j, meta in enumerate(bound.made):
        if meta is None:
            continue
        sbp = _output_sbp(bound, j, label, reduction, chosen)
        if sbp is None:
            return None
        outputs.append(sbp)
    if not (_additive if reduction == "sum" else _ordered)(bound, chosen, outputs):
        return None
    return Signature(tuple(inputs), tuple(outputs))


def _output_sbp(bound: _Bound, j: int, label: str | None, reduction: str, chosen: tuple[int, ...]) -> Sbp | None:
    """What output j then is; None where it is nothing that has a name."""
    depends = bound.factors.outputs[j].depends
    if label is not None and label in bound.outputs[j]:
        return None if depends.intersection(chosen) else S(bound.outputs[j].index(label))
    touched = [
        any(i in chosen or (label is not None and label in bound.inputs[i]) for i in term if i in depends)
        for term in bound.terms
        if depends.intersection(term)
    ]
    if not any(touched):
        return B
    many = label is not None and len(bound.factors.reductions) > 1
    return partial(reduction) if all(touched) and not many else None


def _additive(bound: _Bound, chosen: tuple[int, ...], outputs: list[Sbp]) -> bool:
    """Truth values do not add, and a float that becomes an integer is rounded before the sum."""
    made = [m for m in bound.made if m is not None]
    partial_out = [m for m, sbp in zip(made, outputs, strict=True) if sbp.is_partial]
    dtypes = [m.dtype for i in chosen if isinstance(m := bound.given[i], TensorMeta)]
    if any(m.dtype == torch.bool for m in partial_out) or torch.bool in dtypes:
        return False
    return all(_is_real(m.dtype) for m in partial_out) or not any(_is_real(d) for d in dtypes)


def _ordered(bound: _Bound, chosen: tuple[int, ...], outputs: list[Sbp]) -> bool:
    """Complex numbers have no maximum."""
    given = [m for i in chosen if isinstance(m := bound.given[i], TensorMeta)]
    made = [m for m in bound.made if m is not None]
    partial_out = [m for m, sbp in zip(made, outputs, strict=True) if sbp.is_partial]
    return not any(m.dtype.is_complex for m in (*given, *partial_out))


def _is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _unread(bound: _Bound) -> Iterator[Signature]:
    """Whatever is partial in an operand of which only the shape is read, the outputs are whole."""
    present = [i for i, m in enumerate(bound.given) if isinstance(m, TensorMeta)]
    outputs = tuple(B for m in bound.made if m is not None)
    for i in present:
        if bound.factors.operands[i].shape_only:
            for reduction in _REDUCTIONS:
                yield Signature(tuple(partial(reduction) if k == i else B for k in present), outputs)
