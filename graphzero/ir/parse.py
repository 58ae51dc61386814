"""Reading a printed graph: the way back from ``ir.text``, whose docstring says what a line is."""

from __future__ import annotations

import ast
import keyword
import math
import operator
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from graphzero.errors import GraphZeroError
from graphzero.ir import ops
from graphzero.ir.graph import LEVELS, StepGraph
from graphzero.ir.text import MODULES, NAMELESS, OVERLOADS
from graphzero.ir.value import DTYPE_NAMES, PHASES, PLACEHOLDER_KINDS, Role, ScalarType, TensorType
from graphzero.sbp.local import LocalSize, LocalStart
from graphzero.sbp.placement import Placement, placement
from graphzero.sbp.types import parse_sbp

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class ParseError(GraphZeroError, ValueError):
    """Text that is no graph; says which line."""


def parse(text: str, place: Placement | None = None) -> StepGraph:
    """Read a printed graph.

    Args:
        text: what ``str(graph)`` prints; spaces between columns are free.
        place: the placement; by default virtual CPU ranks in the hierarchy that the first line names.

    Raises:
        ParseError: with the number of the line and what was expected.
    """
    if not isinstance(text, str):
        raise ParseError(f"parse reads the text of a graph, what str(graph) gives, not {text!r:.40}")
    return _Parser(text, place).graph()


class _Parser:
    def __init__(self, text: str, place: Placement | None):
        self.lines = [line.rstrip() for line in text.strip("\n").splitlines()]
        self.values: dict[str, fx.Node] = {}
        self.number = next((i for i, line in enumerate(self.lines) if not _is_blank(line)), len(self.lines))
        self.place = place

    def fail(self, problem: str) -> ParseError:
        line = self.lines[self.number] if self.number < len(self.lines) else "(end of text)"
        return ParseError(f"line {self.number + 1} of the graph: {problem}\n  > {line.strip()}")

    def graph(self) -> StepGraph:
        name, place, level = self._header()
        self.result = StepGraph(name, place, fx.Graph(), level)
        phase = "input"
        for number in range(self.number + 1, len(self.lines)):
            self.number = number
            line = self.lines[self.number].strip()
            if line.endswith(":") and line[:-1] in PHASES:
                if line == "input:" and phase != "input":
                    raise self.fail("inputs stand first, above every op")
                phase = line[:-1]
            elif re.match(r"return(\W|$)", line):
                self._return(" ".join(part.strip() for part in self.lines[self.number :] if not _is_blank(part)))
                return self.result
            elif not _is_blank(line):
                self._value(line, phase)
        raise self.fail("a graph ends in a line `return ...`")

    def _header(self) -> tuple[str, Placement, str]:
        line = self.lines[self.number].strip() if self.number < len(self.lines) else ""
        found = re.fullmatch(r"graph\s+(.+)\(((?:\s*\w+\s*=\s*\d+\s*,?)+)\)(?:\s+(\w+))?", line)
        if found is None:
            raise self.fail("expected `graph name(axis=ranks, ...) level`")
        level = found[3] or "captured"
        if level not in LEVELS:
            raise self.fail(f"{level!r} is no level; one of {', '.join(LEVELS)}")
        axes = [pair.split("=") for pair in found[2].replace(" ", "").split(",")]
        sizes = [int(size) for _, size in axes]
        if self.place is None:
            grid = torch.arange(math.prod(sizes)).reshape(sizes).tolist()
            try:
                self.place = placement("cpu", grid, names=tuple(name for name, _ in axes), virtual=True)
            except GraphZeroError as error:
                raise self.fail(str(error)) from None
        return found[1], self.place, level

    def _value(self, line: str, phase: str) -> None:
        found = re.fullmatch(r"(\w+)\s*=\s*(.*\S)\s+:\s+(.+)", line)
        if found is None:
            raise self.fail("expected `name = op(arguments) : type  sbp`")
        name, text, tail = found.groups()
        tail, _, role = tail.partition(";")
        if name in self.values:
            raise self.fail(f"{name} is defined twice")
        node = self._placeholder(name, text) if phase == "input" else self._op(name, text)
        if node.name != name or keyword.iskeyword(name):
            raise self.fail(f"a value cannot be called {name}, Python or torch.fx keeps that name; write {name}_1")
        node.meta["phase"], node.meta["source"] = phase, ""
        node.meta["type"], node.meta["sbp"], node.meta["pins"] = self._tail(tail.strip())
        if role:
            node.meta["role"] = self._role(role.strip(), "")
        self.values[name] = node

    def _placeholder(self, name: str, text: str) -> fx.Node:
        role = self._role(text, name)
        if role.kind not in PLACEHOLDER_KINDS:
            raise self.fail(
                f"inputs are {', '.join(PLACEHOLDER_KINDS)}; an op stands under `forward:` or a later phase"
            )
        node = self.result.graph.create_node("placeholder", name, name=name)
        node.meta["role"] = role
        return node

    def _role(self, text: str, name: str) -> Role:
        found = re.fullmatch(r"(\w+)\((.*)\)", text)
        if found is None:
            raise self.fail(f"{text!r}: expected `kind(path)` or `kind(path, key)`")
        words = re.findall(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[\w.]+", found[2])
        words = [ast.literal_eval(word) if word[0] in "'\"" else word for word in words]
        if len(words) > 2:
            raise self.fail(f"{text!r}: expected `kind(path)` or `kind(path, key)`")
        return Role(found[1], *(words or ([name] if found[1] not in NAMELESS else [])))

    def _op(self, name: str, text: str) -> fx.Node:
        try:
            call = ast.parse(text, mode="eval").body
        except SyntaxError as error:
            raise self.fail(f"{text!r} is no call: {error.msg}") from None
        graph = self.result.graph
        if isinstance(call, ast.Subscript):
            return graph.create_node(
                "call_function", operator.getitem, (self._read(call.value), self._read(call.slice)), name=name
            )
        if not isinstance(call, ast.Call):
            raise self.fail(f"{text!r} is no call of an op")
        target = self._target(call.func)
        args = tuple(self._read(arg) for arg in call.args)
        kwargs = {str(word.arg): self._read(word.value) for word in call.keywords}
        return graph.create_node("call_function", target, args, kwargs, name=name)

    def _target(self, func: ast.expr) -> Any:
        words = ast.unparse(func).split(".")
        found = _find_op(words)
        if found is None:
            raise self.fail(f"no op is called {'.'.join(words)}")
        return found

    def _read(self, x: ast.expr) -> Any:
        match x:
            case ast.Constant():
                return x.value
            case ast.Name(id="inf" | "nan"):
                return float(x.id)
            case ast.Name():
                if x.id not in self.values:
                    raise self.fail(f"{x.id} is not defined above this line")
                return self.values[x.id]
            case ast.List():
                return [self._read(item) for item in x.elts]
            case ast.Tuple():
                return tuple(self._read(item) for item in x.elts)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) | ast.Name(id="inf" | "nan")):
                return -self._read(x.operand)
            case ast.BinOp(left=size, op=ast.Div(), right=ast.Name(id=axis)):
                return LocalSize(self._size(size, LocalSize), self._axis(axis))
            case ast.BinOp(left=size, op=ast.MatMult(), right=ast.Name(id=axis)):
                return LocalStart(self._size(size, LocalStart), self._axis(axis))
            case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=complex())):
                return ast.literal_eval(x)
            case ast.Call(func=ast.Name(id="device"), args=[], keywords=words):
                return torch.device(*(ast.literal_eval(word.value) for word in words))
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if hasattr(torch, name):
                return getattr(torch, name)
        raise self.fail(f"cannot read the argument {ast.unparse(x)!r}")

    def _size(self, x: ast.expr, kind: type) -> Any:
        """What an axis cuts: a number, or what axes outside it have cut."""
        found = self._read(x)
        if isinstance(found, (int, kind)):
            return found
        raise self.fail(f"{ast.unparse(x)!r} is no size that an axis cuts")

    def _axis(self, name: str) -> str:
        if name not in self.result.placement.names:
            raise self.fail(f"no axis is called {name}; the graph's are {', '.join(self.result.placement.names)}")
        return name

    def _tail(self, text: str) -> tuple[Any, Any, tuple[bool, ...]]:
        if text.startswith("("):
            if not text.endswith(")"):
                raise self.fail(f"{text!r}: expected the types of several results in brackets")
            pairs = [self._one(part) for part in _split(text[1:-1])]
            if any(pins for _, _, pins in pairs):
                raise self.fail("several results have no pins; pin the value that picks one, `a = y[0]`")
            nds = tuple(nd for _, nd, _ in pairs)
            return tuple(t for t, _, _ in pairs), nds if any(nd is not None for nd in nds) else None, ()
        return self._one(text)

    def _one(self, text: str) -> tuple[Any, Any, tuple[bool, ...]]:
        if text in ("float", "int", "bool"):
            return ScalarType(text), None, ()
        if text == "_":
            return None, None, ()
        found = re.fullmatch(r"(\w+)\[\s*((?:\d+\s*,\s*)*\d*)\s*\]\s*(.*)", text)
        if found is None:
            raise self.fail(f"{text!r}: expected a type such as f32[8, 16], and an SBP")
        dtype = DTYPES.get(found[1]) or getattr(torch, found[1], None)
        if not isinstance(dtype, torch.dtype):
            raise self.fail(f"{found[1]!r} is no dtype; {', '.join(DTYPES)}")
        shape = tuple(int(size) for size in found[2].split(",") if size)
        return TensorType(dtype, shape), *self._nd(found[3])

    def _nd(self, text: str) -> tuple[Any, tuple[bool, ...]]:
        if not text:
            return None, ()
        words = _split(text[1:-1]) if text.startswith("(") else [text]
        if len(words) != len(self.result.placement.names):
            raise self.fail(f"{text!r}: expected one SBP for each axis of {self.result.placement.names}")
        try:
            nd = tuple(None if word[0] == "?" else parse_sbp(word.removesuffix("!")) for word in words)
        except GraphZeroError as error:
            raise self.fail(str(error)) from None
        pins = tuple(word.endswith("!") for word in words)
        return nd, pins if any(pins) else ()

    def _return(self, text: str) -> None:
        outputs: list[Any] = []
        aux: dict[str, fx.Node] = {}
        updates: dict[str, fx.Node] = {}
        for part in _split(text.removeprefix("return"), ";"):
            if part.startswith("update(") and part.endswith(")"):
                updates = dict(self._pairs(_split(part[7:-1])))
            elif re.match(r"[\w.]+=", part):
                aux |= dict(self._pairs([part]))
            else:
                outputs = [self._literal(word) for word in _split(part)]
        self.result.graph.output((tuple(outputs), aux, updates))

    def _literal(self, word: str) -> Any:
        try:
            return self._read(ast.parse(word, mode="eval").body)
        except SyntaxError as error:
            raise self.fail(f"{word!r} is no value: {error.msg}; the graph ends with what it returns") from None

    def _pairs(self, words: list[str]) -> Iterable[tuple[str, fx.Node]]:
        for word in words:
            name, _, source = word.partition("=")
            if source.strip() not in self.values:
                raise self.fail(f"{word!r}: {source} is not defined above this line")
            yield name.strip(), self.values[source.strip()]


def _find_op(words: list[str]) -> Any:
    """The op written as ``words``: our own, ATen's, ``operator.mul``, or ``namespace.op.overload``.

    Nothing else: a text from elsewhere names ops and arithmetic, never a function of some module.
    """
    if len(words) == 1 and words[0] in ops.BY_NAME:
        return ops.BY_NAME[words[0]]
    if len(words) == 2 and words[0] in MODULES:
        arithmetic = words[0] != "torch" or words[1].startswith(("sym_", "_sym_"))
        return getattr(MODULES[words[0]], words[1], None) if arithmetic else None
    for namespace in (torch.ops.graphzero, torch.ops.aten):
        packet = getattr(namespace, words[0], None) if len(words) <= 2 else None
        if packet is not None:
            names = (words[1],) if len(words) == 2 else OVERLOADS
            return next((getattr(packet, name) for name in names if name in packet.overloads()), None)
    if len(words) == 3 and hasattr(getattr(torch.ops, words[0]), words[1]):
        return getattr(getattr(getattr(torch.ops, words[0]), words[1]), words[2], None)
    return None


def _is_blank(line: str) -> bool:
    return not line.strip() or line.strip().startswith("#")


def _split(text: str, at: str = ",") -> list[str]:
    """Cut at the commas, or at another character, outside brackets and quotes."""
    parts, depth, quote, begin, escaped = [], 0, "", 0, False
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and not escaped
        elif char in "'\"":
            quote = char
        elif char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
        elif char == at and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    return [part for part in (*parts, text[begin:].strip()) if part]
