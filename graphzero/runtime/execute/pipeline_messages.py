"""Messages between processes that run the stages of a pipeline: values that parts hand over, and scalars of the state.

A message goes to the rank of another member of ``pp`` with the same place on all other axes.  A rank sends a value as
soon as it is made, and receives it in front of the call that reads it, into memory that this call is given.

A sender keeps what it has sent until the receiver has it.  It waits for that in front of its first call
behind the one that reads it, in the order of ``PipelineProgram.calls``: all ranks know that order and could run one
after the other in it, so they do not wait for each other in a circle, and how long a value is held does not depend on
how fast they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from graphzero import _compat
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_parts import BODY, PipelineProgram, Slot, StageMessage
from graphzero.ir.pipeline_stages import home_stage
from graphzero.ir.transfer_layout import shape_on
from graphzero.runtime.transport.primitives import Handle
from graphzero.runtime.world.process import ProcessWorld
from graphzero.runtime.world.world import Sent
from graphzero.sbp.placement import PIPELINE


class MessagePassing:
    """The messages of one rank in each step.  graph: the whole program."""

    def __init__(self, graph: StepGraph, pipeline: PipelineProgram, world: ProcessWorld) -> None:
        self.graph, self.pipeline, self.world = graph, pipeline, world
        member, messages = world.member, pipeline.messages
        self.sends: dict[int, list[tuple[int, StageMessage]]] = {}  # by the call behind which they are sent
        self.receives: dict[int, list[tuple[int, StageMessage]]] = {}  # by the call in front of which they are read
        for number, message in enumerate(messages):
            if message.source == member:
                self.sends.setdefault(message.sent_after, []).append((number, message))
            elif message.target == member:
                self.receives.setdefault(message.read_by, []).append((number, message))
        self.call_names = list(_name_calls(pipeline))
        self._nodes = {node.name: node for node in graph.nodes}
        self._shared = shared_states(graph, pipeline)
        self.count = len(messages) + len(self._shared) * (pipeline.schedule.ranks - 1)
        self._scalars: dict[str, Tensor] = {}
        self._storages: set[int] = set()  # of bound tensors

    def bind(self, values: Mapping[str, Sequence[Tensor]]) -> None:
        """Take note of the tensors of persistent placeholders."""
        self._scalars = {name: values[name][0].detach() for name in self._shared}
        self._storages = {_compat.storage_id(x) for tensors in values.values() for x in tensors}

    def begin_step(self) -> StepMessages:
        return StepMessages(self, self.world.reserve_messages(self.count))

    def allocate(self, slot: Slot) -> Tensor:
        """Memory for a value from another stage."""
        node = self._nodes[slot[0].name]
        type_ = value.tensor_type(node)
        shape = shape_on(self.graph, type_, value.nd_of(node), self.world.rank_ids[0])
        return torch.empty(shape, dtype=type_.dtype, device=self.world.device)

    def is_bound(self, x: Tensor) -> bool:
        """Whether a value lies in memory that outlives the step, which the step may write before it is read."""
        return _compat.storage_id(x) in self._storages

    def scalar_messages(self) -> list[tuple[int, int, int, Tensor]]:
        """Number, source, target and tensor of each scalar of the state that goes from its writer to all others."""
        messages, number = [], len(self.pipeline.messages)
        for name, source in self._shared.items():
            for target in range(self.pipeline.schedule.ranks):
                if target != source:
                    messages.append((number, source, target, self._scalars[name]))
                    number += 1
        return messages


class StepMessages:
    """The messages of one step.  first: number of the first of them."""

    def __init__(self, passing: MessagePassing, first: int) -> None:
        self.passing, self.world, self.first = passing, passing.world, first
        self._under_way: list[tuple[int, int, Handle, Tensor]] = []  # what is sent: by which call it is read, where

    def wait_for_readers(self, call: int) -> None:
        """Let go of what calls before ``call`` read."""
        waiting = []
        for sent in self._under_way:
            read_by, target, handle, _ = sent
            if read_by < call:
                self.world.wait_for_member(handle, target, f"to come to {self.passing.call_names[read_by]}")
            else:
                waiting.append(sent)
        self._under_way = waiting

    def receive_for(self, call: int) -> dict[Slot, list[Tensor]]:
        """Receive what a call reads of other stages."""
        received, handles = {}, []
        for number, message in self.passing.receives.get(call, ()):
            x = self.passing.allocate(message.slot)
            handles.append((message, self.world.receive_from_member(message.source, x, self.first + number)))
            received[message.slot] = [x]
        for message, handle in handles:
            purpose = f"to end {self.passing.call_names[message.sent_after]}"
            self.world.wait_for_member(handle, message.source, purpose)
        self.world.note_doing(self.passing.call_names[call])
        return received

    def send(self, number: int, message: StageMessage, x: Tensor, is_written_later: bool) -> None:
        """Begin to send a value."""
        if is_written_later or self.passing.is_bound(x):
            x = x.clone()
        self._send(number, message.target, x, message.read_by)

    def _send(self, number: int, target: int, x: Tensor, read_by: int) -> None:
        if self.world.trace is not None:
            self.world.trace.append(Sent("send", PIPELINE, x.numel() * x.element_size()))
        handle = self.world.send_to_member(target, x, self.first + number)
        self._under_way.append((read_by, target, handle, x))

    def share_scalars(self) -> None:
        """Give all ranks the scalars of the state that one stage has written."""
        handles = []
        for number, source, target, x in self.passing.scalar_messages():
            if source == self.world.member:
                self._send(number, target, x, len(self.passing.pipeline.calls))
            elif target == self.world.member:
                handles.append((source, self.world.receive_from_member(source, x, self.first + number)))
        for source, handle in handles:
            self.world.wait_for_member(handle, source, "to end the step")


def _name_calls(pipeline: PipelineProgram) -> Iterator[str]:
    """What calls are called in messages; the last name is of the end of the step."""
    for part, micro_batch in pipeline.calls:
        key = pipeline.parts.parts[part].key
        yield f"{key} of micro-batch {micro_batch}" if key.kind in BODY else str(key)
    yield "the end of the step"


def shared_states(graph: StepGraph, pipeline: PipelineProgram) -> dict[str, int]:
    """Placeholder -> the member of ``pp`` that writes it, of the states that all ranks keep: scalars, and what is of
    no stage."""
    writers = {name: pipeline.member_of(part.key.stage) for part in pipeline.parts.parts for name in part.graph.updates}
    return {
        node.name: writers[node.name]
        for node in graph.placeholders("param", "buffer", "state")
        if node.name in writers and home_stage(node) is None
    }
