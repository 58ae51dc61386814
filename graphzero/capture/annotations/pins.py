"""SBPs that the user pins inside build: ``to_global(h, sbp=...)`` leaves a ``pin`` op with a number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from torch import Tensor, fx

from graphzero import _compat
from graphzero.capture.annotations.local_regions import refuse_inside
from graphzero.ops import PIN
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Sbp

_LOCAL = "What runs there is per-rank code, whose values are global only as out_sbp says; pin what the region returns"
Pinned = tuple[Sbp | None, ...]
_running: ContextVar[tuple[Placement, list[Pinned]] | None] = ContextVar("graphzero_pins", default=None)


def is_capturing() -> bool:
    """Return whether build is being traced."""
    return _running.get() is not None


def placement_of_capture() -> Placement:
    """The placement of the step that is being traced."""
    running = _running.get()
    assert running is not None
    return running[0]


def pin_value(x: Tensor, sbp: Sequence[Sbp | None]) -> Tensor:
    """Pin ``x`` inside build: one SBP per placement axis, None where it is free.  Outside of a Graph the identity."""
    running = _running.get()
    if running is None:
        return x
    refuse_inside("to_global pins a value inside of a local_region", _LOCAL)
    _, pins = running
    pins.append(tuple(sbp))
    return PIN(x, len(pins) - 1)  # type: ignore[no-any-return]


@_compat.contextmanager
def collecting_pins(placement: Placement) -> Iterator[list[Pinned]]:
    """While this is open, ``pin_value`` writes down what is pinned in a step on ``placement``."""
    pins: list[Pinned] = []
    with _compat.assigned(_running, (placement, pins)):
        yield pins


def mark_pins(graph: fx.Graph, pins: list[Pinned]) -> None:
    """Put the SBPs on the pin nodes of ``graph``."""
    for node in graph.find_nodes(op="call_function", target=PIN):
        number = node.args[1]
        assert isinstance(number, int)
        if 0 <= number < len(pins):
            node.meta["sbp"] = pins[number]
            node.meta["pins"] = tuple(sbp is not None for sbp in pins[number])
