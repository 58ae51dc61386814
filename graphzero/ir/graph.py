"""StepGraph: one whole training step as a typed, printable graph.

A thin owner of a ``torch.fx.Graph``: placeholders are what the step reads (batch, parameters, states,
hyperparameters ...), ``call_function`` nodes are ops, and the output node holds three things::

    ((outputs of build, flat, ...),  {"grad_norm.0": node, ...},  {placeholder name: its new value})

What is known of each value is in ``graphzero.ir.value``.  Passes change a clone (see ``passes.base``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import Graph, GraphModule, Node

from graphzero import _compat
from graphzero.errors import SbpError, VerifyError
from graphzero.ir import ops, value
from graphzero.ir.text.printer import print_graph, show_as_printed
from graphzero.ir.value import Role, TensorType, Type
from graphzero.ops import AS_GLOBAL, AS_LOCAL, PIN, SAME
from graphzero.sbp.placement import Placement
from graphzero.sbp.registry import CallSignatures
from graphzero.sbp.types import Nd, Sbp, replace_at

PERSISTENT = ("param", "buffer", "state")  # kinds of placeholders that stay from step to step
Analysis = TypeVar("Analysis")
LEVELS = ("captured", "propagated", "boxed", "lowered", "local")


class StepGraph:
    """The program of one step.

    Attributes:
        name: the user's Graph class, or what ``Graph(name=...)`` says.
        placement: the ranks it is written for; shapes in types are global.
        graph: the ``torch.fx.Graph``.
        level: how far it is lowered: "captured" (SBPs only on pins), "propagated" (every value has an SBP),
            "boxed" (every op reads operands in an SBP it allows), "lowered" (boxes are collectives),
            "local" (sizes in arguments are this rank's).
        stated: whether types are only what a text says; ``verify`` computes them, before anything else is done.
        is_read: whether it, or what passes made it of, was read from a text; its indices may be anything then.
    """

    def __init__(self, name: str, placement: Placement, graph: Graph, level: str = "captured", stated: bool = False):
        self.name, self.placement, self.graph, self.level, self.stated = name, placement, graph, level, stated
        self.is_read = stated
        self._module: GraphModule | None = None
        self._analyses: dict[Any, Any] = {}
        self._facts: list[Any] = []  # of the graph that they are of
        self.lawful: dict[Node, tuple[Any, ...]] = {}  # nodes that ``verify`` found correct, by which facts
        self.rules: dict[tuple[Node, int | None], tuple[list[Any], CallSignatures]] = {}  # see ``ir.calls``

    @property
    def fx(self) -> GraphModule:
        """The graph as a ``torch.fx.GraphModule`` that shares its nodes; it is for reading and rewriting."""
        if self._module is None or self._module.graph is not self.graph:
            self._module = _compat.LazyGraphModule(torch.nn.Module(), self.graph, class_name=self.name)
        return self._module

    _repr_pretty_ = show_as_printed

    def __str__(self) -> str:
        return print_graph(self)

    # ---- reading

    @property
    def nodes(self) -> Iterable[Node]:
        """All nodes in the order in which they run: placeholders, ops, the output."""
        return self.graph.nodes

    @property
    def output(self) -> Node:
        """The last node.  Raises VerifyError where ops were added below it, or there is none."""
        last: Node | None = next(iter(reversed(self.graph.nodes)), None)
        if last is None or last.op != "output":
            raise VerifyError(
                f"graph {self.name} does not end in its output but in '{last.name if last is not None else ''}'\n  "
                "Add ops at a place: with graph.graph.inserting_before(graph.output): graph.call(...)"
            )
        return last

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The values that build returned, flat: nodes and plain literals."""
        values: tuple[Any, ...] = self.output.args[0][0]  # type: ignore[index,assignment]
        return values

    @property
    def aux(self) -> dict[str, Node]:
        """Values the runtime hands to the Graph besides build's outputs: ``grad_norm.0``."""
        named_values: dict[str, Node] = self.output.args[0][1]  # type: ignore[index,assignment]
        return named_values

    @property
    def updates(self) -> dict[str, Node]:
        """New value of each placeholder that the step changes, by placeholder name."""
        new_states: dict[str, Node] = self.output.args[0][2]  # type: ignore[index,assignment]
        return new_states

    def placeholders(self, *kinds: str) -> Iterator[Node]:
        """The placeholders, all or those of the given role kinds."""
        for node in self.graph.find_nodes(op="placeholder"):
            if not kinds or value.has_role(node, *kinds):
                yield node

    def node(self, name: str) -> Node:
        """The node that prints as ``name``, or the parameter, buffer, state or input of that path.

        Paths are as in ``param(...)`` of the text, "model.2.weight"; a state's ends in its name, ".weight/exp_avg".
        Raises VerifyError where there is none.
        """
        for node in self.nodes:
            if name in (node.name, value.path_of(node)):
                return node
        raise VerifyError(f"graph {self.name} has no value named {name!r}; print it to see the names: print(graph)")

    def gradients(self) -> dict[str, Node]:
        """Parameter path -> the value of its gradient when backward ends."""
        return {node.meta["role"].of: node for node in self.graph.nodes if value.has_role(node, "gradient")}

    def analysis(self, make: Callable[[StepGraph], Analysis]) -> Analysis:
        """The result of ``make`` for the graph as it is now, computed once while nothing changes.

        What it returns speaks of the graph as it was, also when that has changed since.
        """
        facts = value.facts(self.graph.nodes)
        if not value.are_same(facts, self._facts):
            self._facts, self._analyses = facts, {}
        if make not in self._analyses:
            self._analyses[make] = make(self)
        result: Analysis = self._analyses[make]
        return result

    def forget(self) -> None:
        """Let go of what has been computed of the graph: it is some half of its memory again."""
        self._facts, self._analyses, self.lawful, self.rules = [], {}, {}, {}

    # ---- changing

    def clone(self) -> StepGraph:
        """A copy that shares no node; types, SBPs and roles are immutable and shared."""
        graph, copies = Graph(), dict[Node, Node]()
        for node in self.graph.nodes:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            if node.op == "output":
                graph.output(args[0])
                break
            copies[node] = _compat.add_node(graph, node.op, node.target, args, kwargs, node.name, node.type)
            copies[node].meta = {**node.meta}
        copy = StepGraph(self.name, self.placement, graph, self.level, self.stated)
        copy.is_read = self.is_read
        return copy

    def __deepcopy__(self, memo: object) -> StepGraph:
        return self.clone()

    __copy__ = clone

    def with_axes(self, placement: Placement, origins: Sequence[int | None]) -> StepGraph:
        """A copy of a captured graph for a placement with other axes.

        origins: of each axis of the placement, the number of the axis here that it is, or is a part of; None for a new
        one, on which nothing is pinned.
        """
        graph = self.clone()
        graph.placement = placement
        for node in graph.nodes:
            for key, new in (("sbp", None), ("pins", False)):
                if entries := node.meta.get(key):
                    node.meta[key] = tuple(new if i is None else entries[i] for i in origins)
            if node.target in (AS_LOCAL, AS_GLOBAL):
                x, said, *rest = node.args
                node.args = (x, [SAME if i is None else said[i] for i in origins], *rest)  # type: ignore[index]
        return graph

    def settle(self) -> None:
        """Be as a clone would be, so that what comes next does not depend on how the last pass went about its work.

        Readers of a value are in the order of the nodes, names of values that are gone are free, ops that are added
        are last, and ``fx`` is made again.
        """
        for node in self.graph.nodes:
            node.users.clear()
        for node in self.graph.nodes:
            for operand in _compat.input_nodes(node):
                operand.users[node] = None
        self.graph.inserting_after()
        _compat.forget_names(self.graph)
        self._module = None

    def set_output(self, outputs: Iterable[Any], aux: dict[str, Node], updates: dict[str, Node]) -> None:
        """Say what the step returns: see ``outputs``, ``aux`` and ``updates``; outputs keep number and order.

        Raises VerifyError for others than a list and two dicts.
        """
        if not (isinstance(outputs, Iterable) and isinstance(aux, Mapping) and isinstance(updates, Mapping)):
            said = f"graph.set_output({outputs!r:.60}, {aux!r:.60}, {updates!r:.60})"
            raise VerifyError(f"{said}\n  It takes a list of values, and two dicts of values by name")
        self.output.args = ((tuple(outputs), dict(aux), dict(updates)),)

    def hand_out(self, instead: Mapping[Node, Node]) -> None:
        """End the step with other values in the place of some, all at once: the output reads a value of each state."""
        self.output.args = torch.fx.map_arg(self.output.args, lambda node: instead.get(node, node))

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        type_: Type,
        *,
        sbp: Any = None,
        phase: str = "",
        kwargs: dict[str, Any] | None = None,
        like: Node | None = None,
        name: str | None = None,
    ) -> Node:
        """Add an op at the insert point of ``graph``; phase and source come from ``like`` unless said.

        Without ``like`` the phase is the last one of the operands.
        type_: of the result, with its global shape: a TensorType, a ScalarType, or a tuple for several results.
        sbp: one per placement axis; None before ``propagate``.
        """
        node = _compat.add_node(self.graph, "call_function", target, args, kwargs or {}, name)
        node.meta["type"] = type_
        node.meta["sbp"] = sbp
        sources = node.all_input_nodes if like is None else [like]
        node.meta["phase"] = phase or value.last_phase(sources)
        node.meta["source"] = value.source_of(like) if like is not None else ""
        if like is not None and "module" in like.meta:
            node.meta["module"] = like.meta["module"]
        if like is not None and value.repeats_of(like):
            node.meta["repeat"] = value.repeats_of(like)
        return node

    def pin(self, target: Node | str, axis: str, sbp: Sbp) -> Node:
        """Fix the SBP of a value on one placement axis.

        A placeholder, a ``use`` or a ``pin`` is annotated in place.  After any other op a ``pin`` node is
        put, which all later readers read, so that what the op makes and what its readers see may differ
        (a partial gradient, pinned to a split, is where a reduce-scatter is placed).

        Returns the annotated node.  Raises SbpError where the value cannot have that SBP.
        """
        node = self.node(target) if isinstance(target, str) else target
        if not isinstance(node, Node) or node.graph is not self.graph:
            raise SbpError(f"cannot pin {node!r:.60} in graph {self.name}: give one of its values, or the name of one")
        index = self.placement.axis(axis)
        self._check_pin(node, axis, sbp)
        if node.op != "placeholder" and node.target not in (ops.use, PIN):
            node = self._pin_after(node)
        count = len(self.placement.names)
        old: Nd | tuple[None, ...] = value.sbp_of(node) or (None,) * count
        pins = value.pins_of(node) or (False,) * count
        node.meta["sbp"] = replace_at(old, index, sbp)
        node.meta["pins"] = replace_at(pins, index, True)
        return node

    def _pin_after(self, node: Node) -> Node:
        with self.graph.inserting_after(node):
            pinned = self.call(PIN, (node, -1), value.tensor_type(node), like=node, name=f"{node.name}_pin")
        for user in list(node.users):
            if user is not pinned:
                user.replace_input_with(node, pinned)
        return pinned

    def _check_pin(self, node: Node, axis: str, sbp: Sbp) -> None:
        if not isinstance(sbp, Sbp):
            raise SbpError(f"cannot pin '{node.name}' to {sbp!r}: write gz.sbp.B, gz.sbp.S(0) or gz.sbp.P")
        type_, role, what = value.type_of(node), value.role_of(node), f"'{node.name}'"
        problem = ""
        if isinstance(type_, tuple):
            picks = ", ".join(user.name for user in node.users) or "none"
            problem = f"it has {len(type_)} results; pin the value that picks one: {picks}"
        elif not isinstance(type_, TensorType):
            problem = f"it is {type_}, not a tensor"
        elif sbp.is_partial and node.op == "placeholder" and role is not None and role.kind in PERSISTENT:
            what = f"the {role.kind} '{node.name}' : {type_}"
            problem = "values that a step keeps cannot be partial sums; pin it to B, or to a split"
        elif sbp.is_split and sbp.dim >= (dims := len(type_.shape)):
            what = f"'{node.name}' : {type_}"
            problem = f"it has {dims} dims; {f'split one of 0..{dims - 1}, or ' * (dims > 0)}pin it to B"
        if problem:
            raise SbpError(f"cannot pin {what} to {sbp} on axis {axis}: {problem}")

    def set_role(self, node: Node, role: Role) -> None:
        """Say what a value is for the step, ``Role("gradient", "model.weight")``."""
        node.meta["role"] = role


def copy_op(graph: StepGraph, node: Node, read: Callable[[Node], Node], name: str = "", **facts: Any) -> Node:
    """Add the op of a node, of this graph or of another, at the insert point of ``graph``.

    read: gives its operands here.  facts: those that are not as of ``node``.
    """
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), read)
    copy = graph.graph.create_node("call_function", node.target, args, kwargs, name=name or node.name)
    copy.meta = {**node.meta, **facts}
    return copy
