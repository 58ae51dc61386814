"""Transfers between ranks, messages between pipeline stages, and copies to and from host memory, that take as long as
they may, and in which nobody may meddle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from graphzero import _compat
from graphzero.errors import GraphZeroError
from graphzero.ir.pipeline_parts import Slot
from graphzero.runtime.execute.executor import Results
from graphzero.runtime.execute.pipeline_executor import PipelineExecutor
from graphzero.runtime.transport.primitives import Handle
from graphzero.runtime.world.host_copies import HostCopies
from graphzero.runtime.world.process import ProcessWorld
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.runtime.world.world import World
from graphzero.sbp.collectives import COLLECTIVES
from graphzero.testing.strict_stages import StrictMessages, fill_with_poison_, is_poison, run_step_by_members, same_bits

HOST_COPY = "copy between host memory and the device"


@contextmanager
def strict_transfers() -> Iterator[None]:
    """Within it, collectives and copies between host memory and the device, of any ranks on CPUs, and messages between
    pipeline stages move their data when a program waits for them, and not before.

    By itself a world of virtual ranks transfers when a collective is launched, so a program that reads what has not
    arrived, or writes over what is still being sent, computes the right numbers there, and wrong ones on a GPU. Between
    processes every rank has to enter it.  Here
    buffers hold no number (NaN, or the largest integer) from launch to wait, and what is reduced holds none
    afterwards either, as a transport may leave it.  Compare with the same step outside: ``assert_same_step`` does.

    Raises:
        GraphZeroError: from the wait, if something between launch and wait wrote to what is sent or received.
    """
    run_together, allocate = PipelineExecutor.run_step, PipelineExecutor.allocate

    def run_apart(executor: PipelineExecutor, inputs: Mapping[str, Sequence[Any]], meter: Any = None) -> Results:
        if executor.messages is not None or meter or executor.meter:  # of processes; what a meter counts is that of one
            return run_together(executor, inputs, meter)
        return run_step_by_members(executor, inputs)

    def allocate_poison(executor: PipelineExecutor, slot: Slot) -> list[Tensor]:
        tensors = allocate(executor, slot)
        with _compat.no_modes():
            for x in tensors:
                fill_with_poison_(x)
        return tensors

    open_plain = ProcessWorld.open_messages

    def open_strict(world: ProcessWorld, count: int, edges: Iterable[tuple[int, int]]) -> tuple[Any, int]:
        transport, first = open_plain(world, count, edges)
        return transport and StrictMessages(transport), first

    with (
        patch.object(VirtualWorld, "begin_transfer", _begin_late(VirtualWorld)),
        patch.object(ProcessWorld, "begin_transfer", _begin_late(ProcessWorld)),
        patch.object(HostCopies, "begin_copy", staticmethod(_begin_host_copy)),
        patch.object(ProcessWorld, "open_messages", open_strict),
        patch.object(PipelineExecutor, "run_step", run_apart),
        patch.object(PipelineExecutor, "allocate", allocate_poison),
    ):
        yield


class StrictTransfer:
    """A collective, or a copy between host memory and the device, that is under way until it is waited for.

    outs, ins: of each local rank.  transfer: carries it out, from the second of two lists to the first.
    """

    def __init__(
        self, kind: str, outs: Sequence[Tensor], ins: Sequence[Tensor],
        transfer: Callable[[Sequence[Tensor], Sequence[Tensor]], object],
    ) -> None:  # fmt: skip
        self.kind, self.outs, self.ins, self.transfer = kind, outs, ins, transfer
        self.collective = COLLECTIVES.get(kind)
        self.poisoned = [*outs, *(ins if self.collective is not None and self.collective.reduces else ())]
        with _compat.no_modes(), torch.no_grad():
            self.sent = [x.clone() for x in ins]
            for x in self.poisoned:
                fill_with_poison_(x)
        self.under_way = True

    def wait(self) -> None:
        """Compare the buffers with what they were at the launch, then move the data."""
        if not self.under_way:
            return
        self.under_way = False
        with _compat.no_modes(), torch.no_grad():
            self._check()
            sent = self.sent
            if self.collective is not None and self.collective.is_in_place:
                for out, x in zip(self.outs, sent, strict=True):
                    out.copy_(x)
                sent = [*self.outs]
            self.transfer(self.outs, sent)

    def _check(self) -> None:
        for x in self.poisoned:
            if not is_poison(x):
                raise GraphZeroError(
                    f"between its launch and its wait, something wrote to the {x.numel():,} elements that a "
                    f"{self.kind} was about to fill"
                )
        for x, before in zip(self.ins, self.sent, strict=True):
            if not any(_overlap(x, out) for out in self.poisoned) and not same_bits(x, before):
                raise GraphZeroError(
                    f"between its launch and its wait, something wrote to the {x.numel():,} elements that a "
                    f"{self.kind} sends"
                )


def _begin_late(world_class: type[World]) -> Callable[..., Handle]:
    """``begin_transfer`` of a kind of world, as late as it may."""
    begin_now = world_class.begin_transfer

    def begin_transfer(
        world: World, kind: str, outs: Sequence[Tensor], ins: Sequence[Tensor], axis: str, reduction: str
    ) -> Handle:
        def transfer(outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
            begin_now(world, kind, outs, ins, axis, reduction).wait()

        return StrictTransfer(kind, outs, ins, transfer)

    return begin_transfer


def _begin_host_copy(target: Tensor, source: Tensor) -> Handle:
    """``HostCopies.begin_copy``, as late as it may."""
    return StrictTransfer(HOST_COPY, [target], [source], lambda outs, ins: outs[0].copy_(ins[0]))


def _overlap(x: Tensor, y: Tensor) -> bool:
    if not x.numel() or not y.numel() or _compat.storage_id(x) != _compat.storage_id(y):
        return False
    first, second = x.storage_offset(), y.storage_offset()
    return first < second + y.numel() and second < first + x.numel()
