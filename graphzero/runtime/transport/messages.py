"""Small messages between all ranks of a communicator: numbers, objects and tensors from one rank to all."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class GroupMessages(ABC):
    """Messages that every rank of ``ids`` takes part in.  Each raises RankError where a rank does not.

    ``purpose`` says in that error what was waited for.
    """

    ids: list[int]
    rank: int

    @abstractmethod
    def run_collective(self, begin: Callable[[Any], Any], purpose: str) -> None:
        """Call ``begin`` with gloo's process group of all ranks, and wait for the work that it returns."""

    def all_reduce(self, x: Tensor, purpose: str) -> None:
        """Replace ``x`` by its maximum over all ranks."""
        self.run_collective(lambda group: group.allreduce([x], _MAX), purpose)

    def broadcast(self, value: Any, first: int, purpose: str) -> Any:
        """Return the object of rank ``first``."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([payload.numel()])
        self.fill(size, first, purpose)
        if self.rank != first:
            payload = torch.empty(int(size), dtype=torch.uint8)
        self.fill(payload, first, purpose)
        return value if self.rank == first else pickle.loads(payload.numpy().tobytes())

    def fill(self, x: Tensor, first: int, purpose: str) -> None:
        """Fill ``x``, dense and of a dtype that gloo knows, with the values that it has on rank ``first``."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.ids.index(first), 0
        self.run_collective(lambda group: group.broadcast([x], options), purpose)

    def all_gather(self, value: Any, purpose: str) -> list[Any]:
        """Return every rank's object, in ascending order of ranks."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._all_gather_tensor(torch.tensor([payload.numel()]), purpose)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: payload.numel()] = payload
        payloads = self._all_gather_tensor(padded, purpose)
        return [pickle.loads(x[: int(size)].numpy().tobytes()) for x, size in zip(payloads, sizes, strict=True)]

    def _all_gather_tensor(self, x: Tensor, purpose: str) -> list[Tensor]:
        copies = [torch.empty_like(x) for _ in self.ids]
        self.run_collective(lambda group: group.allgather([copies], [x]), purpose)
        return copies

    def gather_along(self, value: Any, ranks: Sequence[int]) -> list[Any]:
        """Return the objects of ``ranks``, in that order; all ranks call it, each for ranks of its own."""
        values = self.all_gather(value, "all ranks to connect")
        return [values[self.ids.index(rank)] for rank in ranks]


_MAX: Any = dist.AllreduceOptions()
_MAX.reduceOp = dist.ReduceOp.MAX
