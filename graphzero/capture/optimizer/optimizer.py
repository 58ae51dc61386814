"""The optimizer's step as a graph: traced once per kind of parameter, from the user's own ``step``.

Parameters of one group, shape and dtype step alike, so one of them is traced and the rest are stamped from it
(``graph_builder.py``).  An optimizer that mixes parameters (a norm over all of them) is noticed, because the traced
step of one then reads another, and is traced whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphzero import _compat
from graphzero.capture.optimizer.branches import ALL, BranchOutcomes, Ways, trace_branches
from graphzero.capture.optimizer.hyperparameters import OF_STATE, Carry, Hyperparameter, is_number, with_numbers
from graphzero.capture.optimizer.initial_state import ObservedDict, cannot_step
from graphzero.capture.optimizer.known_updates import cached_update, key_of
from graphzero.capture.optimizer.step_functions import is_fused, pure_module
from graphzero.capture.optimizer.stepped_numbers import (
    carried,
    carry_of,
    changed_of_group,
    fixed_number,
    hyperparameters_of_group,
    number_of_states,
)
from graphzero.capture.optimizer.stepped_parameter import SteppedParameter, marks_of
from graphzero.capture.optimizer.stepping import OptimizerTracer
from graphzero.capture.optimizer.uniform_updates import has_uniform_updates
from graphzero.capture.problems import problem
from graphzero.capture.spec import OptimizerSpec
from graphzero.errors import CaptureError
from graphzero.ir import value
from graphzero.ir.storage.overlap import Regions

Shape = tuple[int, ...]

# 0-d states are float32, but eager optimizers compute with them as Python numbers: 1 - 0.999**step in float32 would be
# off by 3e-5.  So a step reads them in float64.
_COUNTER = (torch.float32, ())
_NUMBER = (torch.float64, (-1,))  # a Python number, which is a number of the group: see ``stepped_numbers.py``


class _NewState(ObservedDict):
    """The state of a parameter in its first step; counters are kept in float64 from where they are made."""

    def __init__(self, counters: frozenset[str]) -> None:
        super().__init__()
        self.counters = counters

    def __setitem__(self, key: str, entry: Any) -> None:
        super().__setitem__(key, entry.double() if key in self.counters and isinstance(entry, Tensor) else entry)


@dataclass
class TracedUpdate:
    """A traced step of ``members`` (in the order of the graph's inputs).

    inputs: placeholder -> what it stands for: ("param" or "grad", path, ""), ("state", path, key), ("hyper", Hyper).
    params: path -> new value; states: (path, key) -> new value.  carries: the numbers of groups that it changes.
    checks: path -> conditions on which the step goes on, each with its message and line.
    """

    members: list[SteppedParameter]
    inputs: dict[fx.Node, tuple[Any, ...]]
    params: dict[str, fx.Node]
    states: dict[tuple[str, str], fx.Node]
    symbols: dict[str, Hyperparameter]
    env: Any
    carries: list[Carry] = field(default_factory=list)
    checks: dict[str, list[tuple[fx.Node, str, str]]] = field(default_factory=dict)


def check(spec: OptimizerSpec) -> None:
    """Refuse, with a reason, what cannot be a graph."""
    optimizer, name = spec.optimizer, type(spec.optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise problem(
            "LBFGS evaluates the loss several times in one step and stops on its value, so a step is not one graph",
            "use AdamW, SGD or another optimizer whose step needs no closure, or run LBFGS eagerly",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise problem(
            "SparseAdam needs sparse gradients, and a graph's values are dense",
            "use Adam or AdamW, with nn.Embedding(sparse=False)",
        )
    if _compat.has_step_hooks(optimizer):
        raise problem(
            f"{name} has step hooks (register_step_pre_hook, register_optimizer_step_post_hook and the like), which a "
            "graph cannot call",
            "remove the hooks and run that code before or after the Graph's call",
        )


def fill_state_kinds(stepping: OptimizerTracer, members: list[SteppedParameter]) -> None:
    """Fill in ``kind`` and ``states`` of the members, from a step on fakes or from state that exists."""
    optimizer = stepping.optimizer
    for member in members:
        marks = () if stepping.guards is None else marks_of(member.param)
        member.kind = (member.group, tuple(member.param.shape), member.param.dtype, marks)
    examples: dict[Any, list[SteppedParameter]] = {}
    for member in members:
        examples.setdefault(member.kind, []).append(member)
    two = [member for kin in examples.values() for member in kin[:2]]  # which may share a state
    if not stepping.mixes and not has_uniform_updates(stepping, members, [kin[0] for kin in examples.values()]):
        stepping.mixes = True
    created = _states_by_step(stepping, members if stepping.mixes else two)
    for member in members:
        real = optimizer.state.get(member.param, {})
        existing = {key: _described(optimizer, member.group, key, entry) for key, entry in real.items()}
        by_step = created.get(member.kind)
        if by_step is None and not existing:
            raise cannot_step(optimizer, KeyError("it reads state that no first step makes"))
        states = {**existing, **(by_step or {})}
        member.numbers = frozenset(key for key, entry in states.items() if entry == _NUMBER)
        member.states = {key: entry for key, entry in states.items() if entry != _NUMBER}
        like = member.states if member.param.dim() else _states_of_a_vector(stepping, member, members)
        member.counters = frozenset(key for key in member.states if like.get(key) == _COUNTER)
        member.kind = (*member.kind, tuple(sorted((k, str(v)) for k, v in states.items())))


def _states_of_a_vector(
    stepping: OptimizerTracer, member: SteppedParameter, members: list[SteppedParameter]
) -> dict[str, Any]:
    """The states that a parameter of one dim would have: what is 0-d there is no state of the shape of a 0-d one.

    It steps in the place of ``member``, among the others where the optimizer mixes them.
    """
    with _compat.FakeTensorMode():
        vector = nn.Parameter(torch.empty(2, dtype=member.param.dtype))
    stand_in = SteppedParameter(member.path, member.group, vector)
    together = [stand_in if one is member else one for one in members] if stepping.mixes else [stand_in]
    return _states_by_step(stepping, together, {id(vector): member.param}).get(stand_in.kind, {})


def _described(optimizer: torch.optim.Optimizer, group: int, key: str, entry: Any) -> tuple[torch.dtype, Shape] | None:
    if entry is None:
        return None
    if is_number(entry) and OF_STATE + key in carried(optimizer, group):
        return _NUMBER
    if not isinstance(entry, Tensor):
        raise problem(
            f"{type(optimizer).__name__} keeps {entry!r} in state[{key!r}], which is not a tensor; it would be a "
            "constant in a graph",
            f"keep it in a 0-d tensor: state[{key!r}] = torch.tensor(0.0), and count it up in place",
        )
    return entry.dtype, tuple(entry.shape)


def _states_by_step(
    stepping: OptimizerTracer, members: list[SteppedParameter], of: Mapping[int, Tensor] = MappingProxyType({})
) -> dict[Any, dict[str, Any]]:  # fmt: skip
    """Kind of a member -> what a step on fakes makes of its state.  of: id of a member's parameter -> the real one."""
    key = key_of("states", 0, stepping.optimizer, members)
    return cached_update(key, lambda: _stepped_states(stepping, members, of))


def _stepped_states(
    stepping: OptimizerTracer, members: list[SteppedParameter], of: Mapping[int, Tensor]
) -> dict[Any, dict[str, Any]]:  # fmt: skip
    optimizer = stepping.optimizer
    numbers = [{h.key: h.value for h in hyperparameters_of_group(0, optimizer, g)} for g in range(len(stepping.groups))]
    with _compat.FakeTensorMode(shape_env=_compat.shape_env(), allow_non_fake_inputs=True) as mode:
        stand_ins = {}
        for member in members:
            param = nn.Parameter(torch.empty(member.param.shape, dtype=member.param.dtype))
            param.grad = torch.empty(param.shape, dtype=param.dtype)
            stand_ins[id(of.get(id(member.param), member.param))] = param
        params = list(stand_ins.values())
        _complete(stepping, stand_ins)
        groups = _groups(stepping, stand_ins, numbers)
        state: dict[Any, Any] = defaultdict(dict)
        try:
            with stepping.standing_in(groups, state, stand_ins, mode):
                stepping.trace_step(BranchOutcomes((), lambda x: ALL))
        except CaptureError:
            raise
        except KeyError:  # state made by __init__ only
            return {}
        except Exception as error:
            raise cannot_step(optimizer, error) from error
    _check_apart(optimizer, params, state)
    return {
        member.kind: {key: _described(optimizer, member.group, key, entry) for key, entry in state[param].items()}
        for member, param in zip(members, params, strict=True)
    }


def _complete(stepping: OptimizerTracer, stand_ins: dict[int, Any]) -> None:
    """Add stand-ins for parameters without a gradient, where parameters are also held outside of the groups."""
    for key, param in stepping.owned.items() if stepping.mixes else ():
        if key not in stand_ins:
            stand_ins[key] = nn.Parameter(torch.empty(param.shape, dtype=param.dtype))


def _check_apart(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], state: Mapping[Any, Any]) -> None:
    """Raise CaptureError for a state that lies in the memory of a parameter or of another state."""
    tensors: dict[str, Tensor] = {f"parameter {i}": param for i, param in enumerate(params)}
    for i, param in enumerate(params):
        tensors |= {f"state[{key!r}]{i}": x for key, x in state[param].items() if isinstance(x, Tensor)}
    for pair in Regions(tensors).overlapping():
        which = max(pair).rstrip("0123456789")
        raise problem(
            f"{type(optimizer).__name__} keeps in {which} a tensor that shares memory with a parameter or another "
            "state, which a graph would keep apart",
            "keep a copy for each parameter: state[key] = p.detach().clone()",
        )


def _groups(
    stepping: OptimizerTracer, stand_ins: Mapping[int, Any], numbers: list[dict[str, Any]]
) -> list[dict[str, Any]]:  # fmt: skip
    groups = []
    for g, group in enumerate(stepping.groups):
        params = [stand_ins[id(p)] for p in group["params"] if id(p) in stand_ins]
        fused = {"fused": True} if is_fused(stepping.optimizer, group) else {}
        groups.append({**with_numbers({**group, "params": params}, numbers[g]), **fused})
    return groups


def trace_update(index: int, stepping: OptimizerTracer, members: list[SteppedParameter]) -> TracedUpdate:
    """Trace one step of the optimizer on ``members`` alone, unless that one is known."""
    update = cached_update(
        key_of("update", index, stepping.optimizer, members),
        lambda: replace(_traced(index, stepping, members), members=[]),  # a kept one holds no parameters
    )
    return replace(update, members=members)


def _traced(index: int, stepping: OptimizerTracer, members: list[SteppedParameter]) -> TracedUpdate:
    env = _compat.shape_env()
    numbers: list[dict[str, Any]] = []
    labels: list[tuple[Any, ...]] = []
    values: list[Any] = []
    symbols: dict[str, Hyperparameter] = {}
    for g in range(len(stepping.groups)):
        numbers.append({})
        for hyper in hyperparameters_of_group(index, stepping.optimizer, g):
            symbol = _compat.new_symbol(env, hyper.value, f"{hyper.role.path}")
            symbols[_compat.symbol_name(symbol)] = hyper
            labels.append(("hyper", hyper))
            values.append(symbol)
    mode = _compat.FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    with mode:
        for member in members:
            shape, dtype = member.param.shape, member.stepped(member.param.dtype)
            for kind in ("param", "grad"):
                labels.append((kind, member.path, ""))
                values.append(torch.empty(shape, dtype=dtype))
            for key, entry in member.entering.items():
                if entry is not None:
                    labels.append(("state", member.path, key))
                    values.append(torch.empty(entry[1], dtype=member.stepped(entry[0])))
    results: list[tuple[Any, ...]] = []

    def program(step: Ways, *given: Any) -> list[Any]:
        for label, number in zip(labels, given, strict=True):
            if label[0] == "hyper":
                numbers[label[1].group][label[1].key] = number
        outcome = step(given, lambda tensors, outcomes: _step(
            stepping, members, numbers, dict(zip(labels, tensors, strict=True)), outcomes, mode))  # fmt: skip
        results[:] = outcome
        return list(outcome.values())

    paths = [None if label[0] == "hyper" else label[1] for label in labels]
    try:
        counts = {symbol for symbol, hyper in symbols.items() if hyper.carried}
        numbered = _compat.kept_symbolic(counts, lambda: fixed_number(stepping.optimizer))
        with mode, numbered, _compat.preserve_node_meta(), _compat.annotate({"phase": "update", "source": ""}):
            module = trace_branches(program, values, paths, stepping.name)
    except CaptureError:
        raise
    except Exception as error:
        raise cannot_step(stepping.optimizer, error) from error
    graph = pure_module(module).graph
    inputs = dict(zip(graph.find_nodes(op="placeholder"), labels, strict=True))
    update = TracedUpdate(members, inputs, {}, {}, symbols, env)
    flat: Any = graph.output_node().args[0]
    for (kind, of, key), node in zip(results, flat, strict=True):
        if kind == "param":
            update.params[of] = node
        elif kind == "state":
            update.states[of, key] = node
        elif kind == "number":
            update.carries.append(carry_of(stepping.optimizer, index, of, key, node, inputs))
        else:
            read = set(value.ancestors(node))
            owners = [label[1] for x, label in inputs.items() if label[0] != "hyper" and x in read]
            update.checks.setdefault(owners[0] if owners else members[0].path, []).append((node, *key[:2]))
    return update


def _step(
    stepping: OptimizerTracer, members: list[SteppedParameter], numbers: list[dict[str, Any]], named: dict[Any, Any],
    outcomes: BranchOutcomes, mode: _compat.FakeTensorMode,
) -> dict[tuple[Any, ...], Any]:  # fmt: skip
    """Results, by ("param", path, ""), ("state", path, key), ("number", group, key) and ("check", path, key)."""
    params: list[Any] = []
    state: dict[Any, dict[str, Any]] = defaultdict(dict)
    for member in members:
        param = named["param", member.path, ""]
        param.grad = named["grad", member.path, ""]
        state[param] = _NewState(member.counters)
        for key, entry in member.entering.items():
            state[param][key] = None if entry is None else named["state", member.path, key]
        given = {key: numbers[member.group].get(OF_STATE + key) for key in member.numbers if not member.first}
        state[param].update({key: x for key, x in given.items() if x is not None})
        params.append(param)
    stand_ins = {id(member.param): param for member, param in zip(members, params, strict=True)}
    _complete(stepping, stand_ins)
    groups = _groups(stepping, stand_ins, numbers)
    before = [dict(group) for group in groups]
    with stepping.standing_in(groups, state, stand_ins, mode):
        stepping.trace_step(outcomes)
    outcome: dict[tuple[Any, ...], Any] = {
        ("check", outcomes.owner_of(x), key): x for key, x in outcomes.checks.items()
    }
    for g, (old, new) in enumerate(zip(before, groups, strict=True)):
        for key in changed_of_group(stepping.optimizer, old, new):
            outcome["number", g, key] = new[key]
    for g, key in sorted({(member.group, key) for member in members for key in member.numbers}):
        counts = [state[p][key] for m, p in zip(members, params, strict=True) if m.group == g and key in m.numbers]
        outcome["number", g, OF_STATE + key] = number_of_states(stepping.optimizer, key, counts)
    for member, param in zip(members, params, strict=True):
        if extra := ", ".join(sorted(set(state[param]) - set(member.states) - member.numbers)):
            raise problem(
                f"{stepping.name} makes more state after its first step: {extra}", "make all state in the first step"
            )
        outcome["param", member.path, ""] = param
        for key, entry in state[param].items():
            if isinstance(entry, Tensor):
                outcome["state", member.path, key] = entry.to(member.stepped(member.states[key][0]))  # type: ignore[index]
    return outcome
