"""The order in which members of pp launch calls and messages: it comes to its end, in queues too."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from staged import Net, batches, placement, staged_graph, tensors_of
from torch import Tensor
from torch_sanitizer import find_race_by_torch

from graphzero.errors import GraphZeroError, ScheduleError
from graphzero.ir.pipeline_launches import LaunchKind, StageLaunch, check_launches, list_launches
from graphzero.ir.pipeline_parts import PipelineProgram
from graphzero.ir.streams.events import EventRecord, EventWait, StreamKernel
from graphzero.ir.streams.stage_events import StageEvents
from graphzero.ir.verifier.stream_order import check_stage_streams, find_race
from graphzero.runtime.execute.pipeline_messages import StepMessages
from graphzero.runtime.transport.communicator import Communicator
from graphzero.schedules import PipelineSchedule, check_schedule, generate_schedule
from graphzero.testing import strict_stages, strict_transfers

STAGES = {
    "model.first": 0,
    "model.layers.0": 1,
    "model.layers.1": 2,
    "model.head": 3,
}  # the head reads the first weight
WORDS = {LaunchKind.RELEASE: "release", LaunchKind.POST: "post", LaunchKind.ARRIVE: "arrive", LaunchKind.SEND: "send"}


@cache
def program() -> PipelineProgram:
    """Four stages, with parts for weight gradients of their own, a weight that two stages use, and a clipped norm."""
    graph = staged_graph(Net(layers=2, tied=True), STAGES, placement(2, 1), "zbv", micro_batches=4, stage=1, clip=0.1)
    graph.compile(*batches(1)[0])
    return graph._selection.last.pipeline  # type: ignore[union-attr, return-value]


def random_schedule(draw: random.Random, ranks: int, stages: int = 4, micro_batches: int = 4) -> PipelineSchedule:
    """Rows of F, I and W in an order that can be run, of stages on any ranks."""
    stage_ranks = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    draw.shuffle(stage_ranks)
    rows: list[list[str]] = [[] for _ in range(ranks)]
    ran: set[tuple[int, str, int]] = set()

    def can_run(stage: int, kind: str, mb: int) -> bool:
        if (stage, kind, mb) in ran or kind != "I" and mb and (stage, kind, mb - 1) not in ran:
            return False
        needed = {"F": (stage - 1, "F", mb), "I": (stage + 1, "I", mb), "W": (stage, "I", mb)}[kind]
        return (not 0 <= needed[0] < stages or needed in ran) and (kind == "F" or (stage, "F", mb) in ran)

    actions = [(s, kind, mb) for s in range(stages) for kind in "FIW" for mb in range(micro_batches)]
    while len(ran) < len(actions):
        action = draw.choice([action for action in actions if can_run(*action)])
        ran.add(action)
        rows[stage_ranks[action[0]]].append("".join(map(str, action)))
    return PipelineSchedule.from_rows(rows)


def schedules() -> list[PipelineSchedule]:
    named = [(name, 4) for name in ("gpipe", "1f1b", "zb1p")]
    named += [(name, 2) for name in ("interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv")]
    drawn = [random_schedule(random.Random(seed), 2 + seed % 3) for seed in range(40)]
    return [generate_schedule(name, ranks, 4) for name, ranks in named] + drawn


def on_schedule(schedule: PipelineSchedule) -> PipelineProgram:
    check_schedule(schedule)
    return replace(program(), schedule=schedule)


def test_launches_of_a_rank_are_its_calls_with_receives_one_call_ahead() -> None:
    pipeline = on_schedule(generate_schedule("1f1b", 4, 4))
    lines = []
    for kind, number in list_launches(pipeline, 2):
        if kind is LaunchKind.CALL:
            lines.append(pipeline.label(pipeline.calls[number]))
        else:
            message = pipeline.messages[number]
            if message.slot[0] in pipeline.repeated:
                made_by = pipeline.label(pipeline.calls[message.sent_after])
                lines.append(f"{WORDS[kind]} {made_by} {message.source} -> {message.target}")
    assert "\n".join(lines).startswith(BEGIN.strip()), "\n".join(lines)


BEGIN = """
post 1F0 1 -> 2
post 1F1 1 -> 2
arrive 1F0 1 -> 2
2F0
send 2F0 2 -> 3
post 3I0 3 -> 2
arrive 1F1 1 -> 2
2F1
send 2F1 2 -> 3
release 2F0 2 -> 3
release 2F1 2 -> 3
arrive 3I0 3 -> 2
2I0
send 2I0 2 -> 1
post 1F2 1 -> 2
2W0
"""


def test_every_schedule_comes_to_its_end() -> None:
    for schedule in schedules():
        pipeline = on_schedule(schedule)
        check_launches(pipeline)
        assert pipeline.messages
        for member in range(schedule.ranks):
            launches = list_launches(pipeline, member)
            numbers = {kind: [launch.number for launch in launches if launch.kind is kind] for kind in LaunchKind}
            assert sorted(numbers[LaunchKind.POST]) == sorted(numbers[LaunchKind.ARRIVE])
            assert sorted(numbers[LaunchKind.SEND]) == sorted(numbers[LaunchKind.RELEASE])
            assert [pipeline.calls[i] for i in numbers[LaunchKind.CALL]] == pipeline.calls_on(member)


def test_both_ends_of_a_direction_have_one_order() -> None:
    for schedule in schedules():
        pipeline = on_schedule(schedule)
        orders: dict[tuple[Any, ...], list[int]] = {}
        for member in range(schedule.ranks):
            for kind, number in list_launches(pipeline, member):
                if kind in (LaunchKind.SEND, LaunchKind.POST):
                    message = pipeline.messages[number]
                    orders.setdefault((message.source, message.target, kind), []).append(number)
        for source, target, _ in orders:
            assert orders[source, target, LaunchKind.SEND] == orders[source, target, LaunchKind.POST]


def test_receives_next_to_their_readers_may_wait_for_each_other_and_are_refused_with_their_cells() -> None:
    texts = []
    for schedule in schedules():
        pipeline = on_schedule(schedule)
        vars(pipeline)["messages"] = [m._replace(posted_before=m.read_by) for m in pipeline.messages]
        try:
            check_launches(pipeline)
        except ScheduleError as error:
            texts.append(str(error))
    assert len(texts) > 4 and texts[0] == (
        "the schedule 'interleaved' does not end: the transfer of 'mm' of prologue@0 on member 0 needs the transfer "
        "of 'mm' of prologue@0 on member 1, which comes after the transfer of 'addmm_mb' of 0F0 on member 1, which "
        "needs the transfer of 'addmm_mb' of 0F0 on member 0, which comes after the transfer of 'mm' of prologue@0 "
        "on member 0"
    )


class RecordingTransport:
    """Sends that end when they are awaited, as on a stream; holds no tensor."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.ended: list[int] = []

    def send(self, number: int, q: int, x: Tensor) -> Any:
        self.tensors.append(weakref.ref(x))

        def wait() -> None:
            assert self.tensors[number]() is not None, "its memory was free before it was sent"
            self.ended.append(number)

        return SimpleNamespace(wait=wait)


def test_a_sent_value_keeps_its_memory_until_its_send_has_ended() -> None:
    transport, pipeline = RecordingTransport(), on_schedule(generate_schedule("1f1b", 4, 4))
    world = SimpleNamespace(
        open_messages=lambda count, edges: (transport, 0), trace=None,
        wait_for_members=lambda handle, members, purpose: handle.wait(),
    )  # fmt: skip
    passing: Any = SimpleNamespace(
        pipeline=pipeline, world=world, count=0, edges=set(), copied={1}, is_bound=lambda x: False,
        names=[pipeline.name_of(call) for call in pipeline.calls],
    )  # fmt: skip
    step = StepMessages(passing)
    x, y = torch.ones(3), torch.ones(3)
    step.send(0, [x])
    step.send(1, [y])
    y.zero_()  # written over by a later call
    del x
    sent = transport.tensors[1]()
    assert transport.tensors[0]() is not None and sent is not None and sent.eq(1).all()
    del sent
    step.release(0)
    assert transport.ended == [0] and transport.tensors[0]() is None
    step.release(1)
    assert transport.ended == [0, 1] and transport.tensors[1]() is None


def test_after_a_call_that_stopped_gpus_do_not_go_on() -> None:
    communicator: Any = SimpleNamespace(rank=3, generation=1, _stages={(1, 3): (0, None)})
    with pytest.raises(GraphZeroError, match="rank 3: a call of these ranks has stopped.*\n  Restart the processes"):
        Communicator.stage_transport(communicator, [1, 3], torch.device("cuda"))


# ---- what a member launches, as streams see it, and in the strict world


def test_no_schedule_has_a_race() -> None:
    for schedule in schedules():
        pipeline = on_schedule(schedule)
        for member in range(schedule.ranks):
            check_stage_streams(pipeline, member)


def test_the_law_of_streams_objects_to_a_dropped_record_or_wait_where_torchs_sanitizer_does() -> None:
    pipeline = on_schedule(generate_schedule("zbv", 2, 4))
    events = StageEvents(pipeline, 1, list_launches(pipeline, 1)).all()
    assert not find_race_by_torch(events)
    seen: Counter[tuple[type, bool]] = Counter()
    for i, event in enumerate(events):
        if not isinstance(event, StreamKernel):
            rest = [*events[:i], *events[i + 1 :]]
            objects = find_race(rest) is not None
            assert objects == find_race_by_torch(rest), event
            seen[type(event), objects] += 1
    # Dropped without harm are those beside another one of the same direction, which orders the same.
    assert all(seen[kind, False] < seen[kind, True] for kind in (EventRecord, EventWait)), seen


def test_a_call_does_not_begin_before_what_it_reads_has_arrived() -> None:
    pipeline = on_schedule(generate_schedule("1f1b", 4, 4))
    launches = list_launches(pipeline, 2)
    first = next(i for i, launch in enumerate(launches) if launch.kind is LaunchKind.ARRIVE)
    assert launches[first + 1].kind is LaunchKind.CALL
    launches[first : first + 2] = reversed(launches[first : first + 2])
    race = find_race(StageEvents(pipeline, 2, launches).all())
    assert race is not None and (race.first.does, race.second.does) == (
        "the receive of 'add_mb' of 1F0 on member 2", "2F0 on member 2",
    )  # fmt: skip


def test_memory_that_is_used_again_while_it_is_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all micro-batches put what they hand over in the same place."""
    monkeypatch.setattr(PipelineProgram, "label", lambda self, call: "each call")
    pipeline = on_schedule(generate_schedule("1f1b", 4, 4))
    with pytest.raises(ScheduleError, match=r"works in the memory of .* in each call while the send of .* may still"):
        check_stage_streams(pipeline, 0)


def step_results() -> list[Tensor]:
    torch.manual_seed(0)
    model = Net(layers=2, tied=True)
    graph = staged_graph(model, STAGES, placement(2, 2), "zbv", micro_batches=4, stage=2, clip=0.1)
    return tensors_of(([graph(*batch) for batch in batches()], graph.full_state_dict()))


@pytest.mark.at_once
def test_members_that_keep_their_values_and_send_messages_late_compute_the_same() -> None:
    expected = step_results()
    with strict_transfers():
        assert all(map(torch.equal, step_results(), expected))


def test_values_that_a_member_does_not_wait_for_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_an_arrival(pipeline: PipelineProgram, member: int) -> list[StageLaunch]:
        launches = list_launches(pipeline, member)
        arrivals = [one for one in launches if one.kind is LaunchKind.ARRIVE]
        return [one for one in launches if member or one != arrivals[-1]]

    monkeypatch.setattr(strict_stages, "list_launches", without_an_arrival)
    with strict_transfers(), pytest.raises(KeyError, match="stage="):
        step_results()


def test_writing_to_what_is_sent_to_another_stage_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    send = StepMessages.send

    def send_and_write(self: StepMessages, number: int, tensors: list[Tensor]) -> None:
        send(self, number, tensors)
        tensors[0].add_(1)

    monkeypatch.setattr(StepMessages, "send", send_and_write)
    with strict_transfers(), pytest.raises(GraphZeroError, match=r"while they were sent to another stage, .* wrote to"):
        step_results()


def test_writing_to_what_is_about_to_arrive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    post = StepMessages.post

    def post_and_write(self: StepMessages, number: int) -> None:
        post(self, number)
        self._posted[number][1][0].zero_()

    monkeypatch.setattr(StepMessages, "post", post_and_write)
    with strict_transfers(), pytest.raises(GraphZeroError, match="before they arrived from another stage"):
        step_results()
