"""Puts a traced build and the traced optimizer steps together to one graph with types, roles and names."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphzero import _compat
from graphzero.capture.optimizer.optimizer import TracedUpdate
from graphzero.capture.optimizer.stepped_parameter import SteppedParameter
from graphzero.capture.rewrite.canonicalise import node_key
from graphzero.capture.trace.build_trace import TracedBuild
from graphzero.ir import value
from graphzero.ir.value import Role, ScalarType, TensorType

_SMALL = 16
_NORMS = (torch.ops.aten.native_layer_norm.default, torch.ops.aten.native_group_norm.default)


def type_of_fake(fake: Any) -> Any:
    """The ``Type`` of a value from the fake it had in tracing."""
    if isinstance(fake, Tensor):
        return TensorType(fake.dtype, tuple(int(n) for n in fake.shape))
    if isinstance(fake, (torch.SymBool, bool)):
        return ScalarType("bool")
    if isinstance(fake, (torch.SymInt, int)):
        return ScalarType("int")
    if isinstance(fake, (torch.SymFloat, float)):
        return ScalarType("float")
    if isinstance(fake, (tuple, list)):
        return tuple(None if x is None else type_of_fake(x) for x in fake)
    raise TypeError(f"a value of type {type(fake).__name__} in a traced graph")


def plain_name(*parts: str) -> str:
    """A readable fx name: ``model.0.weight`` -> ``model_0_weight``."""
    return re.sub(r"\W+", "_", "_".join(part for part in parts if part)).strip("_")


class GraphBuilder:
    """The graph under construction.  constants: by name of their placeholder, the tensors that build closes over."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.placeholders: dict[Role, fx.Node] = {}
        self.constants: dict[str, Tensor] = {}
        self.equal: dict[Any, fx.Node] = {}

    def placeholder(self, role: Role, name: str, fake: Any) -> fx.Node:
        node = self.graph.placeholder(plain_name(name) or "value")
        node.meta = {"type": type_of_fake(fake), "val": fake, "role": role, "phase": "input", "source": "", "sbp": None}
        self.placeholders[role] = node
        return node

    # ---- build

    def add_build(self, traced: TracedBuild, roles: Iterable[Role | None]) -> dict[fx.Node, fx.Node]:
        """Copy the nodes of build; returns old -> new.  ``roles``: of the traced graph's inputs, in order."""
        module, copies = traced.module, {}
        for node, role in zip(module.graph.find_nodes(op="placeholder"), roles, strict=True):
            if role is not None:
                copies[node] = self.placeholders[role]
        for node in module.graph.nodes:
            if node.op == "get_attr":
                copies[node] = self._constant(module, node)
            elif node.op == "call_function":
                copies[node] = self._copy(node, copies)
        return copies

    def _copy(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        copied = self.graph.node_copy(node, lambda x: copies[x])
        custom = node.meta.get("custom", {})
        fake = node.meta.get("val")
        copied.meta = {"type": () if fake is None else type_of_fake(fake), "val": fake, "sbp": None}
        _statistics_in_float32(copied)
        copied.meta.update(phase=custom.get("phase", "forward"), source=custom.get("source", ""))
        if custom.get("module"):
            copied.meta["module"] = custom["module"]
        return copied

    def add_constants(self, module: fx.GraphModule) -> None:
        """Placeholders for the tensors that build closes over."""
        for node in module.graph.find_nodes(op="get_attr"):
            tensor: Tensor = getattr(module, str(node.target))
            if _uniform(tensor) is None and not any(tensor is constant for constant in self.constants.values()):
                name = f"constant_{len(self.constants)}"
                placeholder = self.placeholder(Role("constant", str(len(self.constants))), name, tensor)
                self.constants[placeholder.name] = tensor

    def _constant(self, module: fx.GraphModule, node: fx.Node) -> fx.Node:
        tensor: Tensor = getattr(module, str(node.target))
        number = _uniform(tensor)
        if number is None:
            name = next(name for name, constant in self.constants.items() if constant is tensor)
            return next(p for p in self.placeholders.values() if p.name == name)
        fill = torch.ops.aten.full.default
        return self.emit(fill, (list(tensor.shape), number), type_of_fake(tensor), kwargs={"dtype": tensor.dtype},
                         phase="forward", fake=tensor)  # fmt: skip

    # ---- update

    def emit(
        self, target: Any, args: Any, type_: Any, *, kwargs: dict[str, Any] | None = None, phase: str = "update",
        fake: Any = None, again: bool = False,
    ) -> fx.Node:  # fmt: skip
        """A node of the update; what was computed before is not computed again, unless it is to be."""
        kwargs = kwargs or {}
        key = node_key(target, args, kwargs)
        if key not in self.equal or phase != "update" or again:
            name = getattr(target, "_opname", None) or getattr(target, "__name__", None)
            node = _compat.add_node(self.graph, "call_function", target, args, kwargs, name)
            node.meta = {"type": type_, "val": fake, "phase": phase, "source": "", "sbp": None}
            if phase != "update" or again:
                return node
            self.equal[key] = node
        return self.equal[key]

    def add_update(self, given: dict[fx.Node, fx.Node], nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Add traced ``nodes`` to the update, with ``given`` in place of inputs; returns old -> new."""
        copies = dict(given)
        for node in nodes:
            if node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda x: copies[x])
                fake = node.meta.get("val")
                copies[node] = self.emit(node.target, args, type_of_fake(fake), kwargs=dict(kwargs), fake=fake)
        return copies

    def add_traced(self, traced: fx.Graph, given: Sequence[fx.Node]) -> list[fx.Node]:
        """Add a traced graph to the update, of ``given``; returns its results."""
        inputs, results = traced.find_nodes(op="placeholder"), traced.output_node().args[0]
        copies = self.add_update(dict(zip(inputs, given, strict=True)), traced.nodes)
        return [copies[node] for node in results]  # type: ignore[union-attr, index]

    def stamp_update(
        self, update: TracedUpdate, model: SteppedParameter, given: dict[fx.Node, fx.Node], nodes: list[fx.Node]
    ) -> tuple[dict[str, fx.Node], list[tuple[fx.Node, str, str]]]:
        """Add ``nodes`` of the traced update of ``model`` with ``given`` in place of its inputs.

        Returns the results, "" -> the new parameter, key -> the new state, and the checks.
        """
        copies = self.add_update(given, nodes)
        results = {"": copies[update.params[model.path]]}
        for (path, key), node in update.states.items():
            if path == model.path:
                results[key] = copies[node]
        checks = update.checks.get(model.path, ())
        return results, [(copies[ok], message, line) for ok, message, line in checks]


def ancestors(update: TracedUpdate, member: SteppedParameter) -> list[fx.Node]:
    """Nodes from which the new parameter, states and checks of ``member`` are computed, in program order."""
    new = [update.params[member.path], *(x for (path, _), x in update.states.items() if path == member.path)]
    new += [ok for ok, *_ in update.checks.get(member.path, ())]
    needed = {node for result in new for node in value.ancestors(result)}
    return [node for node in new[0].graph.nodes if node in needed]


def is_separable(update: TracedUpdate) -> bool:
    """Return whether each member steps from its own parameter, gradient and states alone."""
    for member in update.members:
        for node in ancestors(update, member):
            label = update.inputs.get(node)
            if label is not None and label[0] != "hyper" and label[1] != member.path:
                return False
    return True


def idle_parameters(update: TracedUpdate) -> list[str]:
    """Paths of the members that a step leaves as they are, and of whose gradients it makes nothing."""
    inputs = {label[:2]: node for node, label in update.inputs.items() if label[0] in ("param", "grad")}
    later = [member for member in update.members if not member.first]  # a first step may only make its state
    same = [member for member in later if update.params[member.path] is inputs["param", member.path]]
    return [member.path for member in same if inputs["grad", member.path] not in ancestors(update, member)]


def _statistics_in_float32(node: fx.Node) -> None:
    """16-bit norms with float32 weights keep mean and rstd in float32; torch's fakes do not know it."""
    if node.target in _NORMS:
        x, weights = node.args[0], [arg for arg in node.args[1:] if isinstance(arg, fx.Node)]
        assert isinstance(x, fx.Node)
        if any(weight.meta["type"].dtype != x.meta["type"].dtype for weight in weights):
            out, *statistics = node.meta["type"]
            node.meta["type"] = (out, *(TensorType(torch.float32, type_.shape) for type_ in statistics))
    source: Any = node.args[0] if node.args else None
    if node.target is operator.getitem and source.target in _NORMS:
        node.meta["type"] = source.meta["type"][node.args[1]]


def _uniform(tensor: Tensor) -> Any:
    """The one number a small tensor is full of, or None."""
    if tensor.is_meta or tensor.numel() == 0 or tensor.numel() > _SMALL or tensor.dtype.is_complex:
        return None
    first = tensor.reshape(-1)[0]
    return first.item() if bool((tensor == first).all()) else None
