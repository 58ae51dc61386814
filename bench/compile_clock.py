"""Clocks that stand still while Python modules are loaded, and what compiling a Graph spends by part."""

from __future__ import annotations

import importlib
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import graphzero as gz

Clock = Callable[[], float]


def user_seconds() -> float:
    """User seconds of this process and of the processes that it ran to their end, such as compilers."""
    return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


@dataclass
class Clocks:
    """Seconds, without those in which modules were loaded: by the wall, and of the processor in user code."""

    loading_wall: float = 0.0
    loading_user: float = 0.0

    def wall(self) -> float:
        return time.perf_counter() - self.loading_wall

    def user(self) -> float:
        return user_seconds() - self.loading_user


@contextmanager
def clocks() -> Iterator[Clocks]:
    """Python finds and runs a module that is not there yet in one function, whoever imports it."""
    found, depth = Clocks(), 0
    machinery: Any = importlib._bootstrap  # type: ignore[attr-defined]
    original = machinery._find_and_load

    def load(*args: Any) -> Any:
        nonlocal depth
        depth += 1
        wall, user = time.perf_counter(), user_seconds()
        try:
            return original(*args)
        finally:
            depth -= 1
            if not depth:
                found.loading_wall += time.perf_counter() - wall
                found.loading_user += user_seconds() - user

    machinery._find_and_load = load
    try:
        yield found
    finally:
        machinery._find_and_load = original


def _modules(*names: str) -> list[Any]:
    return [importlib.import_module(f"graphzero.{name}") for name in names]


class CompileClock:
    """The seconds that ``clock`` counts while Graphs compile, by part; made before they do."""

    def __init__(self, clock: Clock) -> None:
        base, variants, compiling = _modules("passes.base", "plan.variants", "step.compile_step")
        self.clock, self.seconds = clock, dict[str, float]()
        compiling.capture = self._timed(compiling.capture, "capture")
        variants.plan_of = self._timed(variants.plan_of, "plan")
        base.time = SimpleNamespace(perf_counter=clock)  # for the seconds of each pass

    def parts(self, graph: gz.Graph, total: float) -> dict[str, float]:
        """Of the one Graph that was compiled, in ``total`` seconds."""
        parts = {"capture": self.seconds["capture"], **{record.name: record.seconds for record in graph.history}}
        parts["verify, all passes"] = sum(record.seconds_verify for record in graph.history)
        parts["plan"] = self.seconds["plan"]
        parts["the rest"] = max(total - sum(parts.values()), 0.0)
        return parts

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = self.clock()
            result = function(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - began
            return result

        return call
