"""InsertBoxing: an explicit ``box`` wherever a reader needs a value in another SBP than it has.

The only pass that moves data between ranks decides nothing here: SBPs say what each op makes, rules say what it
must read for that.  A value is boxed to one SBP once.  A reduction comes right after what it reduces, a gather
or a cut right before its first reader, and a box before a ``use`` or a ``pin`` at that node's place.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from torch import fx

from graphzero.errors import SbpError
from graphzero.ir import calls, ops, value
from graphzero.ir.aliases import ANNOTATIONS, is_whole_view
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import Role
from graphzero.passes.base import BuiltinPass
from graphzero.passes.place.forward_sweep import output_sbp
from graphzero.sbp.link_costs import Costs, Links, costs_on
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import B, Nd


@dataclass(frozen=True)
class InsertBoxing(BuiltinPass):
    """Inserts a ``box`` wherever a value is read in another SBP than it has, once per value and SBP.

    After it, every op reads its operands in an SBP that its rule allows.  links: what communication costs on each axis,
    () for bytes.

    Requires: an SBP for every value, one that its op can make.
    Ensures: every op reads its operands in an SBP that its rule allows; states leave the step as they entered it,
        outputs whole or as this rank's share.

    Example::

        insert_boxing

        -graph sums(dp=2) propagated
        +graph sums(dp=2) boxed
           x = batch() : f32[8, 4]  S(0)!
           w = param() : f32[4, 2]  B!
         forward:
           u = use(w) : f32[4, 2]  B!
           y = mm(x, u) : f32[8, 2]  S(0)
           s = sum.dim_IntList(y, [0]) : f32[2]  P
        -  r = relu(s) : f32[2]  B
        +  s_b = box(s) : f32[2]  B
        +  r = relu(s_b) : f32[2]  B
           return y, r
    """

    links: Links = field(default=(), repr=False)

    def __call__(self, graph: StepGraph) -> StepGraph:
        boxes = _Boxes(graph, costs_on(graph.placement, self.links))
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in ANNOTATIONS:
                source = value.operand(node)
                node.update_arg(0, boxes.box_value(source, value.nd_of(node), node, reuse=False))
            elif calls.is_op(node):
                _box_operands(graph, node, boxes)
        _box_ends(graph, boxes)
        graph.level = "boxed"
        return graph


class _Boxes:
    """The boxes made so far, by value and SBP, and what they cost."""

    def __init__(self, graph: StepGraph, costs: Costs):
        self.graph, self.costs = graph, costs
        self.made: dict[tuple[fx.Node, Nd], fx.Node] = {}

    def box_value(self, node: fx.Node, want: Nd, reader: fx.Node, reuse: bool = True) -> fx.Node:
        """``node`` in the SBP ``want``, for ``reader``, which comes later than every reader before."""
        have = value.nd_of(node)
        if have == want:
            return node
        if reuse and (node, want) in self.made:
            return self.made[node, want]
        if reuse and _shows_another(node, want):
            return self._shown(node, want, reader)
        reduces = any(h.is_partial and h is not w for h, w in zip(have, want, strict=True))
        after = reuse and reduces and node.op != "placeholder"
        place = self.graph.graph.inserting_after(node) if after else self.graph.graph.inserting_before(reader)
        with place:
            like = node if after or node.op != "placeholder" else reader
            name = f"{node.name.removesuffix('_pin')}_{''.join(sbp.kind.lower() for sbp in want)}"
            box = self.graph.call(ops.box, (node,), value.tensor_type(node), sbp=want, like=like, name=name)
        box.meta["phase"] = value.phase_of(node) if after else _phase_for(reader)
        role = _moved_role(node, reader)
        if role is not None:
            box.meta["role"] = role
        self.made[node, want] = box
        return box

    def _shown(self, node: fx.Node, want: Nd, reader: fx.Node) -> fx.Node:
        """``node`` shows another value in other dims: what that is gathered to serves all that show it."""
        source = value.operand(node)
        gathered_nd = tuple(
            B if w is not h else s for w, h, s in zip(want, value.nd_of(node), value.nd_of(source), strict=True)
        )
        gathered = self.box_value(source, gathered_nd, reader)
        with self.graph.graph.inserting_before(reader):
            args = (gathered, *node.args[1:])
            name = f"{node.name}_{''.join(sbp.kind.lower() for sbp in want)}"
            view = self.graph.call(node.target, args, value.tensor_type(node), sbp=want, like=node, name=name)
        view.meta["phase"] = _phase_for(reader)
        self.made[node, want] = view
        return view


def _phase_for(reader: fx.Node) -> str:
    """The phase of what is made for a reader: what only leaves the step is made last."""
    return "update" if reader.op == "output" else value.phase_of(reader)


def _shows_another(node: fx.Node, want: Nd) -> bool:
    """Return whether ``node`` is a view that is needed gathered: the gather may as well be of what it is a view of."""
    if not is_whole_view(node.target) or value.role_of(node) is not None or value.phase_of(node) == "update":
        return False
    return all(h is w or (h.is_split and w is B) for h, w in zip(value.nd_of(node), want, strict=True))


def _moved_role(node: fx.Node, reader: fx.Node) -> Role | None:
    """The role of the value that a box moves, if the plan counts it: a parameter or a gradient."""
    named = [node, reader] if reader.op == "call_function" and reader.target in ANNOTATIONS else [node]
    roles = (value.role_of(candidate) for candidate in named)
    return next((role for role in roles if role is not None and role.kind in ("param", "gradient")), None)


def _box_operands(graph: StepGraph, node: fx.Node, boxes: _Boxes) -> None:
    operands = value.tensor_operands(node)
    wants: list[Nd] = list(zip(*(s.inputs for s in _select(graph, node, operands, boxes.costs)), strict=True))
    if all(value.nd_of(o) == w for o, w in zip(operands, wants, strict=True)):
        return
    remaining = iter([boxes.box_value(o, w, node) for o, w in zip(operands, wants, strict=True)])

    def swap(operand: fx.Node) -> fx.Node:
        return next(remaining) if value.is_tensor(operand) else operand

    args, kwargs = fx.map_arg((node.args, node.kwargs), swap)
    node.args, node.kwargs = args, kwargs


def _select(graph: StepGraph, node: fx.Node, operands: list[fx.Node], costs: Costs) -> tuple[Signature, ...]:
    """The signatures, one per axis, that make the node's results in their SBP and go together, with least boxing."""
    ranked = [_ranked(graph, node, axis, operands, costs) for axis in range(len(graph.placement.names))]
    best = tuple(signatures[0][1] for signatures in ranked)
    if not calls.misfit(graph, node, dict(enumerate(best))):
        return best
    for ways in sorted(itertools.product(*ranked), key=lambda ways: sum(cost for cost, _ in ways)):
        chosen = tuple(signature for _, signature in ways)
        if not calls.misfit(graph, node, dict(enumerate(chosen))):
            return chosen
    raise SbpError(
        f"no signatures of {node.name} that make {value.sbp_of(node)} go together: each "
        f"{calls.misfit(graph, node, dict(enumerate(best)))}\n  Run `propagate` after passes that move pins"
    )


def _ranked(
    graph: StepGraph, node: fx.Node, axis: int, operands: list[fx.Node], costs: Costs
) -> list[tuple[float, Signature]]:
    """Signatures that make the node's results in their SBP on one axis, with the cost of boxing, cheapest first."""
    outputs = calls.output_sbps(node, axis)
    priced: list[tuple[float, Signature]] = []
    for signature in calls.signatures_of(graph, node, axis, (*calls.input_sbps(node, axis), *outputs)):
        if signature.outputs != outputs:
            continue
        total = 0.0
        for operand, want in zip(operands, signature.inputs, strict=True):
            have = value.nd_of(operand)[axis]
            if have is not want:
                total += costs.box(have, want, value.tensor_type(operand).nbytes, axis) + 1e-3
        priced.append((total, signature))
    if not priced:
        raise SbpError(
            f"no signature of {node.name} makes {', '.join(map(str, outputs))} on axis {graph.placement.names[axis]}\n"
            "  Run `propagate` after passes that move pins"
        )
    return sorted(priced, key=lambda one: one[0])


def _box_ends(graph: StepGraph, boxes: _Boxes) -> None:
    """New states leave in the SBP they entered with, outputs complete or as this rank's share."""
    output = graph.output
    placeholders = {p.name: p for p in graph.placeholders("param", "buffer", "state")}
    updates = {}
    for name, new in graph.updates.items():
        old = placeholders[name]
        role = value.role_of(old)
        box = boxes.box_value(new, value.nd_of(old), output)
        if box is not new:
            box.meta["role"] = role if role is not None and role.kind == "param" else None
            _move_after(new, box)
        updates[name] = box

    def leave(node: fx.Node, whole: bool) -> fx.Node:
        if not value.is_tensor(node):
            return node
        nd = enumerate(value.nd_of(node))
        wanted = tuple(B if whole else output_sbp(graph, node, axis, sbp) for axis, sbp in nd)
        return boxes.box_value(node, wanted, output)

    outputs = fx.map_arg(graph.outputs, lambda node: leave(node, whole=False))
    aux = {name: leave(node, whole=True) for name, node in graph.aux.items()}
    graph.set_output(outputs, aux, updates)


def _move_after(node: fx.Node, box: fx.Node) -> None:
    """``box`` of ``node`` as early as it can stand: after ``node``, and after the gather that it may be a view of."""
    if node.op == "placeholder":
        return
    gathered = value.operand(box)
    if gathered is not node and len(gathered.users) == 1:  # made for this
        _move_after(gathered.all_input_nodes[0], gathered)
    max(node, gathered).append(box)
