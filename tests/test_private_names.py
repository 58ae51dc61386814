"""Private names of torch, and those that not all versions have, stand in ``_compat`` alone; a Graph's in ``graph``."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator
from functools import cache

from sources import PATHS, ROOT, tree

# Attributes with an underscore that torch's documentation, or code everywhere, treats as public.
KNOWN = {
    "_schema", "_overloadname", "_opname",  # of an op: how docs of custom ops and dispatch modes look at one
    "_parameters", "_buffers", "_modules",  # of a module: what its setattr and state_dict are made of
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_metadata", "_apply",
    "_BatchNorm",  # the base of all batch norms
    "_version",  # of a tensor: notes on in-place correctness
    "_ops",  # torch._ops.OpOverload, the type of an op
    "_foreach_copy_", "_fused_adam_", "_fused_adamw_",  # bindings of ATen's ops, which have no other name
    "_asdict", "_replace", "_getframe",  # Python's own
}  # fmt: skip
MODULES = ("torch.utils._pytree", "torch.utils._python_dispatch")  # as "Extending PyTorch" imports them
OTHERS = [path for path in PATHS if path.parent.name != "_compat"]


def at(path: pathlib.Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def own_names() -> set[str]:
    """What graphzero itself defines or assigns."""
    found: set[str] = set()
    for path in PATHS:
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                found.add(node.attr)
    return found


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_names(code: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of every private name that is not graphzero's own; ATen's ops are named as they are."""
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if any(map(is_private, name.split("."))) and not name.startswith(MODULES):
                    yield node.lineno, name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.") and any(map(is_private, alias.name.split("."))):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and not is_self(node.value):
            base = ast.unparse(node.value)
            if base != "aten" and not base.startswith("torch.ops") and node.attr not in own | KNOWN:
                yield node.lineno, f"{base}.{node.attr}"


def asked_names(code: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) wherever torch is asked whether it has a name, or which version it is."""
    for node in ast.walk(code):
        match node:
            case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[of, ast.Constant(str(name)), *_]):
                if ast.unparse(of).split(".")[0] in ("torch", "dist"):
                    yield node.lineno, f"{ast.unparse(of)}.{name}"
            case ast.Compare(left=of) if "torch.__version__" in ast.unparse(of):
                yield node.lineno, "torch.__version__"


def test_only_compat_reads_private_names_of_torch() -> None:
    found = [
        f"{at(path, line)} reads {name}" for path in OTHERS for line, name in private_names(tree(path), own_names())
    ]
    assert not found, "put these into graphzero/_compat/, with a plain name:\n" + "\n".join(found)


def test_only_compat_tells_versions_of_torch_apart() -> None:
    found = [f"{at(path, line)} asks for {name}" for path in OTHERS for line, name in asked_names(tree(path))]
    assert not found, "ask in graphzero/_compat/:\n" + "\n".join(found)


def private_names_of(cls: ast.ClassDef) -> set[str]:
    """Methods, and attributes that are assigned."""
    methods = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
    stored = {x.attr for x in ast.walk(cls) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)}
    return set(filter(is_private, methods | stored))


def read_from_outside(code: ast.AST, names: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) wherever one of ``names`` is an attribute of anything but ``self``."""
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute) and node.attr in names and not is_self(node.value):
            yield node.lineno, ast.unparse(node)


def test_only_the_graph_reads_what_is_private_in_it() -> None:
    own = ROOT / "graph.py"
    (graph,) = (x for x in tree(own).body if isinstance(x, ast.ClassDef) and x.name == "Graph")
    names = private_names_of(graph)
    found = [
        f"{at(path, line)} reads {name}"
        for path in PATHS
        if path != own
        for line, name in read_from_outside(tree(path), names)
    ]
    assert not found, "ask the Graph: graph.prepared_call(...)\n" + "\n".join(found)


def test_the_check_sees_what_is_private_in_a_graph() -> None:
    text = (
        "class Graph:\n    def __init__(self):\n        self.name, self._state = 1, 2\n    def _run(self): ...\n"
        "def f(graph, own):\n    graph._run(own.graph._state)\n    self._run(graph.name, graph._other)\n"
    )
    code = ast.parse(text)
    assert isinstance(code.body[0], ast.ClassDef)
    names = private_names_of(code.body[0])
    assert names == {"_state", "_run"}
    assert {name for _, name in read_from_outside(code, names)} == {"graph._run", "own.graph._state"}


def test_the_check_sees_how_versions_are_told_apart() -> None:
    text = (
        'getattr(torch._C, "a", None)\nhasattr(dist, "b")\ntorch.__version__ >= "2.13"\n'
        'getattr(x, "c")\ngetattr(torch, name)\nprint(torch.__version__)\n'
    )
    assert {name for _, name in asked_names(ast.parse(text))} == {"torch._C.a", "dist.b", "torch.__version__"}


def test_the_check_sees_what_it_is_to_find() -> None:
    text = (
        "import torch._dynamo\nfrom torch._C import _x\nfrom torch.utils._pytree import tree_map\n"
        "x._local_tensor\nself._own\ntorch._C._set(1)\ntorch.ops.aten._to_copy\naten._softmax\nx._version\nx._ours\n"
    )
    found = {name for _, name in private_names(ast.parse(text), {"_ours"})}
    assert found == {"torch._dynamo", "torch._C._x", "x._local_tensor", "torch._C", "torch._C._set"}
