"""Transfers of virtual ranks on streams of their own, each of which begins late, as on a device that is busy.

By itself a process that has all ranks transfers where it launches, on the stream of compute: whatever is launched after
it finds the result.  Here nothing but a wait orders the two, as between GPUs; what is read too early is poison, and
what is written over too early arrives.  On a CPU, which has no streams, a transfer takes place where it is awaited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from graphzero.runtime.execute.pipeline_executor import PipelineExecutor
from graphzero.runtime.transport.primitives import DONE
from graphzero.runtime.world.host_copies import HostCopies
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.testing import strict_stages
from graphzero.testing.strict_stages import fill_with_poison_

SLOW = 5_000_000  # cycles: milliseconds


def copy_to(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


class LateTransfer:
    """A transfer that begins on a stream of its own after what compute has been given, after a while.

    waits: whether ``wait`` does; without that a test shows that it would notice.
    """

    def __init__(
        self, device: torch.device, transfer: Callable[[], object], tensors: Sequence[Tensor], waits: bool
    ) -> None:
        self.module, self.tensors, self.waits = torch.get_device_module(device), tensors, waits
        self.transfer: Callable[[], object] | None = transfer
        side = self.module.Stream()
        side.wait_stream(self.module.current_stream())
        with self.module.stream(side):
            if device.type == "cuda":
                torch.cuda._sleep(SLOW)
                self._move()
            self.ended = side.record_event()

    def _move(self) -> None:
        if self.transfer is not None:
            self.transfer()
            self.transfer = None

    def wait(self) -> None:
        if self.waits:
            self._move()
            self.module.current_stream().wait_event(self.ended)


class LateMailbox:
    """Messages between stages, each of which is under way from the later of its two launches on."""

    def __init__(self, device: torch.device, waits: bool, count: Callable[[str], None]) -> None:
        self.device, self.waits, self.count = device, waits, count
        self.ends: dict[int, LateMessage] = {}

    def send(self, number: int, target: int, x: Tensor) -> LateMessage:
        return self._meet(number, "source", x)

    def receive(self, number: int, source: int, into: Tensor) -> LateMessage:
        fill_with_poison_(into)
        self.count("message")
        return self._meet(number, "target", into)

    def _meet(self, number: int, end: str, x: Tensor) -> LateMessage:
        message = self.ends.setdefault(number, LateMessage(self))
        setattr(message, end, x)
        message.begin()
        return message


class LateMessage:
    """A message, to both of its ends."""

    def __init__(self, mailbox: LateMailbox) -> None:
        self.mailbox = mailbox
        self.source: Tensor | None = None
        self.target: Tensor | None = None
        self.transfer: LateTransfer | None = None

    def begin(self) -> None:
        source, target = self.source, self.target
        if source is not None and target is not None:
            move = partial(copy_to, target.view(-1), source.view(-1))
            self.transfer = LateTransfer(self.mailbox.device, move, [source, target], self.mailbox.waits)

    def wait(self) -> None:
        if self.transfer is not None:
            self.transfer.wait()
        elif (
            self.source is not None
        ):  # a sender waits until this has arrived, where the receiver has not come to it yet
            self.source = self.source.clone()


@contextmanager
def late_transfers(waits: bool = True) -> Iterator[Counter[str]]:
    """Within it all transfers of virtual ranks are late; how many there were, by their kinds."""
    seen: Counter[str] = Counter()
    begin_now, copy_now = VirtualWorld.begin_transfer, HostCopies.begin_copy

    def begin_transfer(
        world: VirtualWorld, kind: str, outs: Sequence[Tensor], ins: Sequence[Tensor], axis: str, reduction: str
    ) -> Any:
        seen[kind] += 1
        sent = {x.untyped_storage().data_ptr() for x in ins}
        for out in outs:
            if out.untyped_storage().data_ptr() not in sent:
                fill_with_poison_(out)
        move = partial(begin_now, world, kind, outs, ins, axis, reduction)
        return LateTransfer(world.device, move, [*outs, *ins], waits)

    def begin_copy(copies: HostCopies, target: Tensor, source: Tensor) -> Any:
        seen["copy"] += 1
        if target.device == copies.device:  # host memory may be read by an earlier copy, which the process waits for
            fill_with_poison_(target)
        if copies.device.type == "cpu":
            return LateTransfer(copies.device, partial(copy_to, target, source), [target, source], waits)
        if target.device.type not in copies._streams:
            copies._streams[target.device.type] = torch.cuda.Stream(copies.device)
        with torch.cuda.stream(copies._streams[target.device.type]):  # the copy begins after this
            torch.cuda._sleep(SLOW)
        handle = copy_now(copies, target, source)
        return handle if waits else DONE

    def run_step(executor: PipelineExecutor, inputs: Any, meter: Any = None) -> Any:
        def mailbox() -> LateMailbox:
            return LateMailbox(executor.world.device, waits, lambda kind: seen.update([kind]))

        with patch.object(strict_stages, "Mailbox", mailbox):
            return strict_stages.run_step_by_members(executor, inputs)

    with (
        patch.object(VirtualWorld, "begin_transfer", begin_transfer),
        patch.object(HostCopies, "begin_copy", begin_copy),
        patch.object(PipelineExecutor, "run_step", run_step),
    ):
        try:
            yield seen
        finally:
            if torch.cuda.is_initialized():  # what nobody has waited for still writes
                torch.cuda.synchronize()
