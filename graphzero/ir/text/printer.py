"""The printed form of a StepGraph: one value a line, and the way back.

``str(parse(text)) == text`` for every text that ``print_graph`` makes.  A line reads::

      y = mm(x, wf) : f32[8, 4]  S(0)  ; loss()

name, op and arguments, type, SBP (``!`` = pinned; on an n-d placement a tuple), pipeline stage (``@1``), role.  What
is under ``forward x3:`` and ``backward x3:`` runs three times, one after the other: once a micro-batch but the last, or
where there are stages, once each.  Arguments are
Python literals, names of values, dtypes (``torch.float32``) and sizes of this rank (``8/dp``, ``8@dp``).
Source lines are not part of the text.

The text has a format, ``FORMAT``, which a line above the first one may state: ``format 1``.  Format 1 is printed
without that line; every later one must begin with it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from graphzero.ir import known_ops, ops, value
from graphzero.ir.pipeline_stages import is_staged, stages_of
from graphzero.ir.value import Role
from graphzero.sbp.placement import Placement

FORMAT = 1  # counted up when a text of before would mean something else, or an older parser would misread a new one
NAMELESS = ("seed", "loss")  # roles of which a step has one


class Printable(Protocol):
    """The parts of a StepGraph that its text holds."""

    name: str
    placement: Placement
    level: str

    @property
    def nodes(self) -> Iterable[fx.Node]: ...
    @property
    def outputs(self) -> Sequence[Any]: ...
    @property
    def aux(self) -> Mapping[str, fx.Node]: ...
    @property
    def updates(self) -> Mapping[str, fx.Node]: ...


def print_graph(graph: Printable, align: bool = True, keep: Callable[[fx.Node], bool] | None = None) -> str:
    """The text of a graph, in columns or, for diffs, without alignment.

    keep: which values; with it what is printed is not a whole program, and has no last line.
    """
    lines = [_header(graph)]
    nodes = (node for node in graph.nodes if node.op != "output" and (keep is None or keep(node)))
    stages = stages_of(graph.nodes) if is_staged(graph.nodes) else {}
    rows: list[Any] = [(node, node.name, *_columns(node, stages.get(node))) for node in nodes]
    widths = [min(max((len(row[i]) for row in rows), default=0), cap) * align for i, cap in ((1, 28), (2, 56), (3, 16))]
    part = ("input", 0)
    for node, name, text, type_, rest in rows:
        if node.op != "placeholder" and (value.phase_of(node), value.repeats_of(node)) != part:
            part = value.phase_of(node), value.repeats_of(node)
            lines.append(f"{part[0]} x{part[1]}:" if part[1] else f"{part[0]}:")
        line = f"  {name:<{widths[0]}} = {text:<{widths[1]}} : {type_:<{widths[2]}}  {rest}"
        lines.append(line.rstrip())
    return "\n".join([*lines, _return(graph)] if keep is None else lines) + "\n"


def print_line(node: fx.Node) -> str:
    """One value as a line of text, without alignment."""
    if node.op == "output":
        return "return ..."
    text, type_, rest = _columns(node)
    return f"{node.name} = {text} : {type_}  {rest}".rstrip()


def op_name(target: Any) -> str:
    """The name of an op in texts."""
    if isinstance(target, torch._ops.OpOverload):
        packet, overload = target.overloadpacket, target._overloadname
        namespace, name = target._schema.name.split("::")
        short = next((o for o in known_ops.OVERLOADS if o in packet.overloads()), None)
        text = name if overload == short else f"{name}.{overload}"
        return text if namespace in ("aten", "graphzero") else f"{namespace}.{name}.{overload}"
    if target in ops.OF_PASSES:
        return str(target.__name__)
    if target in known_ops.NAME_OF:
        return known_ops.NAME_OF[target]
    return f"{target.__module__}.{target.__qualname__}"


def _header(graph: Printable) -> str:
    axes = ", ".join(
        f"{name}={size}" for name, size in zip(graph.placement.names, graph.placement.hierarchy, strict=True)
    )
    name = graph.name if re.fullmatch(r"\w[\w.-]*", graph.name) else repr(graph.name)
    return f"graph {name}({axes}) {graph.level}"


def _columns(node: fx.Node, stage: int | None = None) -> tuple[str, str, str]:
    """Op and arguments; type; SBP, stage and role."""
    if node.op == "placeholder":
        text = role_text(value.role_of(node) or Role("batch"), node.name)
    elif node.target is operator.getitem:
        text = f"{_arg(node.args[0])}[{_arg(node.args[1])}]"
    else:
        parts = [_arg(a) for a in node.args] + [f"{k}={_arg(v)}" for k, v in node.kwargs.items()]
        text = f"{op_name(node.target)}({', '.join(parts)})"
    return text, *_tail(node, stage)


def _tail(node: fx.Node, stage: int | None) -> tuple[str, str]:
    type_, nd = value.type_of(node), value.sbp_of(node)
    if isinstance(type_, tuple):
        inner = (f"{t}  {nd_text(s)}".rstrip() if t is not None else "_" for t, s in value.results_of(node))
        text, rest = f"({', '.join(inner)})", ""
    else:
        text, rest = str(type_), nd_text(nd, value.pins_of(node))
    if stage is not None:
        rest += f"{'  ' * bool(rest)}@{stage}"
    role = value.role_of(node)
    if role is not None and node.op != "placeholder":
        rest += f"{'  ' * bool(rest)}; {role_text(role)}"
    return text, rest


def nd_text(nd: Any, pins: tuple[bool, ...] = ()) -> str:
    """``S(0)`` on one axis, ``(S(0), B)`` on several, "" where it is not known; ``!`` where it is pinned."""
    if nd is None:
        return ""
    pins = pins or (False,) * len(nd)
    parts = [("?" if s is None else str(s)) + "!" * pin for s, pin in zip(nd, pins, strict=True)]
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


def role_text(role: Role, name: str = "") -> str:
    """``kind(path)`` or ``kind(path, key)``; the name of its placeholder need not be said."""
    parts = [] if role.of == ("" if role.kind in NAMELESS else name) and not role.key else [word(role.of)]
    parts += [word(role.key)] if role.key else []
    return f"{role.kind}({', '.join(parts)})"


def word(text: str) -> str:
    """A path as it is, anything else in quotes."""
    return text if re.fullmatch(r"[\w.]+", text) else repr(text)


def _arg(x: Any) -> str:
    if isinstance(x, fx.Node):
        return x.name
    if isinstance(x, list):
        return f"[{', '.join(map(_arg, x))}]"
    if isinstance(x, tuple):
        return f"({', '.join(map(_arg, x))}{',' * (len(x) == 1)})"
    if isinstance(x, torch.Size):
        return _arg(list(x))
    return repr(x)


def _return(graph: Printable) -> str:
    parts = [", ".join(map(_arg, graph.outputs))] if graph.outputs else []
    parts += [f"{name}={node.name}" for name, node in graph.aux.items()]
    if graph.updates:
        pairs = [f"{name}={node.name}" for name, node in graph.updates.items()]
        joined = ", ".join(pairs)
        parts.append(f"update({joined})" if len(joined) < 100 else "update(\n    " + ",\n    ".join(pairs) + ")")
    return f"  return {'; '.join(parts)}".rstrip()


def show_as_printed(shown: object, printer: Any, cycle: bool) -> None:
    """A ``_repr_pretty_`` of IPython's, by which a result shows as ``print`` shows it, not by the ``repr`` of its
    fields."""
    printer.text(str(shown))
