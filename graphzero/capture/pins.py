"""SBPs that the user pins inside build: ``to_global(h, sbp=...)`` leaves a ``pin`` op with a number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, fx

from graphzero.ops import PIN
from graphzero.sbp.types import Sbp

Pinned = tuple[Sbp | None, ...]
_running: ContextVar[list[Pinned] | None] = ContextVar("graphzero_pins", default=None)
_axes: ContextVar[tuple[str, ...]] = ContextVar("graphzero_axes", default=())


def is_capturing() -> bool:
    """Whether build is being traced."""
    return _running.get() is not None


def axes_of_capture() -> tuple[str, ...]:
    """Names of the placement axes of the step that is being traced."""
    return _axes.get()


def pin_value(x: Tensor, sbp: Sequence[Sbp | None]) -> Tensor:
    """Pin ``x`` inside build: one SBP per placement axis, None where it is free.  Outside of a Graph the identity."""
    pins = _running.get()
    if pins is None:
        return x
    pins.append(tuple(sbp))
    return PIN(x, len(pins) - 1)  # type: ignore[no-any-return]


@contextmanager
def collecting(axes: tuple[str, ...]) -> Iterator[list[Pinned]]:
    """While this is open, ``pin_value`` writes down what is pinned in a step on these placement axes."""
    pins: list[Pinned] = []
    tokens = _running.set(pins), _axes.set(axes)
    try:
        yield pins
    finally:
        _running.reset(tokens[0])
        _axes.reset(tokens[1])


def mark(graph: fx.Graph, pins: list[Pinned]) -> None:
    """Put the SBPs on the pin nodes of ``graph``."""
    for node in graph.find_nodes(op="call_function", target=PIN):
        number = node.args[1]
        assert isinstance(number, int)
        if 0 <= number < len(pins):
            node.meta["sbp"] = pins[number]
            node.meta["pins"] = tuple(sbp is not None for sbp in pins[number])
