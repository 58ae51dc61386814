"""Nested arguments and results as flat lists: torch's pytree, and dataclasses of users as they are.

A dataclass that nothing has registered with pytree is a node of its fields here, and here alone: torch's registry of
types, which others read, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from torch.utils import _pytree as pytree


class _Fields:
    """A dataclass object on its way through pytree, which makes the object itself of it again."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self.of) if hasattr(self.of, field.name))


def _children(node: _Fields) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    names = node.names()
    return [_opened(getattr(node.of, name)) for name in names], (type(node.of), names)


def _children_with_keys(node: _Fields) -> tuple[list[tuple[Any, Any]], tuple[type, tuple[str, ...]]]:
    children, context = _children(node)
    return [(pytree.GetAttrKey(name), child) for name, child in zip(context[1], children, strict=True)], context


def _unflatten_record(children: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = context
    record: Any = object.__new__(kind)  # a frozen one too; what __init__ and __post_init__ do has been done
    for name, child in zip(names, children, strict=True):
        object.__setattr__(record, name, child)
    return record


pytree.register_pytree_node(_Fields, _children, _unflatten_record, flatten_with_keys_fn=_children_with_keys)


def _is_record(leaf: Any) -> bool:
    return hasattr(type(leaf), "__dataclass_fields__")


def _opened(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: _Fields(leaf) if _is_record(leaf) else leaf, tree)


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves, and how ``pytree.tree_unflatten`` makes the tree of them again."""
    leaves, spec = pytree.tree_flatten(tree)
    return pytree.tree_flatten(_opened(tree)) if any(map(_is_record, leaves)) else (leaves, spec)


def paths(tree: Any) -> list[tuple[Any, ...]]:
    """The keys that lead to each leaf, in the order of ``flatten``."""
    return [path for path, _ in pytree.tree_flatten_with_path(_opened(tree))[0]]
