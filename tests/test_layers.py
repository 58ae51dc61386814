"""Imports go down the list of layers, those in functions and for type checkers too.  Nothing imports in a circle."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from sources import PATHS, ROOT, tree

LAYERS = (  # what stands in one line does not know each other
    {"errors", "_compat"},
    {"logs", "extensions", "schedules"},
    {"ops"},
    {"sbp"},
    {"ir"},
    {"capture", "passes", "runtime"},
    {"plan"},
    {"config"},
    {"step"},
    {"checkpoint"},
    {"graph", "region", "convert"},
    {"nn", "serialization"},
    {"testing"},
    {"cli", "pytest_plugin"},
    {"plugins"},
    {"__main__", "__init__"},
)
LAYER = {name: at for at, names in enumerate(LAYERS) for name in names}
LARGEST = {"": 10, "sbp/rules": 25}  # files beside __init__
OTHERS = 17


def module_of(path: pathlib.Path) -> str:
    """ "ir.text.printer"; a package by its name, and graphzero itself as "__init__"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PATHS}


def imports(path: pathlib.Path, modules: Iterable[str] = MODULES) -> Iterator[tuple[int, str]]:
    """(line, module of graphzero) of every import in a file, wherever it stands."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}:{node.lineno}: graphzero writes its imports in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, _, inner = name.partition(".")
            while first == "graphzero" and inner:
                if inner in modules:
                    yield node.lineno, inner
                    break
                inner = inner.rpartition(".")[0]


def part(module: str) -> str:
    return module.partition(".")[0]


def first_circle(users: Mapping[str, Iterable[str]]) -> str:
    try:
        TopologicalSorter(users).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return ""


def folder(module: str) -> str:
    """The one in which a module's file stands."""
    return str(MODULES[module].parent.relative_to(ROOT))


def test_every_module_has_a_layer_and_every_layer_its_modules() -> None:
    assert {part(module) for module in MODULES} == set(LAYER)


def test_a_module_imports_from_layers_below_its_own_or_from_its_own_room() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports graphzero.{there}, which is beside or above {part(module)}"
        for module, path in MODULES.items()
        if module != "__init__"
        for line, there in imports(path)
        if part(there) != part(module) and LAYER[part(there)] >= LAYER[part(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_package_itself_imports_plug_ins() -> None:
    """The core finds them by their entry points; ``graphzero`` has their public names, and loads them when used."""
    users = {name for name in MODULES for _, there in imports(MODULES[name]) if part(there) == "plugins"}
    assert {name for name in users if part(name) != "plugins"} == {"__init__"}


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert not first_circle({name: {there for _, there in imports(path)} for name, path in MODULES.items()})


def test_no_two_folders_in_a_room_import_each_other() -> None:
    """A room's own files, such as the one that puts its parts together, may stand on both sides."""
    rooms = {name: folder(name) for name in MODULES}
    inner = {name for name, where in rooms.items() if "/" in where}
    users: dict[str, set[str]] = {}
    for name in inner:
        for _, there in imports(MODULES[name]):
            if there in inner and rooms[there] != rooms[name]:
                users.setdefault(rooms[name], set()).add(rooms[there])
    assert not first_circle(users)


def test_a_folder_has_as_many_files_as_one_sees_at_a_glance() -> None:
    counts: dict[str, int] = {}
    for name, path in MODULES.items():
        if path.name != "__init__.py":
            where = folder(name)
            counts["" if where == "." else where] = counts.get("" if where == "." else where, 0) + 1
    assert {where: n for where, n in counts.items() if n > LARGEST.get(where, OTHERS)} == {}


def test_the_check_sees_what_it_is_to_find(tmp_path: pathlib.Path) -> None:
    text = (
        "from typing import TYPE_CHECKING\nimport graphzero.passes.base\nfrom graphzero import runtime, errors\n"
        "from graphzero.ir.value import Role\nimport torch\n"
        "if TYPE_CHECKING:\n    from graphzero.graph import Graph\n"
        "try:\n    import graphzero.plan\nexcept ImportError:\n    from graphzero import cli\n"
        "def later():\n    from graphzero.testing import fake_world\n"
    )
    path = tmp_path / "some.py"
    path.write_text(text)
    found = {(line, there) for line, there in imports(path)}
    assert found == {
        (2, "passes.base"), (3, "runtime"), (3, "errors"), (4, "ir.value"), (7, "graph"), (9, "plan"), (11, "cli"),
        (13, "testing"),
    }  # fmt: skip


def test_a_circle_is_found() -> None:
    assert first_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert not first_circle({"a": {"b"}, "b": {"c"}, "d": {"a"}})
