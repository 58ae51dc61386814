"""An independent measurement of a run's memory: bytes of distinct storages, as the dispatcher sees them made.

It knows nothing of the plan and of lifetimes in the graph: storages are noticed when an op returns them and
forgotten when torch frees them.  What ops use inside (workspaces, a backend's buffers) is not seen.
A run with several local ranks is measured on the first, which holds the fullest pieces.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphzero import _compat
from graphzero.ir.memory_space import HOST
from graphzero.ir.pipeline_parts import PartCall

Name = str | tuple[str, int]  # of a node, or of one result of a node


@dataclass(frozen=True)
class Measured:
    """Bytes of distinct storages on the first local rank.

    peak: the most that was alive at once, what was registered included; at_peak: by category at that moment;
    resident: by category, what was registered before the run; node: the op that reached the peak.
    timeline: (op, bytes alive when it had run), in order.  host: the most that was in host memory, which is in none of
    the others.
    """

    peak: int
    at_peak: dict[str, int]
    resident: dict[str, int]
    node: str
    timeline: list[tuple[str, int]] = field(repr=False)
    host: int = 0


class _Storage:
    __slots__ = ("category", "maker", "nbytes", "reference")

    def __init__(self, nbytes: int, category: str, maker: str, reference: Any):
        self.nbytes, self.category, self.maker, self.reference = nbytes, category, maker, reference


class MemoryMeter(TorchDispatchMode):
    """Counts storages while it is the active mode; pass it to ``Executor.run_step``.

    Args:
        categories: category by node name, or by (node name, number of the result); others are "temporaries".
    """

    def __init__(self, categories: Mapping[Any, str] | None = None):
        super().__init__()  # type: ignore[no-untyped-call]
        self.categories = dict(categories or {})
        self.live = 0
        self.peak = 0
        self.timeline: list[tuple[str, int]] = []
        self.host, self.host_peak = 0, 0
        self._alive: dict[int, _Storage] = {}
        self._resident: dict[str, int] = {}
        self._at_peak: list[_Storage] = []
        self._is_peak = False  # what is alive now is the peak, and has not been noted
        self._node, self._kind, self._peak_node = "", "temporaries", ""

    def register(self, category: str, tensors: Iterable[Tensor], most: int | None = None) -> None:
        """Count storages that are there before the run; one that is known keeps its first category.

        most: bytes that each counts at most; the rest of it is not there for this run.
        """
        for tensor in tensors:
            nbytes = tensor.untyped_storage().nbytes()
            nbytes = nbytes if most is None else min(nbytes, most)
            if self._see(tensor, category, "", nbytes) and category != HOST:
                self._resident[category] = self._resident.get(category, 0) + nbytes

    def measured(self) -> Measured:
        """Results so far."""
        self._note_peak()
        at_peak: dict[str, int] = {}
        for storage in self._at_peak:
            if storage.nbytes and storage.category != HOST:
                at_peak[storage.category] = at_peak.get(storage.category, 0) + storage.nbytes
        timeline = list(self.timeline)
        return Measured(self.peak, at_peak, dict(self._resident), self._peak_node, timeline, self.host_peak)

    # ---- what generated code calls

    def begin_part(self, call: PartCall) -> None:
        """Parts of a pipeline are counted as they come."""

    def watches(self, local: int) -> bool:
        """The first one only: it holds the fullest pieces."""
        return local == 0

    def enter(self, node: str, kind: str) -> None:
        """The ops that follow belong to ``node`` ("" at the end); what it does not hand out is of category ``kind``."""
        if self._node and node != self._node:
            self.timeline.append((self._node, self.live))
        self._node, self._kind = node, kind

    def meet(self, node: fx.Node) -> None:
        """Collectives run outside of this mode: what a backend allocates is not seen."""

    def add_result(self, x: Any, names: Sequence[Name]) -> None:
        """``x`` is a result of the node, known by the first of ``names`` that has a category."""
        if isinstance(x, Tensor):
            self._see(x, self._kind, self._node)  # compiled code makes its results past this mode
            block = self._alive.get(_compat.storage_id(x))
            if block is not None and block.maker == self._node and block.category != HOST:
                block.category = next((self.categories[n] for n in names if n in self.categories), "temporaries")

    # ---- what torch calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for operand in tree_leaves((args, kwargs)):
            if isinstance(operand, Tensor):
                self._see(operand, "", "", nbytes=0)  # not made here, or known already
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor, self._kind, self._node)
        return result

    def _see(self, tensor: Tensor, category: str, maker: str, nbytes: int | None = None) -> bool:
        storage, key = tensor.untyped_storage(), _compat.storage_id(tensor)
        if key in self._alive:
            return False
        nbytes = storage.nbytes() if nbytes is None else nbytes
        self._alive[key] = _Storage(nbytes, category, maker, weakref.ref(storage, lambda _: self._die(key)))
        if category == HOST:
            self.host += nbytes
            self.host_peak = max(self.host, self.host_peak)
            return True
        self.live += nbytes
        if self.live > self.peak:
            self.peak, self._is_peak, self._peak_node = self.live, True, maker
        return True

    def _die(self, key: int) -> None:
        if self._alive[key].category == HOST:
            self.host -= self._alive.pop(key).nbytes
            return
        self._note_peak()
        self.live -= self._alive.pop(key).nbytes

    def _note_peak(self) -> None:
        if self._is_peak:
            self._at_peak, self._is_peak = list(self._alive.values()), False
