"""The files of graphzero as trees, each of which is parsed once."""

from __future__ import annotations

import ast
import pathlib
from functools import cache

import graphzero

ROOT = pathlib.Path(graphzero.__file__).parent
PATHS = sorted(ROOT.rglob("*.py"))


@cache
def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
