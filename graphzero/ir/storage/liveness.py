"""Positions and storages of a program's values, the spans of storages, their purpose, and bytes over time.

The model of the eager executor that the plan counts by: an op allocates its results densely, unless it is told where
to put them (``inplace``), a view allocates nothing, a value dies after its last reader, a storage with its last view.
Operator workspaces are not modelled.

Passes, laws, plan and runtime all ask ``liveness(graph)``, which is computed once for a graph as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt
from torch import fx

from graphzero.ir import memory_space, ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.roots import Roots, Storage, storage_roots
from graphzero.ir.transfer import Transfer, transfer_of
from graphzero.ir.transfer_layout import TransferLayout, lay_out, nbytes_on
from graphzero.ops import CHECK

_SPAN = ("begin", "end", "nbytes")  # of a life
Bytes = npt.NDArray[np.int64]  # while each node of a program runs, in order

RESIDENT = {"param": "parameters", "state": "optimizer_states", "buffer": "buffers", "constant": "buffers"}
SLOT_ALIGNED = 64  # bytes
# Categories that no later value changes.
_SETTLED = ("gradients", "accumulators", "optimizer_states", memory_space.HOST)


@dataclass(frozen=True)
class StorageSpan:
    """One storage: the positions between which it is alive, its bytes, and its purpose.

    ``begin`` is -1 for what is there before the step, ``end`` is the position of its last reader, or the
    position of the output for what stays.  ``category`` is "" for inputs, which are the user's.
    """

    storage: Storage
    begin: int
    end: int
    nbytes: int
    category: str


class Liveness:
    """Liveness of one program at one moment; ``liveness(graph)`` gives that of a graph as it is now.

    nodes: in order; position: the number of each.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.nodes: list[fx.Node] = list(graph.nodes)

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        return {node: i for i, node in enumerate(self.nodes)}

    @cached_property
    def roots(self) -> Roots:
        """Per node, the storage of each of its results."""
        return storage_roots(self.graph)

    @cached_property
    def last_check(self) -> int:
        """The position of the last check, -1 for none: until then states stay as they were."""
        return next((i for i in reversed(range(len(self.nodes))) if self.nodes[i].target is CHECK), -1)

    @cached_property
    def repeated(self) -> range:
        """The positions of what is repeated, once a micro-batch but the last; empty where nothing is."""
        positions = [i for i, node in enumerate(self.nodes) if value.repeats_of(node)]
        return range(positions[0], positions[-1] + 1) if positions else range(0)

    @cached_property
    def turns(self) -> list[int]:
        """Positions in the order in which they run, what is repeated as often as it is."""
        inside, count = self.repeated, len(self.nodes)
        times = value.repeats_of(self.nodes[inside.start]) if inside else 0
        return [*range(inside.start), *[*inside] * times, *range(inside.stop, count)] if inside else [*range(count)]

    @cached_property
    def section(self) -> dict[fx.Node, tuple[int, str]]:
        """For each node its part of the program (0: before the repeated part, 1: in it, 2: after it) and its phase.

        No op is moved from one section into another but within one part.
        """
        inside = self.repeated
        part = {node: 2 if inside and i >= inside.stop else int(i in inside) for i, node in enumerate(self.nodes)}
        return {node: (part[node], value.phase_of(node)) for node in self.nodes}

    @cached_property
    def section_end(self) -> dict[tuple[int, str], int]:
        """Per section, the position of its last op."""
        return {self.section[node]: i for i, node in enumerate(self.nodes) if node.op == "call_function"}

    @cached_property
    def phase_end(self) -> dict[str, int]:
        """Per phase, the position of its last op."""
        return {value.phase_of(node): i for i, node in enumerate(self.nodes) if node.op == "call_function"}

    @cached_property
    def transfers(self) -> dict[fx.Node, Transfer]:
        """The program's transfers by the node that is, or begins, each; in order."""
        all_transfers = ((node, transfer_of(node)) for node in self.nodes)
        return {node: moves for node, moves in all_transfers if moves is not None}

    @cached_property
    def layouts(self) -> dict[fx.Node, TransferLayout]:
        """Layout of each transfer in its buffer."""
        return {node: lay_out(self.graph, moves) for node, moves in self.transfers.items()}

    @cached_property
    def readers(self) -> dict[Storage, list[int]]:
        """The positions, in order, of what reads each storage: the wait too of a transfer that reads until then.

        A state is not read by the ``assign`` that writes over it, nor where the step hands that on.  What is made
        before what is repeated, and read there, is read until that ends.
        """
        readers_by_storage: dict[Storage, set[int]] = {}
        inside = self.repeated
        for node, results in self.roots.items():
            readers = [user for user in node.users if _is_read(node, user)]
            waits = [m.end for user in readers if (m := self.transfers.get(user)) and m.reads_until_awaited]
            positions = [self.position[user] for user in chain(readers, waits)]
            for storage in results:
                if storage is not None:
                    readers_by_storage.setdefault(storage, set()).update(positions)
        for storage, read in readers_by_storage.items() if inside else ():
            if self.position[storage[0]] < inside.start and any(i in inside for i in read):
                read.add(inside.stop - 1)
        return {storage: sorted(positions) for storage, positions in readers_by_storage.items()}

    def last_reader(self, storage: Storage) -> int:
        """The position of the last node that reads a storage, the output included; -1 for none."""
        return max(self.readers[storage], default=-1)

    # ---- lives

    def spans(self) -> tuple[StorageSpan, ...]:
        """Every storage in the memory of the fullest rank's device, the first one's, without communication slots."""
        return self._spans

    @cached_property
    def _spans(self) -> tuple[StorageSpan, ...]:
        return tuple(self._span(storage) for storage in self.readers if not memory_space.lies_on_host(storage[0]))

    def on_host(self) -> tuple[StorageSpan, ...]:
        """Every storage in host memory: states that stay there, and what the step makes there."""
        return tuple(self._span(storage) for storage in self.readers if memory_space.lies_on_host(storage[0]))

    def _span(self, storage: Storage) -> StorageSpan:
        node = storage[0]
        begin = -1 if node.op == "placeholder" else self.position[node]
        end = len(self.nodes) - 1 if begin < 0 else max(self.last_reader(storage), self._last_made[storage])
        return StorageSpan(storage, begin, end, self._nbytes(storage), self.categories[storage])

    @cached_property
    def _last_made(self) -> dict[Storage, int]:
        """The position of the last value that lives in each storage and that nothing reads."""
        last_made: dict[Storage, int] = {}
        for node, results in self.roots.items():
            if not node.users:
                last_made.update((storage, self.position[node]) for storage in results if storage is not None)
        return {storage: last_made.get(storage, -1) for storage in self.readers}

    def _nbytes(self, storage: Storage) -> int:
        node, index = storage
        moves = self.transfers.get(node)
        if moves is not None and moves.is_direct:
            return self.layouts[node].arrived_elements * self.layouts[node].itemsize
        type_, nd = value.results_of(node)[index]
        return nbytes_on(self.graph, type_, nd)

    def nbytes_of(self, node: fx.Node) -> int:
        """Bytes of the fullest rank's pieces of all results of a node."""
        results = (one for one in value.results_of(node) if isinstance(one[0], value.TensorType))
        return sum(nbytes_on(self.graph, type_, nd) for type_, nd in results)

    @cached_property
    def categories(self) -> dict[Storage, str]:
        """Purpose of each storage, by the plan's categories.

        A storage that holds a gradient at some time is ``gradients``; one that forward makes and that backward, the
        update or the caller reads is ``activations``, and so is what is computed again for backward to read; 16-bit
        copies of wider parameters are ``compute_parameters``; what adds up gradients of micro-batches is
        ``accumulators``; what lies in host memory is ``host``, and ``activations`` on its way there and back, but for
        states; the rest are ``temporaries``, gathered parameters among them.
        """
        category: dict[Storage, str] = {}
        gathered: set[Storage] = set()  # that hold parameters, whatever reads them later
        for node, results in self.roots.items():
            role, outlives = value.role_of(node), _outlives_forward(node)
            for storage in results:
                if storage is None:
                    continue
                known = category.get(storage) or _first_category(storage)
                if role is not None and role.kind == "param":
                    gathered.add(storage)
                    known = "compute_parameters" if _is_copy_of(node, self._masters.get(role.of)) else known
                category[storage] = _category(node, storage, known, storage in gathered, outlives)
        return category

    @cached_property
    def _masters(self) -> dict[str, int]:
        """Bytes of an element of each parameter, by its path."""
        params = ((value.role_of(node), node) for node in self.graph.placeholders("param"))
        return {role.of: value.tensor_type(node).dtype.itemsize for role, node in params if role is not None}

    # ---- bytes

    @cached_property
    def slots(self) -> dict[int, int]:
        """Bytes of each communication slot: what the largest transfer that uses it needs, rounded up.

        Launches that have no slot yet count as if they shared one.
        """
        slot_bytes: dict[int, int] = {}
        for node, moves in self.transfers.items():
            if moves.slot is not None:
                need = -(-self.layouts[node].slot_bytes // SLOT_ALIGNED) * SLOT_ALIGNED
                slot_bytes[moves.slot] = max(slot_bytes.get(moves.slot, 0), need)
        return slot_bytes

    @cached_property
    def transient(self) -> Bytes:
        """Buffers of transfers outside the slots, alive while the transfer runs."""
        nbytes = np.zeros(len(self.nodes), dtype=np.int64)
        for node, moves in self.transfers.items():
            if not moves.is_launch:
                nbytes[self.position[node]] = self.layouts[node].slot_bytes
        return nbytes

    def resident(self) -> dict[str, int]:
        """Bytes by category of what is there between steps, slots ("communication") among them."""
        nbytes = dict.fromkeys((*RESIDENT.values(), "communication"), 0)
        for span in self.spans():
            if span.begin < 0 and span.category:
                nbytes[span.category] += span.nbytes
        nbytes["communication"] += sum(self.slots.values())
        return nbytes

    def over_time(self, spans: Iterable[StorageSpan]) -> Bytes:
        """Bytes of those of ``lives`` that the step makes."""
        in_step = [span for span in spans if span.begin >= 0]
        begins, ends, sizes = (np.array([getattr(x, name) for x in in_step], dtype=np.int64) for name in _SPAN)
        return bytes_held(begins, ends, sizes, len(self.nodes))

    def total(self) -> Bytes:
        """All bytes that the plan counts, by position; the largest is its peak, except for unused parts of an arena."""
        return sum(self.resident().values()) + self.transient + self.over_time(self.spans())


def bytes_held(begins: Bytes, ends: Bytes, sizes: Bytes, count: int) -> Bytes:
    """Bytes at each of ``count`` positions of what is held from its begin to its end, both included."""
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, begins, sizes)
    np.add.at(change, ends + 1, -sizes)
    return np.cumsum(change[:-1])


def liveness(graph: StepGraph) -> Liveness:
    """The liveness of a graph as it is now."""
    return graph.analysis(Liveness)


def _is_read(node: fx.Node, user: fx.Node) -> bool:
    """Return whether ``user`` needs what was in the storage of ``node`` before any assign."""
    if user.target in ops.ASSIGNING:
        return user.args[1] is node
    return node.target not in (ops.assign, ops.to_host_wait) or user.op != "output"


def _first_category(storage: Storage) -> str:
    node = storage[0]
    role = value.role_of(node)
    if memory_space.lies_on_host(node):
        return memory_space.HOST
    if node.target is ops.to_device_launch:
        return RESIDENT["state"] if value.operand(node).op == "placeholder" else "activations"
    if role is not None and role.kind == "accumulator" and node.op != "placeholder":
        return "accumulators"
    if node.op == "placeholder":
        return RESIDENT.get(role.kind, "") if role is not None else ""
    return "temporaries"


def _is_copy_of(node: fx.Node, itemsize: int | None) -> bool:
    """Return whether a value that shows a parameter has smaller elements than it."""
    small = value.tensor_type(node).dtype.itemsize if value.is_tensor(node) else None
    return small is not None and itemsize is not None and small < itemsize


def _outlives_forward(node: fx.Node) -> bool:
    """Return whether anything but forward reads a value."""
    return any(
        value.phase_of(user) != "forward" or user.op == "output" or user.target is ops.to_host_launch
        for user in node.users
    )


def _category(node: fx.Node, storage: Storage, known: str, is_param: bool, outlives: bool) -> str:
    if storage[0].op == "placeholder" or known in _SETTLED:
        return known
    if value.has_role(node, "gradient"):
        return "gradients"
    if is_param:
        return known
    if memory_space.is_reload(storage[0].target):
        return "activations"
    if value.is_recomputed(storage[0]):
        return "activations" if not all(map(value.is_recomputed, node.users)) else known
    return "activations" if outlives and value.phase_of(storage[0]) == "forward" else known
