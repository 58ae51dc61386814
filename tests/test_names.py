"""Names are those of the field: one name for one class, verbs with an object, locals that say what they contain."""

from __future__ import annotations

import ast
import pathlib
from collections import defaultdict
from collections.abc import Iterator

from sources import PATHS, ROOT, tree

WORDS = frozenset(  # none says what it names
    [
        "found",
        "made",
        "held",
        "told",
        "kept",
        "asked",
        "whoever",
        "somebody",
        "anybody",
        "thing",
        "things",
        "stuff",
        "looks",
        "torn",
        "lives",
        "matter",
    ]
)
VERBS = frozenset(["read", "write", "run", "of", "get", "do", "make"])
OPENINGS = frozenset(  # of docstrings that ask instead of naming the thing
    ["what", "whatever", "whoever", "it", "how", "which", "who", "where", "when", "why", "that", "those"]
)

CLASSES_OF_ONE_NAME: dict[str, str] = {}  # name -> why two classes have it
METHODS_OF_ONE_WORD = {  # (class, method) -> why it is not a verb with its object
    ("Command", "run"): "what commands of plug-ins define",
    ("_Register", "get"): "a dict of torch's, with the methods of a dict",
    ("ProgressThread", "run"): "what a threading.Thread defines",
    ("Trace", "write"): "public",
}

EMPTY_WORDS = {("graphzero/plan/plan.py", "kept"): "public"}  # (file, name) -> why it stays

REPOSITORY = ROOT.parent
BESIDE = sorted(path for folder in ("bench", "docs", "examples") for path in (REPOSITORY / folder).rglob("*.py"))
ALL = [*PATHS, *BESIDE]


def classes() -> dict[str, list[tuple[pathlib.Path, int]]]:
    places: dict[str, list[tuple[pathlib.Path, int]]] = defaultdict(list)
    for path in PATHS:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append((path, node.lineno))
    return places


def methods(path: pathlib.Path, module: ast.Module) -> Iterator[tuple[str, str, str]]:
    """(where, class, method) of each method whose name is one of VERBS."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name.strip("_") in VERBS:
                    yield f"{path.name}:{method.lineno}", node.name, method.name


def names(path: pathlib.Path, module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of the module, and of each class, function, parameter and local that it defines."""
    yield 1, path.stem
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.lineno, node.name


def docstrings(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring."""
    for node in ast.walk(module):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def asks(text: str) -> bool:
    return text.split()[0].lower() in OPENINGS


def is_empty_word(name: str) -> bool:
    return name.strip("_").lower() in WORDS


def empty_names() -> set[tuple[str, str]]:
    """(file, name) of each name that says nothing."""
    return {
        (path.relative_to(REPOSITORY).as_posix(), name)
        for path in ALL
        for _, name in names(path, tree(path))
        if is_empty_word(name)
    }


def test_no_two_classes_have_one_name() -> None:
    doubles = {name: places for name, places in classes().items() if len(places) > 1}
    assert not {name: places for name, places in doubles.items() if name not in CLASSES_OF_ONE_NAME}


def test_a_method_is_a_verb_with_its_object() -> None:
    assert not [f"{owner}.{method} ({where})" for path in ALL for where, owner, method in methods(path, tree(path))
                if (owner, method) not in METHODS_OF_ONE_WORD]  # fmt: skip


def test_names_say_what_they_name() -> None:
    assert empty_names() == EMPTY_WORDS.keys()


def test_a_docstring_names_the_thing() -> None:
    asking = [f"{path.relative_to(REPOSITORY)}:{line}: {text.splitlines()[0]}"
              for path in ALL for line, text in docstrings(tree(path)) if asks(text)]  # fmt: skip
    assert not asking, "\n".join(asking)


def test_exceptions_are_in_use() -> None:
    present = classes()
    assert all(len(present.get(name, ())) > 1 for name in CLASSES_OF_ONE_NAME)
    used = {(owner, method) for path in ALL for _, owner, method in methods(path, tree(path))}
    assert used >= METHODS_OF_ONE_WORD.keys()


def test_the_checks_see_what_they_are_to_find() -> None:
    path = pathlib.Path("looks.py")
    module = ast.parse(
        "class Held:\n    'What is held.'\n    def read(self, kept):\n        'Read it.'\n"
        "        found = 1\n        for _made in found: pass\n"
    )
    assert [(line, asks(text)) for line, text in docstrings(module)] == [(2, True), (4, False)]
    assert [name for _, name in names(path, module) if is_empty_word(name)] == [
        "looks",
        "Held",
        "kept",
        "found",
        "_made",
    ]
    assert [(owner, method) for _, owner, method in methods(path, module)] == [("Held", "read")]
