"""Transfers: collectives as values of the program see them, however they are written.

    g = all_gather(w, 0, 'dp')                                          one value
    b = bucket_all_gather([v, w], [0, 1], 'dp')                         several at once, read as b[0], b[1]
    l = launch('bucket_all_gather', 2, [v, w], [0, 1], 'dp')            begun in communication slot 2,
    a = wait(l)                                                         and its results, a[0], a[1]
    c = all_gather(w, 0, 'dp', dtype=torch.bfloat16)                    cast where this rank's piece is laid down

The first three hold the same facts, and each may state such a dtype where it gathers.  ``transfer_of`` reads a
transfer; ``bucket``, ``launch`` and ``put_in_slot`` write one.  No other file depends on the positions of their
arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.sbp.collectives import COLLECTIVES, CollectiveKind

_KINDS: dict[Any, str] = {op: op.__name__ for op in ops.COLLECTIVES} | {
    op: op.__name__.removeprefix("bucket_") for op in ops.BUCKETS
}
_BUCKET_OF: dict[str, Callable[..., Any]] = {_KINDS[op]: op for op in ops.BUCKETS}
# Of each move but a relabel: its arguments after the value, and the kinds of SBP between which it goes.
MOVE_TABLE: Mapping[Any, tuple[tuple[str, ...], str, str]] = {
    ops.slice_shard: (("dim", "axis"), "B", "S"),
    ops.place_shard: (("dim", "axis"), "S", "P"),
    ops.keep_first: (("axis",), "B", "P"),
    **{ops.BY_NAME[kind]: (one.arguments, one.src, one.dst) for kind, one in COLLECTIVES.items()},
}
NO_SLOT_YET = -1  # the slot of a launch, until ``slots`` gives it one, or says that it needs none (None)


@dataclass(frozen=True)
class Transfer:
    """One collective.

    node: the call that makes it, or begins it.  kind: of ``sbp.collectives``.
    axis: the placement axis whose ranks meet.  members: the values that move.  dims: of each the split dim, a pair
    where source and result are split, () where neither is.  reduction: where the op says it, as an all_reduce does.
    is_launch: whether it is only begun at ``node``.  slot: the communication slot of a launch; None where it has none.
    """

    node: fx.Node
    kind: str
    axis: str
    members: tuple[fx.Node, ...]
    dims: tuple[Any, ...]
    reduction: str = "sum"
    is_launch: bool = False
    slot: int | None = None

    @property
    def collective(self) -> CollectiveKind:
        return COLLECTIVES[self.kind]

    @property
    def casts(self) -> bool:
        """Whether values are cast on the way, as a gather may do."""
        return "dtype" in self.node.kwargs

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which values are moved and delivered."""
        said = self.node.kwargs.get("dtype")
        return said if isinstance(said, torch.dtype) else value.tensor_type(self.members[0]).dtype

    @property
    def is_direct(self) -> bool:
        """Whether it is a bucket of one member that moves without a slot.

        A gather arrives in the storage of its result, a reduce-scatter leaves from the storage of its operand, an
        all-reduce works in it: from the launch on the operand of a reduction is read by nothing else.
        """
        return self.is_launch and self.slot is None

    @property
    def is_in_place(self) -> bool:
        """Whether its result is in the operand's storage."""
        return self.is_direct and self.collective.is_in_place

    @property
    def spends_operand(self) -> bool:
        """Whether the transfer takes over the operand's storage when it begins."""
        return self.is_direct and self.collective.reduces

    @property
    def reads_until_awaited(self) -> bool:
        """Whether the operand must stay until the transfer has finished."""
        return self.spends_operand and not self.is_in_place

    @property
    def end(self) -> fx.Node:
        """The node that has its results: its wait, or the call itself."""
        return next(iter(self.node.users)) if self.is_launch else self.node

    @property
    def results(self) -> list[fx.Node]:
        """The values that it delivers, in the order of its members; where one is not read, ``end``."""
        end = self.end
        if not value.is_multi(end):
            return [end]
        picks = {user.args[1]: user for user in end.users}
        return [picks.get(i, end) for i in range(len(self.members))]

    def completes(self, graph: StepGraph) -> str:
        """The reduction that joins the ranks' values: "sum", "max" or "min", "" for a transfer that only moves values.

        A reduce-scatter has no argument for it: the partial values that it completes say it.
        """
        if "reduction" in self.collective.arguments:
            return self.reduction
        reductions = {value.nd_of(member)[graph.placement.axis(self.axis)].reduction for member in self.members}
        assert len(reductions) == 1, f"one bucket holds partial values that complete by {', '.join(sorted(reductions))}"
        return reductions.pop()


def transfer_of(node: fx.Node) -> Transfer | None:
    """The transfer that ``node`` is, or begins; None for any other node."""
    if node.op != "call_function":
        return None
    if node.target is ops.launch:
        name, slot, *args = node.args
        return _of_bucket(node, str(name).removeprefix("bucket_"), args, is_launch=True, slot=slot)
    kind = _KINDS.get(node.target)
    if kind is None:
        return None
    if node.target in ops.BUCKETS:
        return _of_bucket(node, kind, node.args)
    given = list(zip(COLLECTIVES[kind].arguments, node.args[1:], strict=False))
    dims = tuple(arg for name, arg in given if name == "dim")
    others = {name: arg for name, arg in given if name != "dim"}
    return Transfer(node, kind, members=(node.args[0],), dims=dims if len(dims) < 2 else (dims,), **others)  # type: ignore[arg-type]


def _of_bucket(node: fx.Node, kind: str, args: Sequence[Any], **more: Any) -> Transfer:
    members, *rest = args
    dims = rest.pop(0) if "dim" in COLLECTIVES[kind].arguments else ()
    return Transfer(node, kind, rest[0], tuple(members), tuple(dims), *rest[1:], **more)


def awaited(wait: fx.Node) -> Transfer | None:
    """The transfer that a ``wait`` ends; None for any other node."""
    return transfer_of(value.operand(wait)) if wait.target is ops.wait else None


def delivered(node: fx.Node) -> tuple[Transfer, int] | None:
    """The transfer that a value comes from, and the number of its member; None for a value that comes from none."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        transfer = awaited(source) or (transfer_of(source) if source.target in ops.BUCKETS else None)
        return None if transfer is None else (transfer, index)
    transfer = transfer_of(node) if node.target in ops.COLLECTIVES else None
    return None if transfer is None else (transfer, 0)


def is_transfer(node: fx.Node) -> bool:
    """Return whether ranks meet at a node: it is a transfer, begins one, or waits for one."""
    return node.target in ops.COMMUNICATING


# ---- writing


def bucket(graph: StepGraph, single: Sequence[fx.Node], like: fx.Node) -> fx.Node:
    """Add, at the insert point, one transfer of what ``single`` ones, of one group, move; their results in order."""
    transfers = [transfer for node in single if (transfer := transfer_of(node)) is not None]
    first = transfers[0]
    members = [member for transfer in transfers for member in transfer.members]
    dims = [dim for transfer in transfers for dim in transfer.dims]
    by_name = {"dim": dims, "axis": first.axis, "reduction": first.reduction}
    args = (members, *(by_name[name] for name in first.collective.arguments))
    types = tuple(value.tensor_type(node) for node in single)
    nds: Any = tuple(value.nd_of(node) for node in single)
    cast = {"dtype": types[0].dtype} if any(transfer.casts for transfer in transfers) else {}
    return graph.call(_BUCKET_OF[first.kind], args, types, sbp=nds, kwargs=cast, like=like)


def launch(graph: StepGraph, bucket: fx.Node) -> fx.Node:
    """Put a launch and a wait in the place of a bucketed transfer; returns the wait."""
    types, nds = value.type_of(bucket), value.sbp_of(bucket)
    name = bucket.target.__name__  # type: ignore[union-attr]
    with graph.graph.inserting_before(bucket):
        args, kwargs = (name, NO_SLOT_YET, *bucket.args), dict(bucket.kwargs)
        begun = graph.call(ops.launch, args, types, sbp=nds, kwargs=kwargs, like=bucket)
        wait = graph.call(ops.wait, (begun,), types, sbp=nds, like=bucket)
    bucket.replace_all_uses_with(wait)
    graph.graph.erase_node(bucket)
    return wait


def put_in_slot(launch: fx.Node, slot: int | None) -> None:
    """Say in which communication slot a launched transfer works; None: in none."""
    name, _, *args = launch.args
    launch.args = (name, slot, *args)
