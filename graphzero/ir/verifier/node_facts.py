"""Facts about nodes that a pass of a user's leaves, whatever its ops compute: each is of the class of its kind.

``check_form`` is about a graph as a whole and comes first.  ``check_facts`` looks at every node, before any law is
checked and before any line is printed for a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphzero.errors import VerifyError
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import OP_PHASES, PHASES, ROLE_KINDS, Role, ScalarType, TensorType
from graphzero.ir.verifier.pass_op_types import Unfit, need
from graphzero.sbp.shards import LocalSize, LocalStart
from graphzero.sbp.types import Sbp

_CONSTANTS = {
    fx.Node, type(None), bool, int, float, complex, str,
    torch.dtype, torch.device, torch.layout, torch.memory_format, LocalSize, LocalStart,
}  # fmt: skip
_NAME = re.compile(r"[^\W\d]\w*")
_CLASSES: dict[str, type] = {"source": str, "module": str, "repeat": int, "stage": int}  # of what may be missing


def check_form(graph: StepGraph, name: str) -> None:
    """Raise VerifyError where the graph that the pass ``name`` returned has no output of the form of a step's."""
    if not isinstance(graph.graph, fx.Graph):
        raise VerifyError(
            f"pass {name} set graph.graph to {graph.graph!r:.60}\n  Change the torch.fx.Graph that is there"
        )
    args: Any = graph.output.args
    parts = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else ()
    are_parts = len(parts) == 3 and isinstance(parts[0], (tuple, list)) and all(isinstance(x, dict) for x in parts[1:])
    if not are_parts:
        raise VerifyError(
            f"pass {name} has the graph return {graph.output.args!r:.100}\n"
            "  A step returns three parts: graph.set_output(outputs, aux, updates)"
        )


def check_facts(graph: StepGraph, where: str) -> None:
    """Raise VerifyError for the first node with a name, types, SBPs, pins, a role, a phase or arguments that are not of
    their classes, or with an earlier phase than what it reads."""
    names = set[str]()
    for node in graph.nodes:
        try:
            is_name = isinstance(node.name, str) and _NAME.fullmatch(node.name) is not None
            need(is_name, "is not a name: letters, digits and _, and no digit first")
            need(node.name not in names, "is the name of two nodes")
            names.add(node.name)
            if node.op != "output":
                _check_meta(graph, node)
            if node.op == "call_function":
                _check_arguments(node)
                check_phase(node)
        except Unfit as error:
            hint = (
                "graph.call(target, args, type, sbp=..., phase=..., name=...) and graph.set_role(node, role) take them"
            )
            raise VerifyError(f"{where}'{node.name}' {error}\n  {hint}") from None


def check_phase(node: fx.Node) -> None:
    """Raise Unfit for an op of no phase, or that reads a value of a later one: passes cut a step between phases."""
    phase = value.phase_of(node)
    need(phase in OP_PHASES, f"has {phase!r:.60} for a phase, which is one of {', '.join(OP_PHASES)}")
    for x in node.all_input_nodes:
        is_later = x.op == "call_function" and PHASES.index(value.phase_of(x)) > PHASES.index(phase)
        need(not is_later, f"is of the phase {phase} and reads '{x.name}' of {value.phase_of(x)}, which follows")


def type_text(type_: Any) -> str:
    """A type in a message; of many results the first."""
    if isinstance(type_, tuple):
        inner = ", ".join("_" if t is None else str(t) for t in type_[:8])
        return f"({inner}{', ...' * (len(type_) > 8)})"
    return str(type_)


def _check_meta(graph: StepGraph, node: fx.Node) -> None:
    type_, nd, role, axes = node.meta["type"], value.sbp_of(node), value.role_of(node), graph.placement.names
    for one in type_ if isinstance(type_, tuple) else (type_,):
        is_shape = not isinstance(one, TensorType) or isinstance(one.shape, tuple)
        need(isinstance(one, (TensorType, ScalarType, type(None))) and is_shape, f"has {one!r:.60} for a type")
    need(type_ is not None, "has None for a type")
    many = isinstance(type_, tuple)
    need(nd is None or (isinstance(nd, tuple) and (not many or len(nd) == len(type_))), (
        f"has {nd!r:.60} for the SBP of {type_text(type_)}; it takes one for each axis, of each result"
    ))  # fmt: skip
    for one in (nd or ()) if many else (nd,):
        good = one is None or (isinstance(one, tuple) and all(sbp is None or isinstance(sbp, Sbp) for sbp in one))
        need(good and (one is None or len(one) == len(axes)), (
            f"has {one!r:.60} for an SBP, which is a tuple with one of gz.sbp for each axis, {', '.join(axes)}"
        ))  # fmt: skip
    need(role is None or (isinstance(role, Role) and role.kind in ROLE_KINDS), f"has {role!r:.60} for a role")
    pins = value.pins_of(node)
    are_pins = isinstance(pins, tuple) and len(pins) in (0, len(axes)) and all(isinstance(pin, bool) for pin in pins)
    need(are_pins, f"has {pins!r:.60} for pins; graph.pin(value, axis, sbp) pins it")
    need(not any(pins) or (nd is not None and all(sbp for pin, sbp in zip(pins, nd, strict=True) if pin)), (
        f"is pinned, and its SBP is {nd!r:.60}; graph.pin(value, axis, sbp) pins it"
    ))  # fmt: skip
    for key in _CLASSES.keys() & node.meta.keys():
        good = isinstance(node.meta[key], _CLASSES[key])
        need(good, f"has {node.meta[key]!r:.60} for its {key}, which is of type {_CLASSES[key].__name__}")


def _check_arguments(node: fx.Node) -> None:
    need(isinstance(node.args, tuple), f"has {node.args!r:.60} for its arguments, which are a tuple")
    strange = next((x for x in _leaves((node.args, node.kwargs)) if type(x) not in _CONSTANTS), None)
    need(strange is None, f"has an argument of type {type(strange).__name__}, neither a value nor a constant")


def _leaves(args: Any) -> Iterator[Any]:
    if isinstance(args, (list, tuple, dict)):
        for arg in args.values() if isinstance(args, dict) else args:
            yield from _leaves(arg)
    else:
        yield args
