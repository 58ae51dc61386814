"""Data of a step on pipeline stages: its schedule over time, the memory of each member of ``pp``, its programs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch import fx

from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_parts import PartCall, PipelineProgram, StagePart, ValueKey
from graphzero.ir.pipeline_stages import stages_of
from graphzero.ir.storage.liveness import Bytes
from graphzero.passes import Record
from graphzero.plan.device import Device
from graphzero.plan.pipelines.pipeline_memory import PipelineMemory
from graphzero.plan.plan import CATEGORIES, PipelinePlan
from graphzero.plan.program_costs import total_over_time
from graphzero.plugins.page.lines import Pool, passes_data, values_data
from graphzero.plugins.page.memory import change_bytes, memory_data
from graphzero.plugins.page.parameters import RankNumbers, parameters_data
from graphzero.plugins.page.snapshots import snapshots
from graphzero.plugins.page.timeline import planned_data
from graphzero.plugins.plan.pipeline_timeline import TimedCall, pipeline_timeline, time_calls, unit_seconds
from graphzero.sbp.placement import PIPELINE

WHOLE = "whole step"
Over = dict[str, Bytes]  # bytes by category while each op of a part runs


class CallMemory:
    """Bytes on the ranks of each member of ``pp``, call by call.

    most: of a call, at its worst moment.  after: what is in flight when it is over.
    worst: of each part, bytes over it in the call at whose worst moment most is held.
    categories: of each part, by number of a value, the category of what it hands over or is given.
    """

    def __init__(self, pipeline: PipelineProgram) -> None:
        memory = PipelineMemory(pipeline)
        self.most: dict[PartCall, int] = {}
        self.after: dict[PartCall, int] = {}
        self.worst: dict[int, Over] = {}
        self.categories = [
            _categories(part, {storage[0]: key for key, storage in of_part.handed_over.items()}, memory)
            for part, of_part in zip(pipeline.parts.parts, memory.parts.values(), strict=True)
        ]
        highest: dict[int, int] = {}
        for call, over, in_flight in (x for i in range(pipeline.schedule.ranks) for x in memory.walk_calls(i)):
            most = int(total_over_time(over).max())
            self.most[call], self.after[call] = most, in_flight
            if most > highest.get(call.part, -1):
                self.worst[call.part], highest[call.part] = over, most


def _categories(part: StagePart, handed_over: dict[fx.Node, ValueKey], memory: PipelineMemory) -> dict[int, str]:
    keys = ((i, part.inputs.get(node.name) or handed_over.get(node)) for i, node in enumerate(part.graph.nodes))
    member = memory.pipeline.member_of(part.key.stage)
    return {i: memory.category_of(key, member) for i, key in keys if key is not None}


def pipeline_data(
    pipeline: PipelineProgram, memory: CallMemory, plan: PipelinePlan, device: Device | None
) -> dict[str, Any]:
    """The schedule over time and the members of ``pp``.

    unit: "seconds", or "forward" where no device is known: then a forward takes 1.  rows: of each member of ``pp``,
    ``[label, number of the part, begin, end, bytes at its worst moment, bytes after it]`` of each call.
    members: what the plan says of each.  edges: ``[stage, stage, bytes, messages]``.
    """
    resident = [sum(member.memory.resident.values()) for member in plan.members]
    return {
        "schedule": plan.schedule,
        "bubble": plan.bubble,
        "unit": "forward" if device is None else "seconds",
        "rows": [
            [
                [pipeline.label(call), call.part, begin, end, memory.most[call], resident[member] + memory.after[call]]
                for call, begin, end in row
            ]
            for member, row in enumerate(_timed(pipeline, device))
        ],
        "members": [
            {
                "stages": list(member.stages),
                "resident": dict(member.memory.resident),
                "at_peak": dict(member.memory.at_peak),
                "peak": member.memory.peak,
                "peak_at": member.memory.peak_at,
                "in_flight": member.in_flight,
            }
            for member in plan.members
        ],
        "edges": [[edge.source, edge.target, edge.bytes, edge.messages] for edge in plan.edges],
    }


def step_data(pipeline: PipelineProgram, device: Device) -> dict[str, Any]:
    """The seconds of a planned step, without events: of the member of ``pp`` that is busy longest."""
    step = pipeline_timeline(pipeline, device)
    parts = ("seconds", "compute", "communication", "exposed", "host")
    return {part: getattr(step, part) for part in parts} | {"sources": dict(device.sources), "rows": []}


def _timed(pipeline: PipelineProgram, device: Device | None) -> list[list[TimedCall]]:
    if device is None:
        return time_calls(pipeline, unit_seconds(pipeline))
    return [list(row) for row in pipeline_timeline(pipeline, device).rows]


def programs_data(
    pipeline: PipelineProgram, memory: CallMemory, flat: StepGraph, history: list[Record], device: Device | None,
    pool: Pool,
) -> list[dict[str, Any]]:  # fmt: skip
    """The programs that are to be read, each with a title: of all parts, and the whole step, which has no memory.

    A part's memory is that of its member of ``pp`` while the part runs for the micro-batch at which most is held.
    """
    ranks, count, programs = RanksOfStages(pipeline), pipeline.placement.size, []
    for i, part in enumerate(pipeline.parts.parts):
        over, of_part = memory.worst[i], memory_data(part.graph, None)
        for life in of_part["lives"]:
            if category := memory.categories[i].get(life[0]):
                life[4] = CATEGORIES.index(category)
        of_part["series"] = {name: change_bytes(nbytes) for name, nbytes in over.items() if nbytes.any()}
        of_part["peak"] = int(total_over_time(over).argmax())
        numbers = ranks.of_stage(part.key.stage)
        programs.append(
            {
                "title": str(part.key),
                **_program_data(part.graph, part.history, pool),
                "memory": of_part,
                "parameters": parameters_data(part.graph, count, partial(_same, numbers)),
                "timeline": {"planned": planned_data(part.graph, device, pool)} if device is not None else {},
            }
        )
    none = {"peak": 0, "categories": [], "series": {}, "lives": [], "slots": [], "buffers": [], "arena": 0}
    return [
        *programs,
        {
            "title": WHOLE,
            **_program_data(flat, history, pool),
            "memory": none,
            "parameters": parameters_data(flat, count, ranks.of_nodes(flat)),
            "timeline": {},
        },
    ]


def _program_data(graph: StepGraph, history: list[Record], pool: Pool) -> dict[str, Any]:
    program_snapshots = snapshots(history)
    return {
        "level": graph.level,
        "text": passes_data(program_snapshots, pool),
        "values": values_data(program_snapshots, graph, pool),
    }


def _same(numbers: list[list[int]], _: fx.Node) -> list[list[int]]:
    return numbers


class RanksOfStages:
    """The ranks of each stage, as numbers in the order of the placement."""

    def __init__(self, pipeline: PipelineProgram) -> None:
        self.pipeline, where = pipeline, pipeline.placement
        numbers = np.arange(where.size).reshape(where.hierarchy)
        self.numbers: list[list[int]] = (
            np.moveaxis(numbers, where.axis(PIPELINE), 0).reshape(where.pipeline_members, -1).tolist()
        )

    def of_stage(self, stage: int | None) -> list[list[int]]:
        """The ranks of each member of ``pp`` that holds the values of a stage: all, for those of none."""
        return self.numbers if stage is None else [self.numbers[self.pipeline.member_of(stage)]]

    def of_nodes(self, graph: StepGraph) -> RankNumbers:
        """The same for the values of the whole program."""
        stages = stages_of(graph.nodes)
        return lambda node: self.of_stage(stages[node])
