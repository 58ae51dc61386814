"""Rows that are sorted by expert, worked on row by row, and put back: what a rank may do with its own rows alone.

A mixture of experts sorts the rows of tokens by their experts, multiplies each group with the weights of its expert,
and returns the rows to the order in which they were.  If nothing between the sort and the return reads a row's place in
the sorted order, or another row, then the result of a row depends on that row alone.  So any part of the rows may be
sorted, multiplied and returned by itself: its results are that part of the results of all rows, whatever the router
chooses.

``SortedRows`` proves this for one sort, op by op: what each value of a rank is to that of all ranks (``Fact``).  An op
that works row by row is known by its rule, which may split the rows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import fx

from graphzero.ir import calls, value
from graphzero.ir.aliases import is_copy, is_name
from graphzero.ops import AS_GLOBAL, AS_LOCAL, GROUPED_MM, STOCHASTIC_ROUND, UNIFORM_LIKE
from graphzero.plugins.experts.routing_ops import (
    COUNTED,
    FILLS,
    LIKE,
    SORTS,
    argument_of,
    counted_root,
    entry_sbp,
    finds_rows_by_number,
    is_choice,
    may_enter,
    numbers_rows,
    row_read,
    row_write,
    sorts_upward,
)  # fmt: skip
from graphzero.sbp.op_call import argument_names
from graphzero.sbp.types import B, P, S, Sbp

aten = torch.ops.aten
NEVER = (AS_LOCAL, AS_GLOBAL, GROUPED_MM, UNIFORM_LIKE, STOCHASTIC_ROUND)  # the last two draw by the row's number


class RowKind(Enum):
    """The relation of a rank's value, made from a sort of its own rows, to the value made from a sort of all rows."""

    SORTED = auto()  # rows, in the order of the sort
    NUMBERS = auto()  # sorted rows: the number of each among the rows as given, divided by ``unit``
    PLACES = auto()  # rows as given: the place of each in the sorted order
    GIVEN = auto()  # rows as given, or what each has of several
    COUNTS = auto()  # summands: how many rows each group has
    ENDS = auto()  # summands: where each group ends
    SUM = auto()  # summands, or what else ``Fact.sbp`` says


@dataclass(frozen=True)
class Fact:
    """A fact about a rank's value.  sbp: how those of the ranks lie in that of all, up to the order of rows."""

    kind: RowKind
    sbp: Sbp
    unit: int = 1

    @property
    def is_inner(self) -> bool:
        """Whether only ops of one rank can read the value, because it has no global meaning."""
        return self.kind in (RowKind.SORTED, RowKind.NUMBERS, RowKind.PLACES)


@dataclass(frozen=True)
class RowOp:
    """An op on the rows of one rank.

    facts: of each result, None for one that is not made.
    enters: the operands from outside, each with the SBP in which the rank has it.
    numbered: an operand that numbers the rows, from 0 on.
    """

    facts: tuple[Fact | None, ...]
    enters: Mapping[fx.Node, Sbp] = field(default_factory=dict)
    numbered: fx.Node | None = None


class SortedRows:
    """The ops that depend on one sort of rows.

    ops: by node, in order; empty where some op reads more of the order than each row's own.
    """

    def __init__(self, sort: fx.Node, nodes: Sequence[fx.Node], parts: int) -> None:
        self.sort, self.parts = sort, parts
        self.keys = value.operand(sort)
        self.rows = value.tensor_type(self.keys).shape[0]
        self.ops: dict[fx.Node, RowOp] = {}
        self.facts: dict[fx.Node, Fact] = {}
        for node in nodes if parts > 1 and self.rows % parts == 0 else ():
            if self._concerns(node) and not self._add_op(node):
                self.ops.clear()
                return

    def _concerns(self, node: fx.Node) -> bool:
        """Return whether an op is the sort, depends on it row by row, or counts what it sorts."""
        if node is self.sort or self._count_rows(node) is not None:
            return True
        if any(x in self.ops and value.is_multi(x) or self._is_inner(x) for x in node.all_input_nodes):
            return True
        kinds = [self.facts[x].kind for x in node.all_input_nodes if x in self.facts]
        reads_groups = RowKind.COUNTS in kinds and node.target is aten.cumsum.default
        return reads_groups or (RowKind.ENDS in kinds and node.target is GROUPED_MM)

    def _is_inner(self, x: fx.Node) -> bool:
        return x in self.facts and self.facts[x].is_inner

    def _add_op(self, node: fx.Node) -> bool:
        """Note what an op does; returns whether a rank may do it by itself."""
        if node.op == "output":
            return False
        if node.target is operator.getitem:
            fact = self.ops[value.operand(node)].facts[node.args[1]]  # type: ignore[index]
            op = None if fact is None else RowOp((fact,))
        elif self._reads_dtype_alone(node):
            return True
        else:
            op = next((op for rule in self._rules() if (op := rule(node)) is not None), None)
        if op is None or (value.role_of(node) is not None and any(fact and fact.is_inner for fact in op.facts)):
            return False
        self.ops[node] = op
        if not value.is_multi(node):
            (fact,) = op.facts
            assert fact is not None
            self.facts[node] = fact
        return True

    def _reads_dtype_alone(self, node: fx.Node) -> bool:
        """Return whether an op makes a constant of a size that its arguments say, as ``new_zeros``."""
        return node.target in FILLS and "size" in argument_names(node.target) and value.operand(node) in self.facts

    def _rules(self) -> Iterator[Any]:
        yield from (self._sort_rows, self._count_rows, self._find_ends, self._divide_numbers, self._read_rows)
        yield from (self._put_rows, self._multiply_groups, self._copy_order, self._fill_rows, self._row_by_row)

    # ---- ops that read or make the order

    def _sort_rows(self, node: fx.Node) -> RowOp | None:
        if node.target not in SORTS or not sorts_upward(node):
            return None
        x, is_multi = value.operand(node), value.is_multi(node)
        if node is self.sort:
            facts, enters = (Fact(RowKind.SORTED, S(0)), Fact(RowKind.NUMBERS, S(0))), {x: S(0)}
        elif self._kind(x) is RowKind.NUMBERS and self.facts[x].unit == 1:
            facts, enters = (Fact(RowKind.SORTED, S(0)), Fact(RowKind.PLACES, S(0))), {}
        else:
            return None
        if node is not self.sort and is_multi and any(user.args[1] == 0 for user in node.users):
            return None  # the numbers in their own order, from 0 on
        return RowOp(facts if is_multi else facts[1:], enters)

    def _count_rows(self, node: fx.Node) -> RowOp | None:
        """Rows of each group, which groups divide in the order of the sort: no key lies below the first group."""
        if node.target is not aten.histc.default:
            return None
        x, low = value.operand(node), argument_of(node, "min")
        if not isinstance(low, (int, float)) or low > 0 or low == argument_of(node, "max") or not is_choice(self.keys):
            return None
        root = counted_root(x)
        is_key = root.target is operator.getitem and root.args == (self.sort, 0)
        if not is_key and (root is not counted_root(self.keys) or value.tensor_type(x).shape[0] % self.parts):
            return None
        return RowOp((Fact(RowKind.COUNTS, P),), {} if self._is_inner(x) else {x: S(0)})

    def _find_ends(self, node: fx.Node) -> RowOp | None:
        is_sum = node.target is aten.cumsum.default and self._kind(value.operand(node)) is RowKind.COUNTS
        return RowOp((Fact(RowKind.ENDS, P),)) if is_sum else None

    def _divide_numbers(self, node: fx.Node) -> RowOp | None:
        """Numbers of rows over how many of them a token has: the numbers of tokens, if parts do not cut a token."""
        floors = argument_of(node, "rounding_mode") == "floor" or node.target is aten.floor_divide.default
        x = node.args[0] if floors else None
        if not isinstance(x, fx.Node) or self._kind(x) is not RowKind.NUMBERS or not isinstance(node.args[1], int):
            return None
        unit = self.facts[x].unit * node.args[1]
        good = node.args[1] > 0 and (self.rows // self.parts) % unit == 0
        return RowOp((Fact(RowKind.NUMBERS, S(0), unit),)) if good else None

    def _read_rows(self, node: fx.Node) -> RowOp | None:
        """Rows as given in the order of the sort, or sorted rows as they were given."""
        if (read := row_read(node)) is None:
            return None
        x, index = read
        if self._kind(index) is RowKind.NUMBERS and not self._is_inner(x) and self._has_rows(x, self.facts[index].unit):
            return RowOp((Fact(RowKind.SORTED, S(0)),), {x: S(0)})
        if self._kind(index) is RowKind.PLACES and self._is_sorted(x, S(0)):
            return RowOp((Fact(RowKind.GIVEN, S(0)),))
        return None

    def _put_rows(self, node: fx.Node) -> RowOp | None:
        """Sorted rows added where they were, or rows as given put into the order of the sort.

        Without adding, every row is written once, so nothing of the base is left.
        """
        if (put := row_write(node)) is None:
            return None
        base, index, rows, adds = put
        fact = self.facts.get(index)
        if fact is None or not fact.is_inner or value.tensor_type(rows).shape[:1] != (self.rows,):
            return None
        outside = {} if self._is_inner(base) else {base: S(0)}
        if fact.kind is RowKind.NUMBERS and self._has_rows(base, fact.unit) and (outside if adds else fact.unit == 1):
            if self._is_sorted(rows, S(0)):
                return RowOp((Fact(RowKind.GIVEN, S(0)),), outside)
            counts = not adds and numbers_rows(rows, self.rows)
            return RowOp((Fact(RowKind.PLACES, S(0)),), outside, rows) if counts else None
        if fact.kind is RowKind.PLACES and not self._is_inner(rows) and (not adds or base.target in FILLS):
            return RowOp((Fact(RowKind.SORTED, S(0)),), {**outside, rows: S(0)})
        return None

    # ---- ops on rows

    def _multiply_groups(self, node: fx.Node) -> RowOp | None:
        if (
            node.target is not GROUPED_MM
            or len(node.args) != 3
            or self._kind(value.operand(node, 2)) is not RowKind.ENDS
        ):
            return None
        a, b = value.operand(node, 0), value.operand(node, 1)
        stacked = [len(value.tensor_type(x).shape) == 3 for x in (a, b)]
        split = (S(1 - stacked[1]), S(int(stacked[0])))
        for x, is_stacked, sbp in zip((a, b), stacked, split, strict=True):
            if is_stacked and self._is_inner(x) or not is_stacked and not self._is_sorted(x, sbp):
                return None
        fact = Fact(RowKind.SORTED, S(int(stacked[0]))) if any(stacked) else Fact(RowKind.SUM, P)
        return RowOp((fact,), {x: B for x, is_stacked in zip((a, b), stacked, strict=True) if is_stacked})

    def _copy_order(self, node: fx.Node) -> RowOp | None:
        """Numbers and places in another integer dtype."""
        x = node.args[0] if is_copy(node.target) or is_name(node.target) else None
        fact = self.facts.get(x) if isinstance(x, fx.Node) else None
        is_order = fact is not None and fact.kind in (RowKind.NUMBERS, RowKind.PLACES)
        return RowOp((fact,)) if is_order and value.tensor_type(node).dtype in COUNTED[:2] else None

    def _fill_rows(self, node: fx.Node) -> RowOp | None:
        """A constant, or what is still to be written, in the size of rows."""
        if node.target not in LIKE:
            return None
        sbp = self.facts[value.operand(node)].sbp
        return RowOp((Fact(RowKind.SORTED, sbp),)) if sbp.is_split else None

    def _row_by_row(self, node: fx.Node) -> RowOp | None:
        """An op whose rule may split the rows: what it makes is rows, or adds up."""
        if not calls.is_op(node) or node.target in NEVER:
            return None
        operands, results = value.tensor_operands(node), calls.result_metas(node)
        if not all(self._is_sorted(x) for x in operands if self._is_inner(x)):
            return None
        own = [self.facts[x].sbp if self._is_inner(x) else None for x in operands]
        for signature in calls.allowed_on(node, None):
            pairs = list(zip(operands, own, signature.inputs, strict=True))
            fits = all(want is have if have else may_enter(x, want) for x, have, want in pairs)
            outputs = list(zip((meta for meta in results if meta), signature.outputs, strict=True))
            adds_or_rows = all(sbp.is_partial or self._are_rows(meta.shape, sbp) for meta, sbp in outputs)
            enters = {(x, entry_sbp(x, want)) for x, have, want in pairs if have is None}
            is_one_each = len(dict(enters)) == len(enters)
            if fits and adds_or_rows and is_one_each and not finds_rows_by_number(node, signature):
                new_facts = (Fact(RowKind.SORTED if sbp.is_split else RowKind.SUM, sbp) for sbp in signature.outputs)
                return RowOp(tuple(None if meta is None else next(new_facts) for meta in results), dict(enters))
        return None

    # ---- what values are

    def _kind(self, x: fx.Node) -> RowKind | None:
        return self.facts[x].kind if x in self.facts else None

    def _is_sorted(self, x: fx.Node, sbp: Sbp | None = None) -> bool:
        return self._kind(x) is RowKind.SORTED and (sbp is None or self.facts[x].sbp is sbp)

    def _has_rows(self, x: fx.Node, unit: int) -> bool:
        shape = value.tensor_type(x).shape
        return bool(shape) and shape[0] * unit == self.rows

    def _are_rows(self, shape: Sequence[int], sbp: Sbp) -> bool:
        return sbp.is_split and sbp.sections == 1 and shape[sbp.dim] == self.rows
