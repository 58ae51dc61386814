"""Rewriting expected texts in test files: what ``pytest --accept`` turns on for ``assert_graph``."""

from __future__ import annotations

import ast
import inspect
import pathlib
import textwrap
from types import FrameType

from graphzero.errors import GraphZeroError

_on = False
_edits: dict[pathlib.Path, list[tuple[ast.expr, str]]] = {}


def enable(on: bool) -> None:
    """Set whether mismatches become the new expectation."""
    global _on
    _on = on


def enabled() -> bool:
    return _on


def rewrite(actual: str) -> None:
    """Remember to put ``actual`` in the place of the second argument of the ``assert_graph`` call under way."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("graphzero."):
        frame = frame.f_back
    if frame is None:
        raise GraphZeroError("--accept: found no test that called assert_graph")
    path = pathlib.Path(frame.f_code.co_filename)
    _edits.setdefault(path, []).append((_literal(path, frame), actual))


def _literal(path: pathlib.Path, frame: FrameType) -> ast.expr:
    """The string literal of the call at the frame's line, there or where the module assigns it to a name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    line = frame.f_lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or line) and len(node.args) > 1:
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function == "assert_graph":
                literal = _string(tree, node.args[1])
                if literal is not None:
                    return literal
    raise GraphZeroError(
        f"--accept: {path.name}:{line}: the expected text is neither a string literal nor a module constant"
    )


def _string(tree: ast.Module, x: ast.expr) -> ast.expr | None:
    if isinstance(x, ast.Constant) and isinstance(x.value, str):
        return x
    if isinstance(x, ast.Name):
        for node in tree.body:
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == x.id for t in node.targets):
                return _string(tree, node.value)
    return None


def write() -> list[pathlib.Path]:
    """Write all remembered edits, last line first, and return the files changed."""
    for path, edits in _edits.items():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for literal, text in sorted(edits, key=lambda edit: -edit[0].lineno):
            first, last = literal.lineno - 1, (literal.end_lineno or literal.lineno) - 1
            head = lines[first].encode()[: literal.col_offset].decode()
            tail = lines[last].encode()[literal.end_col_offset :].decode()
            indent = "" if not head.startswith(" ") else " " * (len(head) - len(head.lstrip()) + 4)
            body = textwrap.indent(text, indent)
            lines[first : last + 1] = [f'{head}"""\n{body}\n{indent}"""{tail}']
        path.write_text("".join(lines), encoding="utf-8")
    changed = list(_edits)
    _edits.clear()
    return changed
