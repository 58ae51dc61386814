"""Executors that compile regions, stretches of compute between collectives, at the extension point
``graphzero.executors``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

from torch import Tensor

from graphzero.errors import shorten_list, shorten_repr
from graphzero.extensions import EXECUTORS, Extension, extensions
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.ir.verifier.read_only_graphs import ReadOnlyGraphs
from graphzero.runtime.world.world import World
from graphzero.sbp.shards import piece_shape


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
    kind_of_compiler = executor.load()
    if missing := [one for one in ("join", "region_function") if not callable(getattr(kind_of_compiler, one, None))]:
        raise executor.refusal(f"is not an executor: it has no {', '.join(missing)}")
    with executor.name_errors():
        compiler = cast("RegionCompiler", kind_of_compiler(world))
    return compiler if executor.is_own else _CheckedRegions(executor, compiler, world)


class _CheckedRegions:
    """The compiler of another distribution: what it gives has the form of what it was given."""

    def __init__(self, plugin: Extension, compiler: RegionCompiler, world: World) -> None:
        self._plugin, self._compiler, self._world = plugin, plugin.guard(compiler), world
        self._results: dict[Any, list[tuple[Any, Any]]] = {}  # type and SBP of each, by op
        self._functions: dict[Any, Callable[[list[Tensor]], list[Tensor]]] = {}

    def join(self, graph: StepGraph) -> StepGraph:
        """See ``RegionCompiler``.  Raises ConfigError for what is no program, or has other ends."""
        given = ReadOnlyGraphs(self._plugin, [graph])
        joined = self._compiler.join(graph)
        given.check()
        if not isinstance(joined, StepGraph):
            raise self._plugin.refusal(
                f"has join(graph) give {shorten_repr(joined)}, not a copy of the graph with regions"
            )
        if other := _ends(joined) ^ _ends(graph):
            raise self._plugin.refusal(f"has join(graph) give a program of other ends: {shorten_list(sorted(other))}")
        self._results = {
            node.target: value.results_of(node) for node in joined.nodes if isinstance(node.target, RegionOp)
        }
        return joined

    def region_function(self, op: Any, local: int) -> Callable[[list[Tensor]], list[Tensor]]:
        """See ``RegionCompiler``.  Raises ConfigError for what cannot be called; so does a call of it for results of
        other types."""
        function = self._compiler.region_function(op, local)
        if not callable(function):
            raise self._plugin.refusal(f"has region_function give {shorten_repr(function)}, which cannot be called")
        hierarchy, at = self._world.placement.hierarchy, self._world.coordinate(local)
        forms = tuple(
            (type_.dtype, piece_shape(type_.shape, nd, hierarchy, at)) if isinstance(type_, TensorType) else None
            for type_, nd in self._results[op]
        )
        return self._functions.setdefault((id(function), forms), partial(self._run_region, function, forms))

    def _run_region(
        self, function: Callable[[list[Tensor]], Any], forms: tuple[Any, ...], operands: list[Tensor]
    ) -> Any:
        with self._plugin.name_errors():
            results = function(operands)
        given = [_form(x) for x in results] if isinstance(results, (list, tuple)) else [type(results).__name__]
        if len(given) != len(forms) or any(
            form is not None and form != one for one, form in zip(given, forms, strict=True)
        ):
            raise self._plugin.refusal(f"has a region give {_shown(given)}, which is to give {_shown(forms)}")
        return results


def _form(x: Any) -> Any:
    return (x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def _shown(forms: Sequence[Any]) -> str:
    return shorten_list([f"{x[0]} of {list(x[1])}" if isinstance(x, tuple) else str(x) for x in forms]) or "nothing"


def _ends(graph: StepGraph) -> set[str]:
    return {f"{len(graph.outputs)} outputs", *graph.aux, *(f"the new value of {name}" for name in graph.updates)}
