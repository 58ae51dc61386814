"""Which storage each value lives in, how long it lives, and what it is for.

The model of the eager executor that the plan counts by: an op allocates its results densely, unless it is told where
to put them (``inplace``), a view allocates nothing, a value dies after its last reader, a storage with its last view.
Operator workspaces are not modelled.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphzero.ir import inplace, layout, ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.remembered import remembered
from graphzero.ir.value import TensorType
from graphzero.ops import AS_GLOBAL, AS_LOCAL, CHECK, PIN

Storage = tuple[fx.Node, int]  # the node that makes it, and the number of the result

# One value under two names: no call at all.
SAME = (
    ops.use, ops.relabel, PIN, AS_LOCAL, AS_GLOBAL, torch.ops.aten.alias.default, torch.ops.aten.detach.default,
)  # fmt: skip
ALIASES = (ops.use, PIN, AS_LOCAL, AS_GLOBAL, ops.box, ops.relabel, ops.slice_shard, ops.assign)
RESIDENT = {"param": "parameters", "state": "optimizer_states", "buffer": "buffers", "constant": "buffers"}
# ATen marks these as making a new tensor, but they return a view of their operand's storage.
UNMARKED_VIEWS = (
    torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default, torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default, torch.ops.aten.unsafe_chunk.default,
)  # fmt: skip


@remembered
def is_view(target: Any) -> bool:
    """Whether an op's results are views of its first operand."""
    if target in ALIASES or target in UNMARKED_VIEWS:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)


def last_check(graph: StepGraph) -> fx.Node | None:
    """The last check of a program, if it has any: until then states stay as they were."""
    return next((node for node in reversed(graph.graph.nodes) if node.target is CHECK), None)


def storage_roots(graph: StepGraph) -> dict[fx.Node, tuple[Storage | None, ...]]:
    """Per node, the storage of each of its results (None for a scalar or a result that is not made)."""
    roots: dict[fx.Node, tuple[Storage | None, ...]] = {}
    for node in graph.nodes:
        if node.op != "output":
            roots[node] = _roots(node, roots)
    return roots


def _roots(node: fx.Node, roots: dict[fx.Node, tuple[Storage | None, ...]]) -> tuple[Storage | None, ...]:
    type_ = value.type_of(node)
    types = type_ if isinstance(type_, tuple) else (type_,)
    if node.target is operator.getitem:
        source, index = node.args
        return (roots[source][index],)  # type: ignore[index]
    if node.target is ops.launch:
        return (_direct_root(node, roots),) if ops.is_direct(node) else (None,) * len(types)
    if node.target is ops.wait and ops.is_direct(node.args[0]):
        return roots[node.args[0]]  # type: ignore[index]
    if inplace.outs_of(node):
        rooms = enumerate(inplace.outs_of(node))
        return tuple((node, i) if room is None else roots[room][0] for i, room in rooms)
    if node.op == "call_function" and is_view(node.target):
        return (roots[node.args[0]][0],) * len(types)  # type: ignore[index]
    return tuple((node, i) if isinstance(t, TensorType) else None for i, t in enumerate(types))


def _direct_root(node: fx.Node, roots: dict[fx.Node, tuple[Storage | None, ...]]) -> Storage | None:
    """An all-reduce works in its operand's storage, others make their result's as they begin, if not told where."""
    room = inplace.out_of(node)
    if room is not None:
        return roots[room][0]
    in_place = node.args[0] == ops.bucket_all_reduce.__name__
    return roots[node.args[2][0]][0] if in_place else (node, 0)  # type: ignore[index]


def reaches(node: fx.Node, state: fx.Node) -> bool:
    """Whether what is written where ``node`` lives is written into ``state``, however that lies.

    Not if it lives there by a view in other sizes, which of some strides is a copy.
    """
    while node is not state:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source.target is ops.wait:  # a gather, which is settled where it belongs
            return True
        room = inplace.room_of(node)
        if room is None and node.target not in (*SAME, ops.slice_shard, operator.getitem):
            return False
        node = room if room is not None else source  # type: ignore[assignment]
    return True


@dataclass(frozen=True)
class Life:
    """One storage: positions in the program between which it is alive, its bytes, and what it is for.

    ``begin`` is -1 for what is there before the step, ``end`` is the position of its last reader, or the
    position of the output for what stays.  ``category`` is "" for inputs, which are the user's.
    """

    storage: Storage
    begin: int
    end: int
    nbytes: int
    category: str


def lives(graph: StepGraph, rank: int | None = None) -> list[Life]:
    """Every storage of the program as ``rank`` sees it, communication slots left out."""
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    roots = storage_roots(graph)
    ends: dict[Storage, int] = {}
    for node, results in roots.items():
        readers = [position[user] for user in node.users]
        readers += [position[next(iter(user.users))] for user in node.users if reads_until_awaited(user)]
        last = max(readers, default=position[node])
        for storage in results:
            if storage is not None:
                ends[storage] = max(ends.get(storage, -1), last)
    categories = storage_categories(graph, roots)
    found = []
    for (node, index), end in ends.items():
        resident = node.op == "placeholder"
        begin, end = (-1, len(nodes) - 1) if resident else (position[node], end)
        found.append(Life((node, index), begin, end, _nbytes(graph, node, index, rank), categories[node, index]))
    return found


def reads_until_awaited(node: fx.Node) -> bool:
    return ops.is_direct(node) and node.args[0] == ops.bucket_reduce_scatter.__name__


def _nbytes(graph: StepGraph, node: fx.Node, index: int, rank: int | None) -> int:
    type_, nd = value.type_of(node), value.sbp_of(node)
    if ops.is_direct(node):
        found = layout.layout_of(graph, node)
        assert found is not None
        return found.arrived_elements * found.itemsize
    if isinstance(type_, tuple):
        type_, nd = type_[index], nd[index]
    size = type_.dtype.itemsize
    for length in layout.shape_on(graph, type_, nd, rank):
        size *= length
    return int(size)


def storage_categories(
    graph: StepGraph, roots: dict[fx.Node, tuple[Storage | None, ...]] | None = None
) -> dict[Storage, str]:
    """What each storage is for, in the words of the plan.

    A storage that holds a gradient at some time is ``gradients``; one that forward makes and that backward, the
    update or the caller reads is ``activations``; the rest are ``temporaries``, gathered parameters among them.
    """
    categories: dict[Storage, str] = {}
    gathered: set[Storage] = set()  # that hold parameters, whoever reads them later
    roots = storage_roots(graph) if roots is None else roots
    for node, results in roots.items():
        role = value.role_of(node)
        for storage in results:
            if storage is None:
                continue
            known = categories.get(storage) or _first_category(storage)
            if role is not None and role.kind == "param":
                gathered.add(storage)
            categories[storage] = _category(node, storage, known, storage in gathered)
    return categories


def _first_category(storage: Storage) -> str:
    node = storage[0]
    role = value.role_of(node)
    if node.op == "placeholder":
        return RESIDENT.get(role.kind, "") if role is not None else ""
    return "temporaries"


def _category(node: fx.Node, storage: Storage, known: str, is_param: bool) -> str:
    role = value.role_of(node)
    if storage[0].op == "placeholder" or known == "gradients":
        return known
    if role is not None and role.kind == "gradient":
        return "gradients"
    outlives = any(value.phase_of(user) != "forward" or user.op == "output" for user in node.users)
    return "activations" if outlives and not is_param and value.phase_of(storage[0]) == "forward" else known


def slot_bytes(graph: StepGraph) -> dict[int, int]:
    """Bytes of each communication slot: what the largest collective that uses it needs, rounded up to 64."""
    slots: dict[int, int] = {}
    for node in graph.graph.find_nodes(op="call_function", target=ops.launch):
        found = layout.layout_of(graph, node)
        slot = node.args[1]
        if slot is None:
            continue
        assert found is not None and isinstance(slot, int)
        slots[slot] = max(slots.get(slot, 0), -(-found.slot_bytes // 64) * 64)
    return slots


def transient_bytes(graph: StepGraph, node: fx.Node) -> int:
    """What a collective outside the buckets packs into: a buffer of its own, for as long as it runs."""
    if node.target is ops.launch:
        return 0
    found = layout.layout_of(graph, node)
    return found.slot_bytes if found is not None else 0
