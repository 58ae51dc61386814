"""Messages between pipeline stages, of virtual ranks and of processes, that arrive as late as they may.

By itself one process that has the ranks of all members hands values from part to part.  Here each member has values of
its own and launches what its processes would, in their order; calls run in the order of ``PipelineProgram.calls``.
Messages between processes begin as they do otherwise, in memory of their own (``StrictMessages``).
A message moves as late as it may, when its receiver waits for it, and what receives it holds no number from the moment
at which it might arrive.  What is sent must stay as it is until its sender has waited for it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from graphzero import _compat
from graphzero.errors import GraphZeroError
from graphzero.ir.pipeline_launches import LaunchKind, list_launches
from graphzero.ir.pipeline_parts import ValueKey
from graphzero.runtime.execute.executor import Results
from graphzero.runtime.execute.pipeline_executor import PipelineExecutor, StageValues
from graphzero.runtime.execute.pipeline_messages import MessagePassing, StepMessages
from graphzero.runtime.transport.primitives import DONE, Handle
from graphzero.runtime.transport.transport import MessageTransport


def run_step_by_members(executor: PipelineExecutor, inputs: Mapping[str, Sequence[Any]]) -> Results:
    """One step on virtual ranks, as the processes of all members run it; see ``PipelineExecutor.run_step``."""
    executor.finish()
    pipeline, mailboxes = executor.pipeline, [Mailbox() for _ in executor.world.local_ranks]
    members = [MemberStep(executor, passing, mailboxes) for passing in _passings_of(executor)]
    for number, call in enumerate(pipeline.calls):
        members[pipeline.member_of(pipeline.parts.parts[call.part].key.stage)].run_to(number, inputs)
    for member in members:
        member.run_to(None, inputs)

    def returned(key: ValueKey) -> Sequence[Any]:
        return members[pipeline.member_of(key.stage)].values.saved[key, 0]

    outputs = [returned(key) if isinstance(key, ValueKey) else key for key in pipeline.parts.outputs]
    return Results(outputs, {name: list(returned(key)) for name, key in pipeline.parts.aux.items()})


class MemberStep:
    """A step of one member of ``pp``, run up to one call after the other."""

    def __init__(self, executor: PipelineExecutor, passing: MessagePassing, mailboxes: Sequence[Mailbox]) -> None:
        self.executor, self.launches = executor, list_launches(executor.pipeline, passing.world.member)
        steps = [_messages(executor, passing, local, mailbox) for local, mailbox in enumerate(mailboxes)]
        messages: Any = MemberMessages(steps)
        self.values = StageValues({}, executor.count_readers(self.launches), messages)

    def run_to(self, call: int | None, inputs: Mapping[str, Sequence[Any]]) -> None:
        """Launch what comes up to a call, and the sends after it; None: all that is left."""
        ran = False
        while self.launches and (call is None or not ran or self.launches[0].kind is LaunchKind.SEND):
            launch = self.launches.pop(0)
            self.executor.run_launch(launch, self.values, inputs)
            ran = ran or launch == (LaunchKind.CALL, call)


class MemberMessages:
    """As ``StepMessages``, for all ranks of a member.  steps: of each of them."""

    def __init__(self, steps: Sequence[StepMessages]) -> None:
        self.steps = steps

    def note_call(self, number: int) -> None:
        """A call begins."""

    def post(self, number: int) -> None:
        for step in self.steps:
            step.post(number)

    def await_arrival(self, number: int) -> list[Tensor]:
        return [x for step in self.steps for x in step.await_arrival(number)]

    def send(self, number: int, tensors: Sequence[Tensor]) -> None:
        for step, x in zip(self.steps, tensors, strict=True):
            step.send(number, [x])

    def release(self, number: int) -> None:
        for step in self.steps:
            step.release(number)


_passings: WeakKeyDictionary[PipelineExecutor, list[MessagePassing]] = WeakKeyDictionary()


def _passings_of(executor: PipelineExecutor) -> list[MessagePassing]:
    """The messages of each member, which are checked once."""
    if executor not in _passings:
        worlds: list[Any] = [MemberWorld(member) for member in range(executor.pipeline.schedule.ranks)]
        _passings[executor] = [
            MessagePassing(executor.graph, executor.pipeline, one, lambda slot: []) for one in worlds
        ]
    return _passings[executor]


def _messages(executor: PipelineExecutor, passing: MessagePassing, local: int, mailbox: Mailbox) -> StepMessages:
    """The messages of a rank in a step, by the code that a process runs."""
    own, world = copy(passing), MemberWorld(passing.world.member or 0, mailbox)
    own.world = world  # type: ignore[assignment]
    own.allocate = lambda slot: [executor.allocate(slot)[local]]
    own.bind({name: [xs[local]] for one in executor.executors.values() for name, xs in one.bound.items()})
    return StepMessages(own)


class MemberWorld:
    """The part of a world that ``StepMessages`` asks for, without processes."""

    trace = None

    def __init__(self, member: int, mailbox: Mailbox | None = None) -> None:
        self.member, self.mailbox = member, mailbox

    def open_messages(self, count: int, edges: Any) -> tuple[Mailbox | None, int]:
        return self.mailbox, 0

    def wait_for_members(self, handle: Handle, members: Sequence[int], purpose: str) -> None:
        handle.wait()


class Mailbox:
    """Messages under way between ranks with the same place on all axes but ``pp``, by their numbers."""

    def __init__(self) -> None:
        self.sent: dict[int, Tensor] = {}

    def send(self, number: int, target: int, x: Tensor) -> Handle:
        with _compat.no_modes(), torch.no_grad():
            self.sent[number] = x.view(-1).clone()  # of what is not dense a transport would send something else
        return SentMessage(x, self.sent[number])

    def receive(self, number: int, source: int, into: Tensor) -> Handle:
        return ReceivedMessage(into, lambda: self.sent.pop(number))


class StrictMessages:
    """The messages of a transport between processes, to and from memory of their own."""

    def __init__(self, transport: MessageTransport | StrictMessages) -> None:
        self.transport = transport
        self.own: int = transport.own

    def send(self, number: int, target: int, x: Tensor) -> Handle:
        before = self._copy_of(x)
        return SentMessage(x, before, self.transport.send(number, target, before))

    def receive(self, number: int, source: int, into: Tensor) -> Handle:
        arrived = self._copy_of(into)
        handle = self.transport.receive(number, source, arrived)
        return ReceivedMessage(into, lambda: self._wait(handle, arrived))

    def broadcast(self, number: int, source: int, x: Tensor) -> Handle:
        copy_of = self._copy_of(x)
        handle = self.transport.broadcast(number, source, copy_of)
        if source == self.own:
            return SentMessage(x, copy_of, handle)
        return ReceivedMessage(x, lambda: self._wait(handle, copy_of))

    def _copy_of(self, x: Tensor) -> Tensor:
        with _compat.no_modes(), torch.no_grad():
            return x.view(-1).clone()

    def _wait(self, handle: Handle, arrived: Tensor) -> Tensor:
        handle.wait()
        return arrived


class SentMessage:
    """A message, to its sender.  before: what was sent, by the transport of ``handle``."""

    def __init__(self, x: Tensor, before: Tensor, handle: Handle = DONE) -> None:
        self.x, self.before, self.handle = x, before, handle

    def wait(self) -> None:
        self.handle.wait()
        with _compat.no_modes(), torch.no_grad():
            if not same_bits(self.x, self.before):
                raise GraphZeroError(
                    f"while they were sent to another stage, something wrote to {self.x.numel():,} elements"
                )


class ReceivedMessage:
    """A message, to its receiver.  fetch: waits for what arrives, and returns it."""

    def __init__(self, into: Tensor, fetch: Callable[[], Tensor]) -> None:
        self.into, self.fetch = into, fetch
        with _compat.no_modes(), torch.no_grad():
            fill_with_poison_(into)

    def wait(self) -> None:
        arrived = self.fetch()
        with _compat.no_modes(), torch.no_grad():
            if not is_poison(self.into):
                raise GraphZeroError(
                    f"before they arrived from another stage, something wrote to {self.into.numel():,} elements"
                )
            self.into.view(-1).copy_(arrived)


def fill_with_poison_(x: Tensor) -> None:
    """Fill a tensor with values that no result has: NaN, the largest integer, True."""
    x.fill_(_poison(x.dtype))


def is_poison(x: Tensor) -> bool:
    """Return whether a tensor is as ``fill_with_poison_`` left it."""
    return same_bits(x, torch.full_like(x, _poison(x.dtype)))


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors of one dtype and as many elements hold the same bytes."""
    return torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
