"""Registry of rules: the SBPs that each op may run on. Costs are not considered here.

    rule(torch.ops.aten.mm.default, "mk,kn->mn")

    @rule(torch.ops.aten.squeeze.dim)
    def squeeze(call: Call) -> str: ...

A rule is a line of factors, or a function of a ``Call`` that returns one.  The line's operands are either the
op's tensor arguments in the order of its schema (an absent optional one is then skipped, a number in a tensor's
place is taken as such), or, where the schema has lists of tensors, the tensors that are there.  Of an op that takes
an index, the dim to which it points may be split where the op has another form, see ``Offset``.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar, overload

from graphzero.errors import SbpError
from graphzero.sbp.derive import Cut, derive
from graphzero.sbp.factors import Factors, parse
from graphzero.sbp.op_call import Call, Op, argument_names, frozen, op_name, operands_of, overload_of, with_scalars
from graphzero.sbp.signature import Signature, TensorMeta, all_broadcast

Shape = Sequence[Any]  # of ints or LocalSize
SizeRule = Callable[[Sequence[Shape], Sequence[Shape]], Any]  # local shapes of inputs and outputs -> the argument


class NoRuleWarning(UserWarning):
    """An op has no rule, so every rank runs all of it."""


class GatheredBatchWarning(UserWarning):
    """An op gathers the batch, and after it every rank computes the same gradient of a parameter."""


Lines = tuple[str, ...]  # an op seen in several ways: what any of its lines allows
Written = str | Lines | Factors | Sequence[Signature] | None  # None: nothing better than all-B
Rule = str | Lines | Factors | Callable[[Call], Written]


@dataclass(frozen=True)
class Offset:
    """The form of an op that runs where the dim to which an index points is split: a rank knows where its piece begins.

    op: takes the arguments of the op it replaces, and by keyword ``start`` and ``total``: where this rank's piece
    begins, and how long the whole dim is; that op itself, if it can do without.  rule: what it may do, besides what the
    op itself may.  tensor, dim: the dim in question; the number of an operand, or -1 for the one result, and a number
    or the argument that holds it.
    only: the argument that says whether the op depends on places at all, as ``causal`` of attention; "" if it does.
    cut: the arguments that say over how many ranks the dim is split, and in how many sections; () for any.
    takes_step: whether it also takes ``step``: a rank may hold each ``step``-th place, in sections of one place a rank.
    """

    op: Op
    rule: Rule
    tensor: int
    dim: int | str
    only: str = ""
    takes_step: bool = False
    cut: tuple[str, ...] = ()

    def is_needed(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the op with these arguments depends on the places of the dim."""
        return not self.only or bool(_argument(op, args, kwargs, self.only))

    def dim_in(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], ndim: int) -> int:
        """The number of the dim; a tensor of too few dims has it last, as scores of a single sample have classes."""
        if isinstance(self.dim, int):
            return min(self.dim, ndim - 1)
        return int(_argument(op, args, kwargs, self.dim)) % max(ndim, 1)

    def splits(self, call: Call, signature: Signature, ranks: int | None) -> bool:
        """Return whether a signature splits the dim, in sections that give a rank places equally far apart."""
        metas = (*call.tensors, *(m for m in call.outputs if m is not None))
        sbp, shape = (*signature.inputs, *signature.outputs)[self.tensor], metas[self.tensor].shape
        if not shape or not sbp.is_split or sbp.dim != self.dim_in(call.op, call.args, call.kwargs, len(shape)):
            return False
        if self.cut:
            return (ranks, sbp.sections) == tuple(call[name] for name in self.cut)
        is_stripe = self.takes_step and ranks is not None and sbp.sections * ranks == shape[sbp.dim]
        return sbp.sections == 1 or is_stripe


def _argument(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    return kwargs[name] if name in kwargs else args[argument_names(op).index(name)]


@dataclass(frozen=True)
class RuleEntry:
    """Entry of the registry for an op; see ``rule``."""

    rule: Rule
    sizes: Mapping[str, SizeRule]
    nonempty: bool
    offset: Offset | None


_entries: dict[Op, RuleEntry] = {}
_cache: dict[Any, CallSignatures] = {}
_equal: dict[tuple[Signature, ...], tuple[Signature, ...]] = {}  # one of each: calls of many shapes have the same
_CACHED = 2**12  # calls whose signatures are kept: some 3 KB each
_warned: set[Op] = set()
_own: set[Op] = set()  # ops whose rule graphzero itself gave
RULES = "graphzero.sbp.rules"  # which register themselves, when something first asks
_state = {"loaded": False, "loading": False}
RuleFunction = TypeVar("RuleFunction", bound=Callable[[Call], Written])


@overload
def rule(
    ops: Op | Sequence[Op],
    *,
    sizes: Mapping[str, SizeRule] | None = None,
    nonempty: bool = False,
    offset: Offset | None = None,
) -> Callable[[RuleFunction], RuleFunction]: ...


@overload
def rule(
    ops: Op | Sequence[Op],
    written: Rule,
    *,
    sizes: Mapping[str, SizeRule] | None = None,
    nonempty: bool = False,
    offset: Offset | None = None,
) -> None: ...


def rule(
    ops: Op | Sequence[Op],
    written: Rule | None = None,
    *,
    sizes: Mapping[str, SizeRule] | None = None,
    nonempty: bool = False,
    offset: Offset | None = None,
) -> Any:
    """Give ``ops`` a rule, as a call with a line of factors or as a decorator of a function of a Call.

    ``sizes`` names arguments that hold sizes of tensors, each with a function of the local shapes of inputs and
    outputs that gives what one rank passes.  ``nonempty``: the op's kernel cannot take a piece with no elements.
    ``offset``: the form of an op that takes an index, for the dim to which that points.
    A later rule for an op replaces graphzero's own.  Raises SbpError for a line that cannot be read.
    """
    if written is None:

        def register(function: RuleFunction) -> RuleFunction:
            rule(ops, function, sizes=sizes, nonempty=nonempty, offset=offset)
            return function

        return register
    for line in (written, offset.rule if offset is not None else None):
        for text in line if isinstance(line, tuple) else (line,):
            if isinstance(text, str):
                parse(text)
    if offset is not None:
        offset = replace(offset, op=overload_of(offset.op))
    for op in ops if isinstance(ops, Sequence) else (ops,):
        _register(overload_of(op), RuleEntry(written, dict(sizes or {}), nonempty, offset))
    return None


def _register(op: Op, entry: RuleEntry) -> None:
    if _state["loading"]:
        if op in _own:
            raise SbpError(f"{op_name(op)} has two rules in graphzero.sbp.rules")
        _own.add(op)
        _entries.setdefault(op, entry)
        return
    _entries[op] = entry
    _forget()


def _load() -> None:
    if not _state["loaded"] and not _state["loading"]:
        _state["loading"] = True
        try:
            importlib.import_module(RULES)
            _state["loaded"] = True
        finally:
            _state["loading"] = False


def has_rule(op: Op) -> bool:
    """Return whether ``op`` may run on anything but B."""
    _load()
    return op in _entries


def registered() -> tuple[Op, ...]:
    """All ops that have a rule, by name."""
    _load()
    return tuple(sorted(_entries, key=op_name))


def signatures(
    op: Op,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Any,
    ranks: int | None = None,
    sections: Collection[int] = (),
    pieces: int | None = None,
) -> tuple[Signature, ...]:
    """Signatures of ``op`` on one placement axis, all-B first, then splits in the order of dims, then partials.

    ``args`` and ``kwargs`` hold a TensorMeta for a tensor and any object that is not a constant for a run-time
    number; ``outputs`` is a TensorMeta or a sequence of them, with None for outputs that are not made.  ``ranks``
    leaves out what would cut unevenly where that is wrong; None takes sizes to divide.  ``sections`` are counts of
    sections in which dims may be split as well.  ``pieces``: into how many a dim is cut where other axes cut it too,
    none of which may be empty where the op cannot take that; by default ``ranks``.  An op without a rule gives all-B
    alone and warns once.
    """
    return signatures_of_call(op, args, kwargs, outputs).on_axis(ranks, sections, pieces)


class CallSignatures:
    """Signatures of one call of an op, by how an axis cuts; see ``signatures``."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._by_cut: dict[Any, tuple[Signature, ...]] = {}

    def on_axis(
        self, ranks: int | None = None, sections: Collection[int] = (), pieces: int | None = None
    ) -> tuple[Signature, ...]:
        """The signatures for an axis of so many ranks."""
        key = (ranks, pieces, frozenset(sections))
        allowed = self._by_cut.get(key)
        if allowed is None:
            allowed = _signatures(self.call, Cut(*key))
            allowed = self._by_cut[key] = _equal.setdefault(allowed, allowed)
        return allowed


def signatures_of_call(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> CallSignatures:
    """The signatures of a call for all axes; arguments as for ``signatures``."""
    _load()
    output_metas = (outputs,) if isinstance(outputs, TensorMeta) else tuple(outputs or ())
    key = (op, frozen(tuple(args)), frozen(dict(kwargs)), output_metas)
    known = _cache.get(key)
    if known is None:
        if len(_cache) >= _CACHED:
            _forget()
        known = _cache[key] = CallSignatures(
            Call(op, with_scalars(tuple(args)), with_scalars(dict(kwargs)), output_metas)
        )
    return known


def _forget() -> None:
    _cache.clear()
    _equal.clear()
    _bases.cache_clear()


def _signatures(call: Call, cut: Cut) -> tuple[Signature, ...]:
    first = all_broadcast(len(call.tensors), sum(m is not None for m in call.outputs))
    entry = _entries.get(call.op)
    if entry is None:
        _warn(call.op)
        return (first,)
    signatures = (first, *_written(call, entry.rule, entry.nonempty, cut))
    if entry.offset is not None:
        placed = _written(call, entry.offset.rule, entry.nonempty, cut)
        signatures += tuple(signature for signature in placed if entry.offset.splits(call, signature, cut.ranks))
    return tuple(dict.fromkeys(signatures))


def _written(call: Call, rule: Rule, nonempty: bool, cut: Cut) -> tuple[Signature, ...]:
    """The signatures that one rule gives."""
    written = rule(call) if callable(rule) else rule
    if written is None:
        return ()
    if isinstance(written, tuple) and written and isinstance(written[0], str):
        return sum((_written(call, line, nonempty, cut) for line in written), ())
    if isinstance(written, str):
        written = parse(written)
    if not isinstance(written, Factors):
        return tuple(written)
    given, order = operands_of(call, len(written.operands))
    try:
        derived = derive(written, given, call.outputs, cut, nonempty)
    except SbpError as error:
        raise SbpError(f"rule of {op_name(call.op)}: {error}") from None
    return tuple(Signature(tuple(s.inputs[i] for i in order), s.outputs) for s in derived)


def entry_of(op: Op) -> RuleEntry | None:
    """The registered facts about an op; None if there are none."""
    _load()
    return _entries.get(op)


def base_of(op: Op) -> Op:
    """The op whose offset form this is; any other one itself."""
    return _bases().get(op, op)


def is_offset_form(op: Op) -> bool:
    """Return whether an op is the offset form of another one, or of itself."""
    return op in _bases()


def rules_stamp() -> object:
    """An object that is replaced when an op gets a rule, for caches of what rules say."""
    return _bases()


@lru_cache(maxsize=1)
def _bases() -> dict[Op, Op]:
    _load()
    return {entry.offset.op: op for op, entry in _entries.items() if entry.offset is not None}


def _warn(op: Op) -> None:
    if op not in _warned:
        _warned.add(op)
        name = op_name(op)
        warnings.warn(
            f"{name} has no SBP rule, so every rank gathers its operands and runs all of it: correct, but slower. "
            f'A rule is one line: graphzero.sbp.rule({name}, "mk,kn->mn")',
            NoRuleWarning,
            stacklevel=5,
        )
