"""``gz.explain``: why a value has the SBP it has.

It runs propagation once more on what propagation was given, watches one value, and says it in words: which
signatures its op allows, what each would have cost there, which was taken, and what the later sweeps made of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from graphzero.errors import ConfigError
from graphzero.graph import Graph
from graphzero.ir import calls, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.printer import print_line, show_as_printed
from graphzero.ir.transfer import delivered
from graphzero.ir.verifier.verify import examine
from graphzero.ops import AS_GLOBAL, AS_LOCAL, ATTENTION, GROUPED_MM
from graphzero.passes import Expand
from graphzero.passes.place.forward_sweep import AxisPropagation, Option
from graphzero.passes.place.propagate import propagation
from graphzero.plugins.experts.expert_choices import choice_line, expert_choices
from graphzero.plugins.explain.stage_parts import node_of_part, place_lines
from graphzero.plugins.split_attention.split_attention import SplitAttention
from graphzero.sbp import boxing, registry
from graphzero.sbp.link_costs import Links
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import B, P, Sbp

_MOST = 12  # signatures shown


@dataclass
class SbpChoice:
    """The choice of a value's SBP on one placement axis.

    options: what the first sweep saw, all-B first; empty where nothing was chosen.  first: what it took.
    producer: the signature after all sweeps, None for placeholders.  sbp: of the value's first result.
    why: in words.  later: what the sweeps after the first made of it.  lost: why splits of operands end here.
    boxes: (reader, SBP it reads, collectives between, bytes on the wire), for readers in another SBP.
    """

    axis: str
    ranks: int
    sbp: Sbp
    why: str = ""
    options: list[Option] = field(default_factory=list)
    first: Signature | None = None
    producer: Signature | None = None
    later: str = ""
    lost: list[str] = field(default_factory=list)
    boxes: list[tuple[str, Sbp, str, float]] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The choice as text."""
        shown_lines = [f"axis {self.axis}, {self.ranks} ranks: {self.sbp}" + (f", {self.why}" if self.why else "")]
        shown = sorted(self.options, key=lambda o: (o.signature != self.first, bool(o.barred), o.order))
        for option in shown[:_MOST]:
            mark = ">" if option.signature == self.first else " "
            cost = "-" if option.barred else f"{option.nbytes:,.0f} B"
            moves = ", ".join(f"{o.name} {have} -> {want}" for o, have, want in option.moves)
            note = option.barred or (f"boxes {moves}" if moves else "boxes nothing")
            note += ", and so gathers a weight that is split" if option.gathers and not option.barred else ""
            shown_lines.append(f"  {mark} {cost:>12}  {option.signature!s:<24}  {note}")
        if len(shown) > _MOST:
            shown_lines.append(f"    and {len(shown) - _MOST} more signatures, none of them cheaper")
        if self.producer is not None and self.producer != self.first:
            shown_lines.append(f"  then {self.producer}: {self.later}")
        shown_lines += [f"  {line}" for line in self.lost]
        shown_lines += [
            f"  {reader} reads it as {want}: {kind}, {size:,.0f} B" for reader, want, kind, size in self.boxes
        ]
        return shown_lines


@dataclass
class Explanation:
    """Result of ``explain``: the value's line, its source, and one choice per placement axis.

    places: of pipeline stages, in words: in which parts it is computed, and what hands it over.
    ways: of attention over a split sequence: the way that was taken, why, and what each costs; of experts that an
        axis splits: the way that was taken, and what each sends.
    """

    line: str
    source: str
    choices: list[SbpChoice]
    places: list[str] = field(default_factory=list)
    ways: list[str] = field(default_factory=list)

    _repr_pretty_ = show_as_printed

    def __str__(self) -> str:
        head = f"{self.line}" + (f"    {self.source}" if self.source else "")
        lines = [*self.places, *self.ways, *(line for choice in self.choices for line in choice.lines())]
        return "\n".join([head, *(f"  {line}" for line in lines)])


def explain(graph: Graph | StepGraph, value_: fx.Node | str) -> Explanation:
    """Explain a value's SBP: the signatures its op allows, what each would have cost, what was taken.

    graph: a compiled Graph, or a StepGraph of level "captured" with its pins (``history`` has it as what
    ``propagate`` was given).  value_: a value, or its name as it is printed, or the path of a parameter, buffer or
    state, "model.2.weight", "model.2.weight/exp_avg"; of pipeline stages also a name of ``stage_programs``,
    "epilogue@0.launch" where parts have different values of a name.  Costs are bytes that one rank sends for boxing the
    op's operands, given all that was boxed above it; with ``config.set_links``, those that the axis of greatest
    bandwidth would carry in the same time.

    Raises:
        ConfigError: the Graph is not compiled, the graph is propagated already, or it has no such value.
    """
    given = _given(graph)
    value_ = next((node.name for node in given.placeholders() if value.path_of(node) == value_), value_)
    links = graph.plan.links if isinstance(graph, Graph) else ()
    expanded, axes = propagation(Expand(links)(given), links, notes=True)
    program = graph.compiled_program("explanation") if isinstance(graph, Graph) else None
    pipeline, places, later = program.pipeline if program is not None else None, list[str](), list[StepGraph]()
    name = value_ if isinstance(value_, str) else value_.name
    if program is not None:
        later.append(program.graph)
        if pipeline is not None:
            part, name = node_of_part(pipeline, program.graph, value_)
            places = place_lines(pipeline, program.graph, part, name)
            later[:0] = [part.graph] if part is not None else []
    node = _find(expanded, name, later)
    ways = _ways(graph, node.name, links) if node.target is ATTENTION else []
    if program is not None and node.target is GROUPED_MM:
        choices = expert_choices(program.graph, program.history)
        ways = [choice_line(one) for one in choices if node.name in one.products]
    return Explanation(print_line(node), value.source_of(node), [_choice(axis, node) for axis in axes], places, ways)


def _ways(graph: Graph | StepGraph, name: str, links: Links) -> list[str]:
    """Lines on the way of an attention over a split sequence that was taken, on each axis that splits it."""
    pass_, before = SplitAttention(links=links), graph
    if isinstance(graph, Graph):
        record = next(record for record in graph.history if record.name == "split_attention")
        assert isinstance(record.pass_, SplitAttention)
        pass_, before = record.pass_, record.before
    assert isinstance(before, StepGraph)
    return [line for choice in pass_.decide(before.clone()) if choice.name == name for line in choice.lines()]


def _given(graph: Graph | StepGraph) -> StepGraph:
    if isinstance(graph, Graph):
        record = next(record for record in graph.history if record.name == "propagate")
        return record.before
    if graph.level != "captured":
        raise ConfigError(
            f"explain: graph {graph.name} is {graph.level}, so its SBPs are chosen already; give the Graph itself, or "
            "the graph that propagate was given: next(r for r in graph.history if r.name == 'propagate').before"
        )
    examine(graph)
    return graph.clone()


def _find(graph: StepGraph, name: str, later: Sequence[StepGraph]) -> fx.Node:
    """The value, or for one that later passes made of another (a box of it) that one.

    later: programs that may have it, the last made first.
    """
    named = {node.name: node for node in graph.nodes if node.op != "output"}
    for program in later:
        nodes = {node.name: node for node in program.nodes}
        if name not in named and name in nodes:
            node = nodes[name]
            # of what is one micro-batch's share of a value, or adds these up, the value of the whole batch
            while (name := node.name.removesuffix("_mb").removesuffix("_sum")) not in named and node.all_input_nodes:
                node = _made_from(node)
    if name not in named or value.is_scalar(named[name]):
        paths = filter(None, map(value.path_of, graph.placeholders()))
        near = difflib.get_close_matches(name, [*named, *paths], n=4)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(
            f"explain: graph {graph.name} has no tensor called {name!r}{hint}\n  print(graph) shows the names"
        )
    return named[name]


def _made_from(node: fx.Node) -> fx.Node:
    """The source of a value that a pass has added: the member of a bucket that is selected, else the first operand."""
    delivery = delivered(node)
    return delivery[0].members[delivery[1]] if delivery is not None else node.all_input_nodes[0]


def _choice(axis: AxisPropagation, node: fx.Node) -> SbpChoice:
    name = axis.graph.placement.names[axis.axis]
    sbp = axis.found[node][0]
    assert sbp is not None
    choice = SbpChoice(name, axis.ranks, sbp)
    if axis.pinned(node) is not None:
        choice.why = "pinned"
    elif node.op == "placeholder":
        choice.why = "an input that is not pinned"
    elif node not in axis.chosen:
        choice.why = "as what it reads"
    else:
        choice.options, choice.first = axis.seen[node]
        choice.producer = axis.chosen[node]
        is_end = node.target in (AS_LOCAL, AS_GLOBAL)
        choice.why = "as local_region says" if is_end else "the cheapest of what its op allows"
        choice.later = _later(axis, node, choice.first, choice.producer)
        choice.lost = [] if is_end else list(_lost(axis, node, choice.producer))
    choice.boxes = list(_boxes(axis, node, sbp))
    return choice


def _boxes(axis: AxisPropagation, node: fx.Node, sbp: Sbp) -> list[tuple[str, Sbp, str, float]]:
    if value.is_multi(node):
        return []
    nbytes = axis.nbytes(node)
    boxes = []
    for user in node.users:
        for want in axis.wants(user, node):
            if want is not sbp:
                kinds = " and ".join(step.kind for step in boxing.move(sbp, want).steps)
                reader = "the step's end" if user.op == "output" else user.name
                boxes.append((reader, want, kinds, axis.costs.box(sbp, want, nbytes, axis.axis)))
    return boxes


def _later(axis: AxisPropagation, node: fx.Node, first: Signature, final: Signature) -> str:
    if not any(sbp.is_partial for sbp in first.outputs):
        return "all of its readers cut it, so no rank computes what it would throw away"
    if any(sbp.is_split for sbp in final.outputs):
        return "all of its readers cut it, and it takes fewer bytes to make the pieces than to add them up"
    said = "partial sums are completed where that moves the fewest bytes in all, and that is above this value"
    if value.is_multi(node):
        return said
    places = [f"{o.name}, {_completion(axis, o):,.0f} B" for o in _completed(axis, node)]
    return f"{said}: {'; '.join(places)} (here {_completion(axis, node):,.0f} B)" if places else said


def _completed(axis: AxisPropagation, node: fx.Node) -> list[fx.Node]:
    """The partial values above ``node`` that are completed so that it is whole."""
    completed: dict[fx.Node, None] = {}
    todo, seen = [node], {node}
    while todo:
        for operand in value.tensor_operands(todo.pop()):
            if value.is_multi(operand) or operand in seen:
                continue
            seen.add(operand)
            options = axis.seen.get(operand)
            if axis.sbp(operand).is_partial:
                completed[operand] = None
            elif options is not None and any(sbp.is_partial for sbp in options[1].outputs):
                todo.append(operand)
    return list(completed)


def _completion(axis: AxisPropagation, node: fx.Node) -> float:
    """Bytes that a rank sends to complete a partial value."""
    return boxing.cost(P, B, value.tensor_type(node).nbytes, axis.ranks)


def _lost(axis: AxisPropagation, node: fx.Node, final: Signature) -> Iterator[str]:
    """Explain why an operand's split does not pass through the op, where it is gathered or cut otherwise."""
    operands = value.tensor_operands(node)
    have = [axis.sbp(operand) for operand in operands]
    allowed = calls.signatures_of(axis.graph, node, axis.axis, have)
    evenly = registry.signatures(
        node.target,  # type: ignore[arg-type]
        [calls.meta_of(arg) for arg in node.args],
        {name: calls.meta_of(arg) for name, arg in node.kwargs.items()},
        calls.result_metas(node),
        sections={sbp.sections for sbp in have} - {1},
    )
    shapes = [value.tensor_type(operand).shape for operand in operands]
    shapes += [meta.shape for meta in calls.result_metas(node) if meta is not None]
    for i, (operand, stands, want) in enumerate(zip(operands, have, final.inputs, strict=True)):
        if not stands.is_split or want is stands or any(s.inputs[i] is stands for s in allowed):
            continue
        uneven = [
            f"cannot cut {shape[sbp.dim]} into {axis.ranks * sbp.sections}"
            for signature in evenly
            if signature.inputs[i] is stands
            for sbp, shape in reversed(list(zip((*signature.inputs, *signature.outputs), shapes, strict=True)))
            if sbp.is_split and shape[sbp.dim] % (axis.ranks * sbp.sections)
        ]
        reason = uneven[0] if uneven else "no signature of the op reads it so"
        moved = "gathered" if want.is_broadcast else f"moved to {want}"
        yield f"{operand.name} is {moved} for it: {stands} would not survive, {reason}"
