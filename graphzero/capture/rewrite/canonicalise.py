"""The plain form of a captured graph: nothing that only autograd, functionalize or devices needed.

One walk in program order.  Gone are: detach, alias, lifted copies, copies and clones that change nothing, views that
give back what an earlier view was made of, chains of views, device arguments, and operands that give a new tensor its
dtype alone.  Every size of a view is a plain number.  It works with the fakes in ``meta["val"]``, which know strides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from graphzero.ir import value
from graphzero.ir.aliases import AliasKind, alias_kind, is_copy, is_plain_view, is_reshape
from graphzero.ops import AS_LOCAL

aten = torch.ops.aten

_TRACED_NAMES = (  # besides those of a program; nothing else leaves them there
    aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default, aten.detach_.default,
)  # fmt: skip
_PIECES = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, operator.getitem, AS_LOCAL)
_STRIDED = (aten.as_strided.default, aten.as_strided_scatter.default)
_HALF = (torch.float16, torch.bfloat16)
_DROPPED = ("device", "layout", "pin_memory", "non_blocking")
_FACTORIES = {
    aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format, aten.arange.default,
    aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default, aten.eye.default, aten.eye.m,
    aten.linspace.default,
}  # fmt: skip
_NEW = {  # ops that read no more than the dtype of their operand -> the same without it
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
    aten.new_empty.default: aten.empty.memory_format,
}


def _is_name(target: Any) -> bool:
    return target in _TRACED_NAMES or alias_kind(target) is AliasKind.NAME


def shows_operand(target: Any) -> bool:
    """Return whether an op gives its one operand another name, form, place or dtype, and computes nothing."""
    return _is_name(target) or is_plain_view(target) or is_copy(target) or target in _PIECES


def canonicalise(graph: fx.Graph) -> None:
    """Rewrite ``graph`` in place."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        _strip_operands(node)
        _fold_number(node)
        same = _same_as(node)
        if same is not None:
            if _is_apart(node, same):
                for user in node.users:
                    user.meta["apart"] = True
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


def _is_apart(node: fx.Node, same: fx.Node) -> bool:
    """Return whether views of ``node`` have another memory layout, by their fakes, than such views of ``same`` would
    have."""
    fake, other = node.meta.get("val"), same.meta.get("val")
    if not isinstance(fake, Tensor) or not isinstance(other, Tensor):
        return "apart" in node.meta
    return "apart" in node.meta or not _same_layout(fake, other)


def _strip_operands(node: fx.Node) -> None:
    kwargs: dict[str, Any] = {key: x for key, x in node.kwargs.items() if key not in _DROPPED and x is not None}
    if kwargs.get("memory_format") is torch.preserve_format:
        del kwargs["memory_format"]
    fake = node.meta.get("val")
    if node.target in _NEW:  # else its readers would depend on a value, and be on its pipeline stage
        node.target, node.args = _NEW[node.target], node.args[1:]
    if node.target in _FACTORIES and isinstance(fake, Tensor):
        kwargs["dtype"] = fake.dtype
    node.kwargs = kwargs


def _fold_number(node: fx.Node) -> None:
    """An op on Python numbers alone, as the conjugate of a factor in a gradient, becomes the number that it gives."""
    fake, op = node.meta.get("val"), node.target
    if op in _FACTORIES or node.all_input_nodes or not isinstance(fake, Tensor) or fake.dim():
        return
    if node.args and isinstance(node.args[0], (bool, int, float, complex)) and callable(op):
        folded: Tensor = op(torch.scalar_tensor(node.args[0], dtype=fake.dtype), *node.args[1:], **node.kwargs)
        node.target, node.args, node.kwargs = aten.scalar_tensor.default, (folded.item(),), {"dtype": folded.dtype}


def _shown_whole(node: fx.Node) -> fx.Node | None:
    """The operand of an op with strides of which the result has all elements in their order, as a view would."""
    scatters = node.target is aten.as_strided_scatter.default
    operands, (size, stride, *begin) = node.all_input_nodes, node.args[1 + scatters :]
    strided: Any = torch.empty_strided(size, stride, device="meta")  # type: ignore[arg-type]
    fakes = [one.meta["val"] for one in operands]
    is_whole = all(one.is_contiguous() and one.numel() == strided.numel() for one in (strided, *fakes))
    begins_there = begin in ([], [None], [fakes[0].storage_offset()]) and fakes[0].dtype == fakes[-1].dtype
    return operands[-1] if is_whole and begins_there else None


def _same_as(node: fx.Node) -> fx.Node | None:
    """An earlier node that has the same value, if there is one; on the way, the node takes its plain form."""
    target, fake = node.target, node.meta.get("val")
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if target is aten.copy.default:
        return _copied(node)
    if source is None or not isinstance(fake, Tensor):
        return None
    if _is_name(target):
        return None if node.meta.get("keep") else source
    old = source.meta.get("val")
    if not isinstance(old, Tensor):
        return None
    if is_copy(target):
        before = _widened(source)
        source = source if before is None else before
        old = source.meta["val"]
        return source if old.dtype == fake.dtype and _same_layout(old, fake) else None
    if target in _STRIDED and (shown := _shown_whole(node)) is not None:
        node.target, node.args = aten.view.default, (shown, list(fake.shape))
        return _same_view(node, shown, fake)
    if is_plain_view(target):
        return _same_view(node, source, fake)
    return None


def _widened(node: fx.Node) -> fx.Node | None:
    """The 16-bit value that ``node`` is in a wider dtype: cast back it is itself."""
    is_meant = node.meta.get("keep") or node.meta.get("reduced")
    source = node.args[0] if node.target is aten._to_copy.default and not is_meant else None
    if not isinstance(source, fx.Node):
        return None
    old, new = source.meta["val"].dtype, node.meta["val"].dtype
    return source if old in _HALF and new in (torch.float32, torch.float64) else None


def _copied(node: fx.Node) -> fx.Node | None:
    """``copy(old, new)`` is ``new`` in the shape and dtype of ``old``."""
    new = value.operand(node, 1)
    fake, new_value = node.meta["val"], new.meta["val"]
    if new_value.dtype != fake.dtype:
        node.target, node.args, node.kwargs = aten._to_copy.default, (new,), {"dtype": fake.dtype}
        if new_value.shape == fake.shape:
            return None
        with node.graph.inserting_before(node):
            wide = node.graph.call_function(aten.expand.default, (new, list(fake.shape)))
            wide.meta.update(node.meta, val=new_value.expand(fake.shape))
        node.args = (wide,)
        return None
    if new_value.shape == fake.shape:
        return new
    node.target, node.args, node.kwargs = aten.expand.default, (new, list(fake.shape)), {}
    node.meta["apart"] = True
    return None


def _same_layout(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and all(n < 2 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))


def _same_view(node: fx.Node, source: fx.Node, fake: Tensor) -> fx.Node | None:
    if is_reshape(node.target):
        node.target = aten.view.default
        node.args = (source, list(fake.shape))
    elif node.target is aten.expand.default:
        node.args, node.kwargs = (source, list(fake.shape)), {}
    first: fx.Node | None = None if "apart" in node.meta else source
    while first is not None:  # back along the chain of views
        old = first.meta.get("val")
        if isinstance(old, Tensor) and old.dtype == fake.dtype and _same_place(old, fake):
            return first
        is_view = is_plain_view(first.target) and "apart" not in first.meta
        previous = first.args[0] if is_view and first.args else None
        first = previous if isinstance(previous, fx.Node) else None
    if node.target is aten.view.default and source.target is aten.view.default:
        before = value.operand(source)
        if before.meta["val"].is_contiguous():
            node.args = (before, node.args[1])
    return None


def _same_place(a: Tensor, b: Tensor) -> bool:
    return _same_layout(a, b) and a.storage_offset() == b.storage_offset()


def merge_equal(graph: fx.Graph, wanted: Callable[[fx.Node], bool]) -> None:
    """Nodes that compute the same from the same become one."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not wanted(node):
            continue
        key = node_key(node.target, node.args, node.kwargs)
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def node_key(target: Any, args: Any, kwargs: Any) -> Any:
    """Equal for calls that compute the same."""
    return target, _frozen(args), _frozen(kwargs)


def _frozen(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple(map(_frozen, x))
    if isinstance(x, dict):
        return tuple((key, _frozen(entry)) for key, entry in sorted(x.items()))
    return (type(x), repr(x)) if isinstance(x, (int, float)) else x  # 1 is not 1.0 or True, nor 0.0 -0.0
