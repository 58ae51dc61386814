"""``capture``: the user's step as one graph."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import fx, nn

from graphzero.capture.annotations.local_regions import finish_regions
from graphzero.capture.annotations.pins import mark_pins
from graphzero.capture.graph_builder import GraphBuilder, idle_parameters, is_separable
from graphzero.capture.guards.guard_set import GuardSet, OptimizerStateGuard, build_number_guards
from graphzero.capture.optimizer import optimizer as updates_of
from graphzero.capture.optimizer.hyperparameters import Carry, hyperparameter_name
from graphzero.capture.optimizer.optimizer import TracedUpdate
from graphzero.capture.optimizer.states import StateFills, equal_states, mark_first_steps
from graphzero.capture.optimizer.stepped_numbers import hyperparameters_of_group, paths_of
from graphzero.capture.optimizer.stepped_parameter import SteppedParameter
from graphzero.capture.optimizer.stepping import OptimizerTracer
from graphzero.capture.precision import check_masters
from graphzero.capture.problems import check_classes, check_parameters, place_of, problem
from graphzero.capture.rewrite.canonicalise import canonicalise, merge_equal
from graphzero.capture.rewrite.finalize import finalize
from graphzero.capture.rewrite.parameter_uses import insert_uses
from graphzero.capture.rewrite.row_gather import gather_rows
from graphzero.capture.spec import Captured, Inputs, Step
from graphzero.capture.trace.build_trace import OutputSlot, TracedBuild
from graphzero.capture.trace.other_threads import capture_lock
from graphzero.capture.trace.retracing import trace_build
from graphzero.capture.update_writer import UpdateWriter
from graphzero.errors import shorten_list
from graphzero.ir.graph import StepGraph
from graphzero.ir.packed_graph import PackedGraph
from graphzero.ir.value import Role, StateSpec, phase_of
from graphzero.logs import phase

aten = torch.ops.aten


def capture(step: Step, inputs: Inputs) -> Captured:
    """Write down one step: build on such ``inputs``, then clipping and the optimizers.

    Args:
        step: the user's build, its modules and optimizers; nothing of it is changed.
        inputs: the arguments of build; no value of a tensor is read.

    Raises:
        CaptureError: with the user's line, where the step cannot be one graph.
    """
    with capture_lock:
        return _Capture(step, inputs).capture_step()


class _Capture:
    def __init__(self, step: Step, inputs: Inputs) -> None:
        self.step, self.inputs = step, inputs
        self.root = nn.Module()
        for name, module in step.modules.items():
            self.root.add_module(name, module)
        self.params = dict(self.root.named_parameters())
        self.paths = {id(param): path for path, param in self.params.items()}
        self.builder = GraphBuilder()
        self.steppings: list[OptimizerTracer] = []
        self.fills: list[StateFills] = []
        self.states: list[StateSpec] = []
        self.update = UpdateWriter(step, self.root, self.builder, self.states)
        self.state_guard = OptimizerStateGuard()
        self.unused: list[str] = []
        self.environments: list[tuple[Any, dict[str, Role]]] = []
        self.carries: list[Carry] = []

    def capture_step(self) -> Captured:
        check_parameters(self.params)
        check_classes({**self.params, **dict(self.root.named_buffers())})
        check_masters(self.step, self.params)
        for i, spec in enumerate(self.step.optimizers):
            updates_of.check(spec)
            self._check_owned(i)
            self.steppings.append(OptimizerTracer(spec.optimizer, i, self.paths))
            self.fills.append(StateFills(self.steppings[i]))
        with phase("build"):
            traced = trace_build(self.step, self.root, self.inputs)
        self._check_backward(traced)
        symbols = {symbol: Role("scalar", name) for symbol, name in traced.symbols.items()}
        self.environments.append((traced.env, symbols))
        final = zip(traced.with_grad, traced.results["final"], strict=True)
        stepped = {path for path, grad in final if grad is not None}  # build may drop a gradient: p.grad = None
        members = [self._members(i, stepped) for i in range(len(self.step.optimizers))]
        with phase("optimizers"):
            updates = [self._trace(i, group) for i, group in enumerate(members)]
        self._add_placeholders(traced, members)
        copies = self._add_build(traced)
        grads = self.update.gradients(traced, copies)
        self.update.begin_scale([member.path for group in members for member in group])
        for i, (group, update) in enumerate(zip(members, updates, strict=True)):
            self.update.add(i, group, update, grads)
        self.update.end_checks()
        self.update.end_scale()
        for average in self.step.averages if updates else ():
            self.update.add_average(average)
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

    def _check_backward(self, traced: TracedBuild) -> None:
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
            warnings.warn(
                f"{step.name}: no gradient reaches {shorten_list(self.unused, 20)}; they and their optimizer "
                "state stay as they are",
                UserWarning,
                stacklevel=4,
            )

    def _members(self, index: int, with_grad: set[str]) -> list[SteppedParameter]:
        optimizer = self.step.optimizers[index].optimizer
        members = [
            SteppedParameter(self.paths[id(p)], g, p, rounded=self.step.rounds(p))
            for g, group in enumerate(optimizer.param_groups)
            for p in group["params"]
            if self.paths[id(p)] in with_grad
        ]
        if members:
            updates_of.fill_state_kinds(self.steppings[index], members)
            self.state_guard |= mark_first_steps(index, members, self.fills[index])
        return members

    def _trace(self, index: int, members: list[SteppedParameter]) -> TracedUpdate | None:
        if not members:
            return None
        stepping = self.steppings[index]
        kinds: dict[Any, list[SteppedParameter]] = {}
        for member in members:
            kinds.setdefault(member.kind, []).append(member)
        chosen = [alike[0] for alike in kinds.values()]
        most = max(kinds.values(), key=len)
        if len(chosen) == 1 and len(most) > 1:
            chosen.append(most[1])
        update = updates_of.trace_update(index, stepping, members if stepping.mixes else chosen)
        if not is_separable(update):
            update = updates_of.trace_update(index, stepping, members)
        if idle := idle_parameters(update):
            self._warn_idle(stepping, idle)
        self.environments.append((update.env, {symbol: hyper.role for symbol, hyper in update.symbols.items()}))
        self.carries += [paths_of(carry, members) for carry in update.carries]
        return update

    def _warn_idle(self, stepping: OptimizerTracer, paths: list[str]) -> None:
        """A step may ignore a gradient, as one of rate 0 does; one that leaves it to another optimizer is cut off."""
        what = f"{stepping.name}.step() makes nothing of the gradient of {', '.join(paths[:8])}"
        if stepping.inner:
            raise problem(
                f"{what}, though {type(stepping.inner[0]).__name__} inside of it may step it",
                "step the inner optimizer on the parameters of self.param_groups, or give it to add_optimizer itself",
                [place_of(stepping.step)],
            )
        warnings.warn(f"{what}; it leaves them as they are", UserWarning, stacklevel=6)

    # ---- placeholders

    def _add_placeholders(self, traced: TracedBuild, members: list[list[SteppedParameter]]) -> None:
        add = self.builder.placeholder
        fakes = [node.meta["val"] for node in traced.module.graph.find_nodes(op="placeholder")]
        for role, fake in zip(self._build_roles(), fakes, strict=True):
            if role.kind != "seed":
                add(role, role.of, fake)
        for i, group in enumerate(members):
            self._add_states(i, group)
            optimizer = self.step.optimizers[i].optimizer
            for g in range(len(optimizer.param_groups)):
                for hyper in hyperparameters_of_group(i, optimizer, g):
                    add(hyper.role, hyperparameter_name(hyper), hyper.value)
        add(Role("seed"), "seed", fakes[-1])
        self.builder.add_constants(traced.module)

    def _build_roles(self) -> list[Role]:
        roles = [Role("batch", leaf.name) for leaf in self.inputs.tensors]
        roles += [Role("scalar", leaf.name) for leaf in self.inputs.floats]
        roles += [Role("param", path) for path in self.params]
        roles += [Role("buffer", path) for path, _ in self.root.named_buffers()]
        return [*roles, Role("seed")]

    def _add_states(self, index: int, members: list[SteppedParameter]) -> None:
        fills = self.fills[index]
        shared = equal_states(members, fills)
        for member in members:
            for key, entry in member.states.items():
                if entry is None:
                    continue
                of = f"optimizer{index}.group{member.group}" if (member.group, key) in shared else member.path
                role = Role("state", of, key)
                node = self.builder.placeholders.get(role)
                if node is None:
                    fake = torch.empty(entry[1], dtype=entry[0], device="meta")
                    node = self.builder.placeholder(role, f"{of}_{key}", fake)
                fill = fills.fill_of(member, key)
                spec = StateSpec(index, member.path, key, entry[0], entry[1], fill, node.name, member.first)
                self.states.append(spec)

    # ---- the graph

    def _add_build(self, traced: TracedBuild) -> dict[fx.Node, fx.Node]:
        copies = self.builder.add_build(traced, self._build_roles())
        for path, old in zip(self.params, traced.results["params"], strict=True):
            self.update.put(Role("param", path), copies[old])
        for (path, _), old in zip(self.root.named_buffers(), traced.results["buffers"], strict=True):
            self.update.put(Role("buffer", path), copies[old])
        return copies

    # ---- the end

    def _finish(self, traced: TracedBuild, copies: dict[fx.Node, fx.Node]) -> Captured:
        graph = self.builder.graph
        slots = [copies[node] for node in traced.results["outputs"]]
        outputs = tuple(slots[leaf.index] if isinstance(leaf, OutputSlot) else leaf for leaf in traced.out)
        losses = [copies[node] for node in traced.results["losses"]]
        aux = {f"check.{i}": copies[node] for i, node in enumerate(traced.results["checks"])}
        graph.output((outputs, self.update.aux | aux, self.update.updates, losses, self.update.ended))
        gather_rows(graph)
        canonicalise(graph)
        merge_equal(graph, lambda node: phase_of(node) == "forward")  # not in backward: recomputation is meant
        finish_regions(graph, self.step.placement, losses)
        insert_uses(graph)
        finalize(graph)
        mark_pins(graph, traced.pins)
        placeholders = {node.name for node in graph.find_nodes(op="placeholder")}
        states = [spec for spec in self.states if spec.placeholder in placeholders]
        constants = {name: tensor for name, tensor in self.builder.constants.items() if name in placeholders}
        step_graph = StepGraph(self.step.name, self.step.placement, graph)
        training = traced.trains and bool(self.step.optimizers)
        return Captured(
            PackedGraph.from_graph(step_graph),
            traced.out_spec,
            training,
            states,
            self.unused,
            self._guards(traced, states),
            constants,
            carries=tuple(self.carries),
            asks_whether_traced=tuple(traced.asks_whether_traced),
        )

    def _guards(self, traced: TracedBuild, states: list[StateSpec]) -> GuardSet:
        scalars = [Role("scalar", leaf.name) for leaf in self.inputs.floats]
        fixed = {Role("scalar", name): x for name, x in traced.fixed.items()}
        counters: dict[str, list[tuple[int, str]]] = {}
        for spec in states:
            counters.setdefault(spec.placeholder, []).append((spec.optimizer, spec.param))
        attributes, namespaces, tensors = {**traced.attributes}, {**traced.namespaces}, [*traced.constants]
        for stepping in self.steppings:
            attributes |= stepping.guarded_attributes()
            namespaces |= stepping.namespaces
            tensors += stepping.constants()
        numbers = build_number_guards(self.environments, () if fixed else scalars, fixed)
        return GuardSet(numbers, self.state_guard.with_counters(counters), attributes, namespaces, tensors)
