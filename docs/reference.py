"""Writes docs/reference.md from the docstrings of the public names: ``python docs/reference.py``."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from graphzero.config import GraphConfig
from graphzero.config.members import plugin_members

PAGE = pathlib.Path(__file__).with_name("reference.md")
ROOT = PAGE.parents[1]
MODULES = {
    "graphzero": "gz",
    "graphzero.sbp": "gz.sbp",
    "graphzero.passes": "gz.passes",
    "graphzero.testing": "gz.testing",
    "graphzero.plugins.check": "graphzero.plugins.check",
}
NOT_FOR_USERS = "For the rest of graphzero:"  # how the text of a method begins that is left out
HEAD = """# Reference

The public names, from their docstrings. `python docs/reference.py` writes this page; do not edit it.

Shapes are global unless a text says otherwise. Memory and traffic are in bytes per rank, times in seconds.
"""


def text() -> str:
    """The page."""
    lines = [HEAD]
    for module, short in MODULES.items():
        lines += _module(module, short)
    return "\n".join(lines)


def undocumented() -> list[str]:
    """Public names without a docstring."""
    missing = []
    for module, short in MODULES.items():
        for name, member in _names(module):
            members = _members(member) if inspect.isclass(member) else []
            missing += [f"{short}.{name}"] * (_is_code(member) and not _doc(member))
            missing += [f"{short}.{name}.{inner}" for inner, text in members if not _doc(text)]
    return missing


def _names(module: str) -> list[tuple[str, Any]]:
    loaded = importlib.import_module(module)
    names = {*loaded.__all__, *(name for name in dir(loaded) if "__dir__" in vars(loaded) and not name.startswith("_"))}
    return [(name, getattr(loaded, name)) for name in sorted(names, key=lambda name: (name.lower(), name))]


def _is_code(public: Any) -> bool:
    return isinstance(public, type) or inspect.isroutine(public)


def _module(module: str, short: str) -> Iterator[str]:
    yield f"## {short}\n\n{markdown(importlib.import_module(module).__doc__ or '')}\n"
    for name, public in _names(module):
        if inspect.ismodule(public):
            continue
        yield f"### {short}.{name}\n"
        elsewhere = next((f"{s}.{n}" for m, s in MODULES.items() for n, x in _names(m) if x is public), None)
        if _is_code(public) and elsewhere != f"{short}.{name}":
            yield f"The same as `{elsewhere}`.\n"
        elif isinstance(public, type):
            yield from _class(public, name)
        elif _is_code(public):
            yield f"`{name}{_arguments(public)}`\n\n{markdown(_doc(public))}\n"
        elif hasattr(public, "__origin__"):
            yield f"The type `{_type(public)}`.\n"
        else:
            yield f"`{public!r}`, of type `{type(public).__name__}`. {markdown(_doc(type(public))).splitlines()[0]}\n"


def _class(public: type, name: str) -> Iterator[str]:
    arguments = "" if issubclass(public, Exception) else _arguments(public)
    text, example, _ = _doc(public).partition("\nExample::\n")
    shown = f"\n\nExample: [passes.md](passes.md#{public().name})." if example else ""
    yield f"`class {name}{arguments}`\n\n{markdown(text)}{shown}\n"
    for name, member in _members(public):
        shown = f"`{name}{_arguments(member)}`" if inspect.isfunction(member) else f"`{name}`"
        first, *rest = markdown(_doc(member)).splitlines() or [""]
        yield "\n".join([f"* {shown}: {first}", *(f"  {line}".rstrip() for line in rest)])
    yield from [""] * bool(_members(public))


def _members(public: type) -> list[tuple[str, Any]]:
    """Public methods and properties that the class itself defines, and calls of it that have a text."""
    members = []
    added = plugin_members(public) if public is GraphConfig else {}
    for name, member in (vars(public) | added).items():
        if name in getattr(public, "__dataclass_fields__", ()):
            continue  # a default that is a function
        is_call = name == "__call__" and bool(member.__doc__)
        if (is_call or not name.startswith("_")) and (inspect.isfunction(member) or isinstance(member, property)):
            members.append((name, member))
    members = [(name, member) for name, member in members if not _doc(member).startswith(NOT_FOR_USERS)]
    return [] if issubclass(public, Exception) else members


def _arguments(public: Any) -> str:
    signature = inspect.signature(public)
    parts, star = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self" or (parameter.name.startswith("_") and parameter.default is not parameter.empty):
            continue
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        default = "" if parameter.default is parameter.empty else f" = {_default(parameter.default)}"
        parts.append(f"{mark}{parameter.name}: {_type(parameter.annotation)}{default}")
    returns = "" if inspect.isclass(public) else _type(signature.return_annotation)
    return f"({', '.join(parts)})" + (f" -> {returns}" if returns not in ("", "None") else "")


def _default(x: Any) -> str:
    return "..." if repr(x).startswith("<") else repr(x)


def _type(annotation: Any) -> str:
    shown = annotation if isinstance(annotation, str) else getattr(annotation, "__qualname__", "")
    if hasattr(annotation, "__origin__") or not shown:
        shown = str(annotation)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", shown)


def _doc(public: Any) -> str:
    if isinstance(public, type) and (public.__doc__ or "").startswith(f"{public.__name__}("):
        return ""  # what dataclass writes
    return inspect.getdoc(public) or ""


def markdown(doc: str) -> str:
    """A docstring as Markdown: lists of what is named, fences around tables, single backticks."""
    lines: list[str] = []
    inside, named = "", r"(\w+|``.+?``)(, \w+)*: "
    for line in [*inspect.cleandoc(doc).replace("``", "`").splitlines(), ""]:
        is_rule = bool(re.fullmatch(r"=+( =+)+", line))
        if inside == "table":
            if line.strip():
                lines.append(line)
                continue
            lines, inside = [*lines, "```"], ""
        if is_rule:
            lines, inside = [*lines, "```text", line], "table"
        elif re.fullmatch(r"(Args|Returns|Raises|Attributes):", line):
            lines, inside = [*lines, line, ""], "section"
        elif inside == "section" and re.match(r" {4}\S", line):
            lines.append(f"* {line.strip()}")
        elif lines and re.match(named, line) and (inside == "list" or not lines[-1]):
            lines, inside = [*lines, f"* {line}"], "list"
        elif inside == "list" and re.match(r"(Raises|Returns) ", line):
            lines, inside = [*lines, "", line], ""
        elif inside in ("section", "list") and line:
            lines.append(f"  {line.strip()}")
        else:
            inside = "" if line else inside.replace("list", "")
            lines.append(line)
    return "\n".join(lines).strip("\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(text(), encoding="utf-8")
