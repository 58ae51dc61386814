"""The import order: errors <- sbp <- ir <- {capture | passes | runtime | plan} <- graph <- {testing | explain ...}."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

import graphzero

ROOT = pathlib.Path(graphzero.__file__).parent
MIDDLE, TOP = 3, 4
LAYERS = {
    "errors": 0, "attention": 0, "bags": 0, "cross_entropy": 0, "fused": 0, "grouped": 0, "pieces": 0, "ops": 0,
    "_compat": 0,
    "sbp": 1, "ir": 2,
    "capture": MIDDLE, "passes": MIDDLE, "runtime": MIDDLE, "plan": MIDDLE,
    "testing": 5, "divergence": 5, "explain": 5, "accept": 5, "pytest_plugin": 5,
}  # fmt: skip  # whatever else there is stands with graph: config, key, selection, compiled ...
FILES = sorted(ROOT.rglob("*.py"))


def part(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def layer(name: str) -> int:
    return LAYERS.get(name, TOP)


def imports(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """(line, part of graphzero) of every import at the top of a file, TYPE_CHECKING apart."""
    yield from _imports(ast.parse(path.read_text(encoding="utf-8")).body)


def _imports(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    for statement in body:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0:
            module = statement.module or ""
            names = [f"graphzero.{alias.name}" for alias in statement.names] if module == "graphzero" else [module]
        elif isinstance(statement, ast.ImportFrom):
            raise AssertionError(f"line {statement.lineno}: graphzero writes its imports in full")
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" not in ast.unparse(statement.test):
            yield from _imports([*statement.body, *statement.orelse])
            continue
        elif isinstance(statement, ast.Try):
            yield from _imports([*statement.body, *(s for h in statement.handlers for s in h.body)])
            continue
        else:
            continue
        for name in names:
            if name.startswith("graphzero."):
                yield statement.lineno, name.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_left_never_imports_right(path: pathlib.Path) -> None:
    here = part(path)
    if here == "__init__":
        return
    wrong = []
    for line, there in imports(path):
        sideways = layer(here) == layer(there) == MIDDLE and here != there
        if layer(there) > layer(here) or sideways:
            wrong.append(f"{path.name}:{line} imports graphzero.{there}, which stands beside or right of {here}")
    assert not wrong, "\n".join(wrong)


def test_the_layers_are_there() -> None:
    assert {*LAYERS, "graph"} <= {part(path) for path in FILES}


def test_the_check_sees_what_it_is_to_find(tmp_path: pathlib.Path) -> None:
    text = (
        "from typing import TYPE_CHECKING\nimport graphzero.passes.zero\nfrom graphzero import runtime, errors\n"
        "from graphzero.ir.value import Role\nimport torch\n"
        "if TYPE_CHECKING:\n    from graphzero.graph import Graph\n"
        "try:\n    import graphzero.plan\nexcept ImportError:\n    from graphzero import cli\n"
        "def later():\n    from graphzero import testing\n"
    )
    path = tmp_path / "some.py"
    path.write_text(text)
    assert [there for _, there in imports(path)] == ["passes", "runtime", "errors", "ir", "plan", "cli"]
