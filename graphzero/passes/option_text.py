r"""Text form of the options of passes, by type: written and parsed.  Nothing in a text is evaluated.

zero{stage=3 axis=(dp_shard)}                                    numbers, true, false, none; several in brackets
    keep_gathered{keep_gathered=('model.*', head.weight)}                     names, in quotes if they are not [\w.]+
pin{placed={batch(x)=S(1) param(w)=(B, S(0))}}                   roles with their SBPs, one or one for each axis
propagate{links=({latency=1e-05 bandwidth=1e9}, {latency=0 bandwidth=4e10})}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from graphzero.errors import GraphZeroError
from graphzero.ir.text.lexer import LineReader, read_sbp
from graphzero.ir.text.printer import role_text, word
from graphzero.ir.value import Role
from graphzero.sbp.types import Sbp


@dataclass(frozen=True)
class Form:
    """Text form of the values of a type.  hint: in words, for messages."""

    hint: str
    read: Callable[[LineReader], Any]
    write: Callable[[Any], str]


def refused(reader: LineReader, begin: int, problem: str) -> Exception:
    """The error to raise of what is at ``begin``."""
    reader.at = begin
    reader.next()
    return reader.fail(problem)


# ---- options


@cache
def forms_of(kind: type) -> Mapping[str, Form]:
    """The options of a pass, or the parts of another dataclass, by name."""
    hints = get_type_hints(kind)
    written = [one.name for one in _fields(kind) if one.init and one.metadata.get("in_text", True)]
    return {name: form_of(hints[name]) for name in written}


def read_options(reader: LineReader, kind: type, what: str) -> Any:
    """An object of ``kind`` from ``name=value name=value }``, after the bracket that opened.

    what: the object is called in messages.
    """
    forms, values, begin = forms_of(kind), dict[str, Any](), reader.at
    while not reader.take("}"):
        at, name = reader.at, reader.word()
        if name and name not in forms:
            raise refused(reader, at, f"{what} has no option {name!r}; it has {', '.join(forms) or 'none'}")
        if name in values:
            raise refused(reader, at, f"{name} occurs twice")
        if not name or not reader.take("="):
            raise refused(reader, at, "expected `name=value`, with a space to the next, or '}'")
        values[name] = forms[name].read(reader)
    return build_options(reader, begin, kind, values, what)


def build_options(reader: LineReader, begin: int, kind: type, options: Mapping[str, Any], what: str) -> Any:
    """The object, or the error for options that are missing or do not fit."""
    missing = [option.name for option in _fields(kind) if _default(option) is MISSING and option.name not in options]
    if missing:
        raise refused(reader, begin, f"{what} needs {', '.join(missing)}")
    try:
        return kind(**options)
    except GraphZeroError as error:
        raise refused(reader, begin, str(error)) from None


def write_options(x: Any) -> str:
    """``{name=value ...}``; options that say nothing (none, false, ...), as by default, are left out."""
    kind: Any = type(x)
    forms = forms_of(kind)
    defaults = {option.name: _default(option) for option in _fields(kind)}
    written = {name: y for name in forms if (y := getattr(x, name)) or y != defaults[name]}
    return f"{{{' '.join(f'{name}={forms[name].write(written[name])}' for name in written)}}}" if written else ""


def _fields(kind: type) -> tuple[Field[Any], ...]:
    return fields(kind) if is_dataclass(kind) else ()


def _default(one: Field[Any]) -> Any:
    return one.default_factory() if one.default_factory is not MISSING else one.default


# ---- values


@cache
def form_of(type_: Any) -> Form:
    """The form of a type.  Raises TypeError for one that no option has yet."""
    origin, args = get_origin(type_), get_args(type_)
    if type_ in _PLAIN:
        return _PLAIN[type_]
    if origin is UnionType and args[1:] == (NoneType,):
        return _optional(form_of(args[0]))
    if origin is tuple and args[1:] == (...,):
        return _nd() if args[0] is Sbp else _several(form_of(args[0]))
    if origin is not None and issubclass(origin, Mapping) and args[0] is Role:
        return _by_role(form_of(args[1]))
    if isinstance(type_, type) and is_dataclass(type_):
        return _record(type_)
    raise TypeError(f"an option of type {type_} has no text form yet")


def _plain(hint: str, read: Callable[[LineReader], Any], write: Callable[[Any], str]) -> Form:
    """read: gives None where something else is."""

    def checked(reader: LineReader) -> Any:
        reader.next()
        begin, value = reader.at, read(reader)
        if value is None:
            raise refused(reader, begin, f"expected {hint}")
        return value

    return Form(hint, checked, write)


def _number(kind: type, *kinds: type) -> Callable[[LineReader], Any]:
    """Reads a number of these types as the first of them; gives None for anything else."""

    def read(reader: LineReader) -> Any:
        number = reader.value() if reader.next() and reader.next() in "-0123456789" else None
        return kind(number) if type(number) in (kind, *kinds) else None

    return read


def _sbp(reader: LineReader) -> Sbp | None:
    begin, name = reader.at, reader.word()
    if name and reader.take("("):
        inside, closed = reader.until(")")
        name = f"{name}({inside})" if closed else ""
    return read_sbp(name, lambda problem: refused(reader, begin, problem)) if name else None


_PLAIN: dict[Any, Form] = {
    bool: _plain(
        "true or false", lambda reader: {"true": True, "false": False}.get(reader.word()), lambda x: str(x).lower()
    ),
    int: _plain("a whole number", _number(int), repr),
    float: _plain("a number", _number(float, int), repr),
    str: _plain("a name", LineReader.path, word),
    Sbp: _plain("an SBP", _sbp, str),
    Role: _plain("a role", LineReader.role, role_text),
}


def _open(reader: LineReader, bracket: str, hint: str) -> None:
    """Go past a bracket."""
    reader.next()
    begin = reader.at
    if not reader.take(bracket):
        raise refused(reader, begin, f"expected {hint}")


def _optional(inner: Form) -> Form:
    return Form(
        f"{inner.hint}; or none",
        lambda reader: None if reader.take("none") else inner.read(reader),
        lambda x: "none" if x is None else inner.write(x),
    )


def _several(item: Form) -> Form:
    def read(reader: LineReader) -> tuple[Any, ...]:
        _open(reader, "(", hint)
        items = []
        while not reader.take(")"):
            items.append(item.read(reader))
            if not reader.take(",") and reader.next() != ")":
                raise reader.fail("expected ',' or ')'")
        return tuple(items)

    hint = f"({item.hint}, ...)"
    return Form(hint, read, lambda x: f"({', '.join(map(item.write, x))})")


def _nd() -> Form:
    sbp = form_of(Sbp)
    several = _several(sbp)
    return Form(
        "an SBP, or one for each axis, (B, S(0))",
        lambda reader: several.read(reader) if reader.next() == "(" else (sbp.read(reader),),
        lambda x: str(x[0]) if len(x) == 1 else several.write(x),
    )


def _by_role(form: Form) -> Form:
    role = form_of(Role)

    def read(reader: LineReader) -> dict[Role, Any]:
        _open(reader, "{", hint)
        values = dict[Role, Any]()
        while not reader.take("}"):
            at, key = reader.at, role.read(reader)
            if key in values or not reader.take("="):
                raise refused(
                    reader, at, f"{role_text(key)} occurs twice" if key in values else "expected `role=value`"
                )
            values[key] = form.read(reader)
        return values

    hint = f"{{role=value ...}}: {role.hint}, {form.hint}"
    return Form(hint, read, lambda x: f"{{{' '.join(f'{role_text(key)}={form.write(y)}' for key, y in x.items())}}}")


def _record(kind: type) -> Form:
    name = kind.__name__
    hint = f"{{{' '.join(f'{option.name}=...' for option in _fields(kind))}}}"

    def read(reader: LineReader) -> Any:
        _open(reader, "{", hint)
        return read_options(reader, kind, name)

    return Form(hint, read, write_options)
