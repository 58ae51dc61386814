"""The launches of each member of ``pp`` in a step, in order: its calls, and around them its sends and receives, and
copies of values that wait on the host.

A value is sent as soon as it is made.  Its receive is posted one call of the receiver ahead of the call that reads it,
so that it arrives while that one runs; or earlier, where the same member is sent something after it that is read
first: from one member to another values travel in one queue, as on a communicator of NCCL.  A sender keeps a value
until it has been received, and waits for that before its first call after the one that reads it.

So the order does not depend on how fast ranks are, and no ranks wait for each other in a circle: all calls could run
one after the other in the order of ``PipelineProgram.calls``.  Then a value has been sent before the call that reads
it, and so has all that its queue holds before it; and all of these have been posted.  ``check_launches`` replays it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from graphzero.errors import ScheduleError
from graphzero.ir.pipeline_parts import PipelineProgram
from graphzero.schedules.queues import describe_circle, run_queues


class LaunchKind(Enum):
    """A kind of launch.  RELEASE: wait until a value has been sent, and let go of it.  POST: begin to receive a value.
    ARRIVE: wait until it has been received.  STORE: begin to copy values to the host.  STORED: wait until they are
    there, and let go of them on the device.  FETCH: begin to copy them back.  FETCHED: wait until they are back."""

    RELEASE = "the end of the send"
    POST = "the receive"
    ARRIVE = "the arrival"
    CALL = "the call"
    SEND = "the send"
    STORE = "the copy to the host"
    STORED = "the end of the copy to the host"
    FETCH = "the copy back"
    FETCHED = "the end of the copy back"


COPIES = (LaunchKind.STORE, LaunchKind.STORED, LaunchKind.FETCH, LaunchKind.FETCHED)


class StageLaunch(NamedTuple):
    """number: of a call, of a message or of a round trip, among all."""

    kind: LaunchKind
    number: int


def list_launches(pipeline: PipelineProgram, member: int | None) -> list[StageLaunch]:
    """List the launches of a member's ranks; None: one process that has the ranks of all members, which sends nothing,
    and copies nothing to the host that other members read in the same memory.

    At the end of the step everything is released, and then comes what goes to all members.
    """
    own = [i for i, call in enumerate(pipeline.calls) if pipeline.is_on(call, member)]
    sends, posts, arrivals = defaultdict(list), defaultdict(list), defaultdict(list)
    for number, message in enumerate(pipeline.messages):
        if message.source == member:
            sends[message.sent_after].append(number)
        elif message.target == member:
            posts[message.posted_before].append(number)
            arrivals[message.read_by].append(number)
    copies = _list_copies(pipeline, member)
    launches: list[StageLaunch] = []
    unreleased: list[int] = []
    for i in own:
        launches += [
            StageLaunch(LaunchKind.RELEASE, number) for number in unreleased if pipeline.messages[number].read_by < i
        ]
        unreleased = [number for number in unreleased if pipeline.messages[number].read_by > i]
        launches += [StageLaunch(LaunchKind.POST, number) for number in posts[i]]
        launches += copies[LaunchKind.FETCH, i]
        launches += [StageLaunch(LaunchKind.ARRIVE, number) for number in arrivals[i]]
        launches += copies[LaunchKind.FETCHED, i]
        launches.append(StageLaunch(LaunchKind.CALL, i))
        launches += [StageLaunch(LaunchKind.SEND, number) for number in sends[i]]
        launches += [*copies[LaunchKind.STORE, i], *copies[LaunchKind.STORED, i]]
        unreleased += sends[i]
    return launches + [StageLaunch(LaunchKind.RELEASE, number) for number in unreleased]


def _list_copies(pipeline: PipelineProgram, member: int | None) -> dict[tuple[LaunchKind, int], list[StageLaunch]]:
    """List the launches of copies to and from the host, by their kind and the call that they run in parallel with."""
    sent = {message.slot for message in pipeline.messages} if member is None else set()
    copies: dict[tuple[LaunchKind, int], list[StageLaunch]] = defaultdict(list)
    for number, trip in enumerate(pipeline.round_trips):
        if member in (None, trip.member) and not sent.intersection(trip.slots):
            places = trip.store_after, trip.stored_after, trip.fetch_before, trip.read_by
            for kind, call in zip(COPIES, places, strict=True):
                copies[kind, call].append(StageLaunch(kind, number))
    return copies


Item = tuple[int, StageLaunch] | tuple[int, int]  # of a member: a launch, or its part in the transfer of a message


def check_launches(pipeline: PipelineProgram) -> None:
    """Raise ScheduleError unless all members come to the ends of their launches, whatever the transport.

    The model is NCCL's, with a communicator for each member and direction: a transfer waits at the head of its queue
    until its other end is at the head of the peer's, and begins after what was launched before it.  Launches of a
    member run in order; only RELEASE and ARRIVE wait for a transfer.
    """
    queues: dict[tuple[int, ...], list[Item]] = {}
    posted = {LaunchKind.SEND, LaunchKind.POST}
    launch_of: dict[Item, Item] = {}
    for member in range(pipeline.schedule.ranks):
        queues[member,] = []
        for launch in list_launches(pipeline, member):
            queues[member,].append((member, launch))
            if launch.kind in posted:
                message, transfer = pipeline.messages[launch.number], (member, launch.number)
                queues.setdefault((member, message.source, message.target), []).append(transfer)
                launch_of[transfer] = member, launch

    def needs(item: Item) -> Iterator[Item]:
        member, launch = item
        if isinstance(launch, int):
            yield launch_of[item]
        elif launch.kind in (LaunchKind.RELEASE, LaunchKind.ARRIVE):
            yield member, launch.number

    ends = ((message.source, message.target) for message in pipeline.messages)
    peers_of: dict[Item, tuple[Item]] = {
        (end, i): ((pair[1 - at], i),) for i, pair in enumerate(ends) for at, end in enumerate(pair)
    }
    queue_of = {item: queue for queue, items in queues.items() for item in items}
    stops = run_queues(queues, needs, peers_of).stops
    if stops:
        head, text = describe_circle(stops, queue_of.__getitem__, lambda item: describe_launch(pipeline, *item))
        first = describe_launch(pipeline, *head)
        raise ScheduleError(f"the schedule {pipeline.schedule.name!r} does not end: {first} {text}")


def sends_of_copies(pipeline: PipelineProgram, member: int | None) -> set[int]:
    """The messages of a member whose value a later call of it writes over, so that it sends a copy."""
    own = [(i, call) for i, call in enumerate(pipeline.calls) if pipeline.is_on(call, member)]
    return {
        number
        for number, message in enumerate(pipeline.messages)
        if message.source == member
        and any(pipeline.writes(call, message.slot) for i, call in own if i > message.sent_after)
    }


def describe_launch(pipeline: PipelineProgram, member: int, launch: StageLaunch | int) -> str:
    """ "the send of 'relu' of 0F3 on member 1".  launch: of a member, or its part in the transfer of a message."""
    number = launch if isinstance(launch, int) else launch.number
    kind = "the transfer" if isinstance(launch, int) else launch.kind.value
    if kind == LaunchKind.CALL.value:
        return f"{pipeline.label(pipeline.calls[number])} on member {member}"
    if isinstance(launch, StageLaunch) and launch.kind in COPIES:
        trip = pipeline.round_trips[number]
        made_by = pipeline.label(pipeline.calls[trip.store_after])
        return f"{kind} of '{trip.slots[0][0].name}' after {made_by} on member {member}"
    message = pipeline.messages[number]
    made_by = pipeline.label(pipeline.calls[message.sent_after])
    return f"{kind} of '{message.slot[0].name}' of {made_by} on member {member}"
