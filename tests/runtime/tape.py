"""A recorder without a GPU, as strict as CUDA's: what a step does is written down and undone, and replays do just that.

Recorded are ops on tensors: the same memory, and the same Python numbers, in every replay.  What a step returns holds
nonsense until the first replay.  Reading a tensor on the host raises, as it does while a stream captures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = [torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default]


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class Log(TorchDispatchMode):
    """seen: the ops that read tensors while it was on, with the layouts of these."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        self.seen += [(func, *((x.dtype, x.shape, x.stride()) for x in tensors))] if tensors else []
        return func(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """The ops that run while it is on."""

    def __init__(self, host_reads: Sequence[Any]) -> None:
        super().__init__()
        self._host_reads = host_reads
        self.lines: list[Callable[[], Any]] = []
        self._made: dict[int, Tensor] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # storages that were there: all of it, and its old bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._host_reads:
            raise RuntimeError(f"{func} is not permitted when stream is capturing")
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for x in given:
            self._keep(x)
        results = func(*args, **kwargs)
        made = [x for x in tree_leaves(results) if isinstance(x, Tensor)]
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            self.lines.append(lambda: func(*args, **kwargs))
        elif made and not {_storage(x) for x in made} <= {_storage(x) for x in given}:
            self.lines.append(lambda: _again(made, func(*args, **kwargs)))
        self._made.update({_storage(x): x for x in made})
        return results

    def _keep(self, x: Tensor) -> None:
        if _storage(x) not in self._made and _storage(x) not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
            self._before[_storage(x)] = whole, whole.clone()

    def undo(self) -> None:
        for whole, before in self._before.values():
            whole.copy_(before)

    def spoil(self) -> None:
        for key, x in self._made.items():
            if key not in self._before:
                torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).fill_(0x7F)


def _again(made: list[Tensor], results: Any) -> None:
    for old, new in zip(made, (x for x in tree_leaves(results) if isinstance(x, Tensor)), strict=True):
        old.copy_(new)


class Tapes:
    """A ``StepRecorder``.

    warm_ups, records: how often it was asked for them; replays: how often tapes ran.  warmed, recorded: what the last
    run before a recording, and the last recording, consisted of.
    host_reads: ops that read a tensor on the host.  fails: whether replays do.
    """

    def __init__(self) -> None:
        self.warm_ups = self.records = self.replays = 0
        self.host_reads = [*HOST_READS]
        self.fails = False
        self.warmed: list[Any] = []
        self.recorded: list[Any] = []

    def warm_up(self, step: Callable[[], Any]) -> Any:
        self.warm_ups += 1
        with Log() as log:
            results = step()
        self.warmed = log.seen
        return results

    def record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.records += 1
        tape, log = Tape(self.host_reads), Log()
        try:
            with tape, log:
                results = step()
        finally:
            tape.undo()
        self.recorded = log.seen
        tape.spoil()

        def replay() -> None:
            self.replays += 1
            if self.fails:
                raise RuntimeError("an illegal memory access was encountered")
            for line in tape.lines:
                line()

        return replay, results
