"""Distinction of checks from branches, from the bytecode on both sides of ``if tensor:``.

A check is a condition of which one side only raises: ``assert ok``, ``if bad: raise ValueError(...)``.  If a side does
anything else (stores, returns, calls something for its effect, looks at another value and goes on), it is a branch.
"""

from __future__ import annotations

import ast
import dis
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

_LONGEST = 300  # characters of a message
_LEAVES = ("RETURN", "YIELD", "SEND", "RERAISE", "SETUP", "BEFORE_WITH", "IMPORT", "DELETE", "GET_AWAITABLE")
_STORES = ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "STORE_SLICE", "END_ASYNC_FOR")
_FILLERS = ("CACHE", "NOT_TAKEN", "EXTENDED_ARG")
_ENDS = ("RETURN", "RAISE_VARARGS", "RERAISE")
_PRINTING = ("__repr__", "__format__", "handle_torch_function")
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


@dataclass(frozen=True)
class RaisingBranch:
    """A check.  when: the truth of the condition on which it raises.  message: what, as the source says it."""

    when: bool
    message: str


def caller() -> FrameType | None:
    """The frame that asks for the truth of a value: the innermost beyond what is between it and torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_globals.get("__package__") or "").startswith("graphzero.capture"):
        frame = frame.f_back
    while frame is not None and (frame.f_code.co_name == "__torch_function__" or _prints(frame)):
        frame = frame.f_back
    return frame


def _prints(frame: FrameType) -> bool:
    """Return whether it is one of torch's own by which Python asks a tensor for its text."""
    return frame.f_code.co_name in _PRINTING and frame.f_globals.get("__name__", "") in (
        "torch._tensor",
        "torch.overrides",
    )


def check_at(frame: FrameType) -> RaisingBranch | None:
    """The check whose condition ``frame`` is evaluating; None where it is a branch, or something else than a jump."""
    return _check_at(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=4096)
def _check_at(code: CodeType, at: int) -> RaisingBranch | None:
    flow = _ControlFlow(code)
    sides = flow.sides(at)
    if sides is None:
        return None
    raising = {truth: flow.only_raises(start) for truth, start in sides.items()}
    raising_sides = [(truth, raises) for truth, raises in raising.items() if raises is not None]
    if len(raising_sides) != 1 or flow.is_caught(raising_sides[0][1]):
        return None
    (when, offset), lines = raising_sides[0], _lines(code)
    message = message_of(code, next(line for begin, end, line in lines if begin <= offset < end))
    return RaisingBranch(when, message)


def _lines(code: CodeType) -> list[tuple[int, int, int]]:
    return [(begin, end, line or code.co_firstlineno) for begin, end, line in code.co_lines()]


class _ControlFlow:
    """The instructions of one function, and where control goes from each."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.all = list(dis.get_instructions(code))
        self.number = {one.offset: i for i, one in enumerate(self.all)}

    def sides(self, at: int) -> dict[bool, int] | None:
        """Truth of the value that is looked at -> number of the first instruction on that side of the jump."""
        i, turned = self.number[at], False
        if self.all[i].opname == "TO_BOOL":
            i = self._following(i)
        if self.all[i].opname == "UNARY_NOT":
            i, turned = self._following(i), True
        jump = self.all[i]
        if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("_IF_TRUE", "_IF_FALSE")):
            return None
        taken = jump.opname.endswith("_IF_TRUE") != turned
        return {taken: self.number[jump.argval], not taken: i + 1}

    def _following(self, i: int) -> int:
        """The next instruction that does anything."""
        i += 1
        while self.all[i].opname in _FILLERS:
            i += 1
        return i

    def only_raises(self, start: int) -> int | None:
        """Offset of a raise, if every way from ``start`` ends in one and does nothing else that lasts."""
        raises: int | None = None
        for i in self._reached(start, lambda one: one.opname == "RAISE_VARARGS"):
            one = self.all[i]
            if one.opname == "RAISE_VARARGS":
                raises = one.offset
            elif one.opname.startswith((*_LEAVES, *_STORES)) or self._is_statement(i):
                return None
        return raises

    def _is_statement(self, i: int) -> bool:
        """Return whether the result of a call is thrown away: it was called for what it does."""
        return self.all[i].opname == "POP_TOP" and self.all[i - 1].opname.startswith("CALL")

    def _reached(self, start: int, ends: Callable[[Any], bool] = lambda one: False) -> Iterator[int]:
        seen, todo = {start}, [start]
        while todo:
            i = todo.pop()
            yield i
            one = self.all[i]
            if ends(one):
                continue
            new = [n for n in self._next(i) if n not in seen]
            seen.update(new)
            todo += new

    def _next(self, i: int) -> list[int]:
        """Instructions to which control may pass from instruction ``i``, within the function."""
        one = self.all[i]
        following = [i + 1] if not _always_jumps(one.opname) and not one.opname.startswith(_ENDS) else []
        following += [self.number[one.argval]] if one.opcode in _JUMPS else []
        return [n for n in following if n < len(self.all)]

    def is_caught(self, offset: int) -> bool:
        """Return whether the function itself goes on after what is raised there."""
        entries: Any = getattr(dis.Bytecode(self.code), "exception_entries", None)
        if entries is None:  # Python 3.10 keeps no table; SETUP_FINALLY opens what POP_BLOCK closes
            opened = [one for one in self.all if one.opname == "SETUP_FINALLY" and one.offset < offset < one.argval]
            return bool(opened)
        handlers = [self.number[entry.target] for entry in entries if entry.start <= offset < entry.end]
        return any(self._goes_on(handler) for handler in handlers)

    def _goes_on(self, handler: int) -> bool:
        ends = ("RERAISE", "RAISE_VARARGS", "WITH_EXCEPT_START")
        return any(self.all[i].opname == "POP_EXCEPT" for i in self._reached(handler, lambda one: one.opname in ends))


def _always_jumps(name: str) -> bool:
    return name in ("JUMP", "JUMP_NO_INTERRUPT", "JUMP_ABSOLUTE", "JUMP_FORWARD") or name.startswith("JUMP_BACKWARD")


def message_of(code: CodeType, line: int) -> str:
    """Message of the ``raise`` or ``assert`` at a line, as it is written: values are shown in braces."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError, ValueError):
        return "a check"
    inside = line - code.co_firstlineno + 1
    statements = [
        node for node in ast.walk(tree) if isinstance(node, (ast.Raise, ast.Assert)) and _covers(node, inside)
    ]
    return " ".join(_said(statements[-1]).split())[:_LONGEST] if statements else "a check"


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _said(node: ast.Raise | ast.Assert) -> str:
    if isinstance(node, ast.Assert):
        return f"AssertionError: {_text(node.msg) if node.msg is not None else ast.unparse(node.test)}"
    if isinstance(node.exc, ast.Call):
        name = ast.unparse(node.exc.func)
        return f"{name}: {_text(node.exc.args[0])}" if node.exc.args else name
    return ast.unparse(node.exc) if node.exc is not None else "a check"


def _text(word: ast.expr) -> str:
    if isinstance(word, ast.Constant):
        return str(word.value)
    if isinstance(word, ast.JoinedStr):
        return "".join(_text(part) for part in word.values)
    return f"{{{ast.unparse(word.value if isinstance(word, ast.FormattedValue) else word)}}}"
