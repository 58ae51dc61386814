"""Finds the parts of a step on pipeline stages that compute a value, and those that it is handed over to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_parts import BODY, PipelineProgram, StagePart, ValueKey
from graphzero.ops import MOVE


def node_of_part(pipeline: PipelineProgram, flat: StepGraph, value_: fx.Node | str) -> tuple[StagePart | None, str]:
    """The part that is meant, None where the whole program has the value, and the value's name.

    value_: a value of a part or of the whole program; or its name, which may begin with that of a part,
    ``epilogue@0.launch``.  Raises ConfigError for a name that only parts have and several of them for different values.
    """
    parts = pipeline.parts.parts
    if isinstance(value_, fx.Node):
        return next((part for part in parts if value_.graph is part.graph.graph), None), value_.name
    prefix, _, name = value_.rpartition(".") if "@" in value_ else ("", "", value_)
    if prefix:
        part = next((part for part in parts if str(part.key) == prefix), None)
        if part is None:
            raise ConfigError(f"explain: there is no part {prefix!r}; parts are {', '.join(str(x.key) for x in parts)}")
        return part, name
    having = [part for part in parts if any(node.name == name for node in part.graph.nodes)]
    if any(node.name == name for node in flat.nodes) or not having:
        return None, name
    if len(having) > 1:
        raise ConfigError(
            f"explain: {name!r} is the name of a value in each of {', '.join(str(part.key) for part in having)}\n"
            f"  Say which: '{having[0].key}.{name}'"
        )
    return having[0], name


def place_lines(pipeline: PipelineProgram, flat: StepGraph, part: StagePart | None, name: str) -> list[str]:
    """In words: the stage and the parts of a value, and what hands it over.

    part: of a value that the whole program does not have.
    """
    if part is not None and all(node.name != name for node in flat.nodes):
        return [f"computed in {part.key}, on stage {part.key.stage} (rank {_member(pipeline, part)} along pp)"]
    node = next((node for node in flat.nodes if node.name == name), None)
    lines = []
    while node is not None and node.target is MOVE:
        lines.append(f"moved to stage {node.args[1]}: there it is what '{node.args[0]}' is")
        node = value.operand(node)
    if node is None:
        return lines
    return [*lines, *_homes(pipeline, node), *_hand_overs(pipeline, node.name)]


def _homes(pipeline: PipelineProgram, node: fx.Node) -> Iterator[str]:
    """The parts where a value is computed; or read, if it is an input of the step."""
    parts = [part for part in pipeline.parts.parts if node.name not in part.inputs]
    having = [part for part in parts if any(other.name == node.name for other in part.graph.nodes)]
    stages = sorted({part.key.stage for part in having})
    names = ", ".join(str(part.key) for part in having)
    ranks = ", ".join(str(pipeline.member_of(stage)) for stage in stages)
    where = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))} (rank {ranks} along pp)"
    if having and node.op == "placeholder":
        yield f"on {where}, read in {names}"
    elif having:
        yield f"computed in {names}, on {where}{': each makes it for itself' if len(having) > 1 else ''}"


def _hand_overs(pipeline: PipelineProgram, name: str) -> Iterator[str]:
    """From which part a value goes to which."""
    makers: Mapping[ValueKey, StagePart] = {key: part for part in pipeline.parts.parts for key in part.outputs}
    readers: dict[ValueKey, list[StagePart]] = {}
    for part in pipeline.parts.parts:
        for key in part.inputs.values():
            if key.name == name:
                readers.setdefault(key, []).append(part)
    for key, parts in readers.items():
        names = ", ".join(str(part.key) for part in parts)
        if key in pipeline.parts.accumulators:
            yield f"an accumulator of stage {key.stage}, which {names} write to or read"
            continue
        each = ", for each micro-batch" if makers[key].key.kind in BODY else ", once a step"
        yield f"{makers[key].key} hands it over to {names}{each}{_message(pipeline, key, parts)}"


def _message(pipeline: PipelineProgram, key: ValueKey, readers: list[StagePart]) -> str:
    """Whether it travels from rank to rank."""
    home = pipeline.member_of(key.stage)
    others = sorted({_member(pipeline, part) for part in readers} - {home})
    return f"; sent from rank {home} to {', '.join(map(str, others))} along pp" if others else ""


def _member(pipeline: PipelineProgram, part: StagePart) -> int:
    return pipeline.member_of(part.key.stage)
