"""Pin: fixes the SBPs that are given: of inputs, parameters, states, and of each phase's use of a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from graphzero.errors import SbpError
from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.printer import role_text
from graphzero.ir.value import Role
from graphzero.passes.base import BuiltinPass
from graphzero.sbp.types import B, Nd, S, Sbp


@dataclass(frozen=True)
class Pin(BuiltinPass):
    """Pins placeholders as the user placed them, and uses and gradients accordingly.

    A parameter is read whole by forward and backward (B on the data axes), as it lies by the update; its
    gradient is completed to the parameter's own SBP when backward has made it.  That is plain data
    parallelism; ``Zero`` moves these pins.

    placed: role of a placeholder -> its SBP.  What is not named: batch inputs S(0) on the data axes (B when
        0-d), everything else B.
    Raises SbpError for a role that no placeholder has, and for another number of SBPs than axes.

    Requires: a captured program, in which each phase reads a parameter through its own ``use``.
    Ensures: inputs, uses and gradients are pinned on every axis; earlier pins stay.

    Example::

        pin

         graph step(dp=2) captured
        -  x = batch() : f32[8, 4]
        -  w = param() : f32[4, 2]
        -  m = state(w) : f32[4, 2]
        +  x = batch() : f32[8, 4]  S(0)!
        +  w = param() : f32[4, 2]  B!
        +  m = state(w) : f32[4, 2]  B!
         forward:
        -  wf = use(w) : f32[4, 2]
        +  wf = use(w) : f32[4, 2]  B!
           y = mm(x, wf) : f32[8, 2]
         backward:
           xt = t(x) : f32[4, 8]
           gw = mm(xt, y) : f32[4, 2]  ; gradient(w)
        +  gw_pin = pin(gw, -1) : f32[4, 2]  B!  ; gradient(w)
         update:
        -  wu = use(w) : f32[4, 2]
        -  m1 = add(m, gw) : f32[4, 2]
        +  wu = use(w) : f32[4, 2]  B!
        +  m1 = add(m, gw_pin) : f32[4, 2]
           w1 = add(wu, m1, alpha=-0.1) : f32[4, 2]
           return y; update(m=m1, w=w1)
    """

    placed: Mapping[Role, Nd] = field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        return "Pin()"

    def __call__(self, graph: StepGraph) -> StepGraph:
        self._check(graph)
        params: dict[str, fx.Node] = {}
        for node in list(graph.placeholders()):
            role = value.role_of(node)
            if not value.is_tensor(node) or role is None:
                continue
            self._pin_placeholder(graph, node, role)
            if role.kind == "param":
                params[role.of] = node
        for node in list(graph.nodes):
            if node.target is ops.use:
                _pin_use(graph, node)
        pin_gradients(graph, {path: value.nd_of(param) for path, param in params.items()})
        return graph

    def _check(self, graph: StepGraph) -> None:
        """Raise SbpError for a role that nothing has, and for another number of SBPs than axes."""
        roles = [role for node in graph.placeholders() if (role := value.role_of(node)) is not None]
        known_roles, axes = set(roles), graph.placement.names
        for role, nd in self.placed.items():
            if role not in known_roles:
                near = (
                    ", ".join(role_text(known_role) for known_role in roles if known_role.kind == role.kind)
                    or "none of that kind"
                )
                raise SbpError(f"pin: nothing in {graph.name} has the role {role_text(role)}; there is {near:.200}")
            if len(nd) != len(axes):
                raise SbpError(
                    f"pin: {role_text(role)} = ({', '.join(map(str, nd))}) is not an SBP on each axis of {graph.name}: "
                    f"{', '.join(axes)}"
                )

    def _pin_placeholder(self, graph: StepGraph, node: fx.Node, role: Role) -> None:
        pins = value.pins_of(node)
        placed = self.placed.get(role)
        for i, axis in enumerate(graph.placement.names):
            if placed is not None:
                graph.pin(node, axis, placed[i])
            elif not (pins and pins[i]):
                graph.pin(node, axis, _default(graph, node, role, axis))


def _default(graph: StepGraph, node: fx.Node, role: Role, axis: str) -> Sbp:
    split = role.kind == "batch" and axis in graph.placement.batch_axes and value.tensor_type(node).shape
    return S(0) if split else B


def _pin_use(graph: StepGraph, node: fx.Node) -> None:
    param = value.operand(node)
    pins = value.pins_of(node)
    for i, axis in enumerate(graph.placement.names):
        if pins and pins[i]:
            continue
        is_whole = axis in graph.placement.batch_axes and value.phase_of(node) != "update"
        graph.pin(node, axis, B if is_whole else value.nd_of(param)[i])


def pin_gradients(graph: StepGraph, wanted: Mapping[str, Nd]) -> dict[str, fx.Node]:
    """Pin each gradient to its SBP in ``wanted``; returns the pin nodes by parameter path."""
    pinned = {}
    for path, node in graph.gradients().items():
        if path not in wanted:
            continue
        role = Role("gradient", path)
        for axis, sbp in zip(graph.placement.names, wanted[path], strict=True):
            node = graph.pin(node, axis, sbp)
        node.meta["role"] = role
        pinned[path] = node
    return pinned
