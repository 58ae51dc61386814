"""The factor language: an op's mathematics in one line, from which all its signatures follow.

    mm "mk,kn->mn"    add "...+...->..."    div "...,~...->..."    native_layer_norm_backward "...N,~...N, ... N:0"

A letter is a dim and has one size.  Left of ``->`` are the operands, right of it the outputs:

* ``,`` multiplies operands and ``+`` adds terms; ``~`` marks an operand in which the op is not linear, ``?``
  one of which only the shape is read;
* an UPPER-case letter is a dim that cannot be split; ``_`` is one that also has no name, of any size;
  ``1`` is a dim of size one;
* ``...`` is the rest of the dims, aligned right, with size-one broadcasting seen from the shapes;
* ``(ab)`` is a dim that merges the dims a and b, as a view does; with an ``_`` in it, (a_), the rest of a dim that
  begins with an a.  Where b is cut, that dim is split in sections, one for each place in a;
* ``out:02`` says which operands an output depends on, by default all;
* a word before the line names the sum in question: ``max: ak->a`` takes maxima over k.  ``sum max min:`` is for
  ops that only move values, through which every kind of partial value passes.

A letter that an output shares may be split.  One that is summed away leaves a P, and a term without it must then
be P itself, else it would be added once per rank.  A P in one linear factor of every term passes through.
A lower-case letter that only outputs have is a dim the op makes by itself, of the local size it is told.

What the line cannot say (dims given as arguments) is for rule functions in ``rules``, which write lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from graphzero.errors import SbpError
from graphzero.sbp.reductions import REDUCTIONS
from graphzero.sbp.signature import TensorMeta

REST = "..."
_DIM = re.compile(r"\.\.\.|\([A-Za-z_]+\)|[A-Za-z1_]")


class NumberOperand:
    """Is in an operand's place for a Python number: it has no dims and cannot be partial."""


NUMBER = NumberOperand()
Given = TensorMeta | NumberOperand | None  # what is passed for an operand; None: an optional one left out


@dataclass(frozen=True)
class FactorOperand:
    dims: tuple[str, ...]
    nonlinear: bool = False
    shape_only: bool = False


@dataclass(frozen=True)
class FactorOutput:
    dims: tuple[str, ...]
    depends: frozenset[int]


@dataclass(frozen=True)
class Factors:
    """A parsed line."""

    text: str
    operands: tuple[FactorOperand, ...]
    terms: tuple[tuple[int, ...], ...]  # operands that multiply, by number; terms add
    outputs: tuple[FactorOutput, ...]
    reductions: tuple[str, ...]


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
        if word not in REDUCTIONS:
            raise SbpError(f"factors {text!r}: {word!r} is not a reduction; write {', '.join(REDUCTIONS)}")
    operands: list[FactorOperand] = []
    terms: list[tuple[int, ...]] = []
    for term in left.split("+"):
        first = len(operands)
        operands += [_operand(part.strip(), text) for part in term.split(",")]
        terms.append(tuple(i for i in range(first, len(operands)) if not operands[i].shape_only))
    if left.strip() == "":
        operands, terms = [FactorOperand(())], [(0,)]
    outputs = tuple(_output(part.strip(), operands, text) for part in right.split(","))
    return Factors(text, tuple(operands), tuple(t for t in terms if t), outputs, reductions)


def _operand(part: str, text: str) -> FactorOperand:
    mark = part[:1] if part[:1] in ("~", "?") else ""
    return FactorOperand(_dims(part[len(mark) :].strip(), text), mark == "~", mark == "?")


def _output(part: str, operands: list[FactorOperand], text: str) -> FactorOutput:
    dims, colon, numbers = part.partition(":")
    if colon and not re.fullmatch(r"\d*", numbers.strip()):
        raise SbpError(f"factors {text!r}: after `:` come operand numbers, one digit each, not {numbers!r}")
    depends = {int(n) for n in numbers.strip()} if colon else set(range(len(operands)))
    if depends and max(depends) >= len(operands):
        count = len(operands)
        raise SbpError(f"factors {text!r}: output {part!r} depends on operand {max(depends)}, but there are {count}")
    return FactorOutput(_dims(dims.strip(), text), frozenset(i for i in depends if not operands[i].shape_only))


def _dims(part: str, text: str) -> tuple[str, ...]:
    dims = tuple(_DIM.findall(part))
    if "".join(dims) != part:
        raise SbpError(f"factors {text!r}: cannot read {part!r}; dims are letters, `1`, `_` and one `...`")
    names = [name for dim in dims for name in ([REST] if dim == REST else dim.strip("()"))]
    for name in names:
        if name not in "1_" and names.count(name) > 1:
            raise SbpError(f"factors {text!r}: {name!r} occurs twice in {part!r}; give each dim its own letter")
    return dims
