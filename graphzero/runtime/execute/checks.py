"""Checks of build: a step whose check is not met stops there, on every rank, before it has changed anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor, fx

from graphzero import _compat
from graphzero.errors import CapacityError, CheckError
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.printer import print_line
from graphzero.ir.transfer import delivered
from graphzero.ops import CHECK, ROOM_FOR_ROWS

_STOPPED = "The step stopped here: parameters, optimizer states and buffers are as they were before the call"
_REPLAYED = "The step was replayed from a recording, which runs to its end: its update has been made"
_NEXT_STEP = {
    _STOPPED: "Go on with other inputs, or correct what makes the value; config.check_values = False leaves checks out",
    _REPLAYED: "Before the next call load a checkpoint, and correct the inputs or what makes the value",
}
_later: ContextVar[bool] = ContextVar("graphzero_checks_later", default=False)


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
    """Raise CapacityError where a run that looked at no check had too little room for rows of experts."""
    for name, node in graph.aux.items():
        if node.target is CHECK and node.args[1] == ROOM_FOR_ROWS and not aux[name][0]:
            raise _error(node, _STOPPED)


def _error(node: fx.Node, then: str) -> CheckError:
    message, source = str(node.args[1]), value.source_of(node)
    if message == ROOM_FOR_ROWS:
        return CapacityError(
            "more rows of tokens go from one rank to the experts of another one than there is room\n  Give more: "
            f'config.set_split_experts("exchange", capacity=...); calls of a Graph do so themselves\n\n  {then}'
        )
    ok = value.operand(node)
    if (delivery := delivered(ok)) is not None:
        ok = delivery[0].members[delivery[1]]
    where = f"\n    at {source}" if source else ""
    return CheckError(
        f"a check of a value does not hold: {message}\n\n  > {print_line(ok)}{where}\n\n  {then}\n  {_NEXT_STEP[then]}"
    )
