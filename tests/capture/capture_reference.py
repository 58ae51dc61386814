"""A reference interpreter for captured graphs, and the comparison with plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from graphzero.capture import Captured, Input, Inputs, OptimizerSpec, Step, capture
from graphzero.ir import ops, value
from graphzero.ir.verifier.verify import verify
from graphzero.ops import PIN
from graphzero.sbp.placement import placement
from graphzero.step.parameter_groups import ParameterGroups

PLACE = placement("cpu", range(1))


class Owner:
    """Stands for a Graph: modules are attributes, ``build`` is the step."""

    def __init__(self, build: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self.function = build

    def build(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def inputs_of(args: Any, kwargs: Any) -> tuple[Inputs, dict[str, Any]]:
    paths, spec = pytree.tree_flatten_with_path((args, kwargs))
    leaves: list[Input] = []
    feed = {}
    for path, leaf in paths:
        name = "in" + "".join(str(key) for key in path)
        name = "".join(c if c.isalnum() else "_" for c in name).strip("_")
        if isinstance(leaf, torch.Tensor):
            leaves.append(Input(name, leaf, tuple(leaf.shape)))
            feed[name] = leaf
        elif isinstance(leaf, float):
            leaves.append(Input(name, leaf))
            feed[name] = leaf
        else:
            leaves.append(Input(name, leaf))
    return Inputs(tuple(leaves), spec), feed


class Program:
    """A captured step with its state, run on one device."""

    def __init__(self, owner: Owner, optimizers: list[Any], args: Any, kwargs: Any = None) -> None:
        self.owner, kwargs = owner, kwargs or {}
        self.optimizers = [o if isinstance(o, OptimizerSpec) else OptimizerSpec(o) for o in optimizers]
        modules = {k: m for k, m in vars(owner).items() if isinstance(m, nn.Module)}
        self.modules = modules
        self.step = Step("step", PLACE, owner.build, modules, self.optimizers)
        inputs, _ = inputs_of(args, kwargs)
        self.captured: Captured = capture(self.step, inputs)
        self.graph = self.captured.graph
        verify(self.graph)
        self.values = self._bind()
        self.aux: dict[str, Any] = {}

    def _bind(self) -> dict[str, Any]:
        root = nn.Module()
        for name, module in self.modules.items():
            root.add_module(name, module)
        params, buffers = dict(root.named_parameters()), dict(root.named_buffers())
        values: dict[str, Any] = dict(self.captured.constants)
        for node in self.graph.placeholders("param", "buffer"):
            held = {**params, **buffers}[value.role_of(node).of]
            values[node.name] = held.detach().clone()
        for spec in self.captured.states:
            real = self.optimizers[spec.optimizer].optimizer.state.get(params[spec.param], {}).get(spec.key)
            held = torch.full(spec.shape, spec.fill, dtype=spec.dtype) if real is None else real.clone()
            if spec.placeholder in values:
                assert torch.equal(values[spec.placeholder], held)
            values[spec.placeholder] = held
        return values

    def __call__(self, *args: Any, seed: int = 0, **kwargs: Any) -> Any:
        _, feed = inputs_of(args, kwargs)
        hypers = ParameterGroups(self.optimizers).numbers
        env: dict[fx.Node, Any] = {}
        graph = self.graph
        assert self.captured.guards.numbers.check({**hypers, **{value.Role("scalar", k): v for k, v in feed.items()}})
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = self._input(node, feed, hypers, seed)
            elif node.op == "call_function":
                env[node] = self._call(node, env)
        self.aux = {name: env[node] for name, node in graph.aux.items()}
        self.values.update({name: env[node].clone() for name, node in graph.updates.items()})
        self.env = env
        flat = [env[x] if isinstance(x, fx.Node) else x for x in graph.outputs]
        return pytree.tree_unflatten(flat, self.captured.out_spec)

    def _input(self, node: fx.Node, feed: dict[str, Any], hypers: dict[Any, float], seed: int) -> Any:
        role = value.role_of(node)
        assert role is not None
        if role.kind in ("batch", "scalar"):
            found = feed[role.of]
        elif role.kind == "hyper":
            found = hypers[role]
        elif role.kind == "seed":
            found = torch.tensor(seed)
        else:
            found = self.values[node.name]
        return found

    def _call(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        args = fx.node.map_arg(node.args, lambda x: env[x])
        kwargs = fx.node.map_arg(node.kwargs, lambda x: env[x])
        if node.target is ops.use or node.target is PIN:
            return args[0]
        target = torch.reshape if node.target is torch.ops.aten.view.default else node.target  # as it runs
        with torch.no_grad():
            found = target(*args, **kwargs)
        type_ = value.type_of(node)
        if isinstance(found, torch.Tensor):
            assert type_ == value.TensorType(found.dtype, tuple(found.shape)), (node.name, type_, found.shape)
        return found

    def parameters(self) -> dict[str, torch.Tensor]:
        return {value.role_of(n).of: self.values[n.name] for n in self.captured.graph.placeholders("param")}

    def buffers(self) -> dict[str, torch.Tensor]:
        return {value.role_of(n).of: self.values[n.name] for n in self.captured.graph.placeholders("buffer")}


def eager_step(owner: Owner, optimizers: list[Any], *args: Any, **kwargs: Any) -> Any:
    """What the graph must equal: zero_grad, build (with backward), clip, step."""
    specs = [o if isinstance(o, OptimizerSpec) else OptimizerSpec(o) for o in optimizers]
    for spec in specs:
        spec.optimizer.zero_grad()
    out = owner.build(*args, **kwargs)
    for spec in specs:
        params = [p for group in spec.optimizer.param_groups for p in group["params"]]
        if spec.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(params, spec.clip_grad_norm, spec.norm_type)
        if spec.clip_grad_value is not None:
            nn.utils.clip_grad_value_(params, spec.clip_grad_value)
        spec.optimizer.step()
    return out


def assert_same(
    owner: Owner, make_optimizers: Any, batches: list[Any], atol: float = 1e-9, between: Any = None
) -> tuple[Program, Owner]:
    """Run the captured step and plain PyTorch side by side on ``batches`` of (args, kwargs); compare everything."""
    eager = copy.deepcopy(owner)
    eager_optimizers, optimizers = make_optimizers(eager), make_optimizers(owner)
    args, kwargs = batches[0]
    program = Program(owner, optimizers, args, kwargs)
    for args, kwargs in batches:
        want = eager_step(eager, eager_optimizers, *args, **kwargs)
        have = program(*args, **kwargs)
        close(have, want, atol)
        if between is not None:
            between(eager_optimizers)
            between(optimizers)
    root = nn.Module()
    for name, module in vars(eager).items():
        if isinstance(module, nn.Module):
            root.add_module(name, module)
    wanted = {**dict(root.named_parameters()), **dict(root.named_buffers())}
    for path, held in {**program.parameters(), **program.buffers()}.items():
        close(held, wanted[path].detach(), atol, path)
    plain = [o.optimizer if isinstance(o, OptimizerSpec) else o for o in eager_optimizers]
    for spec in program.captured.states:
        held = plain[spec.optimizer].state[wanted[spec.param]][spec.key]
        close(program.values[spec.placeholder], held, atol, f"{spec.param} {spec.key}")
    return program, eager


def close(have: Any, want: Any, atol: float, what: str = "") -> None:
    have, want = pytree.tree_leaves(have), pytree.tree_leaves(want)
    assert len(have) == len(want)
    for a, b in zip(have, want, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b.detach(), atol=atol, rtol=1e-6, msg=lambda m: f"{what}: {m}")
        else:
            assert a == b
