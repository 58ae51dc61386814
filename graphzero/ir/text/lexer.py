"""The words of a printed graph: numbers, strings, names, and the arguments that consist of them.

A ``LineReader`` goes over one line from left to right and never back, so that the time of reading grows with the text
alone.  Nothing of a text is evaluated: an argument is one of the forms below.

    8  -1.5  1e-05  inf  nan  (1+2j)  True  None  'text'  [...]  (...)      constants
    name                                                                   a value above
    8/dp  8@dp  8/dp/tp                                                    a rank's size, where its piece begins
    torch.float32  torch.strided  torch.contiguous_format                  dtypes, layouts, memory formats
    device(type='cpu')  device(type='cuda', index=1)                       devices
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphzero.errors import GraphZeroError
from graphzero.ir.text.printer import NAMELESS
from graphzero.ir.value import ROLE_KINDS, Role
from graphzero.sbp.placement import DEVICE_TYPES
from graphzero.sbp.shards import LocalSize, LocalStart
from graphzero.sbp.types import Sbp, parse_sbp

DEEPEST = 16  # brackets in one another
LARGEST = 2**63 - 1
MOST_DIMS = 64  # as torch has it

_WORD = re.compile(r"[^\W\d]\w*")
_KEYWORD = re.compile(r"[^\W\d]\w*[ \t]*=")
_DOTTED = re.compile(r"[\w.]+")
_DECIMAL = r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"
_NUMBER = re.compile(rf"-?\s*(?:inf|nan|{_DECIMAL}j?)(?!\w)")
_COMPLEX = re.compile(rf"\(\s*-?\s*(?:inf|nan|{_DECIMAL})\s*[+-]\s*(?:inf|nan|{_DECIMAL})j\s*\)")
_DEVICE = re.compile(r"device\(\s*type\s*=\s*'(\w+)'\s*(?:,\s*index\s*=\s*([0-9]{1,2}|1[01][0-9]|12[0-7])\s*)?\)")
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.?))", re.DOTALL)
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_SPACES = re.compile(r"\s*")
_WORDS: dict[str, Any] = {"True": True, "False": False, "None": None}
_TORCH_KINDS = (torch.dtype, torch.layout, torch.memory_format)


def read_sbp(word: str, fail: Callable[[str], Exception]) -> Sbp:
    """The SBP that a word says.  fail: makes the error to raise."""
    digits = re.findall(r"[0-9]+", word[:200])
    if len(word) > 60 or any(len(number) > 18 for number in digits) or int((*digits, 0)[0]) > MOST_DIMS:
        raise fail(f"{word!r:.80} is not an SBP of up to {MOST_DIMS} dims")
    try:
        return parse_sbp(word)
    except GraphZeroError as error:
        raise fail(str(error)) from None


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    return chr(int(code, 16)) if code else _PLAIN[match[4]]


class LineReader:
    """A reader of one line, with its position.

    fail: makes the error to raise of what is wrong.  values: what names of values mean.  axes: of the placement.
    """

    def __init__(
        self, text: str, fail: Callable[[str], Exception], values: dict[str, fx.Node], axes: tuple[str, ...] = ()
    ) -> None:
        self.text, self.fail, self.values, self.axes = text, fail, values, axes
        self.at = 0

    # ---- characters

    def take(self, mark: str) -> bool:
        """Go past ``mark``, if it is here, and the spaces around it."""
        self._skip()
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        self._skip()
        return True

    def next(self) -> str:
        """The next character that is not a space, or nothing."""
        self._skip()
        return self.text[self.at : self.at + 1]

    def until(self, mark: str) -> tuple[str, bool]:
        """Read up to ``mark`` and past it, or to the end; returns the text and whether there was a mark."""
        before, mark, _ = self.text[self.at :].partition(mark)
        self.at += len(before) + len(mark)
        return before.strip(), bool(mark)

    def rest(self) -> str:
        """Read all that is left."""
        self._skip()
        remainder, self.at = self.text[self.at :].rstrip(), len(self.text)
        return remainder

    def _skip(self) -> None:
        self._match(_SPACES)

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match is not None else self.at
        return match[0] if match is not None else ""

    # ---- words

    def word(self) -> str:
        """A name, or nothing if none is here."""
        self._skip()
        return self._match(_WORD)

    def dotted(self) -> str:
        """Letters, digits and dots: a path, the name of an op."""
        self._skip()
        return self._match(_DOTTED)

    def keyword(self) -> str:
        """The name of an argument with its ``=``, or nothing."""
        self._skip()
        return self._match(_KEYWORD).rstrip("= \t")

    def string(self) -> str | None:
        """A text in quotes, as Python writes it; None if none is here."""
        self._skip()
        token = self._match(_STRING)
        if not token:
            return None
        try:
            text = _ESCAPE.sub(_unescaped, token[1:-1])
            text.encode()
        except (KeyError, ValueError):  # another escape, or half of a character
            raise self.fail(f"{token:.80} is not a text as repr writes it") from None
        return text

    def path(self) -> str | None:
        """Read one word of a role: a path as it is, or anything in quotes."""
        quoted = self.string()
        return quoted if quoted is not None else self.dotted() or None

    def role(self, name: str = "") -> Role:
        """``kind(path)`` or ``kind(path, key)``; name: of the placeholder, which then is the path that is left out."""
        begin, kind, words = self.at, self.word(), list[str]()
        good = self.take("(")
        while good and not self.take(")"):
            word = self.path()
            good = word is not None and (self.take(",") or self.next() == ")")
            words.append(word or "")
        if not good or len(words) > 2:
            raise self.fail(f"{self.text[begin:].strip()!r:.200}: expected `kind(path)` or `kind(path, key)`")
        if kind not in ROLE_KINDS and not name:
            raise self.fail(f"no role is called {kind}; one of {', '.join(ROLE_KINDS)}")
        return Role(kind, *(words or ([name] if kind not in NAMELESS else [])))

    # ---- arguments

    def items(self, close: str, depth: int = 0) -> list[Any]:
        """Values up to the bracket ``close``, after the one that opened."""
        values: list[Any] = []
        while not self.take(close):
            values.append(self.value(depth))
            if not self.take(",") and self.next() != close:
                raise self.unreadable()
        return values

    def value(self, depth: int = 0) -> Any:
        """Read one argument."""
        begin = self.at
        result = self._primary(depth)
        while self.next() in ("/", "@") and self.next():
            mark, self.at = self.next(), self.at + 1
            result = self._cut(result, LocalSize if mark == "/" else LocalStart, begin)
        return result

    def unreadable(self) -> Exception:
        """The error where no argument, or more than one, is between two commas."""
        if self.next() in ("", ":"):
            return self.fail(f"{self.text[: self.at].strip()!r:.200} is not a call: a bracket is not closed")
        begin = max(self.text.rfind(mark, 0, self.at) for mark in ",([=") + 1
        ends = [end for mark in ",)]" if (end := self.text.find(mark, self.at)) >= 0]
        return self.fail(f"cannot read the argument {self.text[begin : min(ends, default=None)].strip()!r:.200}")

    def _primary(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise self.fail(f"more than {DEEPEST} brackets in one another")
        mark = self.next()
        if number := self._match(_NUMBER) or self._match(_COMPLEX):
            return self._number("".join(number.split()))
        if mark in ("'", '"') and mark:
            string = self.string()
            if string is None:
                raise self.fail("a text in quotes does not end")
            return string
        if self.take("["):
            return self.items("]", depth + 1)
        if self.take("("):
            begin = self.at
            items = self.items(")", depth + 1)
            if len(items) == 1 and not re.search(r",\s*\)\s*\Z", self.text[begin : self.at]):
                raise self.fail("a tuple of one is written with a comma: (x,)")
            return tuple(items)
        return self._named()

    def _number(self, text: str) -> int | float | complex:
        is_whole = text.removeprefix("-").isdigit()
        if len(text) > 400 or (is_whole and not -LARGEST - 1 <= int(text) <= LARGEST):
            raise self.fail(f"{text:.40} is beyond what 64 bits hold")
        return int(text) if is_whole else complex(text) if "j" in text else float(text)

    def _named(self) -> Any:
        begin, name = self.at, self.word()
        if not name:
            raise self.unreadable()
        if name in _WORDS:
            return _WORDS[name]
        if name == "torch" and self.take("."):
            return self._of_torch(self.word())
        if name == "device" and self.next() == "(":
            self.at = begin
            return self._device()
        if name in self.values:
            return self.values[name]
        if self.next() in (".", "(") and self.next():
            raise self.unreadable()
        if keyword.iskeyword(name):
            raise self.fail(f"cannot read the argument {name!r}")
        raise self.fail(f"{name} is not defined above this line")

    def _of_torch(self, name: str) -> Any:
        constant = torch.__dict__.get(name)
        if not isinstance(constant, _TORCH_KINDS):
            raise self.fail(
                f"cannot read the argument 'torch.{name:.80}': of torch a text names dtypes, layouts and memory formats"
            )
        return constant

    def _device(self) -> torch.device:
        match = _DEVICE.match(self.text, self.at)
        if match is None or match[1] not in DEVICE_TYPES:
            kinds = ", ".join(DEVICE_TYPES)
            raise self.fail(f"a device is device(type='cpu') or device(type='cuda', index=0), of {kinds}")
        self.at = match.end()
        return torch.device(match[1]) if match[2] is None else torch.device(match[1], int(match[2]))

    def _cut(self, size: Any, kind: type[LocalSize] | type[LocalStart], begin: int) -> LocalSize | LocalStart:
        """The size that an axis cuts: a number, or the piece of an axis outside it."""
        if type(size) is not int and not isinstance(size, kind):
            raise self.fail(f"{self.text[begin : self.at - 1].strip()!r:.80} is not a size that an axis cuts")
        axis = self.word()
        if axis not in self.axes:
            raise self.fail(f"no axis is called {axis}; the graph's are {', '.join(self.axes)}")
        outside = size
        while isinstance(outside, (LocalSize, LocalStart)):
            if outside.axis == axis:
                raise self.fail(f"axis {axis} cuts a size once")
            outside = outside.size
        return kind(size, axis)  # type: ignore[arg-type]  # checked above
