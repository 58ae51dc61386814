"""Messages between ranks through process groups of torch.distributed, which is how they go between GPUs.

A process group runs what is begun in it one after the other, and a send there waits for its receive: NCCL's queue of a
communicator.  So each direction between two ranks has a process group of its own, of these two, and what goes to all
ranks has one of all.  Which order of messages comes to its end then is the caller's: ``ir/pipeline_launches.py``.

On a GPU nothing here stops the process: a message begins after what its stream has been given, and ``wait`` makes the
stream wait for the message.  So memory may be used again as soon as ``wait`` has returned, also by what another rank
has not read yet as far as this process knows.  The process waits only as a group is first used, when NCCL connects its
two ranks; ``open_edges`` does that, in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphzero import _compat
from graphzero.runtime.transport.primitives import DONE, Handle
from graphzero.runtime.transport.transport import MessageTransport, as_bytes

Edge = tuple[int, int]  # from one number in the line to another


class ProcessGroupTransport(MessageTransport):
    """Messages of one line of ranks."""

    def __init__(
        self, ranks: Sequence[int], own: int, limit: float, device: torch.device,
        connect: Callable[[str, Sequence[int]], Any],
    ) -> None:  # fmt: skip
        """connect: makes the process group of some global ranks, all of which call it with one name for it."""
        super().__init__(ranks, own, limit)
        self.device, self._connect = device, connect
        self._everyone: Any = None
        self._edges: dict[Edge, Any] = {}

    def open_edges(self, edges: Iterable[Edge]) -> None:
        """Connect this rank with those that it sends to and receives from; every rank of the line calls it.

        Ranks meet in the order of edges, so none waits for one that waits for it.
        """
        new = [edge for edge in sorted({*edges}) if self.own in edge and edge not in self._edges]
        if self._everyone is None:
            self._everyone = self._connect("all", self.ranks)
        for source, target in new:
            name = f"from {self.ranks[source]} to {self.ranks[target]}"
            self._edges[source, target] = self._connect(name, sorted((self.ranks[source], self.ranks[target])))
            greeting = torch.zeros(1, dtype=torch.uint8, device=self.device)
            begin, other = (self.send, target) if source == self.own else (self.receive, source)
            begin(0, other, greeting).wait()

    def send(self, number: int, q: int, x: Tensor) -> Handle:
        return self._begin(self._edges[self.own, q].send, q, x) if x.numel() else DONE

    def receive(self, number: int, q: int, into: Tensor) -> Handle:
        return self._begin(self._edges[q, self.own].recv, q, into) if into.numel() else DONE

    def _begin(self, begin: Callable[..., Any], q: int, x: Tensor) -> Handle:
        number_in_group = int(self.ranks[q] > self.ranks[self.own])
        return _Message(self, q, x, lambda: begin([as_bytes(x)], number_in_group, 0))

    def broadcast(self, number: int, source: int, x: Tensor) -> Handle:
        if not x.numel():
            return DONE
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        peer = source if source != self.own else self.others[0]
        return _Message(self, peer, x, lambda: self._everyone.broadcast([as_bytes(x)], options))

    def close(self) -> None:
        for group in self._groups() if self.device.type == "cpu" else ():  # NCCL's messages cannot be taken back
            _compat.break_gloo(group)

    def shut_down(self) -> None:
        """End NCCL's communicators when their messages have arrived; every rank of the line calls it."""
        for group in self._groups() if self.device.type != "cpu" else ():
            group.shutdown()

    def _groups(self) -> list[Any]:
        in_order = [self._edges[edge] for edge in sorted(self._edges)]
        return in_order if self._everyone is None else [self._everyone, *in_order]


class _Message:
    """A message under way, which holds its tensor.  q: the number of the rank that it depends on."""

    def __init__(self, transport: ProcessGroupTransport, q: int, x: Tensor, begin: Callable[[], Any]) -> None:
        self._transport, self._q = transport, q
        self._tensor: Tensor | None = x
        self._work = self._checked(begin)

    def wait(self) -> None:
        self._checked(self._work.wait)
        self._tensor = None

    def _checked(self, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except RuntimeError as error:
            raise self._transport.connection_error(self._q, error) from error
