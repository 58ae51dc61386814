"""Executors that compile regions, stretches of compute between collectives, at the extension point
``graphzero.executors``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from torch import Tensor

from graphzero.extensions import EXECUTORS, extensions
from graphzero.ir.graph import StepGraph
from graphzero.runtime.world.world import World


class RegionOp:
    """An op of several results that stands for a region; its text is shown where the region fails."""

    __module__ = "graphzero"

    def __init__(self) -> None:
        self.__name__ = self.__qualname__ = "region"

    def __call__(self, *inputs: Any) -> Any:
        raise RuntimeError("a region is compiled by an executor; Python does not call it")


class RegionCompiler(Protocol):
    """The functions of one program's regions: an executor is a class of these, made with the world of a program.

    Making one raises ConfigError on a machine that cannot run it.
    """

    def join(self, graph: StepGraph) -> StepGraph:
        """A copy of the program in which each region is a call of a ``RegionOp``, followed by its results."""
        ...

    def region_function(self, op: Any, local: int) -> Callable[[list[Tensor]], list[Tensor]]:
        """The function that a local rank calls for a region: from a list of operands, which it may empty, to results.

        One object for several regions or ranks where they compute the same.
        """
        ...


def region_compiler(kind: str, world: World) -> RegionCompiler | None:
    """The compiler of an executor; None for "eager", which calls op by op."""
    if kind == "eager":
        return None
    executor = extensions(EXECUTORS)[kind]
    compiler = executor.load()
    if missing := [name for name in ("join", "region_function") if not callable(getattr(compiler, name, None))]:
        raise executor.refusal(f"is not an executor: it has no {', '.join(missing)}")
    return cast("RegionCompiler", compiler(world))
