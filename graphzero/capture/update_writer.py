"""The update of a step, joined to its build: gradients scaled back, clipped, stepped with, and what is rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn

from graphzero.capture.graph_builder import GraphBuilder, ancestors, is_separable
from graphzero.capture.optimizer.average import tensors_of, trace_average
from graphzero.capture.optimizer.clip import clip
from graphzero.capture.optimizer.loss_scale import LossScaleUpdate, trace_loss_scale
from graphzero.capture.optimizer.optimizer import TracedUpdate
from graphzero.capture.optimizer.stepped_parameter import SteppedParameter
from graphzero.capture.precision import check_born
from graphzero.capture.problems import problem
from graphzero.capture.rewrite.finalize import origin
from graphzero.capture.spec import LOSS_SCALE, AverageSpec, Step
from graphzero.capture.trace.build_trace import TracedBuild
from graphzero.ir.value import Role, StateSpec, TensorType, tensor_type
from graphzero.ops import CHECK, STOCHASTIC_ROUND

aten = torch.ops.aten


class UpdateWriter:
    """Writes after build what happens to gradients, parameters and states.

    updates: name of a placeholder -> its new value.  aux: what else the step hands out.  ended: path -> the gradient
    that backward left.
    """

    def __init__(self, step: Step, root: nn.Module, builder: GraphBuilder, states: list[StateSpec]) -> None:
        self.step, self.root, self.builder, self.states = step, root, builder, states
        self.params = dict(root.named_parameters())
        self.aux: dict[str, fx.Node] = {}
        self.updates: dict[str, fx.Node] = {}
        self.ended: dict[str, fx.Node] = {}
        self.narrow: set[str] = set()  # paths of gradients that the update still has to widen
        self.scale: LossScaleUpdate | None = None
        self.checks: dict[tuple[str, str], fx.Node] = {}  # by message and line
        self.rounded = 0  # how many values the update has rounded stochastically

    def gradients(self, traced: TracedBuild, copies: dict[fx.Node, fx.Node]) -> dict[str, fx.Node]:
        """The gradients that the optimizers read; ``self.ended``: those that backward left, by path."""
        grads: dict[str, fx.Node] = {}
        wide = dict(zip(traced.with_wide, traced.results["wide"], strict=True))
        for path, old, new in zip(traced.with_grad, traced.results["ended"], traced.results["final"], strict=True):
            self.ended[path] = copies[old]
            if self.step.rounds(self.params[path]):  # build reads it in 16 bit again, but ranks do not add it up so
                copies[old].meta["reduced"] = True
            if new is None:
                continue
            if path in wide and origin(new) is origin(wide[path]):  # as build left it: the update does it once more
                self.narrow.add(path)
                grads[path] = self._keep_gradient(path, copies[old])
                continue
            grads[path] = copies[new]
            if origin(old) is origin(new):  # a node of its own, which finish() takes away where it is not needed
                grads[path] = self._keep_gradient(path, copies[old])
        return grads

    def _keep_gradient(self, path: str, grad: fx.Node) -> fx.Node:
        type_ = grad.meta["type"]
        alias = self.builder.emit(aten.alias.default, (grad,), type_, phase="backward", fake=grad.meta["val"])
        alias.meta["keep"] = True
        self.ended[path] = alias
        return alias

    def begin_scale(self, paths: list[str]) -> None:
        """Unless no loss is scaled: how many elements of gradients are not finite, of parameters that are stepped."""
        precision, nodes = self.step.precision, self.builder.placeholders
        if precision is None or precision.scaling is None or not paths:
            return
        check_born(self.step, self.states)
        scale = nodes[Role("buffer", f"{LOSS_SCALE}.scale")]
        self.scale = LossScaleUpdate(self.builder.emit, scale, [self.ended[path] for path in paths])

    def _add_check(self, ok: fx.Node, message: str, line: str) -> None:
        """A condition on which the update goes on, joined to those of other parameters at this line."""
        if self.scale is not None:
            ok = self.builder.emit(aten.logical_or.default, (ok, self.scale.overflow), tensor_type(ok))
        before = self.checks.get((message, line))
        if before is not None:
            ok = self.builder.emit(aten.logical_and.default, (before, ok), tensor_type(ok))
        self.checks[message, line] = ok

    def end_checks(self) -> None:
        """The checks of all updates."""
        for i, ((message, line), ok) in enumerate(self.checks.items()):
            self.aux[f"check.update.{i}"] = check = self.builder.emit(CHECK, (ok, message), tensor_type(ok))
            check.meta["source"] = line

    def end_scale(self) -> None:
        """The loss scale of the next step, after all updates."""
        precision = self.step.precision
        if self.scale is not None and precision is not None and precision.scaling is not None:
            self.aux["skipped"] = self.scale.overflow
            names = [f"{LOSS_SCALE}.{name}" for name, _ in self.step.modules[LOSS_SCALE].named_buffers()]
            roles = [Role("buffer", name) for name in names]
            given = [self.scale.overflow, *(self.builder.placeholders[role] for role in roles)]
            new = self.builder.add_traced(trace_loss_scale(precision.scaling), given)
            for role, node in zip(roles, new, strict=True):
                self.put(role, node)

    def _widened(self, path: str, grad: fx.Node) -> fx.Node:
        """A gradient as the optimizer reads it: in the dtype of its parameter, and unscaled."""
        dtype = torch.float32 if self.step.rounds(self.params[path]) else self.params[path].dtype
        if path not in self.narrow:
            return self._cast(grad, dtype)
        if self.scale is not None:
            grad = self._cast(grad, torch.float32)
            grad = self.builder.emit(aten.mul.Tensor, (grad, self.scale.inverse()), tensor_type(grad))
        return self._cast(grad, dtype)

    def _rounded(self, node: fx.Node) -> fx.Node:
        """An update's result for a bfloat16 value, in float32, rounded as it is stored."""
        shape = tensor_type(node).shape
        number, self.rounded = self.rounded, self.rounded + 1
        args = (node, self.builder.placeholders[Role("seed")], number, [0] * len(shape), list(shape))
        return self.builder.emit(STOCHASTIC_ROUND, args, TensorType(torch.bfloat16, shape))

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        type_ = TensorType(dtype, tensor_type(node).shape)
        if tensor_type(node).dtype == dtype:
            return node
        return self.builder.emit(aten._to_copy.default, (node,), type_, kwargs={"dtype": dtype})

    def add(
        self, index: int, members: list[SteppedParameter], update: TracedUpdate | None, grads: dict[str, fx.Node]
    ) -> None:
        """The step of one optimizer; ``update``: what was traced of it, None where no parameter has a gradient."""
        if update is None:
            return
        own = {member.path: grads[member.path] for member in members if member.path in grads}
        clipped, norm = self._clipping(index, own)
        begun = len(self.builder.graph.nodes)
        own = {path: clipped(self._widened(path, grad)) for path, grad in own.items()}
        is_wider = bool(self.narrow) or any(member.rounded for member in members)
        late = list(self.builder.graph.nodes)[begun:] if is_wider else []
        if norm is not None:
            self.aux[f"grad_norm.{index}"] = norm
        places = {(spec.param, spec.key): spec for spec in self.states if spec.optimizer == index}
        by_name = {node.name: node for node in self.builder.placeholders.values()}
        models = {member.path: member for member in update.members}
        by_path = {member.path: member for member in members}
        by_kind = {member.kind: member for member in reversed(update.members)}
        needed = {member.path: ancestors(update, member) for member in update.members}
        whole = not is_separable(update)
        for member in members:
            model = models.get(member.path) or by_kind[member.kind]
            given = {}
            for node, label in update.inputs.items():
                if label[0] == "hyper":
                    given[node] = self.builder.placeholders[label[1].role]
                elif label[1] == model.path or whole:
                    path = label[1] if whole else member.path
                    entering = self._input(label[0], path, label[2], own, places, by_name)
                    given[node] = self._cast(entering, by_path[path].stepped(tensor_type(entering).dtype))
            results, checks = self.builder.stamp_update(update, model, given, needed[model.path])
            for ok, message, line in checks:
                self._add_check(ok, message, line)
            for key, node in results.items():
                self._add_result(member, key, node, places, by_name)
        _sink(self.builder.graph, late)

    def _clipping(self, index: int, grads: dict[str, fx.Node]) -> tuple[Callable[[fx.Node], fx.Node], fx.Node | None]:
        """See ``clip``.  The norm is that of unscaled gradients: where all are scaled alike, it is unscaled itself."""
        emit, spec = self.builder.emit, self.step.optimizers[index]
        if self.scale is None or spec.clip_grad_norm is None:
            return clip(emit, spec, grads, grads, None)
        if self.narrow.issuperset(grads):
            return clip(emit, spec, grads, grads, self.scale.inverse())
        return clip(emit, spec, grads, {path: self._widened(path, grad) for path, grad in grads.items()}, None)

    def _input(
        self, kind: str, path: str, key: str, grads: dict[str, fx.Node], places: dict[Any, StateSpec],
        by_name: dict[str, fx.Node],
    ) -> fx.Node:  # fmt: skip
        if kind == "grad":
            return grads[path]
        if kind == "state":
            return by_name[places[path, key].placeholder]
        return self._read_rounded(self.builder.placeholders[Role("param", path)])

    def _add_result(
        self, member: SteppedParameter, key: str, node: fx.Node, places: dict[Any, StateSpec],
        by_name: dict[str, fx.Node],
    ) -> None:  # fmt: skip
        param = self.builder.placeholders[Role("param", member.path)]
        name = places[member.path, key].placeholder if key else param.name
        dtype = tensor_type(by_name[name]).dtype
        if member.stepped(dtype) != dtype:
            node = by_name[name] if node is self._cast(by_name[name], tensor_type(node).dtype) else self._rounded(node)
        if node is not by_name[name]:
            if self.scale is not None:
                node = self.scale.keep_on_overflow(by_name[name] if key else self._read_rounded(param), node)
            before = self.updates.setdefault(name, node)
            if not key:
                self.updates[name] = node
            elif before is not node:
                raise problem(
                    f"the parameters of one group change their common state {key!r} differently",
                    "give these parameters a parameter group each",
                )

    def add_average(self, spec: AverageSpec) -> None:
        """The average follows the parameters and buffers with which the step ends."""
        traced, nodes = trace_average(spec, self.step.rounds), self.builder.placeholders
        roles = {id(x): Role("param", path) for path, x in self.params.items()}
        roles |= {id(x): Role("buffer", path) for path, x in self.root.named_buffers()}
        params, buffers = tensors_of(spec.averaged.module)
        ours = [nodes[roles[id(x)]] for x in (spec.averaged.n_averaged, *params, *buffers)]
        model = [self._read_rounded(nodes[roles[id(x)]]) for some in tensors_of(spec.of) for x in some]
        dtypes = [node.meta["val"].dtype for node in traced.find_nodes(op="placeholder")]
        entering = [self._cast(node, dtype) for node, dtype in zip((*ours, *model), dtypes, strict=True)]
        results = self.builder.add_traced(traced, entering)
        for placeholder, old, new in zip(ours, entering[: len(ours)], results, strict=True):
            if new is not old:
                is_wider = tensor_type(new).dtype != tensor_type(placeholder).dtype
                self.updates[placeholder.name] = self._rounded(new) if is_wider else new

    def _read_rounded(self, param: fx.Node) -> fx.Node:
        """A parameter as it enters the update."""
        return self.updates.get(param.name, param)

    def put(self, role: Role, node: fx.Node) -> None:
        """Say what is new of what ``role`` names, if it is."""
        placeholder = self.builder.placeholders[role]
        if node is not placeholder:
            self.updates[placeholder.name] = node


def _sink(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Put each of ``nodes`` right before its first reader, so that few of them are held at a time."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in reversed(list(nodes)):
        first = min(node.users, key=position.__getitem__, default=None)
        if first is not None:
            first.prepend(node)
            position[node] = position[first]
