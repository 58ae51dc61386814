"""Lists of passes as text: ``zero{stage=2},propagate,insert_boxing``.

Passes stand apart by commas, options by spaces.  ``default{...}`` is the whole list that a Graph runs with these
``Options``, ``fuse`` and ``schedule`` are the passes of those groups.  Names and types are those of the passes' own
fields, values are written as ``option_text`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from graphzero.ir.text.lexer import LineReader
from graphzero.ir.text.parser import ParseError
from graphzero.passes.base import Pass, pass_text
from graphzero.passes.option_text import build_options, read_options, refused
from graphzero.passes.pass_list import (
    GROUPS,
    Options,
    default_passes,
    first_on,
    level_after,
    pass_entries,
    pass_names,
)

DEFAULT = "default"
SHOWN = 60  # characters of a text at either side of what is wrong


def print_passes(passes: Iterable[Pass]) -> str:
    """The text of a list of passes."""
    return ",".join(map(pass_text, passes))


def parse_passes(text: str, level: str = "captured", own: Mapping[str, Callable[..., Any]] | None = None) -> list[Pass]:
    """Read a list of passes.

    Args:
        text: what ``print_passes`` gives; spaces around names and marks are free.
        level: of the graph that they are for.
        own: passes of the user's by the names that they have in the text; a dataclass is made with its options.

    Raises:
        ParseError: with the place, and what is allowed there.
    """
    reader = LineReader(text, lambda problem: _error(text, reader.at, problem), {})
    parsed, more = list[Pass](), bool(reader.next())
    while more:
        passes, level = _next(reader, level, own or {})
        parsed += passes
        more = reader.take(",")
    if reader.next():
        raise reader.fail("expected ',' and a pass, or the options in {}")
    return parsed


def _next(reader: LineReader, level: str, own: Mapping[str, Callable[..., Any]]) -> tuple[list[Pass], str]:
    """Read the next passes, for a graph of that level; returns them and the level that they leave."""
    begin, name = reader.at, reader.word()
    if name in own:
        return [_own_pass(reader, own[name], name)], level
    if name == DEFAULT:
        return default_passes(_options(reader, Options, name), since=first_on(level)), pass_entries()[-1].level
    if name not in (*pass_names(), *GROUPS):
        what = f"no pass is called {name!r}" if name else "expected the name of a pass"
        more = f"{', '.join(GROUPS)} for several that go together, and {DEFAULT} for the whole list"
        names = ", ".join((*pass_names(), *own))
        raise refused(reader, begin, f"{what}; the passes are {names}; {more}")
    entry = next(one for one in pass_entries() if name in (one.name, one.group))
    if entry.level != level:
        here = ", ".join(one.name for one in pass_entries() if one.level == level)
        problem = f"{name} takes a {entry.level} graph, and here it is {level}; it can go on with {here}"
        raise refused(reader, begin, problem)
    kind = GROUPS.get(name, entry.kind)
    return [_options(reader, kind, name)], level_after(pass_entries(), pass_entries().index(entry))


def _own_pass(reader: LineReader, pass_: Callable[..., Any], name: str) -> Pass:
    try:
        return _options(reader, pass_, name) if isinstance(pass_, type) else pass_
    except TypeError as error:  # of a field without a text form
        raise reader.fail(f"{name}: {error}") from None


def _options(reader: LineReader, kind: type, name: str) -> Any:
    begin = reader.at
    if reader.take("{"):
        return read_options(reader, kind, name)
    return build_options(reader, begin, kind, {}, name)


def _error(text: str, at: int, problem: str) -> ParseError:
    begin = max(at - SHOWN, 0)
    window = text[begin : at + SHOWN].replace("\n", " ").replace("\t", " ")
    return ParseError(f"passes, character {at + 1}: {problem}\n  {window}\n  {' ' * (at - begin)}^")
