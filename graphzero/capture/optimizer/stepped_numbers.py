"""Python numbers that ``step`` changes: ``group["step"] += 1``, ``state["step"] += 1``, a running maximum of rates.

Those of parameters' states are one number for all parameters of a group.

Which they are is learnt from a step of a twin (``initial_state.py``).  A program reads them again in every call, as it
does any hyperparameter; what they are after it follows from the numbers of groups alone and is computed on the host,
by the operations that ``step`` did, so that it is plain PyTorch's to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from graphzero.capture.host_values.number import HostNumber
from graphzero.capture.optimizer.hyperparameters import (
    OF_STATE,
    Carried,
    Carry,
    Hyperparameter,
    constants_of_numbers,
    is_number,
    of_group,
)
from graphzero.capture.optimizer.initial_state import changed_numbers
from graphzero.capture.optimizer.stepped_parameter import SteppedParameter
from graphzero.capture.problems import problem, problem_here
from graphzero.errors import CaptureError
from graphzero.ir import value
from graphzero.ir.value import Role

_known: WeakKeyDictionary[torch.optim.Optimizer, dict[int, tuple[Any, Carried]]] = WeakKeyDictionary()


def carried(optimizer: torch.optim.Optimizer, group: int) -> Carried:
    """The numbers of a group that ``step`` changes.  torch's own optimizers count in tensors."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return {}
    settings = optimizer.param_groups[group]
    ndims = tuple(sorted({p.dim() for p in settings["params"]}))
    known = _known.setdefault(optimizer, {})
    if group not in known or not _holds(known[group], settings, ndims):
        known[group] = _signature(settings, ndims), changed_numbers(optimizer, group, ndims)
    return known[group][1]


def counts_in_states(optimizer: torch.optim.Optimizer, group: int) -> bool:
    """Return whether states of a group's parameters hold Python numbers, or will."""
    return any(key.startswith(OF_STATE) for key in carried(optimizer, group))


def _signature(group: Mapping[str, Any], ndims: tuple[int, ...]) -> Any:
    return ndims, {key: x for key, x in group.items() if is_number(x)}


def _holds(known: tuple[Any, Carried], group: Mapping[str, Any], ndims: tuple[int, ...]) -> bool:
    """While the group lacks a number, what stands for it may follow from the others."""
    (of, numbers), changed = known
    has_all = all(key in group or key.startswith(OF_STATE) for key in changed)
    return of == ndims and (has_all or _signature(group, ndims)[1] == numbers)


def hyperparameters_of_group(index: int, optimizer: torch.optim.Optimizer, group: int) -> list[Hyperparameter]:
    """The run-time numbers of one parameter group of the optimizer that is number ``index``."""
    known = carried(optimizer, group)
    hypers = list(of_group(index, group, optimizer.param_groups[group], known))
    if known and (of_states := numbers_of_states(optimizer, group)):
        hypers = [h for h in hypers if h.key not in of_states]
        hypers += [Hyperparameter(index, group, key, x, carried=True) for key, x in of_states.items()]
    return hypers


def numbers_of_states(optimizer: torch.optim.Optimizer, group: int) -> dict[str, Any]:
    """The Python numbers that the states of a group's parameters hold.  Raises CaptureError where they differ."""
    numbers: dict[str, Any] = {}
    keys = [key for key in carried(optimizer, group) if key.startswith(OF_STATE)]
    for param in optimizer.param_groups[group]["params"] if keys else ():
        state = optimizer.state.get(param) or {}
        for key in keys:
            x = state.get(key[len(OF_STATE) :])
            if is_number(x) and numbers.setdefault(key, x) != x:
                raise problem(
                    f"state[{key[len(OF_STATE) :]!r}] of {type(optimizer).__name__} is a Python number that differs "
                    f"among the parameters of group {group}: {numbers[key]} and {x}",
                    "give parameters with other counts their own parameter group, or count in 0-d tensors",
                )
    return numbers


def constants_of_group(index: int, optimizer: torch.optim.Optimizer, group: int) -> tuple[Any, ...]:
    """See ``constants_of_numbers``."""
    known = carried(optimizer, group)
    if known and (of_states := numbers_of_states(optimizer, group)):
        known = {**known, **of_states}
    return constants_of_numbers(index, group, optimizer.param_groups[group], known)


def changed_of_group(
    optimizer: torch.optim.Optimizer, before: Mapping[str, Any], after: dict[str, Any]
) -> list[str]:  # fmt: skip
    """The keys of the numbers and words of a group that a traced step has changed.  Raises CaptureError for others."""
    keys = []
    for key in [key for key in {**before, **after} if before.get(key) is not after.get(key) or key not in before]:
        if isinstance(after.get(key), torch.SymBool):
            after[key] = bool(after[key])  # decided by a guard, as any branch is
        old, new = before.get(key), after.get(key)
        if isinstance(new, (torch.SymInt, torch.SymFloat)):
            keys.append(key)
        elif isinstance(new, (bool, int, float, str, type(None))) and key in after:
            if isinstance(old, (torch.SymInt, torch.SymFloat)) or key not in before or old != new:
                keys.append(key)
        elif not _is_same(old, new):
            if isinstance(new, HostNumber):
                raise _from_values(optimizer, key)
            kind = "a tensor" if isinstance(new, Tensor) else f"a {type(new).__name__}"
            raise problem(
                f"{type(optimizer).__name__}.step() changes param_groups[...][{key!r}], {kind}, which is a constant "
                "in a graph",
                "keep it in optimizer.state as a tensor and change it in place, or keep a number there",
            )
    return keys


def _is_same(old: Any, new: Any) -> bool:
    if isinstance(old, (list, tuple)) and type(old) is type(new) and len(old) == len(new):
        return all(x is y or (is_number(x) and x == y) for x, y in zip(old, new, strict=True))
    return False


def number_of_states(optimizer: torch.optim.Optimizer, key: str, results: Iterable[Any]) -> Any:
    """Result of a traced step for a Python number in the states of one group's parameters, equal in each."""
    first, *others = results
    texts = {str(x.node.expr) if isinstance(x, (torch.SymInt, torch.SymFloat)) else str(x) for x in (first, *others)}
    if len(texts) > 1 or not (is_number(first) or isinstance(first, (torch.SymInt, torch.SymFloat))):
        raise problem(
            f"{type(optimizer).__name__}.step() changes the Python number state[{key!r}] differently among the "
            "parameters of one group, or to something that is not a number",
            f"keep it in a 0-d tensor: state[{key!r}] = torch.tensor(0.0), and count it up in place",
        )
    return first


def carry_of(
    optimizer: torch.optim.Optimizer, index: int, group: int, key: str, result: Any, inputs: Mapping[fx.Node, Any]
) -> Carry:  # fmt: skip
    """The computation that a traced step applies to a number.

    result: its node, or the number itself.  inputs: what the placeholders of the trace stand for.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    roles: list[Role] = []
    needed = {*value.ancestors(result)} if isinstance(result, fx.Node) else set()
    for node in result.graph.nodes if needed else ():
        if node not in needed:
            continue
        if node.op == "placeholder" and inputs[node][0] == "hyper":
            copies[node] = graph.placeholder(f"number_{len(roles)}")
            roles.append(inputs[node][1].role)
        elif node.op == "placeholder" or isinstance(node.meta.get("val"), Tensor):
            raise _from_values(optimizer, key)
        else:
            copies[node] = graph.node_copy(node, lambda x: copies[x])
    graph.output(copies[result] if isinstance(result, fx.Node) else result)
    return Carry(index, group, key, tuple(roles), fx.GraphModule(nn.Module(), graph).forward)


def fixed_number(optimizer: torch.optim.Optimizer) -> CaptureError:
    """The step of ``optimizer`` asks for the value that a number which it changes has in this call."""
    return problem_here(
        f"{type(optimizer).__name__}.step() takes a number that it changes from step to step as a plain int or float: "
        "int(), float(), range() or an index; it would be a constant in a graph",
        "compute with the number itself and compare it (if step % 5 == 0), or keep it in a 0-d tensor of "
        "optimizer.state",
    )


def paths_of(carry: Carry, members: Iterable[SteppedParameter]) -> Carry:
    """``carry`` with the paths of those of ``members`` whose states hold it."""
    key = carry.key_of_state
    is_held = carry.key.startswith(OF_STATE)
    paths = [m.path for m in members if is_held and m.group == carry.group and key in m.numbers]
    return replace(carry, paths=tuple(paths))


def _from_values(optimizer: torch.optim.Optimizer, key: str) -> CaptureError:
    return problem(
        f"{type(optimizer).__name__}.step() computes the Python number {_place(key)} from values of tensors (.item(), "
        "float(t))",
        "keep it in optimizer.state as a 0-d tensor and change it in place",
    )


def _place(key: str) -> str:
    return f"state[{key[len(OF_STATE) :]!r}]" if key.startswith(OF_STATE) else f"param_groups[...][{key!r}]"
