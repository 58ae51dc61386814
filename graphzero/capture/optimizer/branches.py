"""Optimizer steps that read values, ``if norm > 1:``, ``norm.item()``: all their branches are traced.

``step`` runs once for each outcome of its conditions, from the same state, and ``torch.where`` selects among the
results.  A condition on one parameter's values decides for that parameter alone, so parameters branch independently; a
condition on several parameters decides for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphzero import _compat
from graphzero.capture.host_values.number import HostNumber
from graphzero.capture.problems import problem, problem_here
from graphzero.capture.rewrite import decompositions
from graphzero.capture.rewrite.canonicalise import merge_equal
from graphzero.errors import CaptureError
from graphzero.ir.source_location import user_frame

MOST = 16  # ways that are written down
ALL = ""  # whom a condition decides for that follows from values of several parameters
Way = tuple[bool, ...]
Label = tuple[Any, ...]


def _close(*args: Any, **kwargs: Any) -> Tensor:
    return torch.isclose(*args, **kwargs).all()


def _same(x: Tensor, y: Tensor) -> Tensor:
    return (x == y).all() if x.shape == y.shape else torch.zeros((), dtype=torch.bool)


_COMPARE: Mapping[Any, Callable[..., Tensor]] = {
    torch.allclose: _close, Tensor.allclose: _close, torch.equal: _same, Tensor.equal: _same
}  # fmt: skip
_TAKEN: Mapping[Any, str] = {
    Tensor.__float__: "float()", Tensor.__int__: "int()", Tensor.__index__: "an index or size",
    Tensor.tolist: "tolist()", Tensor.numpy: "numpy()", Tensor.__array__: "numpy",
}  # fmt: skip


class BranchMetError(BaseException):
    """A step that was traced as if it looked at no value does."""


class SharedConditionError(BaseException):
    """A condition that was taken to be of one parameter follows from values of several."""


class BranchOutcomes(TorchFunctionMode):
    """While it is on, conditions turn out as ``way`` says, one after another, and true beyond that.

    way: None to raise BranchMetError.  owner_of: the parameter for which a condition decides.
    checks: (message, the user's line, how many alike came before) -> the condition on which the step goes on.
    """

    def __init__(self, way: Way | None, owner_of: Callable[[Tensor], str]) -> None:
        super().__init__()
        self.way, self.owner_of, self.taker = way, owner_of, ""
        self.conditions: dict[str, list[Tensor]] = {}
        self.checks: dict[tuple[str, str, int], Tensor] = {}
        self.known: dict[Any, bool] = {}  # by what was asked: an equal condition turns out alike

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__:
            return self.truth(args[0])
        if func is Tensor.item:
            return HostNumber.read_tensor(args[0], self)
        if func in _COMPARE:
            return self.truth(_COMPARE[func](*args, **(kwargs or {})))
        if func in _TAKEN:
            raise self.problem(f"{_TAKEN[func]} of a tensor", args[0])
        if any(isinstance(x, HostNumber) for x in pytree.tree_leaves((args, kwargs))):
            return HostNumber.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))

    def truth(self, x: Tensor) -> bool:
        if self.way is None:
            raise BranchMetError
        owner, condition = self.owner_of(x), _compat.traced_call(_compat.functional_value(x))
        if condition not in self.known:
            conditions = self.conditions.setdefault(owner, [])
            conditions.append(x.reshape(()) != 0)
            self.known[condition] = self.way[len(conditions) - 1] if len(conditions) <= len(self.way) else True
        return self.known[condition]

    def check(self, ok: Tensor, message: str, line: str) -> None:
        """Note that plain PyTorch raises where ``ok`` is false."""
        alike = sum(key[:2] == (message, line) for key in self.checks)
        self.checks[message, line, alike] = ok.reshape(())

    def check_number(self, ok: Callable[[], Tensor], message: str) -> None:
        """See ``ValueReads.check_number``."""
        self.check(ok(), message, user_frame())

    def text(self, x: Any) -> str:
        return f"tensor of shape {list(x.shape)}"

    def problem(self, what: str, x: Tensor) -> CaptureError:
        return problem_here(
            f"an optimizer's step takes the value of a tensor: {what}",
            "compute with the tensor, or with .item() by arithmetic and comparisons alone",
        )


# What comes of a step, by label: of the inputs of the trace, and how it is run on them.
Ways = Callable[[Sequence[Any], Callable[[Sequence[Any], BranchOutcomes], dict[Label, Any]]], dict[Label, Any]]


def trace_branches(
    program: Callable[..., list[Any]], values: list[Any], paths: list[str | None], name: str
) -> fx.GraphModule:
    """``program(ways, *values)`` as a graph.

    paths: of the parameter that each of ``values`` belongs to.  name: of the optimizer.
    """

    def owner_of(x: Tensor) -> str:
        owners = {paths[i] for i in _compat.traced_from(_compat.functional_value(x)) or ()}
        if len(owners - {None}) != 1:
            raise SharedConditionError
        (owner,) = owners - {None}
        return str(owner)

    def traced(ways: Ways) -> fx.GraphModule:
        pure = torch.func.functionalize(partial(program, ways), remove="mutations")
        module = _compat.make_fx(pure, decompositions.TABLE)(*values)
        _join_equal_results(module.graph)
        return module

    with suppress(BranchMetError):
        return traced(lambda given, step: step(given, BranchOutcomes(None, lambda x: ALL)))
    with suppress(SharedConditionError):
        return traced(partial(_all_branches, owner_of, name))
    return traced(partial(_all_branches, lambda x: ALL, name))


def _all_branches(
    owner_of: Callable[[Tensor], str], name: str, given: Sequence[Any],
    step: Callable[[Sequence[Any], BranchOutcomes], dict[Label, Any]],
) -> dict[Label, Any]:  # fmt: skip
    def anew(outcomes: BranchOutcomes) -> dict[Label, Any]:
        return step([x.clone() if isinstance(x, Tensor) else x for x in given], outcomes)

    return merge_branches(anew, owner_of, name)


def _join_equal_results(graph: fx.Graph) -> None:
    """Join results that all branches compute alike, as the step count: no condition selects them."""
    merge_equal(graph, lambda node: torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()))
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.where.self):
        if node.args[1] is node.args[2]:
            node.replace_all_uses_with(node.args[1])
    graph.eliminate_dead_code()


@dataclass
class _BranchRun:
    """Results of a step on one branch, by label, and the conditions that led there."""

    results: dict[Label, Any]
    conditions: Mapping[str, list[Tensor]]


def merge_branches(
    step: Callable[[BranchOutcomes], dict[Label, Any]], owner_of: Callable[[Tensor], str], name: str
) -> dict[Label, Any]:  # fmt: skip
    """Results of a step for all branches, selected by ``torch.where``.

    step: from the same beginning each time; its results by label, of which the second entry is the parameter.
    """
    runs: dict[Way, _BranchRun] = {}

    def explore(way: Way) -> None:
        if len(runs) == MOST:
            raise problem(
                f"{name}.step() branches on values of tensors in more than {MOST} ways",
                "use torch.where or clamp for decisions per element or per parameter",
            )
        outcomes = BranchOutcomes(way, owner_of)
        runs[way] = _BranchRun(step(outcomes), outcomes.conditions)
        depth = max(map(len, outcomes.conditions.values()), default=0)
        for i in range(len(way), depth):
            explore((*way, *[True] * (i - len(way)), False))

    explore(())
    checks = {label for run in runs.values() for label in run.results if label[0] == "check"}
    for run in runs.values():  # a branch on which torch checks nothing goes on
        run.results.update({label: torch.ones((), dtype=torch.bool) for label in checks - run.results.keys()})
    first = runs[()].results
    for run in runs.values():
        changed = [label for label in {**first, **run.results} if label not in first or label not in run.results]
        changed += [
            label for label, x in first.items() if label[0] == "number" and not _equal(x, run.results.get(label))
        ]
        if changed:
            kind, _, key = changed[0]
            what = "the Python number" if kind == "number" else "the state"
            raise problem(
                f"{name}.step() makes {what} {key!r} depending on a branch on values of tensors",
                "always make it, as a tensor, and choose its value with torch.where",
            )
    return {label: x if label[0] == "number" else _chosen(label, runs, ()) for label, x in first.items()}


def _equal(a: Any, b: Any) -> bool:
    kinds = (torch.SymInt, torch.SymFloat)
    return str(a.node.expr if isinstance(a, kinds) else a) == str(b.node.expr if isinstance(b, kinds) else b)


def _chosen(label: Label, runs: Mapping[Way, _BranchRun], way: Way) -> Tensor:
    """The result ``label`` where the first conditions turn out as ``way`` says."""
    key = way
    while key and key[-1]:
        key = key[:-1]
    run = runs[key]
    conditions = [*run.conditions.get(ALL, ()), *run.conditions.get(label[1], ())]
    result: Tensor = run.results[label]
    if len(conditions) == len(way):
        return result
    met, otherwise = (_chosen(label, runs, (*way, outcome)) for outcome in (True, False))
    return met if met is otherwise else torch.where(conditions[len(way)], met, otherwise.to(met.dtype))
