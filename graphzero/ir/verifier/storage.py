"""The laws of storage, from level "lowered" on: what may be written over, and when.

    w1 = assign(w, new)            the old w is not read below it, and w1 is the new w; likewise to_host_launch(w, new)
    y = mul(x, 2.0, out=x)         mul can write over x, x has y's type and SBP, and nothing reads the old x below it
    y = _softmax(x, 1, False, out=x)      its kernel writes row by row, so x is known to lie row by row
    c = check(ok, '...')           no state is written above it
    l = launch('...', 0, [v])      slot 0 is free until something waits for l; without a slot, what a reduction works in
                                   may not be read until then, nor after

Which storage a value lives in is ``storage``'s, which op may write where is ``inplace``'s.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from graphzero.errors import VerifyError
from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import inplace, kernel_forms
from graphzero.ir.storage.dense import Orders, has_kernel
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.storage.roots import Roots, Storage, reaches, read_by
from graphzero.ir.transfer import NO_SLOT_YET, Transfer, awaited
from graphzero.ir.verifier.violation import violation

_WRITING: tuple[Any, ...] = (
    *ops.ASSIGNING,
    ops.launch,
    ops.wait,
)  # and what is told where: without any, each value has its own


def check_storage(graph: StepGraph, where: str) -> None:
    """Raise VerifyError where a storage is read after it is written over, or a slot taken while it is in use."""
    if any(node.target in _WRITING or value.OUT in node.kwargs for node in graph.nodes):
        walk = _StorageWalk(graph, where)
        for node in graph.nodes:
            walk.pass_by(node)
        walk.end()


class _StorageWalk:
    """State of storages on the way down a program: which have been written over."""

    def __init__(self, graph: StepGraph, where: str) -> None:
        self.graph, self.where = graph, where
        at = liveness(graph)
        self.roots, self.transfers = at.roots, at.transfers
        self.held: dict[Storage | None, list[fx.Node]] = {}  # values by storage
        self.written: dict[Storage | None, fx.Node] = {}  # storage of a state -> what has assigned to it
        self.spent: dict[fx.Node, fx.Node] = {}  # value -> the result, or the reduction, that is put in its storage
        self.unchecked = at.nodes[at.last_check] if at.last_check >= 0 else None  # that is still to come
        self.busy: dict[Any, fx.Node] = {}  # slot, or launch without one -> what is under way there
        self.orders = Orders(at.nodes if any(value.OUT in node.kwargs for node in at.nodes) else ())

    def pass_by(self, node: fx.Node) -> None:
        if self.written or self.spent:
            for operand, root in read_by(node, self.roots):
                self._check_read(node, operand, root)
        for root in self.roots.get(node, ()):
            self.held.setdefault(root, []).append(node)
        if node is self.unchecked:
            self.unchecked = None
        if node.target in ops.ASSIGNING:
            self._check_write(node, value.operand(node))
        if rooms := [(i, room) for i, room in enumerate(inplace.outs_of(node)) if room is not None]:
            reads = _Reads(node, self.roots)
            for i, room in rooms:
                self._check_write(node, room)
                self._check_room(node, i, room, reads)
                self._check_overwrite(node, room, reads)
                self._spend(self.roots[node][i], node)
        if node.target in ops.ASSIGNING:
            self.written[self.roots[value.operand(node)][0]] = node
        elif node.target is ops.launch:
            self._launch(self.transfers[node])
        elif (over := awaited(node)) is not None:
            self.busy = {slot: launch for slot, launch in self.busy.items() if launch is not over.node}

    def end(self) -> None:
        placeholders = {node.name: node for node in self.graph.placeholders()}
        for name, new in self.graph.updates.items():
            state = placeholders[name]
            is_there = new.target is not ops.assign and self.roots[new] == ((state, 0),) and new is not state
            if is_there and _is_written(new, state) and not reaches(new, state):
                problem = f"'{new.name}', the new '{name}', lives in a view of it, which may turn out to be a copy"
                raise self._violation(new, problem, f"Say assign({name}, {new.name}), or put it elsewhere")
        for node in self.graph.nodes:
            if node.target in ops.ASSIGNING:
                self._check_new(node, value.operand(node))
        for launch in self.busy.values():
            raise self._violation(launch, f"no op waits for '{launch.name}'", "Add the wait, or drop the launch too")

    def _violation(self, node: fx.Node, problem: str, hint: str) -> VerifyError:
        return violation(node, self.where, problem, hint)

    def _check_read(self, node: fx.Node, operand: fx.Node, root: Storage | None) -> None:
        writer = self.written.get(root)
        is_use = node.op != "output" and node.target is not operator.getitem
        is_new = operand is writer or (operand.target is ops.to_host_wait and operand.args[0] is writer)
        if writer is not None and is_use and not is_new:
            problem = f"'{node.name}' reads '{operand.name}' after '{writer.name}' wrote over it"
            raise self._violation(node, problem, f"Move '{writer.name}' below its last reader")
        if operand in self.spent and self.spent[operand] is not node:
            writer = self.spent[operand]
            problem = f"'{node.name}' reads '{operand.name}', in whose storage '{writer.name}' writes"
            raise self._violation(node, problem, f"Put '{writer.name}' elsewhere, or make it later")

    def _check_write(self, node: fx.Node, room: fx.Node) -> None:
        """A step that a check stops has changed nothing."""
        storage = self.roots[room][0]
        if self.unchecked is not None and storage is not None and storage[0].op == "placeholder":
            problem = f"'{node.name}' writes over '{storage[0].name}' before '{self.unchecked.name}' is checked"
            raise self._violation(node, problem, f"Move '{self.unchecked.name}' above it, or the write below")

    def _check_new(self, node: fx.Node, state: fx.Node) -> None:
        """Check that what is assigned to a state is its new value: a step that names another one would not have it."""
        new, results = self.graph.updates.get(state.name), node.users if node.target is ops.to_host_launch else (node,)
        if state.op == "placeholder" and new not in results:
            named = f"whose new value is '{new.name}'" if new is not None else "which the step does not change"
            hint = "Assign the value that the graph's updates name, once: graph.set_output(outputs, aux, updates)"
            raise self._violation(node, f"'{node.name}' writes over '{state.name}', {named}", hint)

    def _check_room(self, node: fx.Node, i: int, room: fx.Node, reads: _Reads) -> None:
        """Result ``i`` may be put over a value of its form, by an op that can put it there."""
        device = self.graph.placement.device_type
        if (moves := self.transfers.get(node)) is not None:
            dense = moves.is_direct and moves.collective.gathers
            good = dense and inplace.arrives_dense(self.graph, moves) and value.type_of(node) == (value.type_of(room),)
        elif node.target in inplace.OVER_OPERANDS:
            same = (value.type_of(node)[i], value.sbp_of(node)[i]) == (value.type_of(room), value.sbp_of(room))
            good = same and reads.over[i] is room
        else:
            kernel = kernel_forms.writing(node.target, device) or kernel_forms.over_first(node.target, device)
            good = kernel is not None and inplace.same_form(node, room)
        if not good:
            problem = f"'{node.name}' cannot be put in the storage of '{room.name}'"
            hint = "out= takes a value of the same type and SBP, and an op with an out form"
            raise self._violation(node, problem, hint)
        is_plain = moves is None and node.target not in inplace.OVER_OPERANDS
        if is_plain and not has_kernel(node, room, self.orders, device):
            if kernel_forms.writing(node.target, device) is None:
                problem = f"'{node.name}' can only write over its first operand, which '{room.name}' is not"
            else:
                problem = f"'{node.name}' writes row by row, and the layout of '{room.name}' is not known to be that"
            raise self._violation(node, problem, "Take out= off it, or make its room by an op that lays it out so")

    def _check_overwrite(self, node: fx.Node, room: fx.Node, reads: _Reads) -> None:
        """Check that an overwritten value is not needed: by the op as it works, or by the user after the step."""
        storage, device = self.roots[room][0], self.graph.placement.device_type
        sharing = [operand for operand in reads.by_storage.get(storage, ()) if operand is not room]
        if node in self.transfers and inplace.is_own_piece(self.transfers[node], room):
            sharing = []
        if sharing or (room in reads.times and not inplace.may_overwrite(node, room, device, reads.times)):
            problem = f"'{node.name}' writes over '{(sharing or [room])[0].name}' while it reads it"
            raise self._violation(node, problem, "Only ops that work element by element may write over an operand")
        if storage is not None and storage[0].op == "placeholder" and storage[0].name not in self.graph.updates:
            problem = f"'{node.name}' writes over '{storage[0].name}', which the step does not change"
            raise self._violation(node, problem, "Only what has a new value in the graph's updates may be written over")

    def _spend(self, storage: Storage | None, writer: fx.Node) -> None:
        """Mark the values in ``storage`` as overwritten."""
        self.spent.update((holder, writer) for holder in self.held[storage] if holder is not writer)

    def _launch(self, moves: Transfer) -> None:
        node, slot = moves.node, moves.slot
        if moves.spends_operand:
            self._spend(self.roots[moves.members[0]][0], node)
        if slot in self.busy:
            problem = f"'{node.name}' takes slot {slot}, in which '{self.busy[slot].name}' is still under way"
            raise self._violation(node, problem, "Wait for the first, or give the second another slot")
        self.busy[node if slot in (None, NO_SLOT_YET) else slot] = node


def _is_written(new: fx.Node, state: fx.Node) -> bool:
    """Return whether a value that lives in ``state`` was written there; else it is a view of the old one, yet to be
    assigned."""
    while new is not state:
        if inplace.room_of(new) is not None or new.target is ops.wait:
            return True
        new = value.operand(new)
    return False


class _Reads:
    """Operands of a node, looked up once for all that it writes.  by_storage: its operands, those that it writes over
    among them; times: how often each is more than room for a result; over: ``inplace.over_operands``, if any."""

    def __init__(self, node: fx.Node, roots: Roots) -> None:
        self.by_storage: dict[Storage | None, list[fx.Node]] = {}
        for operand in value.tensor_operands(node):
            self.by_storage.setdefault(roots[operand][0], []).append(operand)
        self.times = inplace.times_read(node)
        self.over = inplace.over_operands(node) if node.target in inplace.OVER_OPERANDS else []
