"""Kernels that write into a given tensor: ``python bench/out_forms.py``.

An op may be given the storage of another value (``out=``), room in the arena, or an operand to write over.  Whether its
kernel then computes the same is not said by torch: some ignore strides, some write beside, some find memory of their
own.  Here every op of PyTorch's own operator samples and of the samples of rules that has such a form is run in it:
strides of result and operands, marks in the memory around, operands as results, in every dtype.  What is printed is
every form that goes wrong though ``graphzero/ir/storage/kernel_forms.py`` allows it.  ``--table`` prints what that file
is to say.
"""

from __future__ import annotations

import argparse
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, NamedTuple

import torch
from _run import in_child, options_of
from memory_layouts import DENSE_ROWS, LAYOUTS, MarkedTensor, StridesAndOffset, largest, layouts_of, same, turned
from op_calls import FAILURES, LARGEST, Call, calls, dense
from torch import Tensor
from torch.utils import _pytree as pytree

from graphzero.ir.storage import inplace, kernel_forms
from graphzero.ir.storage.dense import ROW_MAJOR

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int64,
    torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
SECONDS = 100  # for all that one process tries
TOGETHER = 16  # ops that one process tries first: to start one takes as long as what it does


@dataclass
class Facts:
    """Tries of an op: (form, layout) -> tries, and those that were wrong, of which one is shown."""

    tried: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: Counter[tuple[str, str]] = field(default_factory=Counter)
    shown: dict[tuple[str, str], str] = field(default_factory=dict)

    def note(self, form: str, layout: str, problem: str, call: Call) -> None:
        self.tried[form, layout] += 1
        if problem:
            self.wrong[form, layout] += 1
            self.shown.setdefault((form, layout), f"{call.key()[:150]}: {problem}")

    def right(self, form: str, layouts: Sequence[str] = LAYOUTS) -> bool:
        """Whether a form was tried, and never wrong."""
        found = [key for key in self.tried if key[0] == form and key[1] in layouts]
        return bool(found) and not any(self.wrong[key] for key in found)


# ---- one call in every form


def try_call(call: Call, facts: Facts, layouts: Sequence[str] = LAYOUTS) -> None:
    if call.op in ROW_MAJOR:
        _try_turned(call, facts)
    wanted = _plain(call)
    if wanted is None:
        return
    _note_rows(call, facts, "rows of rows", [call.run(torch.clone)])
    first = next((x for x in call.tensors if x.shape == wanted.result.shape), None)
    if kernel_forms.is_pointwise(call.op) and first is not None and len(call.tensors) > 1:
        after = call.tensors[[x is first for x in call.tensors].index(True) + 1 :]
        made = call.run(lambda x: turned(x) if any(x is one for one in after) else x)
        _note_rows(call, facts, "rows of the first", [made])
    if kernel_forms.out_form(call.op) is not None:
        for name, place in layouts_of(wanted.result.shape, layouts):
            for change in (torch.clone, turned):
                facts.note("out", name, _try_out(call, wanted, place, change), call)
    _try_operands(call, wanted, facts, layouts)


class Wanted(NamedTuple):
    """The expected result of a form, and the largest number in it and the operands, by which rounding is judged."""

    result: Tensor
    scale: float


def _plain(call: Call) -> Wanted | None:
    """The op's own result; None where it has several or none, or draws."""
    try:
        wanted, again = (call.run(lambda x: x) for _ in range(2))
    except FAILURES:
        return None
    if not isinstance(wanted, Tensor) or wanted.layout != torch.strided or wanted.numel() > LARGEST:
        return None
    scale = largest([wanted, *call.tensors])
    return Wanted(dense(wanted), scale) if same(wanted, again, scale) else None


def _try_turned(call: Call, facts: Facts) -> None:
    """Of operands that are turned."""
    try:
        made = [x for x in pytree.tree_leaves(call.run(turned)) if isinstance(x, Tensor)]
    except FAILURES:
        return
    _note_rows(call, facts, "always rows", made)


def _note_rows(call: Call, facts: Facts, form: str, made: list[Tensor]) -> None:
    facts.note(form, "rows", "" if all(x.is_contiguous() for x in made) else "other strides", call)


def _try_operands(call: Call, wanted: Wanted, facts: Facts, layouts: Sequence[str]) -> None:
    """Over each operand like the result, and over one that stands in all their places."""
    alike = [i for i, x in enumerate(call.args) if isinstance(x, Tensor) and x.dim() and _is_like(x, wanted.result)]
    for at in alike:
        _over_one(call, wanted, at, facts, layouts)
    if len(alike) > 1:
        one = call.args[alike[0]]
        twin = Call(call.op, tuple(one if i in alike else x for i, x in enumerate(call.args)), call.kwargs)
        result = _plain(twin)
        if result is not None and _is_like(one, result.result):
            _over_one(twin, result, alike[0], facts, layouts)


def _is_like(x: Tensor, other: Tensor) -> bool:
    return x.shape == other.shape and x.dtype == other.dtype


def _over_one(call: Call, wanted: Wanted, at: int, facts: Facts, layouts: Sequence[str]) -> None:
    """Over argument ``at``, by each form that the op has for that."""
    for name, place in layouts_of(wanted.result.shape, layouts):
        if kernel_forms.out_form(call.op) is not None:
            facts.note(f"out is {at}", name, _try_over(call, wanted, place, at, _into), call)
        if at == 0 and kernel_forms.in_place_form(call.op) is not None:
            facts.note("over first", name, _try_over(call, wanted, place, at, _over), call)


def _into(call: Call, args: Any, kwargs: Any, room: Tensor) -> None:
    form, keyword = kernel_forms.out_form(call.op)  # type: ignore[misc]
    form(*args, **kwargs, **{keyword: room})


def _over(call: Call, args: Any, kwargs: Any, room: Tensor) -> None:
    kernel_forms.in_place_form(call.op)(*args, **kwargs)  # type: ignore[misc]


def _try_out(
    call: Call, wanted: Wanted, strides_and_offset: StridesAndOffset, change: Callable[[Tensor], Tensor]
) -> str:
    """Into a room beside the operands."""
    room, given = MarkedTensor(wanted.result.shape, wanted.result.dtype, strides_and_offset), call.with_tensors(change)
    return _outcome(room, wanted, lambda: _into(call, *given, room.view))


def _try_over(
    call: Call, wanted: Wanted, strides_and_offset: StridesAndOffset, at: int, form: Callable[..., None]
) -> str:
    """Over an operand; operands that are one tensor stay one."""
    room, original = MarkedTensor(wanted.result.shape, wanted.result.dtype, strides_and_offset), call.args[at]
    room.view.copy_(original)
    given = call.with_tensors(lambda x: room.view if x is original else x.clone())
    return _outcome(room, wanted, lambda: form(call, *given, room.view))


def _outcome(room: MarkedTensor, wanted: Wanted, run: Callable[[], None]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run()
    except (*FAILURES, Warning) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return room.problem(*wanted)


# ---- all calls


def measure(
    dtypes: Sequence[torch.dtype], most: int = 4, every: int = 1, allowed_only: bool = False
) -> dict[Any, Facts | None]:
    """The facts of every op that was met, None of those that no process outlives.

    allowed_only: what goes wrong and is in no table may be another op's doing.  A table needs to know it.
    """
    by_op: dict[Any, list[Call]] = defaultdict(list)
    for dtype in dtypes:
        for call in calls(dtype, _is_told, most, every).values():
            by_op[call.op].append(call)
    found: dict[Any, Facts | None] = {}
    ops = iter(by_op)
    while some := list(islice(ops, TOGETHER)):
        known, *_ = in_child(lambda some=some: {i: _facts(by_op[op], LAYOUTS) for i, op in enumerate(some)}, SECONDS)
        known = known or {}
        for i, op in enumerate(some):  # what went wrong may be another op's doing
            wrong = i in known and (problems({op: known[i]}) if allowed_only else any(known[i].wrong.values()))
            clean = i in known and not wrong
            found[op] = known[i] if clean else facts_of(by_op[op]) or facts_of(by_op[op], DENSE_ROWS)
    return {op: facts for op, facts in found.items() if facts is None or facts.tried}


def _is_told(op: Any) -> bool:
    has_form = kernel_forms.out_form(op) is not None or kernel_forms.in_place_form(op) is not None
    return has_form or op in ROW_MAJOR


def facts_of(given: Sequence[Call], layouts: Sequence[str] = LAYOUTS) -> Facts | None:
    """Facts of calls from another process, since some kernels overwrite other memory; None if it dies."""
    found, *_ = in_child(lambda: _facts(given, layouts), SECONDS)
    if found is not None:
        for layout in set(LAYOUTS) - set(layouts):
            found.note("out", layout, "the process died", given[0])
    return found


def _facts(given: Sequence[Call], layouts: Sequence[str]) -> Facts:
    facts = Facts()
    for call in given:
        try_call(call, facts, layouts)
    return facts


# ---- tables


@dataclass(frozen=True)
class Tables:
    """The tables of ``kernel_forms``, by name."""

    ANY_STRIDES: frozenset[str]
    ROWS_ONLY: frozenset[str]
    OVER_FIRST: frozenset[str]
    NOT_IN_ROWS: frozenset[str]
    NOT_AS_FIRST: frozenset[str]
    NOT_OVER: frozenset[str]

    @classmethod
    def said(cls) -> Tables:
        return cls(*(getattr(kernel_forms, one.name) for one in fields(cls)))

    @classmethod
    def of(cls, found: Mapping[Any, Facts | None]) -> Tables:
        """The tables as measured."""
        known = {op: facts for op, facts in found.items() if facts is not None}
        strided = {op for op, facts in known.items() if facts.right("out")}
        rows = {op for op, facts in known.items() if facts.right("out", DENSE_ROWS)} - strided
        first = {op for op, facts in known.items() if facts.right("over first")}
        known = {op: known[op] for op in strided | rows | first}
        pointwise = {op: facts for op, facts in known.items() if kernel_forms.is_pointwise(op)}
        lying = {op for op, facts in known.items() if not facts.right("rows of rows")}
        apart = {op for op, facts in pointwise.items() if len(_places(op)) > 1 and not facts.right("rows of the first")}
        over = {
            f"{kernel_forms.name_of(op)}/{at}"
            for op, facts in pointwise.items()
            for at in _places(op)
            if not facts.right(f"out is {at}", LAYOUTS if op in strided else DENSE_ROWS)
            and not (at == 0 and op not in strided | rows and op in first)
        }
        named = (frozenset(map(kernel_forms.name_of, ops)) for ops in (strided, rows, first, lying, apart))
        return cls(*(*named, frozenset(over)))

    def text(self) -> str:
        """As it is to stand in the file."""
        return "\n".join(f'{one.name} = _names("""\n{_filled(getattr(self, one.name))}\n""")' for one in fields(self))


def _filled(names: frozenset[str]) -> str:
    return textwrap.fill(" ".join(sorted(names)), 120, break_on_hyphens=False, break_long_words=False)


def _places(op: Any) -> list[int]:
    """The arguments that are tensors."""
    return [i for i, a in enumerate(op._schema.arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")]


def _allowed(op: Any) -> dict[str, Sequence[str]]:
    """Form -> the layouts in which graphzero takes the op for right."""
    found: dict[str, Sequence[str]] = {}
    if kernel_forms.writing(op) is not None:
        found["out"] = DENSE_ROWS if kernel_forms.writes_rows(op) else LAYOUTS
        found |= {f"out is {at}": found["out"] for at in _places(op) if inplace.works_over(op, at, "cpu")}
    if kernel_forms.over_first(op) is not None:
        found["over first"] = LAYOUTS
    if kernel_forms.makes_rows(op):
        found["rows of rows"] = LAYOUTS
    if kernel_forms.follows_first(op):
        found["rows of the first"] = LAYOUTS
    if op in ROW_MAJOR:
        found["always rows"] = LAYOUTS
    return found


def problems(found: Mapping[Any, Facts | None]) -> list[str]:
    """Forms that the tables allow and that gave a wrong result."""
    lines = []
    for op, facts in found.items():
        name, allowed = kernel_forms.name_of(op), _allowed(op)
        if facts is None:
            lines += [f"{name}: the process died"] * bool(allowed)
        else:
            lines += [
                f"{name}, {form}, {layout}: {text}"
                for (form, layout), text in facts.shown.items()
                if layout in allowed.get(form, ())
            ]
    return sorted(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", default=[str(d).removeprefix("torch.") for d in DTYPES])
    parser.add_argument("--every", type=int, default=1, help="take every n-th operator")
    parser.add_argument("--most", type=int, default=4, help="samples of one operator and dtype")
    parser.add_argument("--table", action="store_true", help="print the tables as they are to stand in the file")
    options = options_of(parser)
    warnings.simplefilter("ignore")
    found = measure([getattr(torch, name) for name in options.dtypes], options.most, options.every)
    if options.table:
        print(Tables.of(found).text())
        return
    wrong = problems(found)
    print(*wrong, f"{len(found)} ops, {len(wrong)} wrong", sep="\n\n")
    if wrong:
        raise SystemExit("the tables allow what goes wrong")


if __name__ == "__main__":
    main()
