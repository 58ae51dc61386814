"""The laws of a StepGraph, checked after every pass.

At every level: operands are before their readers, every value has a type, an update has the type of what it
replaces.  From "propagated" on: every tensor has an SBP that its op can make.  From "boxed" on: every op reads
what it allows, and a state leaves the step with the SBP it entered with.  From "lowered" on: what moves values is in
``collective_moves``, what may be written over in ``storage``, what transfers under way may touch in ``stream_order``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from typing import Any

from torch import fx

from graphzero._compat import arguments, input_nodes
from graphzero.errors import VerifyError, shorten_repr
from graphzero.ir import calls, value
from graphzero.ir.aliases import ANNOTATIONS
from graphzero.ir.graph import LEVELS, PERSISTENT, StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.text.printer import nd_text, op_name
from graphzero.ir.value import TensorType
from graphzero.ir.verifier.collective_moves import check_moves
from graphzero.ir.verifier.memory_spaces import check_spaces
from graphzero.ir.verifier.node_facts import check_facts
from graphzero.ir.verifier.stated_types import check_sizes, check_stated
from graphzero.ir.verifier.storage import check_storage
from graphzero.ir.verifier.stream_order import check_streams
from graphzero.ir.verifier.violation import check_unmoved, violation
from graphzero.sbp.shards import nests
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import Nd, Sbp


def verify(
    graph: StepGraph, after: str = "", is_final: bool = True, known: Mapping[fx.Node, tuple[Any, ...]] | None = None
) -> StepGraph:
    """Check every law that holds at the graph's level; returns the graph.

    Args:
        after: the pass that made it, for the message.
        is_final: whether no pass follows, so that the law of streams holds too, which is about what runs.
        known: of a pass that is not built in, ``facts_of`` the graph before it: what has others is computed again.

    Raises:
        VerifyError: the law, the line with its neighbours and the user's source line, what is allowed, what to do.
    """
    where = f"after pass {after}: " if after else ""
    level = LEVELS.index(graph.level)
    _check_order(graph, where)
    suspects: Iterable[fx.Node] = ()  # nodes that a pass of a user's has changed
    if known is not None and not graph.stated:
        check_facts(graph, where)
        suspects = _changed(facts_of(graph), known)
        check_stated(graph, suspects, where)
    _check_repeated(graph, where)
    _check_updates(graph, where)
    check_spaces(graph, where)
    examine(graph, where)
    if level >= LEVELS.index("propagated"):
        laws = min(level, LEVELS.index("lowered"))
        facts = facts_of(graph, laws)
        changed = _changed(facts, graph.lawful)
        _check_known(graph, changed, where)
        for node in changed:
            _check_one(graph, node, where, boxed=level >= LEVELS.index("boxed"))
        if level >= LEVELS.index("boxed"):
            _check_results(graph, where)
        if level >= LEVELS.index("lowered"):
            check_moves(graph, changed, where)
        if graph.level == LEVELS[-1]:
            check_sizes(graph, changed if graph.is_read else suspects, where)
        graph.lawful = facts  # not before the last of them is checked
    if level >= LEVELS.index("lowered"):
        check_storage(graph, where)
        if is_final:
            check_streams(graph, where)
    return graph


def examine(graph: StepGraph, where: str = "") -> None:
    """Compute what a text has stated of a graph that was read, once; what runs or counts it relies on no more.

    Raises VerifyError for the first value that is not what its line says.
    """
    if graph.stated:
        _check_order(graph, where)
        check_stated(graph, graph.nodes, where)
        graph.stated = False


def _check_order(graph: StepGraph, where: str) -> None:
    seen, last = set[fx.Node](), graph.output
    for node in graph.nodes:
        for operand in input_nodes(node):
            if operand not in seen:
                raise VerifyError(
                    f"{where}'{node.name}' reads '{operand.name}', which is not made above it\n  "
                    "Insert new nodes before their first reader: with graph.graph.inserting_before(node): ..."
                )
        seen.add(node)
        if node.op not in ("placeholder", "call_function", "output") or (node.op == "output") != (node is last):
            raise VerifyError(f"{where}'{node.name}' is a {node.op} node; a graph holds placeholders, calls, an output")
        if node.op != "output" and "type" not in node.meta:
            raise VerifyError(
                f"{where}'{node.name}' = {op_name(node.target)}(...) has no type\n  "
                "Make nodes by graph.call(target, args, type), or set node.meta['type']"
            )


def _check_repeated(graph: StepGraph, where: str) -> None:
    """Check that repeated ops are consecutive, and that later ops read only loop-carried values of theirs."""
    if not any(map(value.repeats_of, graph.nodes)):
        return
    at = liveness(graph)
    inside = at.repeated
    counts = {value.repeats_of(at.nodes[i]) for i in inside}
    for i in inside:
        node = at.nodes[i]
        if value.repeats_of(node) == 0 or len(counts) > 1 or node.op != "call_function":
            problem = f"'{node.name}' is between ops that are repeated, and is not repeated as often"
            raise violation(node, where, problem, "Add ops with like= a neighbouring op, or after these")
        leaves = any(at.position[user] >= inside.stop for user in node.users)
        storages = [storage for storage in at.roots[node] if storage is not None]
        if leaves and any(at.position[storage[0]] >= inside.start for storage in storages):
            problem = f"'{node.name}' is made again each time, and read after the last repetition"
            raise violation(node, where, problem, "Hand it on in an accumulator: accumulate, put, or carry")


def _check_updates(graph: StepGraph, where: str) -> None:
    strange: list[Any] = [x for x in graph.outputs if isinstance(x, (list, tuple, dict))]
    strange += [x for x in (*graph.aux.values(), *graph.updates.values()) if not isinstance(x, fx.Node)]
    if strange:
        raise VerifyError(
            f"{where}the step would hand out {shorten_repr(strange[0])}, which is not a value of it\n"
            "  graph.set_output(outputs, aux, updates) takes a flat list of values and constants, and dicts of values"
        )
    placeholders = {node.name: node for node in graph.placeholders()}
    for name, new in graph.updates.items():
        old = placeholders.get(name)
        if old is None or not value.has_role(old, *PERSISTENT):
            raise VerifyError(
                f"{where}the step updates '{name}', which is not a parameter, buffer or state of the graph\n  "
                f"It may update: {', '.join(n for n in list(placeholders)[:8])}"
            )
        if value.type_of(old) != value.type_of(new):
            problem = f"'{new.name}' : {value.type_of(new)} is to replace '{name}' : {value.type_of(old)}"
            raise violation(new, where, problem, "An update keeps shape and dtype; cast or reshape before it")


def _check_known(graph: StepGraph, nodes: Iterable[fx.Node], where: str) -> None:
    for node in nodes:
        if node.op == "output" or value.is_scalar(node):
            continue
        for result_type, sbp in value.results_of(node):
            if isinstance(result_type, TensorType):
                _check_sbp(node, result_type, sbp, graph, where)


def _check_sbp(node: fx.Node, type_: TensorType, nd: Nd | None, graph: StepGraph, where: str) -> None:
    axes, hierarchy = graph.placement.names, graph.placement.hierarchy
    if nd is None or len(nd) != len(axes) or None in nd:
        problem = f"'{node.name}' has no SBP on each of the axes {', '.join(axes)}"
        raise violation(
            node, where, problem, "Add values before `propagate`, or with an SBP: graph.call(..., sbp=value.nd_of(x))"
        )
    for axis, sbp in zip(axes, nd, strict=True):
        if sbp.is_split and sbp.dim >= len(type_.shape):
            problem = f"'{node.name}' is {sbp} on axis {axis}, but it has {len(type_.shape)} dims"
            raise violation(node, where, problem, "Split one of its dims, or pin it to B")
    if not nests(type_.shape, nd, hierarchy):
        problem = f"'{node.name}' of shape {list(type_.shape)} cannot be cut as {nd_text(nd)}: sections must be even"
        raise violation(node, where, problem, "Pin it to B on one of the axes")


def facts_of(graph: StepGraph, laws: int | None = None) -> dict[fx.Node, tuple[Any, ...]]:
    """The facts of each node that decide, with the first two of each operand, whether it is correct.

    They are objects compared by identity: they are never changed, only replaced.  laws: those to check, by their level;
    by default those of the graph's own.
    """
    about = (graph.placement, LEVELS.index(graph.level) if laws is None else laws)
    return {
        node: (node.meta.get("type"), node.meta.get("sbp"), node.target, *arguments(node), *about)
        for node in graph.nodes
    }


def _changed(facts: Mapping[fx.Node, tuple[Any, ...]], known: Mapping[fx.Node, tuple[Any, ...]]) -> list[fx.Node]:
    """The nodes that are not as they were last found correct, or read what is not: a pass leaves most as they were."""
    changed: list[fx.Node] = []
    retyped: set[fx.Node] = set()
    for node, own in facts.items():
        before = known.get(node)
        if before is not None and (own[0] is not before[0] or own[1] is not before[1]):
            retyped.add(node)
        if before is None or not all(map(is_, own, before)) or (retyped and not retyped.isdisjoint(input_nodes(node))):
            changed.append(node)
    return changed


def _check_one(graph: StepGraph, node: fx.Node, where: str, boxed: bool) -> None:
    if node.op == "call_function" and calls.is_op(node):
        axes = [i for i, ranks in enumerate(graph.placement.hierarchy) if ranks > 1 or not boxed]  # one rank has it all
        for part in calls.parts_of(node):
            runs = {axis: _check_op(graph, node, axis, where, boxed, part) for axis in axes}
            if boxed and len(runs) > 1 and (why := calls.misfit(graph, node, runs, part)):
                raise violation(node, where, f"'{node.name}' {why}", "Pin it to B on one of the axes before this op")
    elif boxed and node.target in ANNOTATIONS:
        check_unmoved(node, value.operand(node), where, "Run `insert_boxing` after passes that move pins")
    elif node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        source = value.sbp_of(node.args[0])
        if source is not None and source[node.args[1]] != value.sbp_of(node):
            problem = f"'{node.name}' is not in the SBP of the result that it picks"
            raise violation(node, where, problem, f"'{node.args[0].name}' makes {source[node.args[1]]}")


def _check_op(graph: StepGraph, node: fx.Node, axis: int, where: str, boxed: bool, part: int | None) -> Signature:
    """The signature in which the op at ``node`` is on ``axis``; before boxes, one that makes its results."""
    inputs, outputs = calls.input_sbps(node, axis, part), calls.output_sbps(node, axis, part)
    allowed = calls.signatures_of(graph, node, axis, (*inputs, *outputs), part=part)
    for signature in allowed:
        if signature.outputs == outputs and (signature.inputs == inputs or not boxed):
            return signature
    if not boxed:
        problem = f"'{node.name}' cannot be {', '.join(map(str, outputs))} on axis {graph.placement.names[axis]}"
        raise violation(node, where, problem, _allows(node, allowed))
    operands = calls.operands_of(node, part)
    summed = next((o for o, sbp in _nonlinear(operands, inputs, allowed) if sbp.is_partial), None)
    if summed is not None:
        problem = f"'{node.name}' reads the partial sum '{summed.name}', but {op_name(node.target)} is not linear"
    else:
        given = _short(Signature(inputs, outputs))
        problem = f"'{node.name}' runs {op_name(node.target)} as {given}, which would not compute the same"
    name = summed.name if summed is not None else operands[0].name if operands else node.name
    hint = (
        f"{_allows(node, allowed)}\n"
        "  Run `propagate` and `insert_boxing` after passes that move pins, or pin it yourself: "
        f'graph.pin("{name}", "{graph.placement.names[axis]}", B)'
    )
    raise violation(node, where, problem, hint)


def _nonlinear(
    operands: list[fx.Node], inputs: tuple[Sbp, ...], allowed: tuple[Signature, ...]
) -> Iterator[tuple[fx.Node, Sbp]]:
    """Operands that no signature takes in the SBP that they have."""
    for i, (operand, sbp) in enumerate(zip(operands, inputs, strict=True)):
        if all(signature.inputs[i] is not sbp for signature in allowed):
            yield operand, sbp


def _allows(node: fx.Node, allowed: tuple[Signature, ...]) -> str:
    shown = ",  ".join(map(_short, allowed[:8])) + (f",  and {len(allowed) - 8} more" if len(allowed) > 8 else "")
    return f"{op_name(node.target)} allows  {shown}"


def _short(signature: Signature, most: int = 12) -> str:
    """A signature; of an op with very many operands, the first."""
    if len(signature.inputs) <= most:
        return str(signature)
    return f"{', '.join(map(str, signature.inputs[:most]))}, ... -> {', '.join(map(str, signature.outputs))}"


def _check_results(graph: StepGraph, where: str) -> None:
    placeholders = {node.name: node for node in graph.placeholders()}
    for name, new in graph.updates.items():
        if value.sbp_of(placeholders[name]) != value.sbp_of(new):
            entered, left = value.sbp_of(placeholders[name]), value.sbp_of(new)
            problem = f"'{name}' enters the step as {nd_text(entered)} and would leave it as {nd_text(left)}"
            raise violation(new, where, problem, "A state keeps its SBP: box its new value, or move the pin of both")
    for out in value.flat_nodes(graph.outputs):
        if value.is_tensor(out) and any(sbp.is_partial for sbp in value.nd_of(out)):
            problem = f"build would return the partial sum '{out.name}'"
            raise violation(out, where, problem, "Run `insert_boxing`, which completes what leaves the step")
