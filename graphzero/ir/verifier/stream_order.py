"""The law of streams: two accesses to one memory, one of them a write by or during a transfer, are ordered.

It is checked for every program whose transfers have their slots, whatever it runs on.  The order of issue, the streams,
records and waits are those of a GPU (``ir/streams``), where nothing else orders accesses.
"""

from __future__ import annotations

from graphzero.errors import ScheduleError
from graphzero.ir import ops
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_launches import list_launches
from graphzero.ir.pipeline_parts import PipelineProgram
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.streams.events import BUFFER, COMPUTE, SLOT, Region, StreamEvents
from graphzero.ir.streams.races import StreamRace, find_race
from graphzero.ir.streams.stage_events import StageEvents
from graphzero.ir.transfer import NO_SLOT_YET
from graphzero.ir.verifier.violation import violation


def check_streams(graph: StepGraph, where: str = "") -> None:
    """Raise VerifyError where two accesses to one memory are not ordered by a stream or by a wait."""
    slots = [moves.slot for moves in liveness(graph).transfers.values() if moves.is_launch]
    if NO_SLOT_YET in slots or not (slots or any(node.target in ops.HOST_LAUNCHES for node in graph.nodes)):
        return
    race = find_race(StreamEvents(graph).all())
    if race is not None:
        raise violation(race.second.node, where, _describe(race), _next_step(race))


def check_stage_streams(pipeline: PipelineProgram, member: int) -> None:
    """The law for a step of a member of ``pp``: its calls, and the messages around them; raises ScheduleError."""
    race = find_race(StageEvents(pipeline, member, list_launches(pipeline, member)).all())
    if race is not None:
        _, memory = race.region
        raise ScheduleError(
            f"the schedule {pipeline.schedule.name!r}: {race.second.does} works in the memory of {memory} while "
            f"{race.first.does} may still run in it"
        )


def _describe(race: StreamRace) -> str:
    first, second = race.first, race.second
    if second.does == "end":
        return f"the step ends while {first} may still run in {_memory(race.region)}: nothing waits for it"
    if second.does == "free":
        return f"after {second} the memory of {_memory(race.region)} is given back while {first} may still run in it"
    return f"{second} works in {_memory(race.region)} while {first} may still run in it"


def _next_step(race: StreamRace) -> str:
    launch = race.first if race.first.stream != COMPUTE else race.second
    return f"Wait for '{launch.node.name}' before, or give one of them other memory"


def _memory(region: Region) -> str:
    kind, which = region
    if kind == SLOT:
        return f"slot {which}"
    return f"the buffer of '{which}'" if kind == BUFFER else f"'{kind.name}'"  # type: ignore[union-attr]
