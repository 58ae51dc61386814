"""Reading a printed graph: the way back from ``printer``, whose docstring says what a line is.

A text is data, wherever it comes from: reading it looks names up in tables and runs nothing, and takes time and memory
in proportion to its length.  What a line says of its op is not believed: ``verify`` computes it again
(``ir.verifier``).
"""

from __future__ import annotations

import copyreg
import keyword
import math
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from graphzero import _compat
from graphzero.errors import GraphZeroError
from graphzero.ir import known_ops
from graphzero.ir.graph import LEVELS, StepGraph
from graphzero.ir.pipeline_stages import stage_of
from graphzero.ir.text.lexer import MOST_DIMS, LineReader, read_sbp
from graphzero.ir.text.printer import FORMAT
from graphzero.ir.value import DTYPE_NAMES, PHASES, PLACEHOLDER_KINDS, ScalarType, TensorType
from graphzero.ops import MOVE
from graphzero.sbp.placement import Placement, placement

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
MOST_RANKS = 2**17  # of a placement that a text names
MOST_AXES = 8
_PLACES = f"a text places on up to {MOST_RANKS} ranks in up to {MOST_AXES} axes"
MOST_BYTES = 2**50  # of one value
_FORMAT = re.compile(r"format +([0-9]+)")
_GRAPH = re.compile(r"graph\b\s*(.*)\(([^()]*)\)\s*(.*)")
_AXIS = re.compile(r"\s*([^\W\d]\w*)\s*=\s*([0-9]+)\s*")
_HEAD = re.compile(rf"({'|'.join(PHASES)})(?: x([1-9][0-9]{{0,5}}))?:")


class ParseError(GraphZeroError, ValueError):
    """Text that is not a graph or a list of passes; says where."""


@_compat.cpu_by_default
def parse(text: str, place: Placement | None = None) -> StepGraph:
    """Read a printed graph.

    Args:
        text: what ``str(graph)`` prints; spaces between columns are free.  A line ``format 1`` may come before it.
        place: the placement, with as many axes as the first line names, of these sizes; by default virtual CPU ranks.

    Raises:
        ParseError: with the number of the line and what was expected; also for a text of another format.
    """
    if not isinstance(text, str):
        raise ParseError(f"parse reads the text of a graph, what str(graph) gives, not {text!r:.40}")
    return _Parser(text, place).graph()


def _reduced(graph: StepGraph) -> tuple[Callable[..., StepGraph], tuple[str, Placement]]:
    """A pickled graph is its text, which is checked when it is read; source lines are not in it."""
    return parse, (str(graph), graph.placement)


copyreg.pickle(StepGraph, _reduced)


class _Parser:
    def __init__(self, text: str, place: Placement | None):
        self.lines = [line.rstrip() for line in text.strip("\n").splitlines()]
        self.values: dict[str, fx.Node] = {}
        self.stages: dict[fx.Node, int | None] = {}
        self.number = next((i for i, line in enumerate(self.lines) if not _is_blank(line)), len(self.lines))
        self.place = place

    def fail(self, problem: str) -> ParseError:
        line = self.lines[self.number] if self.number < len(self.lines) else "(end of text)"
        line = line.strip()
        shown = line if len(line) <= 400 else f"{line[:396]} ..."
        return ParseError(f"line {self.number + 1} of the graph: {problem}\n  > {shown}")

    def graph(self) -> StepGraph:
        name, self.place, level = self._header()
        self.result = StepGraph(name, self.place, fx.Graph(), level, stated=True)
        phase, repeat = "input", 0
        for number in range(self.number + 1, len(self.lines)):
            self.number = number
            line = self.lines[self.number].strip()
            if head := _HEAD.fullmatch(line):
                if head[1] == "input" and (phase != "input" or head[2]):
                    raise self.fail("inputs come first, before every op")
                phase, repeat = head[1], int(head[2] or 0)
            elif re.match(r"return(\W|$)", line):
                self._return(" ".join(part.strip() for part in self.lines[self.number :] if not _is_blank(part)))
                return self.result
            elif not _is_blank(line):
                self._value(line, phase, repeat)
        raise self.fail("a graph ends in a line `return ...`")

    def _reader(self, text: str) -> LineReader:
        return LineReader(text, self.fail, self.values, self.result.placement.names)

    # ---- the first lines

    def _check_format(self) -> None:
        """Go past a line ``format 1``.  Raises ParseError for another format."""
        match = _FORMAT.fullmatch(self.lines[self.number].strip()) if self.number < len(self.lines) else None
        if match is None:
            return
        if match[1] != str(FORMAT):
            raise self.fail(
                f"this graphzero reads programs of format {FORMAT}, and this one is of format {match[1]:.20}; read it "
                "with the version that has printed it, or a newer one"
            )
        self.number += 1
        while self.number < len(self.lines) and _is_blank(self.lines[self.number]):
            self.number += 1

    def _header(self) -> tuple[str, Placement, str]:
        self._check_format()
        match = _GRAPH.fullmatch(self.lines[self.number].strip()) if self.number < len(self.lines) else None
        words = match[2].rstrip().removesuffix(",").split(",") if match is not None else ()
        axes = [_AXIS.fullmatch(word) for word in words]
        if match is None or not all(axes):
            raise self.fail("expected `graph name(axis=ranks, ...) level`")
        reader = LineReader(match[1], self.fail, {})
        quoted = reader.string()
        name, level = match[1].strip() if quoted is None else quoted, match[3] or "captured"
        if not name or (quoted is not None and reader.rest()):
            raise self.fail("expected `graph name(axis=ranks, ...) level`")
        if level not in LEVELS:
            raise self.fail(f"{level!r:.80} is not a level; one of {', '.join(LEVELS)}")
        return name, self._placed([(axis[1], axis[2]) for axis in axes if axis is not None]), level

    def _placed(self, axes: list[tuple[str, str]]) -> Placement:
        fits = len(axes) <= MOST_AXES and all(len(size) < 10 for _, size in axes)
        names, shape = tuple(name for name, _ in axes), tuple(int(size) for _, size in axes if fits)
        if not fits or any(size > MOST_RANKS for size in shape) or math.prod(shape) > MOST_RANKS:
            raise self.fail(_PLACES)
        if self.place is not None:
            if (self.place.names, self.place.hierarchy) != (names, shape):
                raise self.fail(f"it was written for other axes than those of {self.place!r}")
            return self.place
        grid = torch.arange(math.prod(shape)).reshape(shape).tolist()
        try:
            return placement("cpu", grid, names=names, virtual=True)
        except GraphZeroError as error:
            raise self.fail(str(error)) from None

    # ---- a line

    def _value(self, line: str, phase: str, repeat: int) -> None:
        reader = self._reader(line)
        name = reader.word()
        if not name or not reader.take("="):
            raise self._no_line()
        if name in self.values:
            raise self.fail(f"{name} is defined twice")
        node = self._placeholder(reader, name) if phase == "input" else self._op(reader, name)
        if node.name != name or keyword.iskeyword(name):
            raise self.fail(f"a value cannot be called {name}, Python or torch.fx keeps that name; write {name}_1")
        if not reader.take(":"):
            raise self._no_line()
        tail, has_role = reader.until(";")
        node.meta["phase"], node.meta["source"] = phase, ""
        if repeat:
            node.meta["repeat"] = repeat
        tail, _, stage = tail.partition("@")
        node.meta["type"], node.meta["sbp"], node.meta["pins"] = self._tail(tail.strip())
        self._stage(node, stage.strip())
        if has_role:
            node.meta["role"] = reader.role()
        if reader.rest():
            raise self._no_line()
        self.values[name] = node

    def _stage(self, node: fx.Node, text: str) -> None:
        """Read the pipeline stage of a placeholder; that of an op follows from its operands."""
        if text and not re.fullmatch(r"[0-9]{1,4}", text):
            raise self.fail(f"{text!r:.80} is not the number of a pipeline stage, @0")
        if text and node.op == "placeholder":
            node.meta["stage"] = int(text)
        if node.target is MOVE and not (len(node.args) == 2 and type(node.args[1]) is int and node.args[1] >= 0):
            raise self.fail("move takes a value and the number of a pipeline stage, move(x, 1)")
        self.stages[node] = stage_of(node, self.stages)
        if text and self.stages[node] != int(text):
            follows = "no stage" if self.stages[node] is None else f"stage {self.stages[node]}"
            raise self.fail(f"{node.name} is on {follows}, which follows from what it reads")

    def _no_line(self) -> ParseError:
        return self.fail("expected `name = op(arguments) : type  sbp`")

    def _placeholder(self, reader: LineReader, name: str) -> fx.Node:
        role = reader.role(name)
        if role.kind not in PLACEHOLDER_KINDS:
            raise self.fail(
                f"inputs are {', '.join(PLACEHOLDER_KINDS)}; an op is written under `forward:` or a later phase"
            )
        node = self.result.graph.create_node("placeholder", name, name=name)
        node.meta["role"] = role
        return node

    def _op(self, reader: LineReader, name: str) -> fx.Node:
        words = reader.dotted()
        graph = self.result.graph
        if reader.take("["):
            items = reader.items("]")
            if len(items) != 1:
                raise self.fail("one result is picked by its number: y[0]")
            if words not in self.values:
                raise self.fail(f"{words} is not defined above this line")
            return graph.create_node("call_function", operator.getitem, (self.values[words], items[0]), name=name)
        if not words or not reader.take("("):
            raise self.fail(f"{reader.text[: reader.text.rfind(' : ')]!r:.200} is not a call of an op")
        target = known_ops.find_op(words.split("."))
        if target is None:
            raise self.fail(f"no op is called {words:.200}")
        if why := known_ops.why_unfit(target):
            raise self.fail(f"{words:.200} {why}; a program holds what computes on tensors and on numbers alone")
        args, kwargs = self._arguments(reader)
        return graph.create_node("call_function", target, args, kwargs, name=name)

    def _arguments(self, reader: LineReader) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = list[Any](), dict[str, Any]()
        while not reader.take(")"):
            name = reader.keyword()
            if name in kwargs or (not name and kwargs):
                raise self.fail(f"the argument {name or len(args)} occurs twice, or after those with names")
            if name:
                kwargs[name] = reader.value()
            else:
                args.append(reader.value())
            if not reader.take(",") and reader.next() != ")":
                raise reader.unreadable()
        return tuple(args), kwargs

    # ---- types and SBPs

    def _tail(self, text: str) -> tuple[Any, Any, tuple[bool, ...]]:
        if text.startswith("("):
            if not text.endswith(")"):
                raise self.fail(f"{text!r:.200}: expected the types of several results in brackets")
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
        name, bracket, rest = text.partition("[")
        inside, closing, sbp = rest.partition("]")
        sizes = [size.strip() for size in inside.split(",")] if inside.strip() else []
        sizes = sizes[:-1] if sizes and not sizes[-1] else sizes
        numbers = all(size.isdigit() and size.isascii() for size in sizes)
        if not (bracket and closing and numbers and re.fullmatch(r"\w+", name.strip())):
            raise self.fail(f"{text!r:.200}: expected a type such as f32[8, 16], and an SBP")
        dtype = DTYPES.get(name.strip()) or torch.__dict__.get(name.strip())
        if not isinstance(dtype, torch.dtype):
            raise self.fail(f"{name.strip()!r:.80} is not a dtype; {', '.join(DTYPES)}")
        return self._type(dtype, sizes), *self._nd(sbp.strip())

    def _type(self, dtype: torch.dtype, sizes: list[str]) -> TensorType:
        fits = len(sizes) <= MOST_DIMS and all(len(size) < 20 for size in sizes)
        shape = tuple(map(int, sizes)) if fits else ()
        if not fits or math.prod(size or 1 for size in shape) * dtype.itemsize > MOST_BYTES:
            raise self.fail(f"a value has up to {MOST_DIMS} dims and 2**50 bytes")
        return TensorType(dtype, shape)

    def _nd(self, text: str) -> tuple[Any, tuple[bool, ...]]:
        if not text:
            return None, ()
        words = _split(text[1:-1]) if text.startswith("(") and text.endswith(")") else [text]
        if len(words) != len(self.result.placement.names):
            raise self.fail(f"{text!r:.200}: expected one SBP for each axis of {self.result.placement.names}")
        nd = tuple(None if word == "?" else read_sbp(word.removesuffix("!"), self.fail) for word in words)
        pins = tuple(word.endswith("!") for word in words)
        return nd, pins if any(pins) else ()

    # ---- the last lines

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
                outputs = [self._output(word) for word in _split(part)]
        self.result.graph.output((tuple(outputs), aux, updates))

    def _output(self, word: str) -> Any:
        reader = self._reader(word)
        output = reader.value()
        if reader.rest():
            raise self.fail(f"{word!r:.200} is not a value; the graph ends with what it returns")
        return output

    def _pairs(self, words: list[str]) -> Iterable[tuple[str, fx.Node]]:
        for word in words:
            name, _, source = word.partition("=")
            if source.strip() not in self.values:
                raise self.fail(f"{word!r:.200}: {source.strip():.80} is not defined above this line")
            yield name.strip(), self.values[source.strip()]


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
