"""InPlace: a result takes the storage of an operand that is not read again, or of the state that it replaces.

So does a gather without a slot: the new parameter arrives where the old one was.  This saves the memory of a result and
the time to map it, and the copy of ``assign`` where a state is replaced.  After this pass, names alone no longer say
what a value is computed from.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.aliases import is_name, is_reshape
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import inplace, kernel_forms
from graphzero.ir.storage.dense import Orders, has_kernel
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.storage.roots import Storage, reaches
from graphzero.ir.transfer import Transfer
from graphzero.passes.base import BuiltinPass


@dataclass(frozen=True)
class InPlace(BuiltinPass):
    """Writes results into storage that is not read again; changes no value.

    Requires: every state that changes is written by an ``assign``; no transfer waits for a slot.
    Ensures: ``out=`` names a value that is not read below; a state whose new value is computed in
    place has no ``assign``.

    Example::

        in_place

         graph step(dp=2) local
           g = batch() : f32[4]  B
           m = buffer() : f32[4]  B
         update:
        -  a = mul(m, 0.9) : f32[4]  B
        -  m1 = add(a, g) : f32[4]  B
        -  k = assign(m, m1) : f32[4]  B
        -  return update(m=k)
        +  a = mul(m, 0.9, out=m) : f32[4]  B
        +  m1 = add(a, g, out=a) : f32[4]  B
        +  return update(m=m1)
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        storages = _Storages(graph)
        for node in list(graph.nodes):
            if node.target in inplace.OVER_OPERANDS:
                storages.write_over_operands(node)
            elif node in storages.transfers:
                storages.receive(storages.transfers[node])
            elif node.op == "call_function" and storages.can_be_told(node):
                storages.write_over_one(node)
            storages.orders.see(node)
        graph.hand_out(storages.dropped)
        for assign in storages.dropped:
            graph.graph.erase_node(assign)
        return graph


_WHOLE = (ops.accumulate, ops.accumulate_mm, ops.to_device_wait)  # what they write into an operand is all of it


class _Storages:
    """The last reader of each storage, while results take over storages.  dropped: assigns in vain -> their values."""

    def __init__(self, graph: StepGraph):
        self.graph, self.device = graph, graph.placement.device_type
        at = liveness(graph)
        self.position, self.roots, self.transfers = at.position, at.roots, at.transfers
        self.orders = Orders()
        self.moved: dict[Storage, Storage] = {}
        self.dropped: dict[fx.Node, fx.Node] = {}
        self.assigns = {node.args[0]: node for node in graph.graph.find_nodes(op="call_function", target=ops.assign)}
        self.replaced: dict[Any, list[fx.Node]] = defaultdict(list)  # new value -> the states that it becomes
        for old, assign in self.assigns.items():
            self.replaced[assign.args[1]].append(old)
        self.last = {storage: at.last_reader(storage) for storage in at.readers}
        for old in self.assigns:  # a step that a check stops has changed nothing
            self.last[old, 0] = max(self.last[old, 0], at.last_check)

    def storage_of(self, node: fx.Node) -> Storage | None:
        """Storage that holds a tensor now."""
        storage = self.roots[node][0]
        return self.moved.get(storage, storage) if storage is not None else None

    def can_be_told(self, node: fx.Node) -> bool:
        """Return whether the op has a form that writes its result where it is told."""
        makes = value.is_tensor(node) and self.roots[node] == ((node, 0),) and bool(value.tensor_type(node).shape)
        kernel = kernel_forms.writing(node.target, self.device) or kernel_forms.over_first(node.target, self.device)
        return makes and kernel is not None

    def write_over_one(self, node: fx.Node) -> None:
        """Put the result over the state that it replaces, else over an operand."""
        replaced = [old for old in self.replaced[node] if self._is_kept(node)]
        operands = dict.fromkeys(value.tensor_operands(node))
        first = [operand for operand in operands if self.storage_of(operand) in [(old, 0) for old in replaced]]
        for room in (*first, *replaced, *operands):
            if self._may_take(node, room, (node, 0)) and self._fits(node, room):
                node.kwargs = {**node.kwargs, value.OUT: room}
                self._move((node, 0), node, room)
                return

    def write_over_operands(self, node: fx.Node) -> None:
        """Put all of several results over the operands that the op's form in place writes over, or none."""
        rooms = inplace.over_operands(node)
        picks = {pick.args[1]: pick for pick in node.users if pick.target is operator.getitem}
        for i, room in enumerate(rooms):
            free = i in picks and self._may_take(picks[i], room, (node, i))
            if not free or not self._reads_alone(node, room):
                return
        node.kwargs = {**node.kwargs, value.OUT: rooms}
        for i, room in enumerate(rooms):
            self._move((node, i), picks[i], room)

    def _is_kept(self, new: fx.Node) -> bool:
        """Return whether a new state is nothing else as well: another state, or what build returns."""
        storage = self.roots[new][0]
        return len(self.replaced[new]) == 1 and storage is not None and self.last[storage] < len(self.position) - 1

    def _may_take(self, result: fx.Node, room: fx.Node, own: Storage) -> bool:
        """Return whether the storage of ``room`` is free for ``result``, a result that would have a storage of its
        ``own``."""
        storage = self.storage_of(room)
        if storage is None or self.last[storage] > self.position[own[0]] or not inplace.same_form(result, room):
            return False
        if storage[0].op == "placeholder":
            assign = self.assigns.get(storage[0])
            is_new = storage[0] in self.replaced[result] and self._is_kept(result)
            if assign is None or not (is_new or self.last[own] < self.position[assign]):
                return False
            if is_new and not reaches(room, storage[0]):
                return False
        return self._covers(room, storage)

    def _covers(self, operand: fx.Node, storage: Storage) -> bool:
        """Return whether a value fills its storage, or is this rank's piece of a state, which stays in its storage."""
        stays = storage[0].op == "placeholder"
        while operand is not storage[0]:
            room = inplace.room_of(operand)
            if room is not None:
                operand = room
            elif _shows_all(operand) or _picks(operand, storage) or (stays and operand.target is ops.slice_shard):
                operand = value.operand(operand)
            else:
                return False
        return True

    def _reads_alone(self, node: fx.Node, room: fx.Node) -> bool:
        """Return whether all that ``node`` reads of the storage of ``room`` is ``room``."""
        storage = self.storage_of(room)
        return all(operand is room for operand in value.tensor_operands(node) if self.storage_of(operand) == storage)

    def _fits(self, node: fx.Node, room: fx.Node) -> bool:
        """Return whether ``node`` may write over ``room``, which it may also read, and has a kernel for that."""
        reads = room in value.tensor_operands(node)
        if not self._reads_alone(node, room):
            return False
        if reads and not inplace.may_overwrite(node, room, self.device):
            return False
        return has_kernel(node, room, self.orders, self.device)

    def _move(self, own: Storage, result: fx.Node, room: fx.Node) -> None:
        """``result`` lives in the storage of ``room`` from now on."""
        storage = self.storage_of(room)
        assert storage is not None
        self.moved[own] = storage
        self.last[storage] = self.last[own]
        if storage[0] in self.replaced[result]:
            self._drop(storage[0], result)

    def receive(self, moves: Transfer) -> None:
        """A gather without a slot may arrive in the storage of the parameter whose new value it brings."""
        if not (moves.is_direct and moves.collective.gathers):
            return
        picks, (sent,) = list(moves.end.users), moves.members
        if len(picks) != 1 or not inplace.arrives_dense(self.graph, moves):
            return
        for old in list(self.replaced[picks[0]]):
            is_new = set(picks[0].users) == {self.assigns[old]}
            is_free = self.last[old, 0] <= self.position[moves.node]
            is_free &= self.storage_of(sent) != (old, 0) or inplace.is_own_piece(moves, old)
            if is_new and is_free and inplace.same_form(picks[0], old):
                moves.node.kwargs = {value.OUT: old}
                self._drop(old, picks[0])

    def _drop(self, old: fx.Node, new: fx.Node) -> None:
        """``new`` is where ``old`` was: nothing is left to assign."""
        assign = self.assigns.pop(old)
        self.replaced[new].remove(old)
        assign.replace_all_uses_with(new, delete_user_cb=lambda user: user.op != "output")
        self.dropped[assign] = new


def _shows_all(node: fx.Node) -> bool:
    return is_name(node.target) or is_reshape(node.target) or node.target in _WHOLE


def _picks(node: fx.Node, storage: Storage) -> bool:
    """Return whether ``node`` is the result that lives in ``storage``, of an op with several."""
    return bool(node.args) and node.args[0] is storage[0] and node.args[1:] == (storage[1],)
