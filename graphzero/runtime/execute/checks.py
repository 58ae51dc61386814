"""Checks: a step whose check is not met stops there, on every rank, before it has changed anything.

Most are build's.  Passes of plug-ins have checks that there is room for what they compute: extension point
``graphzero.checks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from graphzero import _compat
from graphzero.errors import CapacityError, CheckError
from graphzero.extensions import CHECKS, Extension, extensions
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.printer import print_line
from graphzero.ir.transfer import delivered
from graphzero.ops import CHECK

_STOPPED = "The step stopped here: parameters, optimizer states and buffers are as they were before the call"
_REPLAYED = "The step was replayed from a recording, which runs to its end: its update has been made"
_NEXT_STEP = {
    _STOPPED: "Go on with other inputs, or correct what makes the value; config.check_values = False leaves checks out",
    _REPLAYED: "Before the next call load a checkpoint, and correct the inputs or what makes the value",
}
_later: ContextVar[bool] = ContextVar("graphzero_checks_later", default=False)


@dataclass(frozen=True)
class RoomCheck:
    """A check of a plug-in's pass that a step has room; where it is not met, a Graph runs the step again with more.

    message: of its op ``check``, which no other check has.
    problem: the beginning of the CapacityError: what has no room, and how to give more.
    give_more: a function that is given the Graph, on every rank, and changes a setting of its ``config`` by which a
    program has more room.
    """

    message: str
    problem: str
    give_more: Callable[[Any], None]


@cache
def room_checks() -> Mapping[str, tuple[Extension, RoomCheck]]:
    """The checks of installed plug-ins, by message.  Raises ConfigError for a plug-in that cannot be used."""
    checks: dict[str, tuple[Extension, RoomCheck]] = {}
    for plugin in extensions(CHECKS).values():
        check = plugin.load()
        if not isinstance(check, RoomCheck):
            raise plugin.refusal("is not a check: give a graphzero.runtime.execute.checks.RoomCheck")
        are_words = isinstance(check.message, str) and check.message and isinstance(check.problem, str)
        if not are_words or not callable(check.give_more):
            raise plugin.refusal("has a check without a message, a problem in words, or a function that gives more")
        if check.message in checks:
            raise plugin.refusal(f"has the message of another check, {check.message!r}")
        checks[check.message] = plugin, check
    return checks


def raise_unmet(node: fx.Node, ok: Tensor) -> None:
    """Raise CheckError for a check whose result is not true."""
    if not _later.get() and not ok:
        raise _error(node, _STOPPED)


@_compat.contextmanager
def later() -> Iterator[None]:
    """While a step is recorded nothing may look at values: ``raise_of_replay`` does, after each replay."""
    with _compat.assigned(_later, True):
        yield


def raise_of_replay(graph: StepGraph, aux: Mapping[str, Sequence[Tensor]]) -> None:
    """Raise CheckError for the first check that was not met in a replayed step."""
    checks = {name: node for name, node in graph.aux.items() if node.target is CHECK}
    if checks:
        passed = torch.stack([aux[name][0] for name in checks]).tolist()
        failed = next((node for node, ok in zip(checks.values(), passed, strict=True) if not ok), None)
        if failed is not None:
            raise _error(failed, _REPLAYED)


def raise_without_room(graph: StepGraph, aux: Mapping[str, Sequence[Tensor]]) -> None:
    """Raise CapacityError where a run that looked at no check had too little room."""
    for name, node in graph.aux.items():
        if node.target is CHECK and not aux[name][0] and node.args[1] in room_checks():
            raise _error(node, _STOPPED)


def _error(node: fx.Node, then: str) -> CheckError:
    message, source = str(node.args[1]), value.source_of(node)
    if message in room_checks():
        return CapacityError(
            f"{room_checks()[message][1].problem}; calls of a Graph do so themselves\n\n  {then}", message
        )
    ok = value.operand(node)
    if (delivery := delivered(ok)) is not None:
        ok = delivery[0].members[delivery[1]]
    where = f"\n    at {source}" if source else ""
    return CheckError(
        f"a check of a value does not hold: {message}\n\n  > {print_line(ok)}{where}\n\n  {then}\n  {_NEXT_STEP[then]}"
    )
