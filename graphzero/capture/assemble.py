"""``capture``: the user's step as one graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn

from graphzero.capture.guards import all_guards
from graphzero.capture.join import Join, ancestors, separable
from graphzero.capture.optimizer import optimizer as stepping
from graphzero.capture.optimizer.clip import clip
from graphzero.capture.optimizer.hyper import hyper_name, of_group
from graphzero.capture.optimizer.loss_scale import NAME, Scale
from graphzero.capture.optimizer.member import Member
from graphzero.capture.optimizer.optimizer import Update
from graphzero.capture.optimizer.states import Fills, equal_states, mark_first_steps
from graphzero.capture.placing.local_regions import finish_regions
from graphzero.capture.placing.pins import mark
from graphzero.capture.precision import check_born, check_masters
from graphzero.capture.problems import check_modules, check_parameters, place_of, problem
from graphzero.capture.rewrite.canonicalise import canonicalise, merge_equal
from graphzero.capture.rewrite.finish import finish, origin
from graphzero.capture.rewrite.picks import pick_rows
from graphzero.capture.rewrite.uses import insert_uses
from graphzero.capture.spec import Captured, Entry, Inputs, StateSpec, Step
from graphzero.capture.trace.threads import one_at_a_time
from graphzero.capture.trace.trace import Slot, Traced, trace_build
from graphzero.ir.graph import StepGraph
from graphzero.ir.packed import Packed
from graphzero.ir.value import Role, TensorType, phase_of, tensor_type

aten = torch.ops.aten


def capture(step: Step, inputs: Inputs) -> Captured:
    """Write down one step: build on such ``inputs``, then clipping and the optimizers.

    Args:
        step: the user's build, its modules and optimizers; nothing of it is changed.
        inputs: the arguments of build; no value of a tensor is read.

    Raises:
        CaptureError: with the user's line, where the step cannot be one graph.
    """
    with one_at_a_time:
        return _Capture(step, inputs).run()


class _Capture:
    def __init__(self, step: Step, inputs: Inputs) -> None:
        self.step, self.inputs = step, inputs
        self.root = nn.Module()
        for name, module in step.modules.items():
            self.root.add_module(name, module)
        self.params = dict(self.root.named_parameters())
        self.paths = {id(param): path for path, param in self.params.items()}
        self.join = Join()
        self.fills = [Fills(spec.optimizer) for spec in step.optimizers]
        self.states: list[StateSpec] = []
        self.entry = Entry()
        self.aux: dict[str, fx.Node] = {}
        self.updates: dict[str, fx.Node] = {}
        self.ended: dict[str, fx.Node] = {}
        self.unused: list[str] = []
        self.environments: list[tuple[Any, dict[str, Role]]] = []
        self.narrow: set[str] = set()  # paths of gradients that the update still has to widen
        self.scale: Scale | None = None
        self.non_finite: fx.Node | None = None

    def run(self) -> Captured:
        check_modules(self.root.named_modules())
        check_parameters(self.params)
        check_masters(self.step, self.params)
        for i, spec in enumerate(self.step.optimizers):
            stepping.check(spec)
            self._check_owned(i)
        traced = trace_build(self.step, self.root, self.inputs)
        self._check_backward(traced)
        symbols = {symbol: Role("scalar", name) for symbol, name in traced.symbols.items()}
        self.environments.append((traced.env, symbols))
        final = zip(traced.with_grad, traced.results["final"], strict=True)
        stepped = {path for path, grad in final if grad is not None}  # build may drop a gradient: p.grad = None
        members = [self._members(i, stepped) for i in range(len(self.step.optimizers))]
        updates = [self._trace(i, found) for i, found in enumerate(members)]
        self._add_placeholders(traced, members)
        copies = self._add_build(traced)
        grads = self._gradients(traced, copies)
        self._begin_scale([self.ended[member.path] for found in members for member in found])
        for i, (found, update) in enumerate(zip(members, updates, strict=True)):
            self._add_update(i, found, update, grads)
        self._end_scale()
        return self._finish(traced, copies)

    # ---- before tracing the optimizers

    def _check_owned(self, index: int) -> None:
        for g, group in enumerate(self.step.optimizers[index].optimizer.param_groups):
            for n, param in enumerate(group["params"]):
                if id(param) not in self.paths:
                    raise problem(
                        f"parameter {n} of group {g} of optimizer {index}, of shape {list(param.shape)}, belongs to no "
                        f"module of {self.step.name}",
                        "assign the module that owns it to the Graph in __init__ (self.model = model), or leave it out "
                        "of the optimizer",
                        facts=[f"modules of the Graph: {', '.join(self.step.modules) or 'none'}"],
                    )

    def _check_backward(self, traced: Traced) -> None:
        step = self.step
        if step.optimizers and not traced.trains:
            raise problem(
                f"{step.name} has an optimizer, but its build calls no backward()",
                "call loss.backward() in build to train (or put gradients into p.grad), or make another Graph without "
                "add_optimizer to evaluate",
                [place_of(step.build)],
            )
        if not step.optimizers:
            return
        owned = [self.paths[id(p)] for s in step.optimizers for g in s.optimizer.param_groups for p in g["params"]]
        grads = set(traced.with_grad)
        if not grads.intersection(owned):
            raise problem(
                f"no parameter of the optimizers gets a gradient from backward() in build of {step.name}",
                "check that the loss depends on the modules' parameters: requires_grad, no_grad(), detach()",
                [place_of(step.build)],
                facts=owned,
            )
        self.unused = [p for p in dict.fromkeys(owned) if p not in grads and self.params[p].requires_grad]
        if self.unused:
            self._warn_unused()

    def _warn_unused(self) -> None:
        names = self.unused
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        warnings.warn(
            f"{self.step.name}: no gradient reaches {shown}; they and their optimizer state stay as they are",
            UserWarning,
            stacklevel=5,
        )

    def _members(self, index: int, with_grad: set[str]) -> list[Member]:
        optimizer = self.step.optimizers[index].optimizer
        found = [
            Member(self.paths[id(p)], g, p)
            for g, group in enumerate(optimizer.param_groups)
            for p in group["params"]
            if self.paths[id(p)] in with_grad
        ]
        if found:
            stepping.state_kinds(optimizer, found)
            self.entry |= mark_first_steps(index, found, self.fills[index])
        return found

    def _trace(self, index: int, members: list[Member]) -> Update | None:
        if not members:
            return None
        spec = self.step.optimizers[index]
        kinds: dict[Any, list[Member]] = {}
        for member in members:
            kinds.setdefault(member.kind, []).append(member)
        chosen = [alike[0] for alike in kinds.values()]
        most = max(kinds.values(), key=len)
        if len(chosen) == 1 and len(most) > 1:
            chosen.append(most[1])
        update = stepping.trace_update(index, spec, chosen)
        if not separable(update):
            update = stepping.trace_update(index, spec, members)
        self.environments.append((update.env, {symbol: hyper.role for symbol, hyper in update.symbols.items()}))
        return update

    # ---- placeholders

    def _add_placeholders(self, traced: Traced, members: list[list[Member]]) -> None:
        add = self.join.placeholder
        fakes = [node.meta["val"] for node in traced.module.graph.find_nodes(op="placeholder")]
        for role, fake in zip(self._build_roles(), fakes, strict=True):
            if role.kind != "seed":
                add(role, role.of, fake)
        for i, found in enumerate(members):
            self._add_states(i, found)
            for g, group in enumerate(self.step.optimizers[i].optimizer.param_groups):
                for hyper in of_group(i, g, group):
                    add(hyper.role, hyper_name(hyper), hyper.value)
        add(Role("seed"), "seed", fakes[-1])
        self.join.add_constants(traced.module)

    def _build_roles(self) -> list[Role]:
        roles = [Role("batch", leaf.name) for leaf in self.inputs.tensors]
        roles += [Role("scalar", leaf.name) for leaf in self.inputs.floats]
        roles += [Role("param", path) for path in self.params]
        roles += [Role("buffer", path) for path, _ in self.root.named_buffers()]
        return [*roles, Role("seed")]

    def _add_states(self, index: int, members: list[Member]) -> None:
        fills = self.fills[index]
        shared = equal_states(members, fills)
        for member in members:
            for key, entry in member.states.items():
                if entry is None:
                    continue
                of = f"optimizer{index}.group{member.group}" if (member.group, key) in shared else member.path
                role = Role("state", of, key)
                node = self.join.placeholders.get(role)
                if node is None:
                    fake = torch.empty(entry[1], dtype=entry[0], device="meta")
                    node = self.join.placeholder(role, f"{of}_{key}", fake)
                fill = fills.of(member, key)
                spec = StateSpec(index, member.path, key, entry[0], entry[1], fill, node.name, member.first)
                self.states.append(spec)

    # ---- the graph

    def _add_build(self, traced: Traced) -> dict[fx.Node, fx.Node]:
        copies = self.join.add_build(traced, self._build_roles())
        for path, old in zip(self.params, traced.results["params"], strict=True):
            self._update(Role("param", path), copies[old])
        for (path, _), old in zip(self.root.named_buffers(), traced.results["buffers"], strict=True):
            self._update(Role("buffer", path), copies[old])
        return copies

    def _update(self, role: Role, node: fx.Node) -> None:
        placeholder = self.join.placeholders[role]
        if node is not placeholder:
            self.updates[placeholder.name] = node

    def _gradients(self, traced: Traced, copies: dict[fx.Node, fx.Node]) -> dict[str, fx.Node]:
        """The gradients that the optimizers read; ``self.ended``: those that backward left, by path."""
        found: dict[str, fx.Node] = {}
        wide = dict(zip(traced.with_wide, traced.results["wide"], strict=True))
        for path, old, new in zip(traced.with_grad, traced.results["ended"], traced.results["final"], strict=True):
            self.ended[path] = copies[old]
            if new is None:
                continue
            if path in wide and origin(new) is origin(wide[path]):  # as build left it: the update does it once more
                self.narrow.add(path)
                found[path] = self._kept(path, copies[old])
                continue
            found[path] = copies[new]
            if origin(old) is origin(new):  # a node of its own, which finish() takes away where it is not needed
                found[path] = self._kept(path, copies[old])
        return found

    def _kept(self, path: str, grad: fx.Node) -> fx.Node:
        type_ = grad.meta["type"]
        made = self.join.emit(aten.alias.default, (grad,), type_, phase="backward", fake=grad.meta["val"])
        made.meta["keep"] = True
        self.ended[path] = made
        return made

    # ---- mixed precision

    def _begin_scale(self, grads: list[fx.Node]) -> None:
        """Unless no loss is scaled: how many elements of gradients are not finite."""
        precision, held = self.step.precision, self.join.placeholders
        if precision is None or precision.scaling is None or not grads:
            return
        check_born(self.step, self.states)
        roles = {name: Role("buffer", f"{NAME}.{name}") for name, _ in self.step.modules[NAME].named_buffers()}
        self.scale = Scale(self.join.emit, precision.scaling, {name: held[role] for name, role in roles.items()})
        self.non_finite = self.scale.count(grads)

    @property
    def overflow(self) -> fx.Node:
        """Whether there are any.  Asked for behind the first norm, whose sum over ranks then goes with theirs."""
        assert self.scale is not None and self.non_finite is not None
        return self.scale.overflow(self.non_finite)

    def _end_scale(self) -> None:
        if self.scale is not None:
            self.aux["skipped"] = self.overflow
            for name, new in self.scale.after(self.overflow).items():
                self._update(Role("buffer", f"{NAME}.{name}"), new)

    def _widened(self, path: str, grad: fx.Node) -> fx.Node:
        """A gradient as the optimizer reads it: in the dtype of its parameter, and unscaled."""
        if path not in self.narrow:
            return grad
        dtype = self.params[path].dtype
        if self.scale is not None:
            grad = self._cast(grad, torch.float32)
            grad = self.join.emit(aten.mul.Tensor, (grad, self.scale.inverse()), tensor_type(grad))
        return self._cast(grad, dtype)

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        type_ = TensorType(dtype, tensor_type(node).shape)
        if tensor_type(node).dtype == dtype:
            return node
        return self.join.emit(aten._to_copy.default, (node,), type_, kwargs={"dtype": dtype})

    def _add_update(self, index: int, members: list[Member], update: Update | None, grads: dict[str, fx.Node]) -> None:
        if update is None:
            return
        own = {member.path: grads[member.path] for member in members if member.path in grads}
        clipped, norm = self._clipping(index, own)
        begun = len(self.join.graph.nodes)
        own = {path: clipped(self._widened(path, grad)) for path, grad in own.items()}
        late = list(self.join.graph.nodes)[begun:] if self.narrow else []
        if norm is not None:
            self.aux[f"grad_norm.{index}"] = norm
        places = {(spec.param, spec.key): spec for spec in self.states if spec.optimizer == index}
        by_name = {node.name: node for node in self.join.placeholders.values()}
        models = {member.path: member for member in update.members}
        by_kind = {member.kind: member for member in reversed(update.members)}
        needed = {member.path: ancestors(update, member) for member in update.members}
        whole = not separable(update)
        for member in members:
            model = models.get(member.path) or by_kind[member.kind]
            given = {}
            for node, label in update.inputs.items():
                if label[0] == "hyper":
                    given[node] = self.join.placeholders[label[1].role]
                elif label[1] == model.path or whole:
                    path = label[1] if whole else member.path
                    given[node] = self._input(label[0], path, label[2], own, places, by_name)
            results = self.join.stamp(update, model, given, needed[model.path])
            for key, node in results.items():
                self._add_result(member, key, node, places, by_name)
        _sink(self.join.graph, late)

    def _clipping(self, index: int, grads: dict[str, fx.Node]) -> tuple[Callable[[fx.Node], fx.Node], fx.Node | None]:
        """See ``clip``.  The norm is that of unscaled gradients: where all are scaled alike, it is unscaled itself."""
        emit, spec = self.join.emit, self.step.optimizers[index]
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
        return self._held(self.join.placeholders[Role("param", path)])

    def _add_result(
        self, member: Member, key: str, node: fx.Node, places: dict[Any, StateSpec], by_name: dict[str, fx.Node]
    ) -> None:
        param = self.join.placeholders[Role("param", member.path)]
        name = places[member.path, key].placeholder if key else param.name
        if node is not by_name[name]:
            if self.scale is not None:
                node = self.scale.kept(self.overflow, by_name[name] if key else self._held(param), node)
            before = self.updates.setdefault(name, node)
            if not key:
                self.updates[name] = node
            elif before is not node:
                raise problem(
                    f"the parameters of one group change their common state {key!r} differently",
                    "give these parameters a parameter group each",
                )

    def _held(self, param: fx.Node) -> fx.Node:
        """A parameter as it enters the update."""
        return self.updates.get(param.name, param)

    # ---- the end

    def _finish(self, traced: Traced, copies: dict[fx.Node, fx.Node]) -> Captured:
        graph = self.join.graph
        slots = [copies[node] for node in traced.results["outputs"]]
        outputs = tuple(slots[leaf.index] if isinstance(leaf, Slot) else leaf for leaf in traced.out)
        losses = [copies[node] for node in traced.results["losses"]]
        self.aux |= {f"check.{i}": copies[node] for i, node in enumerate(traced.results["checks"])}
        graph.output((outputs, self.aux, self.updates, losses, self.ended))
        pick_rows(graph)
        canonicalise(graph)
        merge_equal(graph, lambda node: phase_of(node) == "forward")  # not in backward: recomputation is meant
        finish_regions(graph, self.step.placement, losses)
        insert_uses(graph)
        finish(graph)
        mark(graph, traced.pins)
        kept = {node.name for node in graph.find_nodes(op="placeholder")}
        states = [spec for spec in self.states if spec.placeholder in kept]
        constants = {name: tensor for name, tensor in self.join.constants.items() if name in kept}
        step_graph = StepGraph(self.step.name, self.step.placement, graph)
        training = traced.trains and bool(self.step.optimizers)
        guards = all_guards(self.environments)
        return Captured(
            Packed(step_graph),
            traced.out_spec,
            training,
            states,
            self.unused,
            guards,
            constants,
            self.entry,
            traced.attributes,
        )


def _sink(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Put each of ``nodes`` right before its first reader, so that few of them are held at a time."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in reversed(list(nodes)):
        first = min(node.users, key=position.__getitem__, default=None)
        if first is not None:
            first.prepend(node)
            position[node] = position[first]
