"""Messages between processes that run the stages of a pipeline: values that parts hand over, and what all ranks get.

A message goes to the rank of another member of ``pp`` with the same place on all other axes.  When it is sent, received
and awaited, ``ir/pipeline_launches.py`` says; how it travels is the transport's.  A value arrives in the memory that
its readers are given.  At the end of a step all ranks are given what it returns, and the scalars of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from graphzero import _compat
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_launches import check_launches, sends_of_copies
from graphzero.ir.pipeline_parts import PipelineProgram, Slot
from graphzero.ir.pipeline_stages import home_stage
from graphzero.ir.verifier.stream_order import check_stage_streams
from graphzero.runtime.transport.primitives import DONE, Handle
from graphzero.runtime.world.process import ProcessWorld
from graphzero.runtime.world.world import Sent
from graphzero.sbp.placement import PIPELINE

Allocate = Callable[[Slot], list[Tensor]]


class MessagePassing:
    """The messages of one rank in each step.

    graph: the whole program.  allocate: memory for a value from another stage.
    Raises ScheduleError where the messages would not all arrive, or a call does not wait for one.
    """

    def __init__(self, graph: StepGraph, pipeline: PipelineProgram, world: ProcessWorld, allocate: Allocate) -> None:
        check_launches(pipeline)
        check_stage_streams(pipeline, world.member or 0)
        self.pipeline, self.world, self.allocate = pipeline, world, allocate
        self.names = [pipeline.name_of(call) for call in pipeline.calls]
        self.edges = {(message.source, message.target) for message in pipeline.messages}
        self.writers = shared_states(graph, pipeline)
        self.count = len(pipeline.messages) + len(pipeline.returned) + len(self.writers)
        self.copied = sends_of_copies(pipeline, world.member)
        self.scalars: dict[str, Tensor] = {}
        self._storages: set[int] = set()  # of bound tensors

    def bind(self, values: Mapping[str, Sequence[Tensor]]) -> None:
        """Take note of the tensors of persistent placeholders."""
        self.scalars = {name: values[name][0].detach() for name in self.writers}
        self._storages = {_compat.storage_id(x) for tensors in values.values() for x in tensors}

    def is_bound(self, x: Tensor) -> bool:
        """Whether a value lies in memory that outlives the step, which the step may write before it is read."""
        return _compat.storage_id(x) in self._storages


class StepMessages:
    """The messages of one step, by their numbers.  is_shared: whether scalars of the state begin to be received."""

    def __init__(self, passing: MessagePassing) -> None:
        self.passing, self.world, self.messages = passing, passing.world, passing.pipeline.messages
        self.is_shared = False
        self._transport, self._first = self.world.open_messages(passing.count, passing.edges)
        self._sent: dict[int, tuple[Handle, Tensor]] = {}
        self._posted: dict[int, tuple[Handle, list[Tensor]]] = {}

    def note_call(self, number: int) -> None:
        """Say which call this rank computes from now on."""
        self.world.note_doing(self.passing.names[number])

    def post(self, number: int) -> None:
        """Begin to receive a value."""
        message = self.messages[number]
        tensors = self.passing.allocate(message.slot)
        transport = self._transport
        handle = DONE if transport is None else transport.receive(self._first + number, message.source, tensors[0])
        self._posted[number] = handle, tensors

    def await_arrival(self, number: int) -> list[Tensor]:
        """Wait until a value has been received."""
        handle, tensors = self._posted.pop(number)
        message = self.messages[number]
        self.world.wait_for_members(handle, [message.source], f"to end {self.passing.names[message.sent_after]}")
        return tensors

    def send(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Begin to send a value of this rank."""
        (x,) = tensors
        if number in self.passing.copied or self.passing.is_bound(x):
            x = x.clone()
        self._trace(x)
        transport, target = self._transport, self.messages[number].target
        handle = DONE if transport is None else transport.send(self._first + number, target, x)
        self._sent[number] = handle, x

    def release(self, number: int) -> None:
        """Wait until a value has been sent, and let go of it."""
        message = self.messages[number]
        purpose = f"to come to {self.passing.names[message.read_by]}"
        self.world.wait_for_members(self._sent[number][0], [message.target], purpose)
        del self._sent[number]

    def share(self, returned: Mapping[Slot, Tensor]) -> None:
        """Give all ranks what the step returns, which they have memory for, and the scalars that one stage writes."""
        passing, pipeline, own = self.passing, self.passing.pipeline, self.world.member
        transport = self._transport
        shared = [(pipeline.member_of(slot[0].stage), x) for slot, x in returned.items()]
        shared += [(source, passing.scalars[name]) for name, source in passing.writers.items()]
        self.is_shared = any(source != own for source in passing.writers.values())
        others = [member for member in range(pipeline.schedule.ranks) if member != own]
        handles = []
        for number, (source, x) in enumerate(shared, self._first + len(self.messages)):
            awaited = others if source == own else [source]
            handles.append((awaited, DONE if transport is None else transport.broadcast(number, source, x)))
            for _ in others if source == own else ():
                self._trace(x)
        for awaited, handle in handles:
            self.world.wait_for_members(handle, awaited, "to end the step")

    def _trace(self, x: Tensor) -> None:
        if self.world.trace is not None:
            self.world.trace.append(Sent("send", PIPELINE, x.numel() * x.element_size()))


def shared_states(graph: StepGraph, pipeline: PipelineProgram) -> dict[str, int]:
    """Placeholder -> the member of ``pp`` that writes it, of the states that all ranks keep: scalars, and what is of
    no stage."""
    writers = {name: pipeline.member_of(part.key.stage) for part in pipeline.parts.parts for name in part.graph.updates}
    return {
        node.name: writers[node.name]
        for node in graph.placeholders("param", "buffer", "state")
        if node.name in writers and home_stage(node) is None
    }
