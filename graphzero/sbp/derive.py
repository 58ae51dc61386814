"""Lines of factors met with shapes: the signatures that an op has there.

Where each letter lies in the operands and outputs is found first; then each letter that may be split, and each choice
of partial operands, gives a signature if all outputs are something that has a name.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod

import torch

from graphzero.errors import SbpError
from graphzero.sbp.factors import REST, FactorOperand, Factors, Given
from graphzero.sbp.reductions import REDUCTIONS
from graphzero.sbp.shards import chunk
from graphzero.sbp.signature import Signature, TensorMeta
from graphzero.sbp.types import B, S, Sbp, partial


@dataclass(frozen=True)
class Cut:
    """Cuts of dims for which signatures are needed.

    ranks: splits that these would not cut alike are left out; None takes sizes to divide.
    pieces: into how many a dim is cut by all axes, none of which may be empty where that matters; by default ``ranks``.
    sections: counts of sections in which dims may be split, besides those that merged dims make.
    """

    ranks: int | None = None
    pieces: int | None = None
    sections: frozenset[int] = frozenset()


ANY = Cut()
Places = dict[str, tuple[int, int]]  # label -> (the dim it lies in, sections that the labels before it make there)


@dataclass(frozen=True)
class _Bound:
    """Factors met with shapes: where each label lies that can be split, per operand and output."""

    factors: Factors
    given: tuple[Given, ...]
    results: tuple[TensorMeta | None, ...]
    inputs: tuple[Places, ...]
    outputs: tuple[Places, ...]
    sizes: dict[str, int]
    merged: frozenset[str]  # labels that share a dim with others somewhere
    terms: tuple[tuple[int, ...], ...]


def derive(
    factors: Factors,
    given: Sequence[Given],
    results: Sequence[TensorMeta | None],
    cut: Cut = ANY,
    nonempty: bool = False,
) -> tuple[Signature, ...]:
    """All one-axis signatures that the line allows for these operands and outputs, all-B first.

    ``results`` are the outputs; absent operands and outputs have no place in a signature.  ``nonempty`` leaves out
    splits that give a rank nothing.
    Raises SbpError where shapes and line disagree.
    """
    bound = _bind(factors, tuple(given), tuple(results))
    signatures: dict[Signature, None] = {}
    for split, reduction, chosen in _candidates(bound, cut, nonempty):
        signature = _signature(bound, split, reduction, chosen)
        if signature is not None:
            signatures[signature] = None
    for signature in _unread(bound):
        signatures[signature] = None
    return tuple(signatures)


def _bind(factors: Factors, given: tuple[Given, ...], results: tuple[TensorMeta | None, ...]) -> _Bound:
    operands = factors.operands
    if not given and operands == (FactorOperand(()),):
        operands = ()
    if len(given) != len(operands) or len(results) != len(factors.outputs):
        raise SbpError(
            f"factors {factors.text!r} have {len(operands)} operands and {len(factors.outputs)} outputs, "
            f"the call has {len(given)} and {len(results)}"
        )
    inputs = [_label(o.dims, m, factors) for o, m in zip(operands, given, strict=True)]
    outputs = [_label(o.dims, m, factors) for o, m in zip(factors.outputs, results, strict=True)]
    sizes = _sizes(factors, inputs, given, outputs, results)
    keep = {label for label in sizes if label.startswith(".") or label.islower()}
    present = {i for i, m in enumerate(given) if m is not None}
    terms = [tuple(i for i in term if i in present) for term in factors.terms]
    return _Bound(
        factors, given, results,
        tuple(_places(dims, m, sizes, keep) for dims, m in zip(inputs, given, strict=True)),
        tuple(_places(dims, m, sizes, keep) for dims, m in zip(outputs, results, strict=True)),
        sizes, frozenset(label for dims in (*inputs, *outputs) for dim in dims if len(dim) > 1 for label in dim),
        tuple(term for term in terms if term),
    )  # fmt: skip


Dims = list[tuple[str, ...]]  # the labels of each dim, outermost first


def _label(dims: tuple[str, ...], meta: Given, factors: Factors) -> Dims:
    """The labels of each dim of a tensor; dims of the rest are ``.0``, ``.1`` ... counted from the right."""
    if not isinstance(meta, TensorMeta):
        return []
    rest = len(meta.shape) - (len(dims) - 1)
    if rest < 0 or (REST not in dims and rest != 1):
        raise SbpError(f"factors {factors.text!r}: {''.join(dims)!r} does not fit the shape {list(meta.shape)}")
    labels: Dims = []
    for dim in dims:
        labels += [(f".{i}",) for i in reversed(range(rest))] if dim == REST else [tuple(dim.strip("()"))]
    for label, size in zip(labels, meta.shape, strict=True):
        if label == ("1",) and size != 1:
            raise SbpError(f"factors {factors.text!r}: a dim written 1 has size {size} in {list(meta.shape)}")
    return labels


def _places(dims: Dims, meta: Given, sizes: dict[str, int], keep: Collection[str]) -> Places:
    places: Places = {}
    for i, (labels, size) in enumerate(zip(dims, meta.shape if isinstance(meta, TensorMeta) else (), strict=True)):
        before = 1
        left = size // max(prod(sizes.get(label, 1) for label in labels), 1)  # what ``_`` stands for
        for label in labels:
            if label in keep and (size != 1 or sizes[label] == 1):
                places[label] = (i, before)
            before *= max(left if label == "_" else sizes.get(label, 1), 1)  # nothing lies in one section
    return places


def _sizes(
    factors: Factors, inputs: list[Dims], given: tuple[Given, ...], outputs: list[Dims],
    results: tuple[TensorMeta | None, ...],
) -> dict[str, int]:  # fmt: skip
    """The size of each label: of the dim it is alone in, else what the others leave of a merged one."""
    seen: dict[str, set[int]] = {}
    merged: list[tuple[tuple[str, ...], int]] = []
    for dims, meta, is_input in [(x, m, True) for x, m in zip(inputs, given, strict=True)] + [
        (x, m, False) for x, m in zip(outputs, results, strict=True)
    ]:
        for labels, size in zip(dims, meta.shape if isinstance(meta, TensorMeta) else (), strict=True):
            if len(labels) > 1:
                merged.append((labels, size))
            elif labels[0] not in "1_" and not (is_input and labels[0].startswith(".") and size == 1):
                seen.setdefault(labels[0], set()).add(size)
    for label, sizes in seen.items():
        if len(sizes) > 1:
            name = "the rest" if label.startswith(".") else repr(label)
            raise _disagree(factors, given, results, f"{name} has sizes {sorted(sizes)}", "a letter has one size")
    size_of = {label: next(iter(sizes)) for label, sizes in seen.items()}
    _divide(size_of, merged)
    for labels, size in merged:
        known = prod(size_of.get(label, 1) for label in labels)
        if (size % known if known else size) or ("_" not in labels and size != known):
            text = (
                f"({''.join(labels)}) has size {size}, its letters {', '.join(f'{x}={size_of.get(x)}' for x in labels)}"
            )
            raise _disagree(factors, given, results, text, "a merged dim is the product of its letters")
    return size_of


def _divide(sizes: dict[str, int], merged: list[tuple[tuple[str, ...], int]]) -> None:
    """Sizes of letters that are in merged dims alone: what others leave, or with ``_`` what all such dims share."""
    while True:
        news = {}
        for labels, size in merged:
            unknown = [label for label in labels if label not in sizes]
            known = prod(sizes[label] for label in labels if label in sizes)
            if len(unknown) == 1 and unknown[0] != "_" and known and size % known == 0:
                news[unknown[0]] = size // known
        shared = [label for labels, _ in merged for label in labels[:1] if label not in sizes and label != "_"]
        if not news and shared:
            news[shared[0]] = gcd(*(size for labels, size in merged if labels[0] == shared[0]))
        if not news:
            return
        sizes.update(news)


def _disagree(
    factors: Factors, given: tuple[Given, ...], results: tuple[TensorMeta | None, ...], what: str, law: str
) -> SbpError:
    shapes = [list(m.shape) for m in (*given, *results) if isinstance(m, TensorMeta)]
    return SbpError(f"factors {factors.text!r}: {what} in shapes {shapes}; {law}")


Split = tuple[str, int] | None  # the label that is split, and its sections
Candidate = tuple[Split, str, tuple[int, ...]]  # with the kind of P, and the operands that are P


def _candidates(bound: _Bound, cut: Cut, nonempty: bool) -> Iterator[Candidate]:
    yield None, "sum", ()
    reductions = bound.factors.reductions
    for label in dict.fromkeys(label for places in (*bound.inputs, *bound.outputs) for label in places):
        summed = any(label in places for places in bound.inputs) and not all(label in o for o in bound.outputs)
        full = nonempty or (summed and reductions != ("sum",))
        lacking = [t for t in bound.terms if not any(label in bound.inputs[i] for i in t)]
        for count in _sections(bound, label, cut.sections):
            if not _cuts(bound, label, count, cut, full):
                continue
            yield (label, count), reductions[0], ()
            if lacking:
                for chosen in itertools.product(*(_linear(bound, t) for t in lacking)):
                    yield (label, count), reductions[0], chosen
    for reduction in reductions:
        if bound.terms:
            for chosen in itertools.product(*(_linear(bound, t) for t in bound.terms)):
                yield None, reduction, chosen


def _sections(bound: _Bound, label: str, wanted: Collection[int]) -> list[int]:
    """Numbers of sections in which a label may be split, 1 first, so that some dim that contains it has a needed
    number."""
    before = {places[label][1] for places in (*bound.inputs, *bound.outputs) if label in places}
    inner = {count // b for count in wanted for b in before if count % b == 0} - {1}
    size = bound.sizes[label]
    return [1, *sorted(n for n in inner if size % n == 0 and (n < size or size == 0))]


def _cuts(bound: _Bound, label: str, count: int, cut: Cut, full: bool) -> bool:
    """Return whether a label can be cut so: evenly where the pieces of sections or of a merged dim would differ."""
    size, ranks = bound.sizes[label], cut.ranks or 1
    pieces = cut.pieces or ranks
    if count > 1 or label in bound.merged:
        return size % (count * ranks) == 0 and (not full or size >= pieces)
    return not full or chunk(size, pieces, pieces - 1)[1] > 0


def _linear(bound: _Bound, term: tuple[int, ...]) -> list[int]:
    """Operands of a term that may be partial."""
    return [i for i in term if not bound.factors.operands[i].nonlinear and isinstance(bound.given[i], TensorMeta)]


def _signature(bound: _Bound, split: Split, reduction: str, chosen: tuple[int, ...]) -> Signature | None:
    inputs = []
    for i, (places, meta) in enumerate(zip(bound.inputs, bound.given, strict=True)):
        if isinstance(meta, TensorMeta):
            inputs.append(partial(reduction) if i in chosen else _split_at(places, split) or B)
    outputs = []
    for j, meta in enumerate(bound.results):
        if meta is None:
            continue
        sbp = _output_sbp(bound, j, split, reduction, chosen)
        if sbp is None:
            return None
        outputs.append(sbp)
    if not (_additive if reduction == "sum" else _ordered)(bound, chosen, outputs):
        return None
    return Signature(tuple(inputs), tuple(outputs))


def _split_at(places: Places, split: Split) -> Sbp | None:
    """The split of a tensor in which the label lies at ``places``; None if it does not."""
    if split is None or split[0] not in places:
        return None
    dim, before = places[split[0]]
    return S(dim, before * split[1])


def _output_sbp(bound: _Bound, j: int, split: Split, reduction: str, chosen: tuple[int, ...]) -> Sbp | None:
    """The SBP of output j then; None where no SBP describes it."""
    depends = bound.factors.outputs[j].depends
    here = _split_at(bound.outputs[j], split)
    if here is not None:
        return None if depends.intersection(chosen) else here
    touched = [
        any(i in chosen or _split_at(bound.inputs[i], split) is not None for i in term if i in depends)
        for term in bound.terms
        if depends.intersection(term)
    ]
    if not any(touched):
        return B
    many = split is not None and len(bound.factors.reductions) > 1
    return partial(reduction) if all(touched) and not many else None


def _additive(bound: _Bound, chosen: tuple[int, ...], outputs: list[Sbp]) -> bool:
    """Truth values do not add, and a float that becomes an integer is rounded before the sum."""
    given, summed = _partial_dtypes(bound, chosen, outputs)
    return torch.bool not in (*given, *summed) and (all(map(_is_real, summed)) or not any(map(_is_real, given)))


def _ordered(bound: _Bound, chosen: tuple[int, ...], outputs: list[Sbp]) -> bool:
    """Complex numbers have no maximum."""
    given, summed = _partial_dtypes(bound, chosen, outputs)
    return not any(dtype.is_complex for dtype in (*given, *summed))


def _partial_dtypes(
    bound: _Bound, chosen: tuple[int, ...], outputs: list[Sbp]
) -> tuple[list[torch.dtype], list[torch.dtype]]:
    """Dtypes of the operands that are chosen, and of the results that are partial."""
    metas = (m for m in bound.results if m is not None)
    given = [m.dtype for i in chosen if isinstance(m := bound.given[i], TensorMeta)]
    return given, [m.dtype for m, sbp in zip(metas, outputs, strict=True) if sbp.is_partial]


def _is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _unread(bound: _Bound) -> Iterator[Signature]:
    """Signatures with partial operands of which only the shape is read: the outputs are whole."""
    present = [i for i, m in enumerate(bound.given) if isinstance(m, TensorMeta)]
    outputs = tuple(B for m in bound.results if m is not None)
    for i in present:
        if bound.factors.operands[i].shape_only:
            for reduction in REDUCTIONS:
                yield Signature(tuple(partial(reduction) if k == i else B for k in present), outputs)
